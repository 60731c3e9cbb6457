"""Commands from rank 0 to the other ranks of the training world, and their reports back, as MessagePack over a gloo
group of their own.

The other ranks wait here between steps for as long as it takes: being idle is legal, so this group's timeout is
not that of the collectives of a step. When rank 0 dies its connections close and the wait ends with an error.
"""

from datetime import timedelta

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from pearl.workers.training.rank_commands import Command

IDLE_LIMIT = timedelta(days=365)
"""Longer than any job: what ends the wait is the launcher, which ends the whole world when one rank is gone."""


class Report(msgspec.Struct, frozen=True):
    """How a rank got on with handing over its memory."""

    released_bytes: int = 0
    parts: dict[str, float] = {}  # seconds
    error: str = ""


class ControlChannel:
    """Construct it on all ranks, after the default process group; one thread a rank uses it."""

    def __init__(self) -> None:
        self._num_ranks = dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=IDLE_LIMIT)
        self._decoder = msgspec.msgpack.Decoder(Command)

    def send(self, command: Command) -> None:
        """Send from rank 0; returns when the other ranks have it."""
        if self._num_ranks > 1:
            data = bytearray(msgspec.msgpack.encode(command))
            dist.broadcast(torch.tensor([len(data)]), src=0, group=self._group)
            dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), src=0, group=self._group)

    def receive(self) -> Command:
        """Wait for the next message, on the other ranks."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, src=0, group=self._group)
        data = np.empty(int(size.item()), np.uint8)
        dist.broadcast(torch.from_numpy(data), src=0, group=self._group)
        command: Command = self._decoder.decode(data.data)
        return command

    def gather(self, report: Report) -> list[Report]:
        """Every rank's, in order, on all ranks. A collective."""
        data = msgspec.msgpack.encode(report)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._num_ranks)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        longest = max(int(size.item()) for size in sizes)
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self._num_ranks)]
        dist.all_gather(found, padded, group=self._group)
        return [
            msgspec.msgpack.decode(part.numpy().data[: int(size.item())], type=Report)
            for part, size in zip(found, sizes, strict=True)
        ]
