"""Many simulated runs side by side: in parallel over policies and seeds, compared in pairs of equal seed."""

import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import msgspec

from pearl.runtime.parent_death import watch_parent
from pearl.sim.job import Job, Result, run

T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t for two-sided 95 %, by degrees of freedom from 1; 2.0 is near enough beyond."""
_PER_SEED_ONLY = ("seed", "per_step", "note")


def run_all(
    jobs: Sequence[Job], on_done: Callable[[int], None] = lambda _: None, num_processes: int | None = None
) -> list[Result]:
    """Run all jobs and return the results in the jobs' order; ``on_done`` gets the index of each job that has
    ended."""
    wanted = min(len(jobs), num_processes or len(os.sched_getaffinity(0)))
    if wanted <= 1:
        return [_told(run(job), index, on_done) for index, job in enumerate(jobs)]
    context = multiprocessing.get_context("spawn")  # a fork would copy the parent's threads' locks
    with ProcessPoolExecutor(wanted, mp_context=context, initializer=watch_parent) as pool:
        futures = {pool.submit(run, job): index for index, job in enumerate(jobs)}
        for future in as_completed(futures):
            future.result()
            on_done(futures[future])
        return [future.result() for future in futures]


def _told(result: Result, index: int, on_done: Callable[[int], None]) -> Result:
    on_done(index)
    return result


def summarize(results: dict[str, list[Result]]) -> dict[str, dict[str, Any]]:
    """Return each policy's means over its seeds, its ratio to the first policy and, with several seeds, their
    spread."""
    first = next(iter(results.values()))
    return {name: _summary(found, first) for name, found in results.items()}


def _summary(found: list[Result], base: list[Result]) -> dict[str, Any]:
    columns = {
        key: [getattr(result, key) for result in found]
        for key in Result.__struct_fields__
        if key not in _PER_SEED_ONLY
    }
    summary: dict[str, Any] = {
        key: values[0] if len(values) == 1 else statistics.fmean(values) for key, values in columns.items()
    }
    ratios = paired_ratios(found, base)
    summary["ratio"] = statistics.fmean(ratios) if ratios else None
    summary["ratio_ci95"] = half_width_95(ratios)
    summary["per_seed"] = [msgspec.to_builtins(result) for result in found]
    return summary


def paired_ratios(found: Sequence[Result], base: Sequence[Result]) -> list[float]:
    """Return throughput over the base's for each seed that both have."""
    pairs = zip(found, base, strict=True)
    return [
        a.throughput_tokens_per_s / b.throughput_tokens_per_s for a, b in pairs if b.throughput_tokens_per_s
    ]


def half_width_95(values: Sequence[float]) -> float | None:
    """Return half the width of the mean's 95 % confidence interval; None for fewer than two values."""
    freedom = len(values) - 1
    if freedom < 1:
        return None
    t = T_95[freedom - 1] if freedom <= len(T_95) else 2.0
    return t * statistics.stdev(values) / math.sqrt(freedom + 1)
