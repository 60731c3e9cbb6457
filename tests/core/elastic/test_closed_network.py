"""The closed queueing network: hand calculations, its limits, and that what it is told matters as it should."""

import itertools

import msgspec
import pytest
from sample_profiles import HAND

from pearl.core.elastic.capacity import allocations
from pearl.core.elastic.closed_network import closed_network
from pearl.core.elastic.survival_fluid import survival_fluid
from pearl.types.plan import Allocation
from pearl.types.profile import Profile, TrajectoryClass

ALIKE = TrajectoryClass(
    share=1.0,
    turns=10.0,
    input_tokens=100.0,
    input_tokens2=10_000.0,
    output_tokens=20.0,
    env_seconds=0.7,
    context_tokens=0.0,
)


def with_classes(*classes: TrajectoryClass, batch_size: float = 1.0, **platform: float) -> Profile:
    workload = msgspec.structs.replace(HAND.workload, batch_size=batch_size, classes=classes)
    return Profile(workload, msgspec.structs.replace(HAND.platform, **platform))


def seconds(profile: Profile, text: str) -> float:
    return closed_network(profile, Allocation.parse(text)).seconds


def of(**changes: float) -> TrajectoryClass:
    return msgspec.structs.replace(ALIKE, **changes)


def test_without_classes_it_is_the_survival_fluid() -> None:
    for allocation in allocations(4):
        assert closed_network(HAND, allocation) == survival_fluid(HAND, allocation)


def test_one_trajectory_meets_nobody() -> None:
    # 10 turns of 100 * 1 ms + 20 * 15 ms, then 10 * 0.3 s and 10 * 0.7 s
    found = closed_network(with_classes(ALIKE), Allocation(colocated=3))
    assert found.seconds == pytest.approx(1.0 + 3.0 + 3.0 + 7.0, rel=0.02)
    assert found.terms.overhead == pytest.approx(3.0, rel=1e-6)
    # and 10 * 100 * 10 B / 20 kB/s instead of the overhead
    assert seconds(with_classes(ALIKE), "1P1D") == pytest.approx(1.0 + 3.0 + 0.5 + 7.0, rel=0.02)


def test_the_terms_add_up_and_the_slowest_class_ends_the_batch() -> None:
    quick, slow = of(share=0.9, turns=5.0), of(share=0.1, turns=50.0)
    profile = with_classes(quick, slow, batch_size=20.0)
    for allocation in allocations(6):
        found = closed_network(profile, allocation)
        assert found.seconds == pytest.approx(sum(msgspec.structs.astuple(found.terms)))
        assert found.terms.env == pytest.approx(50 * 0.7, rel=1e-3)


def test_a_prefill_pool_that_limits_sets_the_pace() -> None:
    # 100 trajectories of 10 turns with 0.1 s of prefill each on the only prefill worker
    assert seconds(with_classes(ALIKE, batch_size=100.0), "1P9D") == pytest.approx(100.0, rel=0.15)


def test_more_workers_are_never_slower() -> None:
    profile = with_classes(of(share=0.5, turns=4.0), of(share=0.5), batch_size=40.0)
    found = [closed_network(profile, Allocation(colocated=n)).seconds for n in range(1, 20)]
    assert all(more <= less * 1.001 for less, more in itertools.pairwise(found))


def test_the_other_classes_matter_only_while_they_live() -> None:
    slow = of(share=0.1, turns=100.0)
    alone = seconds(with_classes(of(share=1.0, turns=100.0), batch_size=1.0), "2C")
    brief = seconds(with_classes(of(share=0.9, turns=1.0), slow, batch_size=10.0), "2C")
    lasting = seconds(with_classes(of(share=0.9, turns=99.0), slow, batch_size=10.0), "2C")
    assert alone < brief < 1.1 * alone
    assert lasting > 1.2 * brief


def test_uneven_prefills_wait_longer_where_they_queue() -> None:
    even = with_classes(ALIKE, batch_size=20.0)
    uneven = with_classes(of(input_tokens2=40_000.0), batch_size=20.0)
    assert seconds(uneven, "1P3D") > 1.03 * seconds(even, "1P3D")


def test_overlapping_batches_take_what_a_trajectory_lives() -> None:
    """Alone in flight, each after the other; and the slowest of two batches in flight is not waited for twice."""
    alone = with_classes(ALIKE, batch_size=8.0)
    flowing = msgspec.structs.replace(alone.workload, in_flight=1.0)
    found = closed_network(Profile(flowing, alone.platform), Allocation(colocated=3))
    assert found.seconds == pytest.approx(8 * 14.0, rel=0.02)
    assert found.seconds == pytest.approx(sum(msgspec.structs.astuple(found.terms)))
    uneven = with_classes(of(share=0.9, turns=1.0), of(share=0.1, turns=100.0), batch_size=10.0)
    flowing = msgspec.structs.replace(uneven.workload, in_flight=10.0)
    found = closed_network(Profile(flowing, uneven.platform), Allocation(colocated=3))
    assert 140.0 / 2 < found.seconds < 85.0


def test_contexts_make_iterations_longer() -> None:
    long = with_classes(of(context_tokens=1000.0), batch_size=20.0, decode_seconds_per_context_token=1e-5)
    assert seconds(long, "2P1D") > 1.05 * seconds(with_classes(ALIKE, batch_size=20.0), "2P1D")


def test_prefixes_that_memory_cannot_keep_are_prefilled_again() -> None:
    def of_memory(tokens: float) -> Profile:
        bytes_held = tokens * HAND.platform.kv_bytes_per_token
        return with_classes(of(context_tokens=5000.0), batch_size=10.0, kv_capacity_bytes=bytes_held)

    assert seconds(of_memory(10_000.0), "1P2D") > 1.5 * seconds(of_memory(1e6), "1P2D")
    assert seconds(of_memory(1e6), "1P2D") == pytest.approx(seconds(of_memory(1e9), "1P2D"))
