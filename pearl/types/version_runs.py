"""Runs of tokens made under one version: merged where they meet, cut to the first tokens."""

from collections.abc import Sequence

from pearl.types.trajectory import VersionRun


def append_run(runs: list[VersionRun], run: VersionRun) -> None:
    """Add a run at the end, to the last one where both have the same versions."""
    last = runs[-1] if runs else None
    if last is not None and last.version == run.version and last.kv_version == run.kv_version:
        runs[-1] = VersionRun(run.version, last.count + run.count, run.kv_version)
    else:
        runs.append(run)


def first_runs(runs: Sequence[VersionRun], count: int) -> list[VersionRun]:
    """Return the runs of the first ``count`` tokens."""
    kept: list[VersionRun] = []
    for run in runs:
        if count <= 0:
            break
        kept.append(VersionRun(run.version, min(run.count, count), run.kv_version))
        count -= run.count
    return kept
