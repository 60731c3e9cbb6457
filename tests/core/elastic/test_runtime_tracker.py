"""What the tracker recovers, and which fits it refuses."""

from random import Random

import msgspec
import pytest
from sample_profiles import shipped
from synthetic_job import SyntheticJob, iterate, iteration_sums

from pearl.core.elastic.iteration_fit import NOTHING, IterationFit, add, fit
from pearl.core.elastic.makespan import closed_form
from pearl.core.elastic.profile_file import read_profile, write_profile
from pearl.core.elastic.runtime_tracker import (
    ENOUGH_STEPS,
    MAX_BUBBLE_RATIO,
    MODEL_ERROR,
    PlatformPriors,
    RuntimeTracker,
    TrackerState,
    TrajectorySample,
    bubble_ratio,
    measure,
    platform_priors,
)
from pearl.types.config import Config, RolloutConfig
from pearl.types.plan import Allocation
from pearl.types.profile import IterationSums, Profile
from pearl.types.trajectory import Turn

TRUE = shipped("qwen3-8b")
PRIORS = PlatformPriors(10.0, 1e6, 1e9)


def tracker(state: TrackerState | None = None) -> RuntimeTracker:
    return RuntimeTracker(state or TrackerState(), batch_size=4, smoothing=0.5, priors=PRIORS)


def sums_of(rows: list[tuple[float, float, float]]) -> IterationSums:
    """(seconds, decoding, prefill) of each iteration."""
    total = NOTHING
    for row in rows:
        total = add(total, iteration_sums(*row))
    return total


def turn(new_prompt: int = 10, prefilled: int = 30, generated: int = 5, env_seconds: float = 1.0) -> Turn:
    return Turn(new_prompt, prefilled, generated, retained_tokens=generated, env_seconds=env_seconds)


# recovering


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("allocation", [Allocation(colocated=8), Allocation(prefill=3, decode=5)])
def test_known_parameters_are_recovered_within_5_percent(allocation: Allocation, seed: int) -> None:
    job = SyntheticJob(TRUE, seed, noise=0.05)
    for _ in range(20):
        job.step(allocation)
    found = job.tracker.profile()
    assert found is not None
    for name in ("decode_fixed_seconds", "decode_seconds_per_seq", "prefill_seconds_per_token"):
        assert getattr(found.platform, name) == pytest.approx(getattr(TRUE.platform, name), rel=0.05), name
    for name in ("num_turns", "turn_input_tokens", "turn_output_tokens", "bubble_ratio", "env_seconds"):
        expected = getattr(TRUE.workload, name)
        tolerance = 0.15 if name == "env_seconds" else 0.05  # of one trajectory, the slowest
        assert getattr(found.workload, name) == pytest.approx(expected, rel=tolerance), name
    assert found.platform.kv_bytes_per_trajectory == pytest.approx(
        TRUE.platform.kv_bytes_per_trajectory, rel=0.01
    )


def test_overhead_is_the_residual_of_colocated_steps() -> None:
    job = SyntheticJob(TRUE, seed=1, noise=0.0)
    job.step(Allocation(prefill=3, decode=5))
    assert job.tracker.profile().platform.overhead_seconds == 0.0  # type: ignore[union-attr]
    for _ in range(30):
        job.step(Allocation(colocated=8))
    assert job.tracker.profile().platform.overhead_seconds == pytest.approx(1.4, rel=0.1)  # type: ignore[union-attr]


def slow(pair_overhead_seconds: float) -> Profile:
    platform = msgspec.structs.replace(
        TRUE.platform, pair_overhead_seconds=pair_overhead_seconds, overhead_seconds=0.0
    )
    return Profile(TRUE.workload, platform)


def overheads(job: SyntheticJob) -> list[float]:
    found = job.tracker.profile()
    assert found is not None
    return [found.platform.overhead_seconds, found.platform.pair_overhead_seconds]


