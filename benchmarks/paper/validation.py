"""The simulator against real time: a profile is fitted to one live run, and other live runs are simulated with it.

    python -m benchmarks.paper.validation [--only emulated,torch] [--tries 2]

Real coordinator and processes. Emulated engine: 16 and 32 workers, whose iterations vary by noise unknown to the
simulator. Torch engine: two workers, each pinned to a core, the trainer idle while they work (staleness 0). A run's
trajectories are replayed in the simulator turn by turn, so that only times are judged. Writes validation.json beside
the other results, and says which errors are beyond their limits (exit code 1). Needs two cores with nothing else to do.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from benchmarks.paper.figure import Figure, Table
from benchmarks.paper.runner import RESULTS
from pearl.runtime import process_markers
from pearl.sim.job import make_job, run
from pearl.testing.live_run import LiveRun, ended

LIMIT_S = 400.0  # of one live run
WARM_UP = 1
"""Steps that are not compared: workers come up, and their first iterations are slow."""
FIT_SEED = 0
COMMON = ("rollout.start=strict", "elastic.borrow=never", "elastic.inter=false", 'elastic.trace=""')


class Kind(NamedTuple):
    """Live runs of one engine: the settings of the run that is fitted to, and of those that are compared."""

    title: str
    config: str
    common: tuple[str, ...]
    fitted: tuple[str, ...]
    compared: tuple[tuple[str, ...], ...]
    limit: float  # of the mean error
    pins: bool = False


KINDS = {
    "emulated": Kind(
        "emulated engine",
        "launch/configs/emulated.toml",
        (
            "run.num_steps=6",
            "data.batch_size=64",
            "emulated.decode_fixed_seconds=0.012",
            "emulated.decode_seconds_per_seq=0.001",
            "emulated.prefill_seconds_per_token=1e-4",
            "environment.num_workers=1",
            "rollout.max_in_flight=64",
        ),
        ("rollout.num_workers=16",),
        (
            ("rollout.num_workers=16", "run.seed=1", "environment.options.seed=1"),
            ("rollout.num_workers=32", "run.seed=2", "environment.options.seed=2"),
            ("rollout.num_workers=16", "run.seed=3", "environment.options.turn_output_tokens=80"),
        ),
        0.05,
    ),
    "torch": Kind(
        "torch engine",
        "launch/configs/quickstart.toml",
        (
            "run.num_steps=8",
            "rollout.staleness_bound=0",
            "elastic.preemptible_gpus=0",
            "environment.num_evaluation_tasks=0",
            "warm_start.num_steps=20",
        ),
        ("rollout.num_workers=2",),
        (
            ("rollout.num_workers=2", "run.seed=1"),
            ("rollout.num_workers=2", "run.seed=2", "data.batch_size=128"),
            ("rollout.num_workers=2", "run.seed=3", "data.batch_size=96"),
        ),
        0.20,
        pins=True,
    ),
}


class Compared(msgspec.Struct, frozen=True):
    settings: str
    live_s: list[float]  # of steps
    simulated_s: list[float]
    load: float  # of the machine before the live run

    @property
    def errors(self) -> list[float]:
        return [abs(b / a - 1) for a, b in zip(self.live_s, self.simulated_s, strict=True)]


def live(kind: Kind, settings: tuple[str, ...], run_dir: Path) -> None:
    words = (kind.config, *COMMON, *kind.common, *settings)
    job = LiveRun(run_dir, *words)
    with ended(job):
        stop = threading.Event()
        pinning = threading.Thread(target=_pin, args=(job.process.pid, stop), daemon=True)
        if kind.pins:
            pinning.start()
        code = job.wait(LIMIT_S)
        stop.set()
    assert code == 0, f"exit code {code}:\n{job.text()[-4000:]}"


def _pin(pid: int, stop: threading.Event) -> None:
    """Give each rollout worker a core of its own, as they come up."""
    cores, pinned = sorted(os.sched_getaffinity(0)), dict[int, int]()
    while not stop.wait(0.2):
        for process in _rollout_workers(pid):
            if process.pid not in pinned:
                pinned[process.pid] = cores[len(pinned) % len(cores)]
                _pin_threads(process, pinned[process.pid])


def _rollout_workers(pid: int) -> Iterator[psutil.Process]:
    """The processes that hold a model, not the launchers above them."""
    try:
        for process in psutil.Process(pid).children(recursive=True):
            group = process.environ().get(process_markers.GROUP_VARIABLE, "")
            if group.startswith("rollout.") and not process.children():
                yield process
    except psutil.NoSuchProcess:
        return


def _pin_threads(process: psutil.Process, core: int) -> None:
    try:
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})
    except (psutil.NoSuchProcess, ProcessLookupError):
        return


def step_seconds(run_dir: Path) -> list[float]:
    lines = [msgspec.json.decode(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    return [float(line["seconds"]) for line in lines if line.get("kind") == "step"]


def simulated(run_dir: Path, fitted: Path) -> list[float]:
    """Of the same job and the same trajectories, with the other run's profile."""
    job = make_job(
        run_dir / "config.toml",
        "config",
        0,
        overrides=('elastic.trace=""',),
        hardware_name=str(fitted),
        workload=str(run_dir),
        trace=(),
        horizon_s=3600.0,
    )
    return [line.seconds for line in run(job).per_step]


