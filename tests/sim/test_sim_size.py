"""What a simulated run may cost: events, from which its time follows on any machine, and memory."""

import subprocess
import sys

from sim_runs import CONFIG, ROOT

from pearl.sim.job import Job, build, make_job
from pearl.traces import read_trace

SEGMENT = ROOT / "launch" / "traces" / "segments" / "B_p3_tp2_seg2.csv"
SECONDS = 900.0
EVENTS_A_TURN = 3.5
"""A turn's own events are its end and its observation; a pair's has its prefill half's end too."""
MEMORY_MIB = 256


def at_paper_scale(policy: str) -> Job:
    trace = tuple(read_trace(SEGMENT))
    return make_job(CONFIG, policy, 0, trace=trace, horizon_s=SECONDS)


def test_events_grow_with_turns_and_not_with_tokens() -> None:
    job = at_paper_scale("pearl+")
    simulation = build(job)
    events = 0

    def count(*_: object) -> None:
        nonlocal events
        events += 1

    simulation._sink = count
    simulation.run(job.horizon_s)
    trajectories = simulation.core._state.rollout.trajectories.values()
    turns = sum(len(trajectory.turns) for trajectory in trajectories)
    assert turns > 1000
    assert events < EVENTS_A_TURN * turns + 2000


def test_a_run_at_paper_scale_fits_into_a_quarter_of_a_gibibyte() -> None:
    words = ["simulate", str(CONFIG), "--policy", "pearl", "--trace", str(SEGMENT), "--seconds", str(SECONDS)]
    # Of the program alone: what getrusage says includes whoever started it.
    code = (
        "import sys; from pearl.cli import main; main(sys.argv[1:]);"
        "print(*[line for line in open('/proc/self/status') if line.startswith('VmHWM')])"
    )
    found = subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True, cwd=ROOT)
    peak_kib = int(found.stdout.split()[-2])
    assert peak_kib < MEMORY_MIB * 1024
