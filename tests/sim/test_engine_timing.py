"""The engine's times against hand numbers: A = 10 ms, b = 1 ms a sequence, prefill 0.1 ms a token, chunks of 100."""

from typing import Any

import msgspec
import pytest

from pearl.sim.clock import VirtualClock
from pearl.sim.engine import Engine
from pearl.sim.hardware import WorkerSpeed
from pearl.sim.iteration_times import iterations_seconds, iterations_within
from pearl.sim.requests import Progress, Request
from pearl.types.ids import AttemptId

SPEED = WorkerSpeed(
    gpus=1,
    decode_fixed_seconds=0.010,
    decode_seconds_per_sequence=0.001,
    decode_seconds_per_context_token=0.0,
    prefill_seconds_per_token=0.0001,
    prefill_seconds_per_context_token=0.0,
    prefill_chunk_tokens=100,
    kv_capacity_tokens=100_000,
    kv_bytes_per_token=1.0,
    kv_bandwidth_bytes_per_s=1.0,
)


class Trial:
    """An engine alone with its clock; ``ended`` is (time, progress) of every attempt that ended."""

    def __init__(self, **speed: Any) -> None:
        self.clock = VirtualClock()
        self.ended: list[tuple[float, Progress]] = []
        self.engine = Engine(self.clock, msgspec.structs.replace(SPEED, **speed), self._on_ended)

    def _on_ended(self, ended: list[Progress]) -> None:
        self.ended.extend((self.clock.now, one) for one in ended)

    def add(self, at_s: float, attempt: int, context: int, make: int, trajectory: int | None = None) -> None:
        who = attempt if trajectory is None else trajectory
        request = Request(AttemptId(attempt), who, who, 10, context, make, "stop")
        self.clock.at(at_s, lambda: self.engine.add(request))

    def abort(self, at_s: float, attempt: int) -> None:
        self.clock.at(at_s, lambda: self.engine.abort(AttemptId(attempt)))

    def run(self) -> dict[int, tuple[float, Progress]]:
        while self.clock.next_time() is not None:
            self.clock.step()
        return {one.request.attempt: (time, one) for time, one in self.ended}


def test_one_sequence_is_one_prefill_pass_and_a_pass_a_token() -> None:
    trial = Trial()
    trial.add(0.0, 1, context=50, make=21)
    time, one = trial.run()[1]
    # The iteration that prefills 50 tokens samples the first token: 10 + 5 ms. Twenty more iterations of 10 + 1 ms.
    assert time == pytest.approx(0.015 + 20 * 0.011)
    assert (one.made, one.prefilled_tokens, one.finish) == (21, 50, "stop")
    assert trial.engine.busy_seconds == pytest.approx(time)


def test_two_sequences_together_slow_each_other_by_b() -> None:
    trial = Trial()
    trial.add(0.0, 1, context=50, make=11)
    trial.add(0.0, 2, context=50, make=21)
    ended = trial.run()
    # Both prefill in one iteration (10 + 10 ms), then ten iterations of 10 + 2 ms, then ten of 10 + 1 ms.
    assert ended[1][0] == pytest.approx(0.020 + 10 * 0.012)
    assert ended[2][0] == pytest.approx(0.020 + 10 * 0.012 + 10 * 0.011)


def test_a_prefill_steals_the_time_of_its_tokens_from_all_that_decode() -> None:
    trial = Trial()
    trial.add(0.0, 1, context=50, make=101)
    trial.add(0.0205, 2, context=250, make=1)
    ended = trial.run()
    # The first has its first token at 15 ms and iterations end at 26, 37 ms, ...: the second begins at 26 ms with
    # chunks of 100, 100 and 50 tokens: 21 + 21 + 16 ms beside one decoding sequence, not three times 11 ms.
    assert ended[2][0] == pytest.approx(0.026 + 0.021 + 0.021 + 0.016)
    assert ended[1][0] == pytest.approx(0.015 + 100 * 0.011 + 0.025)
    assert ended[2][1].prefilled_tokens == 250


def test_time_a_pass_grows_with_the_context() -> None:
    trial = Trial(decode_seconds_per_context_token=1e-5)
    trial.add(0.0, 1, context=50, make=11)
    # Ten passes over 51, 52, ... 60 tokens of context: 10 * 11 ms + 1e-5 * 555 s.
    assert trial.run()[1][0] == pytest.approx(0.015 + 0.110 + 555e-5)


def test_time_a_prefilled_token_grows_with_its_position() -> None:
    trial = Trial(prefill_seconds_per_context_token=1e-6)
    trial.add(0.0, 1, context=100, make=1)
    # Positions 0 to 99 add 1e-6 * 4950 s.
    assert trial.run()[1][0] == pytest.approx(0.010 + 0.010 + 4950e-6)


