"""Arrivals and reclaims that are asked for (by a person, a trace): which GPUs they are about, or why they cannot be.

Chosen by the GPU table at the moment in which the request is handled, so that two in a row never meet.
"""

import math
from collections.abc import Collection, Sequence

from pearl.types.events import PreemptRequested
from pearl.types.gpu_table import GpuRow, GpuTable
from pearl.types.ids import GpuId


def choose_gpus(request: PreemptRequested, table: GpuTable, *, inter: bool) -> tuple[GpuId, ...]:
    """Return the GPUs that arrive or are reclaimed; ``inter`` is elastic.inter.

    Raises:
        ValueError: what is wrong, and what there is instead.
    """
    _check(request)
    if request.action == "reclaim":
        return _reclaimed(request, table)
    if not inter:
        raise ValueError(
            "elastic.inter = false: this job uses no GPUs that arrive; start it with elastic.inter = true"
        )
    return _arriving(request, table, request.hosts)


def _check(request: PreemptRequested) -> None:
    if bool(request.gpus) == (request.count != 0):
        raise ValueError("give either ids of GPUs or how many")
    if request.count < 0:
        raise ValueError(f"{request.count} GPUs: give at least 1")
    if len(set(request.gpus)) < len(request.gpus):
        raise ValueError(f"a GPU is named twice: {', '.join(request.gpus)}")
    if not (math.isfinite(request.grace_s) and request.grace_s >= 0):
        raise ValueError(f"grace of {request.grace_s} s: give seconds from 0 on")


def _arriving(request: PreemptRequested, table: GpuTable, hosts: Collection[str]) -> tuple[GpuId, ...]:
    """Absent ones in the table's order; when these are too few, those that come back once they have been returned."""
    rows = [row for row in table.of_zone("preemptible") if row.host in hosts]
    able = [row for row in rows if not row.present and not _is_reclaimed(row)]
    if request.count:
        coming_back = [row for row in rows if _is_reclaimed(row) and not row.is_back and not row.is_lost]
        return _first(able + coming_back, request.count, "can arrive")
    for row in _named(request.gpus, table):
        if _is_reclaimed(row):
            raise ValueError(f"{row.gpu} is being reclaimed: wait until it has been returned")
        if row.present:
            raise ValueError(f"{row.gpu} is there already; those that can arrive: {_names(able)}")
        if row.host not in hosts:
            raise ValueError(f"{row.gpu}: host {row.host} has no agent in the run; start pearl agent there")
    return request.gpus


def _reclaimed(request: PreemptRequested, table: GpuTable) -> tuple[GpuId, ...]:
    """Present ones, the last of the table first; when these are too few, those that were to come back."""
    rows = table.of_zone("preemptible")
    able = [row for row in rows if row.usable]
    if request.count:
        coming_back = [row for row in rows if row.is_back]
        return _first([*able[::-1], *coming_back[::-1]], request.count, "can be reclaimed")
    for row in _named(request.gpus, table):
        if _is_reclaimed(row) and not row.is_back:
            raise ValueError(f"{row.gpu} is being reclaimed already")
        if not row.present:
            raise ValueError(f"{row.gpu} is not there; those that can be reclaimed: {_names(able)}")
    return request.gpus


def _named(gpus: Sequence[GpuId], table: GpuTable) -> list[GpuRow]:
    preemptible = table.of_zone("preemptible")
    for gpu in gpus:
        row = table.rows.get(gpu)
        if row is None:
            raise ValueError(f'there is no GPU "{gpu}"; preemptible are: {_names(preemptible)}')
        if row.zone != "preemptible":
            raise ValueError(f"{gpu} is not preemptible ({row.zone}); preemptible are: {_names(preemptible)}")
    return [table.rows[gpu] for gpu in gpus]


def _is_reclaimed(row: GpuRow) -> bool:
    return row.reclaim_deadline_s is not None


def _first(rows: Sequence[GpuRow], count: int, what: str) -> tuple[GpuId, ...]:
    if len(rows) < count:
        there = f"{len(rows)} {what}: {_names(rows)}" if rows else f"none {what}"
        raise ValueError(f"{count} GPU(s) wanted, but {there}")
    return tuple(row.gpu for row in rows[:count])


def _names(rows: Sequence[GpuRow]) -> str:
    return ", ".join(row.gpu for row in rows) or "none"
