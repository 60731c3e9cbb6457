"""Which allocation a budget of workers should have (paper §4.3): enumerate, predict, compare, and switch reluctantly.

A pure function of profile, budget, current allocation and settings. A switch that nothing forces must promise a
relative gain above its threshold, larger for a change of mode than of ratio, and more seconds than it costs.

Workers on lent training GPUs come and go with every step, and their roles are chosen together with those of the
workers that stay: an allocation is as good as it is alone and with the best roles for the others beside it, each for
its share of the time. So what is best does not change with their coming and going, and nobody switches for them.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from pearl.core.elastic.candidate_search import NOTHING_LENT, Candidate, CandidateSearch, Lending
from pearl.core.elastic.capacity import allocations, is_feasible
from pearl.core.elastic.closed_network import closed_network
from pearl.core.elastic.makespan import Model, closed_form
from pearl.core.elastic.survival_fluid import survival_fluid
from pearl.types.config import ElasticConfig
from pearl.types.plan import Allocation
from pearl.types.profile import Profile

FEW = 8
"""Allocations of which all are looked at."""
MODELS: dict[str, Model] = {
    "closed-form": closed_form,
    "fluid": survival_fluid,
    "network": closed_network,
}

Switch = Literal["none", "first", "resize", "ratio", "mode"]
"""none: as it was; first: nothing was before; resize: workers came or went and no other changed its role; ratio:
workers change between prefill and decode; mode: between colocated and disaggregated."""


class Decision(msgspec.Struct, frozen=True):
    target: Allocation  # no workers at all when the budget is 0
    seconds: float | None  # predicted makespan of the target; None while there is no profile
    candidates: tuple[Candidate, ...]  # that were looked at, feasible or not
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
    *,
    base: Allocation | None = None,
    lending: Lending = NOTHING_LENT,
    thorough: bool = True,
) -> Decision:
    """The allocation that ``num_workers`` should have.

    Args:
        profile: None while nothing has been measured.
        current: roles of the workers that stay, as they are; workers that join have none yet, so it may hold fewer
            than ``num_workers``. More than ``num_workers`` means that some leave, whichever role they have.
        cost: of a switch that nothing forces; a fixed policy does not ask.
        base: roles of workers among them that keep theirs; whole, or None.
        lending: of training GPUs, beside these workers.
        thorough: look at every allocation, also where a few tell which is best.

    Raises:
        ValueError: for a policy (``config.pd``) that is neither "colocated", "adaptive" nor an allocation.
    """
    policy = config.pd
    if num_workers <= 0:
        return Decision(Allocation(), None, (), "no workers: nothing to decide")
    possible = [a for a in allocations(num_workers) if base is None or _contains(a, base)]
    if profile is None:
        target, reason = _unmeasured_or_fixed(policy, possible, current)
        return _fixed(target, None, current, reason)
    scene = CandidateSearch(profile, possible, MODELS[config.makespan], lending)
    feasible = [a for a in possible if is_feasible(profile, a)]
    _search(scene, possible, feasible, current, thorough=thorough or config.makespan == "closed-form")
    if policy == "adaptive":
        return _adapt(scene.found, current, config, cost)
    target, reason = _nearest(policy, possible, feasible or possible, num_workers)
    if target not in feasible:
        reason += "; the batch's KV cache does not fit its decode workers"
    return _fixed(target, scene, current, reason)


def _search(
    scene: CandidateSearch,
    possible: Sequence[Allocation],
    feasible: Sequence[Allocation],
    current: Allocation | None,
    *,
    thorough: bool,
) -> None:
    """Evaluate all candidates, or those that a choice needs: colocation, the best split, and the best of those
    that keep all roles."""
    if thorough or len(possible) <= FEW:
        scene.evaluate_all()
        return
    splits = [a for a in feasible or possible if not a.is_colocated]
    kept = [] if current is None else [a for a in splits if _keeps_roles(current, a)]
    for some in (splits, kept):
        scene.search_splits(some)
    for allocation in possible:
        if allocation.is_colocated:
            scene.evaluate(allocation)


# fixed policies


def _fixed(
    target: Allocation, scene: CandidateSearch | None, current: Allocation | None, reason: str
) -> Decision:
    seconds = None if scene is None else scene.evaluate(target).seconds
    candidates = () if scene is None else scene.found
    switch = switch_between(current, target)
    return Decision(target, seconds, candidates, reason, switch, forced=switch not in ("none", "first"))


def _nearest(
    policy: str, possible: Sequence[Allocation], feasible: Sequence[Allocation], num_workers: int
) -> tuple[Allocation, str]:
    """The very allocation that is the policy, whatever memory says: it is the person's word, and an engine that lacks
    room computes some of it again. With other numbers of workers the feasible one nearest to its ratio."""
    colocated = Allocation(colocated=num_workers)
    wish = colocated if policy == "colocated" else Allocation.parse(policy)
    if wish.is_colocated:
        return colocated, "the policy is colocated"
    if wish in possible:
        return wish, f"{wish} is the policy"
    splits = [allocation for allocation in feasible if not allocation.is_colocated]
    if not splits:
        return colocated, f"{wish} is the policy, but no split of {num_workers} workers is feasible"
    share = wish.prefill / wish.total
    target = min(splits, key=lambda a: (abs(a.prefill / a.total - share), a.prefill))
    return target, f"{wish} is the policy: {target} is nearest to its ratio"


def _unmeasured_or_fixed(
    policy: str, possible: Sequence[Allocation], current: Allocation | None
) -> tuple[Allocation, str]:
    """An adaptive policy leaves what is whole as it was, when all are there; else it colocates where it may, which
    needs to know nothing."""
    if policy != "adaptive":
        return _nearest(policy, possible, possible, possible[0].total)
    target = current if current is not None and current in possible else possible[0]
    return target, f"{target} until there is a profile"


# adaptive


def _adapt(
    candidates: Sequence[Candidate], current: Allocation | None, config: ElasticConfig, cost: SwitchCost
) -> Decision:
    feasible = [candidate for candidate in candidates if candidate.feasible]
    feasible = feasible or list(candidates)  # of workers that keep their roles, whatever the batch has become
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
    best = _reluctant(rivals, current, config)
    gain = f"{1 - best.seconds / stay.seconds:.1%} less than {_show(stay)}"
    return _decision(best, candidates, current, f"{_show(best)}, {gain}")


def _forced(
    feasible: Sequence[Candidate],
    candidates: Sequence[Candidate],
    current: Allocation,
    config: ElasticConfig,
) -> Decision:
    """No worker's role can be kept as it is."""
    best = _reluctant(feasible, current, config)
    reason = f"{current} cannot be kept: {_show(best)} instead"
    return _decision(best, candidates, current, reason, forced=True)


def _reluctant(found: Sequence[Candidate], current: Allocation, config: ElasticConfig) -> Candidate:
    """The best of them, in the mode that is, unless the other one gains enough over that."""
    best = min(found, key=_preference)
    same = [c for c in found if c.allocation.is_colocated == current.is_colocated]
    if not same:
        return best
    here = min(same, key=_preference)
    return here if best.seconds >= here.seconds * (1 - config.mode_threshold) else best


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


def _contains(allocation: Allocation, base: Allocation) -> bool:
    return allocation.is_colocated == base.is_colocated and _fits(base, allocation)


def _is_pure(allocation: Allocation) -> bool:
    """Return whether only one mode is in use; both are while a plan runs."""
    return allocation.is_colocated or allocation.colocated == 0


def _preference(candidate: Candidate) -> tuple[float, bool, int]:
    """The least makespan; of equal ones colocation, then the most decode workers."""
    return candidate.seconds, not candidate.allocation.is_colocated, candidate.allocation.prefill


def _show(candidate: Candidate) -> str:
    return f"{candidate.allocation} ({candidate.seconds:.4g} s)"