def test_pairs_have_an_overhead_of_their_own() -> None:
    """What a step with pairs took beyond the model makes pairs dearer, and colocation no cheaper."""
    job = SyntheticJob(slow(2.0), seed=1, noise=0.0)
    for allocation in [Allocation(colocated=8)] * 5 + [Allocation(prefill=3, decode=5)] * 30:
        job.step(allocation)
    assert overheads(job) == pytest.approx([0.0, 2.0], rel=0.1, abs=1e-9)


def test_a_mode_that_was_not_tried_is_no_cheaper_for_it() -> None:
    """At first it is charged what the other one took beyond the model, then as much of it as may be the model's."""
    job = SyntheticJob(slow(2.0), seed=1, noise=0.0)
    for _ in range(ENOUGH_STEPS - 1):
        job.step(Allocation(prefill=3, decode=5))
        assert overheads(job) == pytest.approx([2.0, 2.0])
    job.step(Allocation(prefill=3, decode=5))
    modelled_s = closed_form(slow(0.0), Allocation(prefill=3, decode=5)).seconds / TRUE.workload.num_turns
    assert overheads(job) == pytest.approx([MODEL_ERROR * modelled_s, 2.0], rel=0.01)


def test_few_steps_of_a_mode_are_believed_in_part() -> None:
    job = SyntheticJob(slow(2.0), seed=1, noise=0.0)
    for _ in range(ENOUGH_STEPS):
        job.step(Allocation(prefill=3, decode=5))
    expected = [2.0 * (ENOUGH_STEPS - count) / ENOUGH_STEPS for count in range(1, ENOUGH_STEPS + 1)]
    for overhead in expected:
        job.step(Allocation(colocated=8))
        assert overheads(job) == pytest.approx([overhead, 2.0], abs=1e-4)


def test_a_step_is_held_against_all_that_served_it() -> None:
    """Lent workers serve a part of each step: what it should have taken is the mean of both speeds."""
    state = TrackerState()
    subject = RuntimeTracker(state, int(TRUE.workload.batch_size), 0.3, PRIORS)
    subject.on_iterations("colocated", iterate(TRUE.platform, "colocated", Random(0), 0.0))
    alone, together = Allocation(colocated=2), Allocation(colocated=8)
    samples = [TrajectorySample((turn(),) * 9, 1.0)]
    subject.on_step(samples)
    profile = subject.profile()
    assert profile is not None
    speeds = [1.0 / closed_form(profile, allocation).seconds for allocation in (alone, together)]
    expected_s = 1.0 / (0.25 * speeds[0] + 0.75 * speeds[1])
    subject.on_step(samples, expected_s + 9 * 0.5, [(alone, 30.0), (together, 90.0)])
    assert state.overhead_seconds == pytest.approx(0.5)
    before = msgspec.msgpack.encode(state.overhead_seconds)
    subject.on_step(samples, 99.0, [(alone, 30.0), (Allocation(prefill=1, decode=1), 90.0)])
    assert msgspec.msgpack.encode(state.overhead_seconds) == before, "two modes tell nothing of either"


def test_a_step_faster_than_the_model_has_no_negative_overhead() -> None:
    state = TrackerState()
    subject = tracker(state)
    subject.on_iterations("colocated", iterate(TRUE.platform, "colocated", Random(0), 0.02))
    subject.on_step([TrajectorySample((turn(env_seconds=50.0),), 1.0)], 1.0, [(Allocation(colocated=8), 1.0)])
    assert state.overhead_seconds < 0
    assert subject.profile().platform.overhead_seconds == 0.0  # type: ignore[union-attr]


def test_a_profile_is_read_back_equal_and_the_state_survives_a_journal() -> None:
    job = SyntheticJob(TRUE, seed=2, noise=0.05)
    job.step(Allocation(colocated=8))
    found = job.tracker.profile()
    assert found is not None
    assert read_profile(write_profile(found)) == found
    state = job.tracker._state
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=TrackerState) == state


