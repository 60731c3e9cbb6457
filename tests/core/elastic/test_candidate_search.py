"""The least makespan is found without looking at every allocation."""

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from sample_profiles import HAND

from pearl.core.elastic.candidate_search import CandidateSearch, Lending
from pearl.core.elastic.capacity import allocations
from pearl.core.elastic.decision_engine import decide
from pearl.core.elastic.makespan import closed_form
from pearl.types.config import ElasticConfig
from pearl.types.plan import Allocation
from pearl.types.profile import Profile

MANY = 40


def profile_with(prefill: float, decode: float) -> Profile:
    platform = msgspec.structs.replace(
        HAND.platform,
        prefill_seconds_per_token=HAND.platform.prefill_seconds_per_token * prefill,
        decode_seconds_per_seq=HAND.platform.decode_seconds_per_seq * decode,
        kv_capacity_bytes=1e15,
    )
    return msgspec.structs.replace(HAND, platform=platform)


@given(
    size=st.integers(2, 300),
    factors=st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)),
    lent=st.sampled_from([0, 1, 7]),
)
def test_downhill_leads_to_the_least_split(size: int, factors: tuple[float, float], lent: int) -> None:
    profile, splits = profile_with(*factors), [a for a in allocations(size) if not a.is_colocated]
    thorough, quick = (CandidateSearch(profile, splits, closed_form, Lending(lent, 0.4)) for _ in range(2))
    thorough.evaluate_all()
    quick.search_splits(splits)
    least = min(candidate.seconds for candidate in thorough.found)
    assert math.isclose(min(candidate.seconds for candidate in quick.found), least, rel_tol=1e-9)
    assert len(quick.found) <= 4 * math.log2(size) + 4


@given(st.integers(1, MANY - 1), st.sampled_from([-3, 0, 3]), st.floats(0.05, 20))
def test_a_quick_decision_is_the_thorough_one(prefill: int, change: int, factor: float) -> None:
    """Also where workers stay, join or leave: what keeps all roles is looked at too."""
    profile, config = profile_with(factor, 1.0), ElasticConfig(pd="adaptive", makespan="fluid")
    current = Allocation(prefill=prefill, decode=MANY - prefill)
    found = [decide(profile, MANY + change, current, config, thorough=thorough) for thorough in (True, False)]
    assert (found[0].target, found[0].switch, found[0].forced) == (
        found[1].target,
        found[1].switch,
        found[1].forced,
    )
    assert len(found[1].candidates) < len(found[0].candidates)
