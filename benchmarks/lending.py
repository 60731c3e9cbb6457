"""Lending of idle training GPUs under `never`, `always` and `gated`, where it pays and where it costs, in real time.

    python benchmarks/lending.py [--steps 12] [--settings pays,costs]

The real coordinator, a process a worker, the emulated engine: two cores, about six minutes. Two settings of the same
job: slow decoding, where two more workers make long windows much shorter, and fast steps beside a costly activation.
The gate knows neither; it decides from its own measurements. Prints a table and the gate's verdicts; exit code 1 when
the gate was on the wrong side in one of them, or the checker found something.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from emulated_jobs import Job, Line, Outcome, run, seconds_of, show_problems, tokens_per_s

POLICIES = ("never", "always", "gated")
WARM_UP = 2
"""Steps that are not compared: workers come up, and the first try to lend is how the gate learns what it costs."""
MAX_LOSS = 0.05
"""The gate may be this much slower than the better of the two others: what its tries cost, and noise."""
COMMON: Mapping[str, Any] = {
    "data.batch_size": 32,
    "data.group_size": 4,
    "environment.num_workers": 1,
    "environment.options.num_turns": 3,
    "environment.options.spread": 0.1,
    "environment.options.jitter": 0.1,
    "environment.options.env_seconds": 0.02,
    "environment.options.env_spread": 0.3,
    "rollout.num_workers": 2,
    "rollout.max_in_flight": 32,
    "rollout.frame_period_s": 0.02,
    "rollout.start": "strict",
    "rollout.update_mode": "in_place",
    "training.num_ranks": 2,
    "emulated.train_seconds": 0.5,
    "emulated.update_seconds": 0.1,
    "emulated.start_seconds": 0.5,
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "pays": {
        "environment.options.turn_output_tokens": 40,
        "emulated.decode_fixed_seconds": 0.005,
        "emulated.decode_seconds_per_seq": 0.002,
        "emulated.activation_seconds": 0.2,
        "emulated.release_seconds": 0.05,
        "emulated.offload_seconds": 0.1,
        "emulated.restore_seconds": 0.1,
    },
    "costs": {
        "environment.options.turn_output_tokens": 40,
        "emulated.decode_fixed_seconds": 0.008,
        "emulated.decode_seconds_per_seq": 0.0001,
        "emulated.train_seconds": 1.0,
        "emulated.activation_seconds": 0.8,
        "emulated.release_seconds": 0.6,
        "emulated.offload_seconds": 0.6,
        "emulated.restore_seconds": 1.0,
    },
}
TOLD = {
    "pays": "slow decoding: a sequence adds 2 ms an iteration; hand-overs of 0.3 and 0.15 s",
    "costs": "fast decoding: a sequence adds 0.1 ms; hand-overs of 1.6 s each way",
}


def job(setting: str, policy: str, steps: int) -> Job:
    settings = {**COMMON, **SETTINGS[setting], "elastic.borrow": policy, "run.num_steps": steps}
    return Job(f"{setting}/{policy}", settings)


def report(setting: str, outcomes: Mapping[str, Outcome]) -> bool:
    """True when the gate did about as well as the better of the two others."""
    print(f"\n{setting}: {TOLD[setting]}")
    names = f"{'policy':>8} {'s/step':>7} {'tokens/s':>9} {'ratio':>6} {'borrows':>8} {'to lend s':>10}"
    print(f"{names} {'to return s':>12}  late")
    base = mean_step(outcomes["never"])
    for policy, outcome in outcomes.items():
        summary = outcome.summary
        print(
            f"{policy:>8} {mean_step(outcome):7.2f} {tokens_per_s(outcome.steps(WARM_UP)):9.0f} "
            f"{base / mean_step(outcome):6.2f} {summary['borrows']:8d} {summary['activation_seconds_mean']:10.2f} "
            f"{summary['deactivation_seconds_mean']:12.2f} {outcome.late_ratio:5.1%}"
        )
    verdicts = [line for line in outcomes["gated"].of_kind("gate") if line["gate"] == "lend"]
    print(f"ratio: speed beside `never`, without the first {WARM_UP} steps. The gate said:")
    show_verdicts(verdicts)
    best = min(mean_step(outcomes["never"]), mean_step(outcomes["always"]))
    return mean_step(outcomes["gated"]) <= best * (1 + MAX_LOSS)


def mean_step(outcome: Outcome) -> float:
    steps = outcome.steps(WARM_UP)
    return seconds_of(steps) / len(steps)


def show_verdicts(verdicts: Sequence[Line]) -> None:
    """One of each kind, with how often it was said in a row."""
    run_of: list[Line] = []
    for verdict in [*verdicts, {}]:
        if run_of and verdict.get("yes") != run_of[-1]["yes"]:
            word = "lend" if run_of[-1]["yes"] else "do not lend"
            print(f"  {len(run_of):3d} x {word:<12} {run_of[-1]['reason']}")
            run_of = []
        run_of.append(verdict)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12, help="of a job, more than the first two")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    options = parser.parse_args()
    is_right = True
    outcomes: list[Outcome] = []
    for setting in options.settings.split(","):
        found = {policy: run(job(setting, policy, options.steps)) for policy in POLICIES}
        is_right &= report(setting, found)
        outcomes += found.values()
    return 0 if show_problems(outcomes) and is_right else 1


if __name__ == "__main__":
    sys.exit(main())