# what a step measures


def test_measure_by_hand() -> None:
    short = TrajectorySample((turn(env_seconds=0.5),), generate_seconds=1.0, queue_seconds=0.5)
    long = TrajectorySample((turn(), turn(new_prompt=4, prefilled=60, generated=11)), generate_seconds=4.0)
    found = measure([short, long])
    assert (found.num_turns, found.env_seconds) == (2.0, 2.0)
    assert found.turn_input_tokens == pytest.approx(40.0)
    assert found.turn_output_tokens == pytest.approx(7.0)
    assert found.decoding_ratio == pytest.approx(5 / 8)
    assert found.context_tokens == pytest.approx((10 + 5 + 10 + 5 + 4 + 11) / 2)


def test_averages_move_and_empty_samples_tell_nothing() -> None:
    state = TrackerState()
    subject = tracker(state)
    subject.on_step([TrajectorySample((turn(generated=10),), 1.0), TrajectorySample((), 0.0)])
    subject.on_step([TrajectorySample((turn(generated=20),), 1.0)])
    subject.on_step([])
    assert state.averages is not None
    assert state.averages.turn_output_tokens == pytest.approx(15.0)


def test_averages_are_slow_within_the_noise_and_jump_out_of_it() -> None:
    state = TrackerState()
    subject = tracker(state)

    def output(tokens: int) -> float:
        subject.on_step([TrajectorySample((turn(generated=tokens),), 1.0)])
        assert state.averages is not None
        return state.averages.turn_output_tokens

    for _ in range(20):
        output(100)
        output(110)
    assert output(120) < 109
    assert output(200) == 200


def test_bubble_ratio_is_finite() -> None:
    assert bubble_ratio(0.5) == 1.0
    assert bubble_ratio(1.0) == 0.0
    assert bubble_ratio(0.0) == MAX_BUBBLE_RATIO


# the fit


def test_exact_iterations_give_exact_coefficients() -> None:
    rows = [(0.01 + 0.002 * d + 1e-4 * p, float(d), float(p)) for d in range(1, 9) for p in (0, 64, 128, 512)]
    found = fit(sums_of(rows), NOTHING)
    assert isinstance(found, IterationFit)
    assert found.decode_fixed_seconds == pytest.approx(0.01)
    assert found.decode_seconds_per_seq == pytest.approx(0.002)
    assert found.prefill_seconds_per_token == pytest.approx(1e-4)


def test_a_prefill_workers_fixed_cost_stays_out_of_a() -> None:
    serving = sums_of([(0.01 + 0.002 * d, float(d), 0.0) for d in range(1, 41)])
    prefilling = sums_of([(0.5 + 1e-4 * p, 0.0, float(p)) for p in range(0, 4000, 100)])
    found = fit(serving, prefilling)
    assert isinstance(found, IterationFit)
    assert found.decode_fixed_seconds == pytest.approx(0.01)
    assert found.prefill_seconds_per_token == pytest.approx(1e-4)


def test_contexts_are_told_from_sequences() -> None:
    """As a batch goes on fewer sequences have longer contexts: without these, A would be too large and b too small."""
    total = NOTHING
    for decoding in range(1, 33):
        context = decoding * (34 - decoding) * 500.0
        for prefill in (0.0, 512.0):
            seconds = 0.01 + 1e-4 * decoding + 5e-8 * context + 1e-5 * prefill
            one = iteration_sums(seconds, float(decoding), prefill)
            told = msgspec.structs.replace(
                one,
                context=context,
                context2=context * context,
                decoding_context=decoding * context,
                prefill_context=prefill * context,
                seconds_context=seconds * context,
            )
            total = add(total, told)
    found = fit(total, NOTHING)
    assert isinstance(found, IterationFit)
    assert found.decode_fixed_seconds == pytest.approx(0.01)
    assert found.decode_seconds_per_seq == pytest.approx(1e-4)
    assert found.decode_seconds_per_context_token == pytest.approx(5e-8)
    assert found.decode_seconds_at(10_000.0) == pytest.approx(6e-4)


