"""Who may use each GPU now: ownership is a lease a GPU. The core is the only writer."""

from typing import Literal

import msgspec

from pearl.types.ids import GpuId, Slot

TRAINING = Slot(-1)
"""Holder of a GPU that the training world uses."""
GpuZone = Literal["training", "dedicated", "preemptible"]
AWAITED_HOST = "(awaited)"
"""Host of a worker's GPUs until a reserved host gives it some."""
POOLS: dict[GpuZone, str] = {"training": "training", "dedicated": "rollout", "preemptible": "spot"}


class GpuRow(msgspec.Struct):
    gpu: GpuId
    zone: GpuZone
    present: bool = True
    holder: Slot | None = None  # a slot, TRAINING, or None while nobody may touch it
    reclaim_began_s: float | None = None  # must be given back
    reclaim_deadline_s: float | None = None
    is_lost: bool = False  # with its host; what ran on it is still to be heard of
    is_back: bool = False  # arrived again already, to be used once it has been given back
    failures: int = 0  # expansions that failed on it in a row
    retry_at_s: float = 0.0  # not used before, after a failure

    @property
    def host(self) -> str:
        return self.gpu.rpartition("/")[0]

    @property
    def usable(self) -> bool:
        return self.present and self.reclaim_deadline_s is None


class GpuTable(msgspec.Struct):
    rows: dict[GpuId, GpuRow] = msgspec.field(default_factory=dict)

    def add(self, gpu: GpuId, zone: GpuZone, *, present: bool = True) -> GpuRow:
        assert gpu not in self.rows, gpu
        row = self.rows[gpu] = GpuRow(gpu, zone, present)
        return row

    def is_usable(self, gpus: tuple[GpuId, ...]) -> bool:
        return all(self.rows[gpu].usable for gpu in gpus)

    def take(self, gpus: tuple[GpuId, ...], holder: Slot) -> None:
        """All or none; they must be present and free."""
        for gpu in gpus:
            row = self.rows[gpu]
            assert row.present, f"GPU {gpu} is not there"
            assert row.holder is None, f"GPU {gpu} is held by {row.holder}, wanted by {holder}"
        for gpu in gpus:
            self.rows[gpu].holder = holder

    def free(self, gpus: tuple[GpuId, ...], holder: Slot) -> None:
        for gpu in gpus:
            row = self.rows[gpu]
            assert row.holder == holder, f"GPU {gpu} is held by {row.holder}, not by {holder}"
            row.holder = None

    def of_zone(self, zone: GpuZone) -> list[GpuRow]:
        return [row for row in self.rows.values() if row.zone == zone]

    def held_by(self, holder: Slot) -> tuple[GpuId, ...]:
        return tuple(row.gpu for row in self.rows.values() if row.holder == holder)