def test_a_kept_prefix_is_not_prefilled_again_until_new_weights() -> None:
    trial = Trial()
    trial.add(0.0, 1, context=50, make=10, trajectory=7)
    trial.add(1.0, 2, context=80, make=10, trajectory=7)
    trial.clock.at(2.0, lambda: trial.engine.cache.flush())
    trial.add(3.0, 3, context=100, make=10, trajectory=7)
    ended = trial.run()
    assert ended[2][1].prefilled_tokens == 80 - 60
    assert ended[3][1].prefilled_tokens == 100


def test_members_of_a_group_share_their_prompt() -> None:
    trial = Trial()
    for attempt in (1, 2):
        request = Request(AttemptId(attempt), attempt, 5, 40, 40, 1, "stop")
        trial.clock.at(float(attempt), lambda r=request: trial.engine.add(r))  # type: ignore[misc]
    ended = trial.run()
    assert [ended[i][1].prefilled_tokens for i in (1, 2)] == [40, 1]


def test_memory_admits_in_order_and_lets_old_prefixes_go() -> None:
    trial = Trial(kv_capacity_tokens=1000)
    trial.add(0.0, 1, context=600, make=100)
    trial.add(0.0, 2, context=600, make=1)
    trial.add(0.0, 3, context=50, make=1)
    ended = trial.run()
    # 600 + 600 do not fit: the second waits for the first, and the third for the second.
    assert ended[2][0] > ended[1][0]
    assert ended[3][0] >= ended[2][0]
    assert trial.engine.cache.cached_tokens <= 1000
    assert trial.engine.retractions == 0


def test_sequences_that_outgrow_memory_are_computed_again() -> None:
    trial = Trial(kv_capacity_tokens=1000)
    trial.add(0.0, 1, context=300, make=400)
    trial.add(0.0, 2, context=300, make=400)
    ended = trial.run()
    assert trial.engine.retractions >= 1
    assert [ended[i][1].made for i in (1, 2)] == [400, 400]
    assert ended[1][1].prefilled_tokens == 300
    assert ended[2][1].prefilled_tokens > 600


def test_an_abort_keeps_what_was_made() -> None:
    trial = Trial()
    trial.add(0.0, 1, context=50, make=100)
    trial.add(0.0, 2, context=50, make=100)
    trial.abort(0.020 + 0.012 * 30 + 0.001, 1)
    trial.abort(9.0, 1)
    ended = trial.run()
    assert (ended[1][1].made, ended[1][1].finish) == (31, "abort")
    assert ended[2][1].made == 100
    assert ended[2][0] == pytest.approx(0.020 + 0.012 * 30 + 0.011 * 69)


def test_an_abort_before_the_first_pass_ends_leaves_the_others_alone() -> None:
    trial = Trial()
    trial.add(0.0, 1, context=50, make=5)
    trial.add(0.001, 2, context=50, make=5)
    trial.abort(0.002, 1)
    trial.abort(0.016, 3)
    ended = trial.run()
    assert ended[1][1].made == 0
    assert ended[2][1].made == 5


def test_all_can_be_aborted_and_the_engine_goes_on() -> None:
    trial = Trial()
    trial.add(0.0, 1, context=50, make=100)
    gone: list[Progress] = []
    trial.clock.at(0.0371, lambda: gone.extend(trial.engine.abort_all()))
    trial.add(1.0, 2, context=50, make=1)
    ended = trial.run()
    assert [(one.made, one.finish) for one in gone] == [(3, "abort")]
    assert list(ended) == [2]


@pytest.mark.parametrize(("one", "growth"), [(0.01, 0.0), (0.01, 1e-6), (0.007, 2e-4)])
@pytest.mark.parametrize("iterations", [0, 1, 2, 7, 1000])
def test_whole_passes_inverts_many_passes(iterations: int, one: float, growth: float) -> None:
    seconds = iterations_seconds(iterations, one, growth)
    assert iterations_within(seconds, one, growth) == iterations
    assert iterations_within(seconds + one * 0.9, one, growth) == iterations


def test_sums_over_passes_are_those_of_a_real_engine() -> None:
    trial = Trial()
    trial.add(0.0, 1, context=50, make=11)
    trial.run()
    sums = trial.engine.tally.take()
    assert (sums.count, sums.decoding, sums.prefill) == (11, 10, 50)
    assert sums.seconds == pytest.approx(0.015 + 0.110)
    assert sums.seconds_prefill == pytest.approx(0.015 * 50)
    assert trial.engine.tally.take().count == 0
