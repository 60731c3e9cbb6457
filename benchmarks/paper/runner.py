"""Simulated runs as values: planned by every figure, run once each, kept in a file so that a second start goes on.

The key of a run is a digest of what it was asked for: settings, hardware, trace and seed. What has changed is run
again; a change of the program is not seen, for which the store is deleted.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pearl.runtime.parent_death import watch_parent
from pearl.sim import policies
from pearl.sim.job import Job, Result, build, make_job, relaxed_gc, result_of
from pearl.traces import read_trace
from pearl.types.profile import Profile

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
HARDWARE = {"8b": "h800-qwen3-8b", "30b": "h800-qwen3-30b-a3b"}
MODELS = {"8b": "Qwen3-8B", "30b": "Qwen3-30B-A3B"}
TWO_HOURS_S = 7200.0
NO_LIMIT_S = 10 * 24 * 3600.0
"""Of runs that end with their number of steps."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What is run; everything else is in the config file of the model."""

    policy: str
    seed: int = 0
    model: str = "8b"
    load_bound: bool = True
    overrides: tuple[str, ...] = ()
    segment: int = 0  # of the trace; 0 = fixed resources
    horizon_s: float = TWO_HOURS_S

    def job(self) -> Job:
        path = ROOT / "launch" / "traces" / "segments" / f"B_p3_tp2_seg{self.segment}.csv"
        return make_job(
            ROOT / "launch" / "configs" / f"simulate-{self.model}.toml",
            self.policy,
            self.seed,
            overrides=self.overrides,
            hardware_name=HARDWARE[self.model] + ("-load-bound" if self.load_bound else ""),
            trace=tuple(read_trace(path)) if self.segment else (),
            horizon_s=self.horizon_s,
        )


def fixed(policy: str, workers: int, steps: int, *overrides: str, **fields: Any) -> Run:
    """A run with a fixed pool that trains a fixed number of batches, so that policies do the very same work."""
    settings = (f"rollout.num_workers={workers}", f"run.num_steps={steps}", *overrides)
    return Run(policy=policy, overrides=settings, horizon_s=NO_LIMIT_S, **fields)


class Outcome(msgspec.Struct, frozen=True):
    """``chosen``: the newest decision for each number of workers. ``profile``: as measured at the end.
    ``serving_s``: when the first turn was asked of a worker."""

    result: Result
    chosen: dict[str, str]
    profile: Profile | None
    cpu_seconds: float
    serving_s: float = 0.0

    @property
    def first_rollout_seconds(self) -> float:
        """Of the first batch, from its first turn to its last."""
        first = self.result.per_step[0]
        return first.end_s - first.train_seconds - self.serving_s


class Line(msgspec.Struct, frozen=True):
    key: str
    run: Run
    outcome: Outcome


def key_of(run: Run, job: Job) -> str:
    config = (ROOT / "launch" / "configs" / f"simulate-{run.model}.toml").read_text(encoding="utf-8")
    parts = (run, policies.find(run.policy).overrides, config, job.hardware, job.workload, job.trace)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:20]


def perform(job: Job) -> Outcome:
    began = time.process_time()
    simulation = build(job)
    with relaxed_gc():
        finish = simulation.run(job.horizon_s)
    chosen = {str(decision.workers): decision.target for decision in simulation.metrics.decisions}
    result = result_of(job, simulation, finish)
    return Outcome(
        result,
        chosen,
        simulation.core.profile(),
        round(time.process_time() - began, 2),
        simulation.pool.first_turn_s or 0.0,
    )


class Runs(NamedTuple):
    """Outcomes of planned runs; some may be missing."""

    found: Mapping[Run, Outcome]

    def of(self, wanted: Iterable[Run]) -> list[Outcome]:
        """Those that are there, in order."""
        return [self.found[run] for run in wanted if run in self.found]

    def pairs(self, wanted: Iterable[tuple[Run, Run]]) -> list[tuple[Outcome, Outcome]]:
        """Those whose both runs are there."""
        return [
            (self.found[one], self.found[other])
            for one, other in wanted
            if one in self.found and other in self.found
        ]


def load(path: Path) -> dict[str, Line]:
    """By key. A line that was cut short by a kill is run again."""
    found: dict[str, Line] = {}
    for raw in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            line = msgspec.json.decode(raw, type=Line)
        except msgspec.DecodeError:
            continue
        found[line.key] = line
    return found


def run_missing(
    planned: Iterable[Run], store: Path, processes: int, say: Callable[[str], None], until_s: float = 1e9
) -> Runs:
    """Run what the store lacks, each outcome written as it comes; none is begun ``until_s`` seconds from now on."""
    jobs = {run: run.job() for run in dict.fromkeys(planned)}
    keys = {run: key_of(run, job) for run, job in jobs.items()}
    known = load(store)
    missing = [run for run in jobs if keys[run] not in known]
    say(f"{len(jobs)} runs planned, {len(jobs) - len(missing)} are there, {len(missing)} to do")
    deadline_s, done = time.monotonic() + until_s, 0
    with store.open("ab") as file:
        for run, outcome in _performed(missing, jobs, processes, deadline_s):
            line = Line(keys[run], run, outcome)
            known[line.key] = line
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            done += 1
            say(f"{done}/{len(missing)} {describe(run)}: {outcome.cpu_seconds:.1f} s")
    return Runs({run: known[key].outcome for run, key in keys.items() if key in known})


def _performed(
    missing: list[Run], jobs: Mapping[Run, Job], processes: int, deadline_s: float
) -> Iterable[tuple[Run, Outcome]]:
    import multiprocessing
    from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(missing))
    with ProcessPoolExecutor(max(1, processes), mp_context=context, initializer=watch_parent) as pool:
        running: dict[Future[Outcome], Run] = {}
        while waiting or running:
            while waiting and len(running) <= processes and time.monotonic() < deadline_s:
                run = waiting.pop()
                running[pool.submit(perform, jobs[run])] = run
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()


def describe(run: Run) -> str:
    where = f"segment {run.segment}" if run.segment else ""
    kind = "load-bound" if run.load_bound else "data sheet"
    return " ".join(
        filter(None, (MODELS[run.model], run.policy, *run.overrides, where, kind, f"seed {run.seed}"))
    )
