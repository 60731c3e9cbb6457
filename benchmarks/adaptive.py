"""A budget that goes 2 -> 4 -> 6 -> 3 workers: the adaptive policy against every fixed one, in real time.

    python benchmarks/adaptive.py [--steps 6] [--policies adaptive,colocated,2P1D]

The real coordinator, a process a worker, the emulated engine: two cores, about 13 minutes. The same job under each
policy, with GPUs that arrive and are reclaimed at the same steps. Cohorts start early: the next one's trajectories
fill the slots of those that end. Prefill weighs about as much as decoding: two workers cannot spare one for each,
three or more can. Prints a table a phase with the allocation, predicted and measured seconds a step, and the totals;
exit code 1 when a fixed policy was faster, or the checker found something.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

from emulated_jobs import Job, Line, Outcome, run, seconds_of, show_problems, tokens_per_s

POLICIES = ("adaptive", "colocated", "1P2D", "1P1D", "2P1D", "3P1D")
BUDGETS = (2, 4, 6, 3)
SETTINGS = {
    "data.batch_size": 32,
    "data.group_size": 4,
    "environment.num_workers": 1,
    "environment.max_turns": 8,
    "environment.max_observation_tokens": 16384,
    "environment.options.num_turns": 3,
    "environment.options.prompt_tokens": 4000,
    "environment.options.turn_input_tokens": 4000,
    "environment.options.turn_output_tokens": 50,
    "environment.options.spread": 0.03,
    "environment.options.jitter": 0.03,
    "environment.options.env_seconds": 0.02,
    "environment.options.env_spread": 0.3,
    "rollout.num_workers": BUDGETS[0],
    "rollout.max_in_flight": 32,
    "rollout.start": "early",
    "rollout.update_mode": "in_place",
    "rollout.max_new_tokens_per_turn": 256,
    "rollout.max_context_tokens": 65536,
    "rollout.kv_capacity_tokens": 655360,
    "rollout.prefill_chunk_tokens": 8192,
    "rollout.frame_period_s": 0.02,
    "emulated.prefill_seconds_per_token": 13e-6,
    "emulated.decode_fixed_seconds": 12e-3,
    "emulated.decode_seconds_per_seq": 0.12e-3,
    "emulated.kv_bandwidth_bytes_per_s": 500e9,
    "emulated.length_spread": 0.1,
    "emulated.start_seconds": 0.5,
    "emulated.update_seconds": 0.02,
    "emulated.train_seconds": 0.02,  # training hardly counts: a step is its rollout
    "elastic.inter": True,
    "elastic.preemptible_gpus": 4,
    "elastic.preparation_prior_s": 1.0,
}


def trace(steps: int) -> list[Line]:
    """GPU local/0 trains, local/1 and local/2 are dedicated, local/3 to local/6 come and go. The third change takes
    prefill workers only, so that the ratio of those that stay is wrong."""
    return [
        {"step": steps, "arrive": ["local/3", "local/4"]},
        {"step": 2 * steps, "arrive": ["local/5", "local/6"]},
        {"step": 3 * steps, "reclaim": ["local/3", "local/4", "local/5"], "grace_s": 5},
    ]


def job(policy: str, steps: int) -> Job:
    settings = {**SETTINGS, "elastic.pd": policy, "run.num_steps": steps * len(BUDGETS)}
    return Job(policy, settings, trace(steps))


class Phase:
    """The steps under one budget. The first is that of the change and counts in totals only."""

    def __init__(self, outcome: Outcome, index: int, steps: int) -> None:
        self.all = outcome.steps(index * steps, (index + 1) * steps)
        self.settled = self.all[1:]
        self.allocations: Counter[str] = Counter()
        self.predictions: list[float] = []
        decisions = outcome.of_kind("decision")
        for line in self.settled:
            made = [d for d in decisions if d["time_s"] <= line["time_s"] - line["seconds"] / 2]
            self.allocations[str(made[-1]["target"]) if made else "-"] += 1
            if made and made[-1]["predicted_s"] is not None:
                self.predictions.append(float(made[-1]["predicted_s"]))

    def show(self) -> str:
        allocation = self.allocations.most_common(1)[0][0]
        predicted = f"{mean(self.predictions):5.2f}" if self.predictions else "    -"
        return f"{allocation:>5} {predicted} {mean([line['seconds'] for line in self.settled]):5.2f}"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def report(outcomes: Sequence[Outcome], steps: int) -> bool:
    """True when no fixed policy was faster than the adaptive one."""
    print(f"\n{'':>10}" + "".join(f"  {f'{budget} workers':>17}" for budget in BUDGETS))
    print(f"{'policy':>10}" + "  alloc  pred  real" * len(BUDGETS) + "  total s  tok/s  ratio  late")
    best = seconds_of(outcomes[0].steps())
    for outcome in outcomes:
        phases = [Phase(outcome, index, steps) for index in range(len(BUDGETS))]
        total = seconds_of(outcome.steps())
        print(
            f"{outcome.name:>10}"
            + "".join(f"  {phase.show():>17}" for phase in phases)
            + f"  {total:7.1f} {tokens_per_s(outcome.steps()):6.0f} {total / best:6.2f} {outcome.late_ratio:5.1%}"
        )
    print(
        "pred, real: seconds a step, without the step of the change; total: all steps; ratio: total to adaptive\n"
    )
    for outcome in outcomes:
        summary = outcome.summary
        names = ("mode_switches", "ratio_switches", "role_changes", "prefilled_tokens", "reprefilled_tokens")
        print(f"{outcome.name:>10}  " + "  ".join(f"{name} {summary[name]}" for name in names))
    return all(seconds_of(outcome.steps()) >= best for outcome in outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6, help="under each budget, at least 2")
    parser.add_argument(
        "--policies", default=",".join(POLICIES), help="the first is what the others are compared to"
    )
    options = parser.parse_args()
    outcomes = [run(job(policy, options.steps)) for policy in options.policies.split(",")]
    is_best = report(outcomes, options.steps)
    return 0 if show_problems(outcomes) and is_best else 1


if __name__ == "__main__":
    sys.exit(main())
