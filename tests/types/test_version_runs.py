"""Runs of one version: what is merged and cut stands for the same tokens, one by one."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pearl.types.trajectory import VersionRun
from pearl.types.version_runs import append_run, first_runs
from pearl.types.weights import Version

A, B, C = Version(0, 1), Version(0, 2), Version(1, 2)
RUNS = st.lists(st.builds(VersionRun, st.sampled_from([A, B, C]), st.integers(1, 4), st.sampled_from([A, B])))


def tokens(runs: list[VersionRun]) -> list[tuple[Version, Version]]:
    return [(run.version, run.kv_version) for run in runs for _ in range(run.count)]


def merged(runs: list[VersionRun]) -> list[VersionRun]:
    found: list[VersionRun] = []
    for run in runs:
        append_run(found, run)
    return found


def test_equal_neighbours_become_one_run() -> None:
    assert merged([VersionRun(A, 2, A), VersionRun(A, 3, A), VersionRun(B, 1, A)]) == [
        VersionRun(A, 5, A),
        VersionRun(B, 1, A),
    ]


def test_older_keys_and_values_keep_runs_apart() -> None:
    runs = [VersionRun(B, 1, A), VersionRun(B, 1, B)]
    assert merged(runs) == runs


@given(RUNS)
def test_merging_keeps_every_token_and_leaves_nothing_to_merge(runs: list[VersionRun]) -> None:
    found = merged(runs)
    assert tokens(found) == tokens(runs)
    assert merged(found) == found
    assert all(tokens([a])[0] != tokens([b])[0] for a, b in pairwise(found))


@given(RUNS, st.integers(0, 40))
def test_a_cut_keeps_exactly_the_first_tokens(runs: list[VersionRun], count: int) -> None:
    assert tokens(first_runs(runs, count)) == tokens(runs)[:count]
