"""What of a worker's frames is stored and told, and what is refused."""

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from pearl.runtime.token_store import TokenStore
from pearl.service.loop.token_ingest import Attempt, BrokenFrameError, TokenIngest
from pearl.testing.fakes import floats, pack, unpack
from pearl.types.ids import AttemptId, Incarnation, Slot, TrajectoryId
from pearl.types.messages.rollout import AttemptDelta, Deltas, IterationStat
from pearl.types.profile import IterationSums
from pearl.types.trajectory import FinishReason, VersionRun
from pearl.types.weights import Version

V0, V1 = Version(0, 0), Version(0, 1)
SLOT, LIFE = Slot(0), Incarnation(1)
TRAJECTORY = TrajectoryId(7)


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    store = TokenStore(tmp_path)
    store.append(TRAJECTORY, "prompt", 0, pack([5, 6]))
    return store


@pytest.fixture
def frames(store: TokenStore) -> TokenIngest:
    frames = TokenIngest(store, vocabulary_size=10)
    frames.open_worker(SLOT, LIFE)
    frames.begin(AttemptId(1), Attempt(TRAJECTORY, 0, SLOT, LIFE))
    return frames


def delta(
    ids: Sequence[int],
    logprobs: Sequence[float] | None = None,
    runs: tuple[VersionRun, ...] | None = None,
    finish: FinishReason | None = None,
    attempt: int = 1,
) -> AttemptDelta:
    chances = [-0.5] * len(ids) if logprobs is None else logprobs
    if runs is None:
        runs = (VersionRun(V0, len(ids), V0),) if ids else ()
    return AttemptDelta(attempt, pack(ids), floats(chances), runs, 2, finish)


def frame(sequence: int, *deltas: AttemptDelta) -> Deltas:
    return Deltas(sequence, deltas)


def test_tokens_are_stored_and_only_counted_for_the_core(frames: TokenIngest, store: TokenStore) -> None:
    event, ended = frames.take(SLOT, LIFE, frame(0, delta([1, 2])))
    assert event is not None
    assert ended == []
    assert [(told.attempt, told.count, told.prefilled_tokens) for told in event.deltas] == [(1, 2, 2)]
    frames.take(SLOT, LIFE, frame(1, delta([3], finish="stop")))
    view = store.view(TRAJECTORY)
    assert unpack(view.ids) == [5, 6, 1, 2, 3]
    assert view.mask == bytes([0, 0, 1, 1, 1])
    assert frames.take(SLOT, LIFE, frame(2, delta([4])))[0] is None  # the attempt has ended
    assert frames.dropped.unknown_attempts == 1


def test_frames_of_an_old_life_are_dropped_and_counted(frames: TokenIngest, store: TokenStore) -> None:
    frames.close_worker(SLOT, LIFE)
    frames.open_worker(SLOT, Incarnation(2))
    assert frames.take(SLOT, LIFE, frame(0, delta([1]))) == (None, [])
    assert frames.dropped.old_frames == 1
    assert store.length(TRAJECTORY) == 2


def test_tokens_of_a_trajectory_that_was_taken_back_are_not_stored(
    frames: TokenIngest, store: TokenStore
) -> None:
    frames.release(TRAJECTORY)
    assert frames.take(SLOT, LIFE, frame(0, delta([1]))) == (None, [])
    assert store.length(TRAJECTORY) == 2


@pytest.mark.parametrize("sequence", [1, 5])
def test_a_hole_refuses_the_frame(frames: TokenIngest, sequence: int) -> None:
    with pytest.raises(BrokenFrameError, match=f"frame {sequence} came where 0 was due"):
        frames.take(SLOT, LIFE, frame(sequence, delta([1])))


