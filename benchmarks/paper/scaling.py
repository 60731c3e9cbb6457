"""How the simulator and the decisions grow with the cluster: a simulated hour with 32 to 512 GPUs, 4,096 with --full.

    python -m benchmarks.paper.scaling [--full]

Half of the GPUs train, an eighth is reserved for rollout, the rest is preemptible and comes and goes; a batch has two
trajectories a GPU. Each size runs in a process of its own. Writes scaling.json beside the other results.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from benchmarks.paper.figure import Chart, Figure, Series, Table
from benchmarks.paper.runner import HARDWARE, RESULTS, ROOT
from pearl.core.elastic.decision_engine import decide
from pearl.sim.job import Job, build, make_job
from pearl.types.config import ElasticConfig
from pearl.types.profile import Profile
from pearl.types.trace import TraceEvent

SIZES = (32, 128, 512)
FULL_SIZES = (*SIZES, 2048, 4096)
HOUR_S = 3600.0
MIB = 1024  # of KiB
NUM_DECISIONS = 9


class Measured(msgspec.Struct, frozen=True):
    gpus: int
    workers: int  # when all are there
    events: int
    steps: int
    cpu_s: float
    memory_mib: float
    decision_ms: float  # for all workers, with the profile of the run; the median of a few


def make(gpus: int) -> Job:
    """Thirds of the preemptible GPUs arrive at once, after 20 minutes and after 40, when one third leaves again."""
    third = gpus // 8
    trace = (
        TraceEvent("arrive", at_s=0.0, count=third),
        TraceEvent("arrive", at_s=1200.0, count=2 * third),
        TraceEvent("reclaim", at_s=2400.0, count=third, grace_s=30.0),
    )
    settings = (
        f"training.num_ranks={gpus // 2}",
        f"rollout.num_workers={gpus // 16}",
        f"data.batch_size={2 * gpus}",
    )
    return make_job(
        ROOT / "launch" / "configs" / "simulate-8b.toml",
        "pearl+",
        0,
        overrides=settings,
        hardware_name=HARDWARE["8b"] + "-load-bound",
        trace=trace,
        horizon_s=HOUR_S,
    )


def measure(gpus: int) -> Measured:
    job = make(gpus)
    simulation = build(job)
    events = 0

    def count(*_: object) -> None:
        nonlocal events
        events += 1

    simulation._sink = count
    began = time.process_time()
    simulation.run(job.horizon_s)
    cpu_s = time.process_time() - began
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    profile = simulation.core.profile()
    workers = gpus // 2
    steps = len(simulation.metrics.steps)
    decision_s = statistics.median(_decision_s(profile, workers) for _ in range(NUM_DECISIONS))
    return Measured(gpus, workers, events, steps, cpu_s, peak_kib / MIB, 1e3 * decision_s)


def _decision_s(profile: Profile | None, workers: int) -> float:
    assert profile is not None, "the run was too short to measure anything"
    began = time.process_time()
    decide(profile, workers, None, ElasticConfig(pd="adaptive"))
    return time.process_time() - began


def in_a_process_of_its_own(gpus: int) -> Measured:
    words = [sys.executable, "-m", "benchmarks.paper.scaling", "--one", str(gpus)]
    found = subprocess.run(words, check=True, capture_output=True, cwd=ROOT)
    return msgspec.json.decode(found.stdout, type=Measured)


def figure(found: list[Measured]) -> Figure:
    rows = [
        [
            str(m.gpus),
            str(m.workers),
            str(m.steps),
            f"{m.events:,}",
            f"{m.cpu_s:.1f}",
            f"{m.events / m.cpu_s:,.0f}",
            f"{m.memory_mib:.0f}",
            f"{m.decision_ms:.1f}",
        ]
        for m in found
    ]
    return Figure(
        name="scaling",
        title="How it grows: a simulated hour with 32 GPUs and more",
        parameters="load-bound, Qwen3-8B, pearl+, a batch of two trajectories a GPU, one core",
        charts=[
            Chart(
                title="events a second of CPU time",
                kind="lines",
                series=[
                    Series(
                        name="events/s",
                        x=[float(m.gpus) for m in found],
                        values=[m.events / m.cpu_s for m in found],
                    )
                ],
                x_title="GPUs",
            ),
        ],
        tables=[
            Table(
                header=[
                    "GPUs",
                    "workers at most",
                    "steps",
                    "events",
                    "CPU s",
                    "events/s",
                    "MiB",
                    "decision ms",
                ],
                rows=rows,
            )
        ],
        remarks=[
            "Events grow with the batch; each costs more with more workers, since the router looks at all of them. A "
            "decision predicts every allocation, so its time grows with the number of workers; there is one a step."
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--one", type=int, help="measure this size only and print it as JSON")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(msgspec.json.encode(measure(arguments.one)).decode())
        return 0
    found = []
    for gpus in FULL_SIZES if arguments.full else SIZES:
        found.append(in_a_process_of_its_own(gpus))
        print(found[-1], flush=True)
    told = msgspec.json.format(msgspec.json.encode(figure(found)), indent=1)
    (arguments.results / "scaling.json").write_bytes(told + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
