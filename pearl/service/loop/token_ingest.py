"""TokenIngest of rollout workers: what is taken into the token store and what of it the core gets to know.

A frame that breaks the protocol (a hole in the sequence, counts that disagree) condemns its worker; a value that
cannot be right (a log-prob that is not finite, an id outside the vocabulary) ends only the attempt it is in.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pearl.runtime.token_store import TokenStore
from pearl.types.events import TokensStreamed
from pearl.types.ids import AttemptId, Incarnation, Slot, TrajectoryId
from pearl.types.messages.rollout import AttemptDelta, Deltas, IterationStat
from pearl.types.profile import IterationSums
from pearl.types.trajectory import TokenDelta
from pearl.types.version_runs import first_runs

WIDTH = 4  # bytes of a packed id and of a packed log-prob


class BrokenFrameError(Exception):
    """The worker does not keep to the protocol: nothing of this frame was taken, and it must be replaced."""


class Attempt(NamedTuple):
    trajectory: TrajectoryId
    turn: int
    slot: Slot
    incarnation: Incarnation
    prefill: tuple[Slot, Incarnation] | None = None  # of a pair: who prefills for it, and makes no token


class Dropped(msgspec.Struct):
    """What was not taken, and why."""

    old_frames: int = 0  # of an incarnation that is gone
    unknown_attempts: int = 0  # deltas of attempts that have ended or were taken back
    bad_values: int = 0  # attempts ended here


class TokenIngest:
    """Knows the running attempts and where each worker's sequence stands; writes generated tokens to the store."""

    def __init__(self, store: TokenStore, vocabulary_size: int) -> None:
        self._store = store
        self._vocabulary_size = vocabulary_size
        self._attempts: dict[AttemptId, Attempt] = {}
        self._by_trajectory: dict[TrajectoryId, set[AttemptId]] = {}
        self._next: dict[tuple[Slot, Incarnation], int] = {}  # sequence number expected from a living worker
        self.dropped = Dropped()

    # what is running

    def open_worker(self, slot: Slot, incarnation: Incarnation) -> None:
        self._next[slot, incarnation] = 0

    def close_worker(self, slot: Slot, incarnation: Incarnation) -> None:
        """TokenIngest of it that still come are old."""
        self._next.pop((slot, incarnation), None)
        for identity, attempt in list(self._attempts.items()):
            if (attempt.slot, attempt.incarnation) == (slot, incarnation):
                self._end(identity)

    def begin(self, identity: AttemptId, attempt: Attempt) -> None:
        assert identity not in self._attempts, identity
        self._attempts[identity] = attempt
        self._by_trajectory.setdefault(attempt.trajectory, set()).add(identity)

    def release(self, trajectory: TrajectoryId) -> None:
        """The trajectory's tokens are void or gone: what its attempts still send is not wanted."""
        for identity in list(self._by_trajectory.get(trajectory, ())):
            self._end(identity)

    def _end(self, identity: AttemptId) -> None:
        attempt = self._attempts.pop(identity)
        others = self._by_trajectory[attempt.trajectory]
        others.discard(identity)
        if not others:
            del self._by_trajectory[attempt.trajectory]

    # frames

    def take(
        self, slot: Slot, incarnation: Incarnation, frame: Deltas
    ) -> tuple[TokensStreamed | None, list[AttemptId]]:
        """Store the frame's tokens.

        Returns:
            The event for the core (None when nothing of the frame is its business), and the attempts that were ended
            here and that the worker should abort.

        Raises:
            BrokenFrameError: the frame is refused whole.
        """
        expected = self._next.get((slot, incarnation))
        if expected is None:
            self.dropped.old_frames += 1
            return None, []
        if frame.sequence != expected:
            raise BrokenFrameError(f"frame {frame.sequence} came where {expected} was due")
        for delta in frame.deltas:
            _check_counts(delta)
            if delta.ids and self._is_prefill_stage(delta, slot, incarnation):
                raise BrokenFrameError(f"attempt {delta.attempt}: tokens came from its prefill stage")
        self._next[slot, incarnation] = expected + 1
        taken: list[TokenDelta] = []
        ended: list[AttemptId] = []
        for delta in frame.deltas:
            attempt = self._attempts.get(AttemptId(delta.attempt))
            if self._is_prefill_stage(delta, slot, incarnation):
                half = TokenDelta(
                    AttemptId(delta.attempt), 0, (), delta.prefilled_tokens, delta.finish, delta.error
                )
                taken.append(half)  # the attempt ends with its decode stage
                continue
            if attempt is None or (attempt.slot, attempt.incarnation) != (slot, incarnation):
                self.dropped.unknown_attempts += 1
                continue
            told = self._take_delta(attempt, delta)
            taken.append(told)
            if told.finish is not None:
                self._end(told.attempt)
                if delta.finish is None:
                    ended.append(told.attempt)
        sums = iteration_sums_of(frame.iterations)
        if not taken and sums is None:
            return None, ended
        return TokensStreamed(slot, incarnation, tuple(taken), sums), ended

    def _is_prefill_stage(self, delta: AttemptDelta, slot: Slot, incarnation: Incarnation) -> bool:
        attempt = self._attempts.get(AttemptId(delta.attempt))
        return attempt is not None and attempt.prefill == (slot, incarnation)

    def _take_delta(self, attempt: Attempt, delta: AttemptDelta) -> TokenDelta:
        count, problem = self._good_tokens(delta)
        runs = delta.runs
        finish, error = delta.finish, delta.error
        if problem:
            self.dropped.bad_values += 1
            runs, finish, error = tuple(first_runs(delta.runs, count)), "error", problem
        if count:
            width = count * WIDTH
            self._store.append(
                attempt.trajectory, "generated", attempt.turn, delta.ids[:width], delta.logprobs[:width], runs
            )
        return TokenDelta(AttemptId(delta.attempt), count, runs, delta.prefilled_tokens, finish, error)

    def _good_tokens(self, delta: AttemptDelta) -> tuple[int, str]:
        """Return how many of the delta's tokens come before the first bad one, and what is wrong with that (""
        when none is)."""
        ids, logprobs = memoryview(delta.ids).cast("i"), memoryview(delta.logprobs).cast("f")
        for index, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            if not math.isfinite(logprob):
                return index, f"log-prob {logprob} of token {token} is not finite"
            if not 0 <= token < self._vocabulary_size:
                return index, f"id {token} is outside the vocabulary of {self._vocabulary_size}"
        return len(ids), ""


