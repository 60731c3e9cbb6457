"""Coordinator and rollout workers. Bulk token data is packed: ids as little-endian int32, log-probs as float32."""

import msgspec

from pearl.types.comparison import Comparison
from pearl.types.plan import Role
from pearl.types.trajectory import FinishReason, VersionRun
from pearl.types.weights import Snapshot, UpdateMode, Version


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """Temperature 0 is greedy. Log-probs are of the distribution that was sampled: softmax(logits / temperature)
    (temperature 1 when greedy)."""

    max_new_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]  # generation ends after emitting one of these; the id is part of the output


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Continue ``ids``. Position i of the trajectory is sampled with a counter keyed by (seed, i), so that the
    same weights give the same tokens wherever and however often it runs.

    With ``pair`` it is one half of an attempt whose other stage goes to another worker under the same attempt id.
    The prefill stage computes the KV of the context and hands it to the decode stage: one delta with its
    ``prefilled_tokens``, no ids and ``finish`` None once the KV is over, or one with "abort" (the handing over
    failed: another pair may do it) or "error" (the request is at fault). The decode stage makes all tokens and ends
    as any attempt does; "abort" also when the KV did not come. A worker's role says which half it is; a request that
    does not fit the role ends as "abort". Whoever sees one half fail aborts the other.
    """

    attempt: int
    trajectory: int  # prefix reuse is keyed by content; the id is for logs
    ids: bytes  # the whole context, int32
    params: SamplingParams
    seed: int  # of the trajectory, 64 bits
    pair: str = ""
    """Of a prefill stage: the decode worker's kv_address; of a decode stage: the prefill worker's name."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End an attempt; what was made is kept and its last delta says finish = "abort". Unknown ids are ignored."""

    attempt: int


class AttemptDelta(msgspec.Struct, frozen=True, array_like=True):
    attempt: int
    ids: bytes  # int32
    logprobs: bytes  # float32, same count
    runs: tuple[VersionRun, ...]  # counts sum to the number of ids
    prefilled_tokens: int  # context tokens computed since the attempt's last delta, not taken from a cache
    finish: FinishReason | None
    error: str = ""


class Deltas(msgspec.Struct, frozen=True, tag=True):
    """All that a worker produced since its last frame; one frame every 20 ms or 32 iterations.
    ``sequence`` counts frames from 0 without a hole."""

    sequence: int
    deltas: tuple[AttemptDelta, ...]
    iterations: tuple["IterationStat", ...] = ()


class IterationStat(msgspec.Struct, frozen=True, array_like=True):
    """One engine pass, for the runtime tracker."""

    seconds: float
    num_decoding: int
    prefill_tokens: int
    context_tokens: int  # sum over decoding sequences


class UpdateWeights(msgspec.Struct, frozen=True, tag=True):
    """Take the snapshot, load it whole, prove it. Until the answer the worker takes no new request."""

    snapshot: Snapshot
    mode: UpdateMode
    bucket_deadline_s: float
    compare: bool = False  # the engine with plain transformers, before the answer


class UpdateWeightsReply(msgspec.Struct, frozen=True, tag=True):
    """``checksum`` is computed by the engine over the weights it now serves."""

    version: Version
    checksum: str
    transfer_seconds: float
    load_seconds: float
    comparison: Comparison | None = None  # what came of it; None = it was not asked for


class SetRole(msgspec.Struct, frozen=True, tag=True):
    """Serve in another role from the answer on. Until then new requests end as "abort"; those that run may finish.
    An error leaves the worker serving in the role it had: requests were still there after ``drain_limit_s``, or its
    engine cannot take the role. Cached KV is forgotten."""

    role: Role
    drain_limit_s: float


class SetRoleReply(msgspec.Struct, frozen=True, tag=True):
    role: Role  # it serves in now
    seconds: float  # from the request, draining included


class Interrupt(msgspec.Struct, frozen=True, tag=True):
    """End every attempt, as Abort does."""


class Release(msgspec.Struct, frozen=True, tag=True):
    """Refuse new requests, cancel an activation at its next step, end every attempt with what it made (their last
    frames leave before the answer), let go of all device memory, verify it. The process stays."""


class ReleaseReply(msgspec.Struct, frozen=True, tag=True):
    released_bytes: int  # measured
    parts: dict[str, float]  # seconds: interrupt, release, verify


class Activate(msgspec.Struct, frozen=True, tag=True):
    """After a release (or a start): memory for weights, the snapshot loaded and proven, memory for KV. A Release that
    comes meanwhile cancels it, and the answer is an error."""

    snapshot: Snapshot
    bucket_deadline_s: float
    compare: bool = False  # as in UpdateWeights


class ActivateReply(msgspec.Struct, frozen=True, tag=True):
    version: Version
    checksum: str  # by the engine, over the weights it now serves
    parts: dict[str, float]  # seconds: weights_memory, transfer, load, kv_memory
    comparison: Comparison | None = None


RolloutMessage = (
    Generate
    | Abort
    | Deltas
    | UpdateWeights
    | UpdateWeightsReply
    | SetRole
    | SetRoleReply
    | Interrupt
    | Release
    | ReleaseReply
    | Activate
    | ActivateReply
)
