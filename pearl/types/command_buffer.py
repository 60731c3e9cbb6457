"""Where the core's parts put what they want done: an ordered list of commands and the op ids they carry."""

from pearl.types.commands import AnyCommand, Report
from pearl.types.ids import OpId
from pearl.types.reports import AnyReport


class CommandBuffer:
    """Commands of the event being handled. ``next_op`` is part of the core's state."""

    def __init__(self, next_op: int) -> None:
        self._next_op = next_op
        self._commands: list[AnyCommand] = []

    @property
    def next_op(self) -> int:
        return self._next_op

    def new_op(self) -> OpId:
        op = self._next_op
        self._next_op += 1
        return OpId(op)

    def emit(self, command: AnyCommand) -> None:
        self._commands.append(command)

    def report(self, report: AnyReport) -> None:
        self._commands.append(Report(report))

    def take(self) -> list[AnyCommand]:
        commands, self._commands = self._commands, []
        return commands
