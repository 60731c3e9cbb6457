import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.workers.training.batching import balance, cut, deal_groups


@given(
    lengths=st.lists(st.integers(1, 100), max_size=40),
    num_ranks=st.integers(1, 5),
    budget=st.integers(1, 200),
)
@pytest.mark.scenario("GR-04")
def test_every_sample_once_and_ranks_run_equally_many(
    lengths: list[int], num_ranks: int, budget: int
) -> None:
    plan = cut(lengths, num_ranks, budget)
    assert len(plan) == num_ranks
    assert len({len(batches) for batches in plan}) == 1
    assert sorted(index for batches in plan for batch in batches for index in batch) == list(
        range(len(lengths))
    )
    for batches in plan:
        for batch in batches:
            assert sum(lengths[index] for index in batch) <= budget or len(batch) == 1


@pytest.mark.parametrize("count", [13, 3, 1, 0])
@pytest.mark.scenario("GR-04")
def test_counts_that_ranks_do_not_divide(count: int) -> None:
    plan = cut([10] * count, 4, 1000)
    assert sum(len(batch) for batches in plan for batch in batches) == count


def test_ranks_get_about_equally_many_tokens() -> None:
    shares = balance([100, 90, 40, 30, 20, 10, 10], 2)
    loads = [sum([100, 90, 40, 30, 20, 10, 10][index] for index in share) for share in shares]
    assert loads == [150, 150]


def test_groups_are_dealt_whole_and_in_prompt_order() -> None:
    groups = [7, 3, 3, 7, 5, 9, 5, 9, 11]
    assert deal_groups(groups, 1) == [[0, 1, 2, 3, 4, 5, 6, 7, 8]]
    assert deal_groups(groups, 2) == [[1, 2, 4, 6], [0, 3, 5, 7, 8]]
    assert deal_groups([1, 1], 3) == [[], [], [0, 1]]
