"""Arrivals and reclaims that were asked for and that the core has not answered yet."""

from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from pearl.types.commands import AnswerPreempt
from pearl.types.events import PreemptRequested
from pearl.types.ids import GpuId
from pearl.types.messages.control import Preempt


class Answer(NamedTuple):
    """Whom to tell: one of the two is called, once."""

    accept: Callable[[tuple[GpuId, ...]], None]
    refuse: Callable[[ValueError], None]


class PendingPreempts:
    def __init__(self) -> None:
        self._numbers = count(1)
        self._pending: dict[int, Answer] = {}

    def add(
        self,
        message: Preempt,
        accept: Callable[[tuple[GpuId, ...]], None],
        refuse: Callable[[ValueError], None],
    ) -> PreemptRequested:
        """Return the event to be put into the inbox; its answer goes to ``accept`` or ``refuse``."""
        number = next(self._numbers)
        self._pending[number] = Answer(accept, refuse)
        gpus = tuple(map(GpuId, message.gpus))
        return PreemptRequested(number, message.action, gpus, message.count, message.grace_s)

    def answer(self, command: AnswerPreempt) -> None:
        """Pass the core's answer on; a request of a former life has nobody who waits for it."""
        answer = self._pending.pop(command.request, None)
        if answer is None:
            return
        if command.error:
            answer.refuse(ValueError(command.error))
        else:
            answer.accept(command.gpus)
