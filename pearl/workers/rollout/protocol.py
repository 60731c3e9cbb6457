"""The engine protocol: what every rollout engine offers, shaped by what SGLang needs. Frozen.

All methods run on the worker's event loop and must not block it. What an engine cannot do raises
``UnsupportedError``; a failure of one request is a delta with ``finish="error"``, never an exception.
"""

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from pearl.types.messages.rollout import IterationStat, SamplingParams
from pearl.types.trajectory import FinishReason, VersionRun
from pearl.types.weights import BucketSpec, TensorSpec, Version

Role = Literal["colocated", "prefill", "decode"]
PauseMode = Literal["abort", "in_place", "retract"]
"""abort: every attempt ends with what it has; in_place: attempts and their KV wait; retract: attempts wait, KV goes."""
MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]


class UnsupportedError(Exception):
    """This engine cannot do that; the message names the engine and the operation."""


class GenerateRequest(msgspec.Struct, frozen=True):
    attempt: int
    ids: npt.NDArray[np.int32]  # [context]
    params: SamplingParams
    seed: int
    pair: str = ""  # as in ``messages.rollout.Generate``


class Delta(msgspec.Struct, frozen=True):
    """New tokens of an attempt. The last delta of an attempt has ``finish``, or, of a prefill stage whose KV is over,
    is ``handed_over``; there is exactly one such."""

    attempt: int
    ids: list[int]
    logprobs: list[float]
    runs: list[VersionRun]  # counts sum to len(ids)
    prefilled_tokens: int = 0
    finish: FinishReason | None = None
    error: str = ""
    handed_over: bool = False

    @property
    def is_last(self) -> bool:
        return self.finish is not None or self.handed_over


class Released(msgspec.Struct, frozen=True):
    """Device memory that a release freed, and proved to be free."""

    num_bytes: int  # measured
    release_s: float
    verify_s: float


Emit = Callable[[Delta], None]


class EngineLoad(msgspec.Struct, frozen=True):
    num_running: int
    num_waiting: int
    kv_used_tokens: int
    kv_capacity_tokens: int


class Engine(Protocol):
    name: str
    role: Role

    async def start(self) -> None:
        """Build everything but the weights; returns when the engine could take an update."""

    async def generate(self, request: GenerateRequest, emit: Emit) -> None:
        """Queue a request; returns at once. ``emit`` is called on the event loop. An attempt id that is
        already known is refused with ValueError."""

    async def abort(self, attempt: int) -> None:
        """End one attempt, queued, retracted or running, with what it made. Unknown ids are ignored."""

    async def pause(self, mode: PauseMode) -> None:
        """Returns when no iteration runs any more."""

    async def continue_generation(self) -> None: ...

    async def flush_cache(self) -> None:
        """Forget all cached KV; only while nothing runs or after pause(abort | retract)."""

    async def begin_update(self, version: Version, tensors: tuple[TensorSpec, ...]) -> None:
        """Only while paused. The engine serves nothing until ``end_update`` returned."""

    async def update_bucket(self, bucket: BucketSpec, data: memoryview) -> None:
        """Load the tensors (or parts of them) in image bytes [offset, offset + num_bytes)."""

    async def end_update(self) -> str:
        """All bytes are in: make the version current; returns ``checksum()``. ValueError names what is missing."""

    async def checksum(self) -> str:
        """Return the checksum of the weights now served, as ``Snapshot.checksum``."""

    async def release(self, tags: tuple[MemoryTag, ...]) -> Released | None:
        """Only while paused and idle; ValueError otherwise. None = this engine has nothing to measure. Content is
        not kept: without its weights the engine serves nothing until a whole update. ResidencyError when the memory
        is not free."""
        ...

    async def restore(self, tags: tuple[MemoryTag, ...]) -> None:
        """Memory, no content; ResidencyError when there is none to be had, and then nothing was changed."""
        ...

    async def set_role(self, role: Role) -> None:
        """Only while idle, else ValueError; cached KV is forgotten. UnsupportedError names a role it cannot take."""

    def is_idle(self) -> bool: ...

    def load(self) -> EngineLoad: ...

    def iteration_stats(self) -> list[IterationStat]:
        """Iterations since the last call; bounded, oldest dropped first."""

    async def shutdown(self) -> None: ...
