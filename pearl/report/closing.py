"""The last lines on the terminal: what happened, in a few words, from summary.json."""

from pathlib import Path

from pearl.report.reading import Line, read_object


def closing_lines(run_dir: Path) -> list[str]:
    """Three to six lines; fewer when the run was cut short before it could sum up."""
    summary = read_object(run_dir / "summary.json")
    if not summary:
        return [f"no summary: the run in {run_dir} was cut short"]
    lines = [
        f"{summary.get('steps')} steps in {_number(summary, 'seconds'):.0f} s, "
        f"sampled reward {_from_to(summary, 'reward_first', 'reward_last')}",
        f"greedy reward on unseen tasks {_from_to(summary, 'eval_reward_start', 'eval_reward')}",
        f"{_number(summary, 'trajectories_trained'):,.0f} trajectories trained, "
        f"{_number(summary, 'tokens_generated'):,.0f} tokens generated, "
        f"staleness at most {summary.get('max_staleness')}",
    ]
    lost = [
        f"{what} {summary[key]}"
        for key, what in (
            ("workers_lost", "workers"),
            ("trainers_lost", "training worlds"),
            ("environment_failures", "environment answers"),
        )
        if summary.get(key)
    ]
    if lost:
        lines.append("lost and replaced: " + ", ".join(lost))
    return lines


def _from_to(summary: Line, first: str, last: str) -> str:
    values = [f"{summary[key]:.2f}" if summary.get(key) is not None else "-" for key in (first, last)]
    return " -> ".join(values)


def _number(summary: Line, key: str) -> float:
    return float(summary.get(key) or 0)
