"""Reserved GPUs of other hosts: the job's own workers run there, and wait for them when their host is lost."""

from collections.abc import Iterator

from pearl.types.core_context import CoreContext
from pearl.types.gpu_table import AWAITED_HOST, GpuRow
from pearl.types.ids import GpuId
from pearl.types.worker_table import WorkerRow


class ReservedPool:
    def __init__(self, context: CoreContext) -> None:
        self._table = context.table
        self._gpus = context.gpu_table

    def bind(self, gpus: tuple[GpuId, ...]) -> None:
        """Take reserved GPUs in at the beginning of a life and give each of the job's workers its share."""
        for gpu in gpus:
            row = self._gpus.rows.get(gpu) or self._gpus.add(gpu, "dedicated")
            assert row.zone == "dedicated", row
            row.present = True
        self.take_vacant()

    def take_vacant(self) -> list[WorkerRow]:
        """Give workers without GPUs those that are there, their former ones first; returns which can be started."""
        vacant = [row for row in self._own_elsewhere() if row.status == "gone"]
        ready = [row for row in vacant if self._is_free(row.gpus)]
        if len(ready) == len(vacant):
            return ready
        vacant = [row for row in vacant if not self._gpus.is_usable(row.gpus)]
        slots = {row.slot for row in vacant}
        taken = {gpu for row in self._table.rows.values() if row.slot not in slots for gpu in row.gpus}
        for row in vacant:
            if gpus := self._find(len(row.gpus), taken):
                self._forget_awaited(row.gpus)
                row.gpus = gpus
                taken.update(gpus)
                ready.append(row)
        return ready

    def _own_elsewhere(self) -> Iterator[WorkerRow]:
        own = {row.host for row in self._gpus.of_zone("training")}
        for row in self._table.rows.values():
            first = self._gpus.rows[row.gpus[0]]
            if row.zone == "dedicated" and first.zone == "dedicated" and first.host not in own:
                yield row

    def _find(self, size: int, taken: set[GpuId]) -> tuple[GpuId, ...]:
        """Return GPUs of one host for a worker, () when no host has enough."""
        own = {row.host for row in self._gpus.of_zone("training")}
        hosts: dict[str, list[GpuRow]] = {}
        for row in self._gpus.of_zone("dedicated"):
            if row.usable and row.holder is None and row.gpu not in taken and row.host not in own:
                found = hosts.setdefault(row.host, [])
                found.append(row)
                if len(found) == size:
                    return tuple(gpu.gpu for gpu in found)
        return ()

    def _is_free(self, gpus: tuple[GpuId, ...]) -> bool:
        return self._gpus.is_usable(gpus) and all(self._gpus.rows[gpu].holder is None for gpu in gpus)

    def _forget_awaited(self, gpus: tuple[GpuId, ...]) -> None:
        for gpu in gpus:
            if self._gpus.rows[gpu].host == AWAITED_HOST:
                del self._gpus.rows[gpu]