def test_what_no_iteration_had_is_not_told() -> None:
    found = fit(sums_of([(0.01 + 0.002 * d, float(d), 0.0) for d in range(1, 41)]), NOTHING)
    assert isinstance(found, IterationFit)
    assert found.prefill_seconds_per_token is None


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(0.02, 5.0, 0.0)] * 100, "nothing varied"),
        ([(0.10 - 0.002 * d, float(d), 0.0) for d in range(1, 41)], "b = -0.002 s is negative"),
        ([(0.002 * d - 0.001, float(d), 0.0) for d in range(1, 41)], "A = -0.001 s is negative"),
        ([(0.01 + 0.002 * d - 1e-5 * p, d, p) for d in (1.0, 9.0) for p in range(20)], "t_prefill = -1e-05"),
        ([(0.01, 1.0, 0.0)] * 5, "5 iterations are fewer"),
    ],
)
def test_impossible_fits_are_refused_with_the_reason(
    rows: list[tuple[float, float, float]], said: str
) -> None:
    found = fit(sums_of(rows), NOTHING)
    assert isinstance(found, str)
    assert said in found


def test_noise_that_looks_like_a_fit_is_refused() -> None:
    rng = Random(3)
    rows = [(0.02 * rng.lognormvariate(0.0, 0.5), 100.0 + (i % 2) * 0.01, 0.0) for i in range(60)]
    found = fit(sums_of(rows), NOTHING)
    assert isinstance(found, str)
    assert "is not determined" in found or "is negative" in found


def test_a_refused_fit_leaves_the_last_good_one() -> None:
    state = TrackerState()
    subject = tracker(state)
    subject.on_iterations("colocated", iterate(TRUE.platform, "colocated", Random(0), 0.02))
    subject.on_step([TrajectorySample((turn(),), 1.0)])
    good = subject.profile()
    assert isinstance(good, Profile)
    assert subject.refusal == ""
    subject.on_iterations("colocated", sums_of([(50.0 - d, float(d), 0.0) for d in range(1, 41)] * 9))
    subject.on_step([TrajectorySample((turn(),), 1.0)])
    assert "is negative" in subject.refusal
    assert subject.profile() == good


def test_a_step_amid_a_change_of_workers_tells_nothing_of_what_is_prefilled() -> None:
    """Contexts that move are prefilled anew, once; what recurs counts from the third step on."""
    state = TrackerState()
    subject = tracker(state)
    usual, moved = turn(prefilled=100), turn(prefilled=900)
    for _ in range(4):
        subject.on_step([TrajectorySample((usual,), 1.0)])
    for expected in (100.0, 100.0, 900.0):
        subject.on_step([TrajectorySample((moved,), 1.0)], steady=False)
        assert state.averages is not None
        assert state.averages.turn_input_tokens == expected
    subject.on_step([TrajectorySample((turn(prefilled=900, generated=30),), 1.0)], steady=False)
    assert state.averages is not None
    assert state.averages.turn_output_tokens == 30.0, "lengths do not depend on who serves"


def test_no_profile_before_batch_and_platform_are_known() -> None:
    subject = tracker()
    assert subject.profile() is None
    subject.on_step([TrajectorySample((turn(),), 1.0)], 10.0, [(Allocation(colocated=1), 10.0)])
    assert subject.profile() is None
    assert "fewer than" in subject.refusal


# priors


def test_priors_come_from_the_model_or_the_emulated_engine() -> None:
    torch = platform_priors(Config())
    assert torch.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert torch.kv_capacity_bytes == 65536 * 512
    emulated = platform_priors(Config(rollout=RolloutConfig(engine="emulated")))
    assert (emulated.kv_bytes_per_token, emulated.kv_bandwidth_bytes_per_s) == (147456.0, 50e9)
