"""Routing is a pure choice: hand numbers, and what holds for all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.core.pipeline.router import (
    PREFILL_STRATEGIES,
    PREFILL_TOKENS_PER_REQUEST,
    STRATEGIES,
    Candidate,
    Strategy,
    cache_aware,
    cache_aware_prefill,
    least_loaded,
    sticky,
)
from pearl.types.ids import Slot


def candidates(*running: int, cached: int = 0, home: int = 0) -> list[Candidate]:
    return [Candidate(Slot(i), r, cached if i == home else 0) for i, r in enumerate(running)]


def test_least_loaded_takes_the_shortest_queue_and_the_lowest_slot() -> None:
    assert least_loaded(10, None, candidates(3, 1, 1)) == 1
    assert least_loaded(10, None, []) is None


def test_sticky_waits_for_its_home() -> None:
    assert sticky(10, Slot(2), candidates(0, 5)) is None
    assert sticky(10, Slot(1), candidates(0, 5)) == 1
    assert sticky(10, None, candidates(3, 0)) == 1


def test_cache_aware_stays_until_another_is_shorter_by_a_request() -> None:
    assert cache_aware(100, Slot(0), candidates(2, 2, cached=100)) == 0
    assert cache_aware(100, Slot(0), candidates(2, 1, cached=100)) == 0, "the prefill costs a little too"
    assert cache_aware(100, Slot(0), candidates(3, 1, cached=100)) == 1


def test_cache_aware_pays_for_a_long_prefix() -> None:
    context = 4 * PREFILL_TOKENS_PER_REQUEST
    assert cache_aware(context, Slot(0), candidates(5, 1, cached=context)) == 0
    assert cache_aware(context, Slot(0), candidates(7, 1, cached=context)) == 1


def test_a_prefill_queue_counts_by_what_its_requests_prefill() -> None:
    """Contexts of 12,000 tokens, of which 2,000 are new to the home: moving costs five requests of its queue."""

    def choose(at_home: int, elsewhere: int) -> Slot | None:
        return cache_aware_prefill(12_000, Slot(0), candidates(at_home, elsewhere, cached=10_000))

    assert choose(5, 0) == 0
    assert choose(6, 0) == 1
    assert choose(8, 3) == 0


def test_a_prefill_worker_without_any_prefix_is_chosen_by_its_queue() -> None:
    assert cache_aware_prefill(500, None, candidates(2, 1, 1)) == 1
    assert cache_aware_prefill(500, Slot(7), candidates(2, 1)) == 1
    assert cache_aware_prefill(500, None, []) is None
    assert cache_aware_prefill(500, Slot(0), candidates(1, 0, cached=500)) == 0, "nothing to prefill at home"


def test_cache_aware_leaves_a_home_that_may_not_serve() -> None:
    assert cache_aware(100, Slot(5), candidates(2, 1)) == 1
    assert cache_aware(100, Slot(0), []) is None


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@pytest.mark.parametrize("strategies", [STRATEGIES, PREFILL_STRATEGIES], ids=["whole", "prefill"])
@given(
    context=st.integers(0, 100_000),
    home=st.none() | st.integers(0, 5),
    running=st.lists(st.integers(0, 50), max_size=6),
)
def test_a_choice_is_always_a_candidate(
    strategies: dict[str, Strategy],
    name: str,
    context: int,
    home: int | None,
    running: list[int],
) -> None:
    offered = candidates(*running)
    chosen = strategies[name](context, None if home is None else Slot(home), offered)
    assert chosen is None or chosen in {c.slot for c in offered}
    if name != "sticky":
        assert (chosen is None) == (not offered)
