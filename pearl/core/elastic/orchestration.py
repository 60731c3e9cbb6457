"""From a target's counts to who does what, with as few changes as there can be (paper §4.4.2, Eqs. 5-6).

Joins and departures are given. Each role keeps its present workers up to its target count; what is missing is filled
by those that join first and by the survivors that are too many elsewhere second. That is the minimum
D_worker + D_role, since the excess of each role must change whatever else is done.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import chain

from pearl.types.ids import Slot
from pearl.types.plan import Allocation, Assignment, Plan, Role

ROLES: tuple[Role, ...] = ("prefill", "decode", "colocated")


def make_plan(
    current: Mapping[Slot, Role], leavers: Collection[Slot], joiners: Collection[Slot], target: Allocation
) -> Plan:
    """The plan from the active workers' roles to the target; the same for the same arguments, in whatever order.

    ``leavers`` are active workers, ``joiners`` are not, and those that stay and join are as many as the target.
    """
    gone, new = set(leavers), set(joiners)
    assert gone <= current.keys(), f"not active: {sorted(gone - current.keys())}"
    assert not new & current.keys(), f"active already: {sorted(new & current.keys())}"
    survivors = {slot: role for slot, role in sorted(current.items()) if slot not in gone}
    assert len(survivors) + len(new) == target.total, (len(survivors), len(new), target)
    excess, open_roles = _compare(survivors, target)
    add, rebind = _fill(open_roles, sorted(new), excess)
    return Plan(add=add, remove=tuple(sorted(gone)), rebind=rebind)


def _compare(survivors: Mapping[Slot, Role], target: Allocation) -> tuple[list[Slot], list[Role]]:
    """The survivors that cannot keep their role, and a role for each worker that is missing in it."""
    missing = {role: target.count(role) for role in ROLES}
    excess: list[Slot] = []
    for slot, role in survivors.items():
        if missing[role]:
            missing[role] -= 1
        else:
            excess.append(slot)
    return excess, list(chain.from_iterable([role] * count for role, count in missing.items()))


def _fill(
    open_roles: list[Role], joiners: list[Slot], excess: list[Slot]
) -> tuple[tuple[Assignment, ...], tuple[Assignment, ...]]:
    split = len(joiners)
    return _assign(joiners, open_roles[:split]), _assign(excess, open_roles[split:])


def _assign(slots: Iterable[Slot], roles: Iterable[Role]) -> tuple[Assignment, ...]:
    return tuple(Assignment(slot, role) for slot, role in zip(slots, roles, strict=True))
