"""Every command of the union reaches the method of its name, and the service and the simulator have them all."""

import re
from typing import get_args

import pytest

from pearl.service.loop.command_executor import CommandExecutor
from pearl.sim.simulation import Simulation
from pearl.types import commands
from pearl.types.command_handler import CommandHandler, dispatch
from pearl.types.commands import AnyCommand, Command

KINDS: tuple[type[Command], ...] = get_args(AnyCommand)


def method_of(kind: type[Command]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


class Recorder:
    """Notes which method was called, whatever its name."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> object:
        return lambda command: self.called.append(name)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_command_reaches_the_method_of_its_name(kind: type[Command]) -> None:
    recorder = Recorder()
    command = kind(*(None for _ in kind.__struct_fields__))  # the fields play no part in it
    dispatch(command, recorder)  # type: ignore[arg-type]
    assert recorder.called == [method_of(kind)]


@pytest.mark.parametrize("handler", [CommandExecutor, Simulation])
def test_a_handler_has_a_method_for_every_command_and_for_nothing_else_in_the_table(
    handler: type[CommandHandler],
) -> None:
    table = {name for name in vars(CommandHandler) if not name.startswith("_")}
    assert table == {method_of(kind) for kind in KINDS}
    assert all(callable(getattr(handler, name)) for name in table)


def test_every_command_class_is_in_the_union() -> None:
    assert set(Command.__subclasses__()) == set(KINDS)
    assert commands.Finish in KINDS
