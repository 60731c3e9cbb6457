"""Plans: exactly the minimum of changes, whole, deterministic."""

from collections.abc import Iterable
from itertools import permutations
from random import Random

import pytest
from calls import num_calls
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.core.elastic.orchestration import ROLES, make_plan
from pearl.types.ids import Slot
from pearl.types.plan import Allocation, Assignment, Plan, Role

Workers = dict[Slot, Role]


def slots(*numbers: int) -> list[Slot]:
    return [Slot(number) for number in numbers]


def workers(roles: Iterable[Role]) -> Workers:
    return {Slot(index): role for index, role in enumerate(roles)}


def after(current: Workers, plan: Plan) -> Workers:
    result = {slot: role for slot, role in current.items() if slot not in plan.remove}
    result.update({assignment.slot: assignment.role for assignment in plan.rebind})
    result.update({assignment.slot: assignment.role for assignment in plan.add})
    return result


def counts(present: Workers) -> Allocation:
    roles = list(present.values())
    return Allocation(*(roles.count(role) for role in ("prefill", "decode", "colocated")))


def minimum(current: Workers, leavers: set[Slot], joiners: set[Slot], target: Allocation) -> int:
    """D_worker + D_role as Eqs. 5 and 6 have it."""
    survivors = counts({slot: role for slot, role in current.items() if slot not in leavers})
    kept = sum(min(survivors.count(role), target.count(role)) for role in ROLES)
    return len(leavers) + len(joiners) + survivors.total - kept


@st.composite
def problems(draw: st.DrawFn, most: int = 40) -> tuple[Workers, set[Slot], set[Slot], Allocation]:
    current = workers(draw(st.lists(st.sampled_from(ROLES), max_size=most)))
    leavers = draw(st.sets(st.sampled_from(sorted(current)))) if current else set()
    joiners = {Slot(1000 + index) for index in range(draw(st.integers(0, most // 2)))}
    total = len(current) - len(leavers) + len(joiners)
    prefill = draw(st.integers(0, total))
    decode = draw(st.integers(0, total - prefill))
    return current, leavers, joiners, Allocation(prefill, decode, total - prefill - decode)


def num_changes(plan: Plan) -> int:
    """D_worker + D_role (Eqs. 5-6)."""
    return len(plan.add) + len(plan.remove) + len(plan.rebind)


@settings(deadline=None, derandomize=True)
@given(problems())
def test_plan_reaches_the_target_with_the_minimum_of_changes(
    problem: tuple[Workers, set[Slot], set[Slot], Allocation],
) -> None:
    current, leavers, joiners, target = problem
    plan = make_plan(current, leavers, joiners, target)
    reached = after(current, plan)
    assert counts(reached) == target
    assert set(reached) == (set(current) - leavers) | joiners
    assert num_changes(plan) == minimum(current, leavers, joiners, target)
    for assignment in plan.rebind:
        assert current[assignment.slot] != assignment.role


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems(most=6))
def test_no_placement_needs_fewer_changes(
    problem: tuple[Workers, set[Slot], set[Slot], Allocation],
) -> None:
    current, leavers, joiners, target = problem
    present = sorted((set(current) - leavers) | joiners)
    roles = [role for role in ROLES for _ in range(target.count(role))]
    fewest = min(
        sum(current.get(slot, role) != role for slot, role in zip(present, placement, strict=True))
        for placement in set(permutations(roles))
    )
    plan = make_plan(current, leavers, joiners, target)
    assert num_changes(plan) == fewest + len(leavers) + len(joiners)


@settings(deadline=None, derandomize=True)
@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_arguments_changes_nothing(
    problem: tuple[Workers, set[Slot], set[Slot], Allocation], rng: Random
) -> None:
    current, leavers, joiners, target = problem
    items = list(current.items())
    rng.shuffle(items)
    shuffled = make_plan(dict(items), sorted(leavers, reverse=True), sorted(joiners, reverse=True), target)
    assert shuffled == make_plan(current, sorted(leavers), sorted(joiners), target)


def test_deficits_are_filled_by_joiners_first() -> None:
    current = workers(["prefill", "prefill", "decode"])
    plan = make_plan(current, [], slots(7, 5), Allocation(prefill=2, decode=3))
    assert plan == Plan(add=(Assignment(Slot(5), "decode"), Assignment(Slot(7), "decode")))


def test_a_shrink_that_takes_the_last_prefill_worker_rebinds_one_survivor() -> None:
    current = workers(["prefill", "decode", "decode", "decode"])
    plan = make_plan(current, slots(0), [], Allocation(prefill=1, decode=2))
    assert plan.remove == (0,)
    assert plan.rebind == (Assignment(Slot(3), "prefill"),)


def test_the_same_target_is_an_empty_plan() -> None:
    assert make_plan(workers(["colocated"] * 3), [], [], Allocation(colocated=3)) == Plan()


@pytest.mark.parametrize(
    ("leavers", "joiners", "target"),
    [
        ([9], [], Allocation(colocated=1)),
        ([], [1], Allocation(colocated=3)),
        ([], [], Allocation(colocated=3)),
    ],
)
def test_callers_mistakes_are_asserted(leavers: list[int], joiners: list[int], target: Allocation) -> None:
    with pytest.raises(AssertionError):
        make_plan(workers(["colocated"] * 2), slots(*leavers), slots(*joiners), target)


def test_a_plan_takes_as_long_as_there_are_workers() -> None:
    """Not as their square; ``benchmarks/decisions.py`` has the seconds."""

    def plan(size: int) -> None:
        current = workers("prefill" if index % 3 else "decode" for index in range(size))
        leavers, joiners = slots(*range(size // 32)), slots(*range(size, size + size // 16))
        make_plan(current, leavers, joiners, Allocation(size // 2, size // 2 + size // 32))

    assert num_calls(lambda: plan(4096)) < 2.1 * num_calls(lambda: plan(2048))