def compare(kind: Kind, directory: Path) -> list[Compared]:
    fitted = directory / "fitted"
    live(kind, kind.fitted, fitted)
    found = []
    for number, settings in enumerate(kind.compared):
        run_dir, load = directory / str(number), os.getloadavg()[0]
        live(kind, settings, run_dir)
        real, virtual = step_seconds(run_dir)[WARM_UP:], simulated(run_dir, fitted)[WARM_UP:]
        count = min(len(real), len(virtual))
        assert count >= len(real) - 1, f"{len(real)} live steps, {len(virtual)} simulated"
        found.append(Compared(" ".join(settings), real[:count], virtual[:count], load))
        print(
            f"  {kind.title}, {found[-1].settings}: live {statistics.fmean(real):.2f} s a step, simulated "
            f"{statistics.fmean(virtual):.2f} s, mean error {statistics.fmean(found[-1].errors):.1%}, load {load:.1f}",
            flush=True,
        )
    return found


def mean_error(found: list[Compared]) -> float:
    return statistics.fmean(error for compared in found for error in compared.errors)


def _row(title: str, one: Compared) -> list[str]:
    return [
        title,
        one.settings,
        str(len(one.live_s)),
        f"{statistics.fmean(one.live_s):.2f}",
        f"{statistics.fmean(one.simulated_s):.2f}",
        f"{100 * statistics.fmean(one.errors):.1f} %",
        f"{100 * max(one.errors):.1f} %",
        f"{one.load:.1f}",
    ]


def figure(results: dict[str, list[Compared]]) -> Figure:
    rows = []
    for name, found in results.items():
        rows += [_row(KINDS[name].title, one) for one in found]
        total = f"{100 * mean_error(found):.1f} %"
        limit = f"at most {100 * KINDS[name].limit:.0f} %"
        rows.append([KINDS[name].title, f"all ({limit})", "", "", "", total, "", ""])
    return Figure(
        name="validation",
        title="The simulator against real time",
        parameters="profile fitted to a live run of its own (seed 0), none of those below; their trajectories replayed "
        "turn by turn; strict batches, the first step left out",
        tables=[
            Table(
                header=[
                    "engine",
                    "run",
                    "steps",
                    "live s",
                    "simulated s",
                    "mean error",
                    "worst step",
                    "load before",
                ],
                rows=rows,
            )
        ],
        remarks=[
            "The error is of single steps. The emulated engine's iterations have lognormal noise of 5 % that the "
            "simulator does not know; the torch engine's workers share two cores with the coordinator and the "
            "environments.",
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--tries", type=int, default=1, help="of an engine whose error is beyond its limit")
    parser.add_argument("--keep", type=Path, help="directory to leave the runs in")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    results: dict[str, list[Compared]] = {}
    for name in arguments.only.split(","):
        for attempt in range(arguments.tries):
            with tempfile.TemporaryDirectory(prefix="pearl-validation-") as directory:
                found = compare(KINDS[name], Path(directory))
                if arguments.keep is not None:
                    shutil.copytree(directory, arguments.keep / f"{name}-{attempt}")
            if name not in results or mean_error(found) < mean_error(results[name]):
                results[name] = found
            if mean_error(found) <= KINDS[name].limit:
                break
            time.sleep(5.0)
    told = msgspec.json.format(msgspec.json.encode(figure(results)), indent=1)
    (arguments.results / "validation.json").write_bytes(told + b"\n")
    beyond = [name for name, found in results.items() if mean_error(found) > KINDS[name].limit]
    for name in beyond:
        print(f"{name}: mean error {mean_error(results[name]):.1%} is beyond {KINDS[name].limit:.0%}")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
