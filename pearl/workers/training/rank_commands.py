"""What rank 0 has the whole training world do. Values only; imports nothing heavy."""

from dataclasses import dataclass

import msgspec

from pearl.types.messages.training import Demonstration, Offload, Restore, Sample


class Begin(msgspec.Struct, frozen=True, tag=True):
    """``restore_step`` None = fresh weights and the warm start; otherwise a checkpoint known to be complete."""

    lineage: int
    restore_step: int | None
    demonstrations: tuple[Demonstration, ...]
    compare: bool = False  # with plain transformers


class Step(msgspec.Struct, frozen=True, tag=True):
    step: int
    samples: tuple[Sample, ...]
    checkpoint: bool


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave the world."""


Command = Begin | Step | Offload | Restore | Stop


@dataclass(slots=True)
class Progress:
    """Read by the event loop for heartbeats while another thread works."""

    micro_batches: int = 0
    busy: str = ""

    def count(self) -> None:
        self.micro_batches += 1