@pytest.mark.parametrize(
    "bad",
    [
        delta([1, 2], logprobs=[-0.5]),
        delta([1, 2], runs=(VersionRun(V0, 1, V0),)),
        delta([1], runs=(VersionRun(V0, 2, V0), VersionRun(V1, -1, V0))),
        AttemptDelta(1, b"\0\0\0", b"\0\0\0", (), 0, None),
    ],
)
def test_counts_that_disagree_refuse_the_frame_whole(
    frames: TokenIngest, store: TokenStore, bad: AttemptDelta
) -> None:
    frames.begin(AttemptId(2), Attempt(TrajectoryId(8), 0, SLOT, LIFE))
    with pytest.raises(BrokenFrameError, match="attempt 1"):
        frames.take(SLOT, LIFE, frame(0, delta([1], attempt=2), bad))
    assert store.length(TrajectoryId(8)) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.scenario("LP-02")
def test_a_bad_logprob_ends_its_attempt_and_keeps_what_came_before(
    frames: TokenIngest, store: TokenStore, bad: float
) -> None:
    frames.begin(AttemptId(2), Attempt(TrajectoryId(8), 0, SLOT, LIFE))
    runs = (VersionRun(V0, 1, V0), VersionRun(V1, 2, V0))
    broken = delta([1, 2, 3], logprobs=[-0.5, -0.25, bad], runs=runs)
    event, ended = frames.take(SLOT, LIFE, frame(0, broken, delta([4], attempt=2)))
    assert event is not None
    first, second = event.deltas
    assert (first.finish, first.count) == ("error", 2)
    assert "not finite" in first.error
    assert first.runs == (VersionRun(V0, 1, V0), VersionRun(V1, 1, V0))
    assert (second.finish, second.count) == (None, 1)
    assert ended == [1]  # the worker is to stop generating it
    assert unpack(store.view(TRAJECTORY).ids) == [5, 6, 1, 2]
    assert store.view(TRAJECTORY).logprobs == struct.pack("<4f", 0, 0, -0.5, -0.25)


@pytest.mark.parametrize("bad", [-1, 10, 2**31 - 1])
def test_an_id_outside_the_vocabulary_ends_its_attempt(
    frames: TokenIngest, store: TokenStore, bad: int
) -> None:
    event, ended = frames.take(SLOT, LIFE, frame(0, delta([1, bad], finish="stop")))
    assert event is not None
    assert ended == []
    assert event.deltas[0].finish == "error"
    assert f"id {bad}" in event.deltas[0].error
    assert store.length(TRAJECTORY) == 3


def test_a_finish_without_tokens_is_told(frames: TokenIngest) -> None:
    event, _ = frames.take(SLOT, LIFE, frame(0, delta([], finish="abort")))
    assert event is not None
    assert event.deltas[0].finish == "abort"
    assert event.deltas[0].count == 0


def test_the_passes_of_a_frame_are_summed_up_and_idle_or_impossible_ones_left_out(
    frames: TokenIngest,
) -> None:
    iterations = (
        IterationStat(0.5, 2, 10, 30),
        IterationStat(0.25, 3, 0, 50),
        IterationStat(9.0, 0, 0, 0),
        IterationStat(math.nan, 1, 0, 5),
        IterationStat(-1.0, 1, 0, 5),
    )
    event, _ = frames.take(SLOT, LIFE, Deltas(0, (delta([1]),), iterations))
    assert event is not None
    assert event.iterations == IterationSums(
        count=2,
        seconds=0.75,
        decoding=5.0,
        prefill=10.0,
        decoding2=13.0,
        prefill2=100.0,
        decoding_prefill=20.0,
        seconds_decoding=1.75,
        seconds_prefill=5.0,
        seconds2=0.3125,
        context=80.0,
        context2=3400.0,
        decoding_context=210.0,
        prefill_context=300.0,
        seconds_context=27.5,
    )
    event, _ = frames.take(SLOT, LIFE, Deltas(1, (), iterations[:1]))
    assert event is not None
    assert event.deltas == ()
    assert frames.take(SLOT, LIFE, Deltas(2, (), iterations[2:])) == (None, [])