def iteration_sums_of(iterations: Sequence[IterationStat]) -> IterationSums | None:
    """Sum up the iterations that decoded or prefilled and whose numbers are possible; None when there are none."""
    counted = [
        one
        for one in iterations
        if (one.num_decoding > 0 or one.prefill_tokens > 0)
        and math.isfinite(one.seconds)
        and one.seconds >= 0
    ]
    if not counted:
        return None
    return IterationSums(
        count=len(counted),
        seconds=sum(one.seconds for one in counted),
        decoding=float(sum(one.num_decoding for one in counted)),
        prefill=float(sum(one.prefill_tokens for one in counted)),
        decoding2=float(sum(one.num_decoding**2 for one in counted)),
        prefill2=float(sum(one.prefill_tokens**2 for one in counted)),
        decoding_prefill=float(sum(one.num_decoding * one.prefill_tokens for one in counted)),
        seconds_decoding=sum(one.seconds * one.num_decoding for one in counted),
        seconds_prefill=sum(one.seconds * one.prefill_tokens for one in counted),
        seconds2=sum(one.seconds**2 for one in counted),
        context=float(sum(one.context_tokens for one in counted)),
        context2=float(sum(one.context_tokens**2 for one in counted)),
        decoding_context=float(sum(one.num_decoding * one.context_tokens for one in counted)),
        prefill_context=float(sum(one.prefill_tokens * one.context_tokens for one in counted)),
        seconds_context=sum(one.seconds * one.context_tokens for one in counted),
    )


def _check_counts(delta: AttemptDelta) -> None:
    count, rest = divmod(len(delta.ids), WIDTH)
    runs = sum(run.count for run in delta.runs)
    if (
        rest
        or len(delta.logprobs) != len(delta.ids)
        or runs != count
        or any(run.count <= 0 for run in delta.runs)
    ):
        raise BrokenFrameError(
            f"attempt {delta.attempt}: {len(delta.ids)} bytes of ids, {len(delta.logprobs)} of log-probs, "
            f"version runs {[run.count for run in delta.runs]}"
        )
