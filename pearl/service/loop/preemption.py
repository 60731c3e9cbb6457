"""Arrivals and reclaims from outside (an admin, a trace): which GPUs they are about, or why it cannot be.

Chosen by the core's own GPU table at the moment in which the event is handled, so that two in a row never meet.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from pearl.types.events import GpusArrived, GpusReclaimed
from pearl.types.ids import GpuId
from pearl.types.messages.control import Preempt


class GpuStatus(msgspec.Struct, frozen=True):
    """A GPU as the core's status tells it."""

    gpu: GpuId
    zone: str
    present: bool
    reclaiming: bool

    @property
    def host(self) -> str:
        return self.gpu.rpartition("/")[0]


class Preemption:
    def __init__(
        self, status: Callable[[], dict[str, Any]], hosts: Callable[[], Collection[str]], *, inter: bool
    ) -> None:
        """``status`` is the core's; ``hosts`` are those on which something could be started now; ``inter`` is
        elastic.inter."""
        self._status = status
        self._hosts = hosts
        self._inter = inter

    def resolve(self, request: Preempt, reason: str = "asked for") -> GpusArrived | GpusReclaimed:
        """The event that carries it out.

        Raises:
            ValueError: what is wrong, and what there is instead. Nothing happens then.
        """
        _check(request)
        if request.action == "arrive":
            return GpusArrived(self._arriving(request))
        return GpusReclaimed(self._reclaimed(request), request.grace_s, reason)

    def unused(self, gpus: Sequence[GpuId]) -> tuple[GpuId, ...]:
        """Return the GPUs that the run does not have."""
        there = {row.gpu for row in self._table() if row.present}
        return tuple(gpu for gpu in gpus if gpu not in there)

    def _arriving(self, request: Preempt) -> tuple[GpuId, ...]:
        if not self._inter:
            raise ValueError(
                "elastic.inter = false: this job uses no GPUs that arrive; start it with elastic.inter = true"
            )
        rows, hosts = self._table(), self._hosts()
        able = [row for row in rows if _is_absent(row) and row.host in hosts]
        if request.count:
            return _first(able, request.count, "can arrive")
        for row in self._named(request.gpus, rows):
            if row.reclaiming:
                raise ValueError(f"{row.gpu} is being reclaimed: wait until it has been returned")
            if row.present:
                raise ValueError(f"{row.gpu} is there already; those that can arrive: {_names(able)}")
            if row.host not in hosts:
                raise ValueError(
                    f"{row.gpu}: host {row.host} has no agent in the run; start pearl agent there"
                )
        return tuple(GpuId(gpu) for gpu in request.gpus)

    def _reclaimed(self, request: Preempt) -> tuple[GpuId, ...]:
        rows = self._table()
        able = [row for row in rows if row.zone == "preemptible" and row.present and not row.reclaiming]
        if request.count:
            return _first(able[::-1], request.count, "can be reclaimed")
        for row in self._named(request.gpus, rows):
            if row.reclaiming:
                raise ValueError(f"{row.gpu} is being reclaimed already")
            if not row.present:
                raise ValueError(f"{row.gpu} is not there; those that can be reclaimed: {_names(able)}")
        return tuple(GpuId(gpu) for gpu in request.gpus)

    def _named(self, gpus: Sequence[str], rows: Sequence[GpuStatus]) -> list[GpuStatus]:
        known: dict[str, GpuStatus] = {row.gpu: row for row in rows}
        preemptible = [row for row in rows if row.zone == "preemptible"]
        for gpu in gpus:
            if gpu not in known:
                raise ValueError(f'there is no GPU "{gpu}"; preemptible are: {_names(preemptible)}')
            if known[gpu].zone != "preemptible":
                raise ValueError(
                    f"{gpu} is not preemptible ({known[gpu].zone}); preemptible are: {_names(preemptible)}"
                )
        return [known[gpu] for gpu in gpus]

    def _table(self) -> list[GpuStatus]:
        return msgspec.convert(self._status()["gpus"], list[GpuStatus])


def _check(request: Preempt) -> None:
    if bool(request.gpus) == (request.count != 0):
        raise ValueError("give either ids of GPUs or how many")
    if request.count < 0:
        raise ValueError(f"{request.count} GPUs: give at least 1")
    if len(set(request.gpus)) < len(request.gpus):
        raise ValueError(f"a GPU is named twice: {', '.join(request.gpus)}")
    if not (math.isfinite(request.grace_s) and request.grace_s >= 0):
        raise ValueError(f"grace of {request.grace_s} s: give seconds from 0 on")


def _is_absent(row: GpuStatus) -> bool:
    return row.zone == "preemptible" and not row.present and not row.reclaiming


def _first(rows: Sequence[GpuStatus], count: int, what: str) -> tuple[GpuId, ...]:
    if len(rows) < count:
        there = f"{len(rows)} {what}: {_names(rows)}" if rows else f"none {what}"
        raise ValueError(f"{count} GPU(s) wanted, but {there}")
    return tuple(row.gpu for row in rows[:count])


def _names(rows: Sequence[GpuStatus]) -> str:
    return ", ".join(row.gpu for row in rows) or "none"
