"""Which allocation a budget of workers should have (paper §4.3): enumerate, predict, compare, and switch reluctantly.

A pure function of profile, budget, current allocation and settings. A switch that nothing forces must promise a
relative gain above its threshold, larger for a change of mode than of ratio, and more seconds than it costs.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from pearl.elastic.capacity import allocations, is_feasible
from pearl.elastic.fluid import survival_fluid
from pearl.elastic.makespan import Model, Terms, closed_form
from pearl.state.config import ElasticConfig
from pearl.state.plan import Allocation
from pearl.state.profile import Profile

MODELS: dict[str, Model] = {"closed-form": closed_form, "fluid": survival_fluid}

Switch = Literal["none", "first", "resize", "ratio", "mode"]
"""none: as it was; first: nothing was before; resize: workers came or went and no other changed its role; ratio:
workers change between prefill and decode; mode: between colocated and disaggregated."""


class Candidate(msgspec.Struct, frozen=True):
    allocation: Allocation
    seconds: float
    terms: Terms
    feasible: bool


class Decision(msgspec.Struct, frozen=True):
    target: Allocation  # no workers at all when the budget is 0
    seconds: float | None  # predicted makespan of the target; None while there is no profile
    candidates: tuple[Candidate, ...]  # of every allocation of the budget, feasible or not
    reason: str
    switch: Switch = "none"
    forced: bool = False  # the current allocation could not be kept


class SwitchCost(msgspec.Struct, frozen=True):
    """What an optional switch takes, and how many steps are left to earn it."""

    seconds: float = 0.0
    num_steps: float = 1.0


FREE = SwitchCost()


def decide(
    profile: Profile | None,
    num_workers: int,
    current: Allocation | None,
    config: ElasticConfig,
    cost: SwitchCost = FREE,
) -> Decision:
    """The allocation that ``num_workers`` should have.

    Args:
        profile: None while nothing has been measured.
        current: roles of the workers that stay, as they are; workers that join have none yet, so it may hold fewer
            than ``num_workers``. More than ``num_workers`` means that some leave, whichever role they have.
        cost: of a switch that nothing forces; a fixed policy does not ask.

    Raises:
        ValueError: for a policy (``config.pd``) that is neither "colocated", "adaptive" nor an allocation.
    """
    policy = config.pd
    if num_workers <= 0:
        return Decision(Allocation(), None, (), "no workers: nothing to decide")
    candidates = () if profile is None else _candidates(profile, num_workers, MODELS[config.makespan])
    if policy == "colocated":
        return _fixed(Allocation(colocated=num_workers), candidates, current, "the policy is colocated")
    if policy != "adaptive":
        target, reason = _nearest(Allocation.parse(policy), num_workers, candidates)
        return _fixed(target, candidates, current, reason)
    if profile is None:
        target = _unmeasured(num_workers, current)
        return _fixed(target, candidates, current, f"{target} until there is a profile")
    return _adapt(candidates, current, config, cost)


def _candidates(profile: Profile, num_workers: int, model: Model) -> tuple[Candidate, ...]:
    found = []
    for allocation in allocations(num_workers):
        prediction = model(profile, allocation)
        feasible = is_feasible(profile, allocation)
        found.append(Candidate(allocation, prediction.seconds, prediction.terms, feasible))
    return tuple(found)


# fixed policies


def _fixed(
    target: Allocation, candidates: Sequence[Candidate], current: Allocation | None, reason: str
) -> Decision:
    seconds = next((c.seconds for c in candidates if c.allocation == target), None)
    switch = switch_between(current, target)
    return Decision(
        target, seconds, tuple(candidates), reason, switch, forced=switch not in ("none", "first")
    )


def _nearest(wish: Allocation, num_workers: int, candidates: Sequence[Candidate]) -> tuple[Allocation, str]:
    """The feasible allocation whose share of prefill workers is nearest to the wish's; without a profile all are."""
    colocated = Allocation(colocated=num_workers)
    if wish.is_colocated:
        return colocated, "the policy is colocated"
    feasible = [c.allocation for c in candidates if c.feasible] or list(allocations(num_workers))
    splits = [allocation for allocation in feasible if not allocation.is_colocated]
    if not splits:
        return colocated, f"{wish} is the policy, but no split of {num_workers} workers is feasible"
    share = wish.prefill / wish.total
    target = min(splits, key=lambda a: (abs(a.prefill / a.total - share), a.prefill))
    return target, f"{wish} is the policy" + ("" if target == wish else f": {target} is nearest to its ratio")


def _unmeasured(num_workers: int, current: Allocation | None) -> Allocation:
    """As it was, when that is whole and all are there; else colocated, which needs to know nothing."""
    if current is not None and current.total == num_workers and current.is_whole:
        return current
    return Allocation(colocated=num_workers)


# adaptive


def _adapt(
    candidates: Sequence[Candidate], current: Allocation | None, config: ElasticConfig, cost: SwitchCost
) -> Decision:
    feasible = [candidate for candidate in candidates if candidate.feasible]
    if current is None or current.total == 0:
        best = min(feasible, key=_preference)
        return _decision(best, candidates, None, f"{_show(best)} is the least of {len(feasible)} feasible")
    kept = [candidate for candidate in feasible if _keeps_roles(current, candidate.allocation)]
    if not kept:
        return _forced(feasible, candidates, current, config)
    stay = min(kept, key=_preference)
    rivals = [c for c in feasible if _gains(stay, c, current, config, cost)]
    if not rivals:
        return _decision(stay, candidates, current, _why_stay(stay, feasible, current, config, cost))
    best = min(rivals, key=_preference)
    gain = f"{1 - best.seconds / stay.seconds:.1%} less than {_show(stay)}"
    return _decision(best, candidates, current, f"{_show(best)}, {gain}")


def _forced(
    feasible: Sequence[Candidate],
    candidates: Sequence[Candidate],
    current: Allocation,
    config: ElasticConfig,
) -> Decision:
    """No worker's role can be kept as it is. The mode still is, unless the other one gains enough."""
    best = min(feasible, key=_preference)
    same = [c for c in feasible if c.allocation.is_colocated == current.is_colocated]
    if same:
        here = min(same, key=_preference)
        if best.seconds >= here.seconds * (1 - config.mode_threshold):
            best = here
    reason = f"{current} cannot be kept: {_show(best)} instead"
    return _decision(best, candidates, current, reason, forced=True)


def _threshold(current: Allocation, allocation: Allocation, config: ElasticConfig) -> float:
    same_mode = allocation.is_colocated == current.is_colocated
    return config.ratio_threshold if same_mode else config.mode_threshold


def _gains(
    stay: Candidate, rival: Candidate, current: Allocation, config: ElasticConfig, cost: SwitchCost
) -> bool:
    """Enough in proportion, and enough in seconds."""
    limit = stay.seconds * (1 - _threshold(current, rival.allocation, config))
    return rival.seconds < limit and (stay.seconds - rival.seconds) * cost.num_steps > cost.seconds


def _why_stay(
    stay: Candidate,
    feasible: Sequence[Candidate],
    current: Allocation,
    config: ElasticConfig,
    cost: SwitchCost,
) -> str:
    best = min(feasible, key=_preference)
    if best.allocation == stay.allocation:
        return f"{_show(stay)} is the least of {len(feasible)} feasible"
    gain = 1 - best.seconds / stay.seconds
    threshold = _threshold(current, best.allocation, config)
    if gain <= threshold:
        return f"{_show(stay)} stays: {_show(best)} gains {gain:.1%}, not above {threshold:.0%}"
    saved = (stay.seconds - best.seconds) * cost.num_steps
    return f"{_show(stay)} stays: {_show(best)} saves {saved:.3g} s, the switch costs {cost.seconds:.3g} s"


def _decision(
    chosen: Candidate,
    candidates: Sequence[Candidate],
    current: Allocation | None,
    reason: str,
    *,
    forced: bool = False,
) -> Decision:
    switch = switch_between(current, chosen.allocation)
    return Decision(chosen.allocation, chosen.seconds, tuple(candidates), reason, switch, forced)


# what changes


def switch_between(current: Allocation | None, target: Allocation) -> Switch:
    if current is None or current.total == 0:
        return "first"
    if current == target:
        return "none"
    if current.is_colocated != target.is_colocated or not _is_pure(current):
        return "mode"
    return "resize" if _keeps_roles(current, target) else "ratio"


def _keeps_roles(current: Allocation, target: Allocation) -> bool:
    """Whether workers only join or only leave on the way: every role gains, or every role loses."""
    if not _is_pure(current) or current.is_colocated != target.is_colocated:
        return False
    return _fits(current, target) or _fits(target, current)


def _fits(small: Allocation, large: Allocation) -> bool:
    return (
        small.prefill <= large.prefill and small.decode <= large.decode and small.colocated <= large.colocated
    )


def _is_pure(allocation: Allocation) -> bool:
    """Not both modes at once, as it is while a plan runs."""
    return allocation.is_colocated or allocation.colocated == 0


def _preference(candidate: Candidate) -> tuple[float, bool, int]:
    """The least makespan; of equal ones colocation, then the most decode workers."""
    return candidate.seconds, not candidate.allocation.is_colocated, candidate.allocation.prefill


def _show(candidate: Candidate) -> str:
    return f"{candidate.allocation} ({candidate.seconds:.4g} s)"
