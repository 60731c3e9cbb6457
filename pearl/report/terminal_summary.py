"""The last lines on the terminal: what happened, in a few words, from summary.json."""

from pathlib import Path

from pearl.report.run_data import Line, read_object


def closing_lines(run_dir: Path) -> list[str]:
    """Two to six lines; fewer when the run was cut short before it could sum up."""
    summary = read_object(run_dir / "summary.json")
    if not summary:
        return [f"no summary: the run in {run_dir} was cut short"]
    lines = [
        f"{summary.get('steps')} steps in {_number(summary, 'seconds'):.0f} s"
        + _from_to(summary, ", sampled reward ", "reward_first", "reward_last"),
        _from_to(summary, "greedy reward on unseen tasks ", "eval_reward_start", "eval_reward"),
        f"{_number(summary, 'trajectories_trained'):,.0f} trajectories trained, "
        f"{_number(summary, 'tokens_generated'):,.0f} tokens generated, "
        f"staleness at most {summary.get('max_staleness')}",
    ]
    if elasticity := _elasticity(summary):
        lines.append(elasticity)
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
    return [line for line in lines if line]


def _elasticity(summary: Line) -> str:
    """ "GPUs: 2 arrived, 1 reclaimed; training GPUs lent 3 times and returned 3 times"."""
    came = [
        f"{summary[key]} {what}"
        for key, what in (("arrivals", "arrived"), ("reclaims", "reclaimed"))
        if summary.get(key)
    ]
    parts = [f"preemptible GPUs: {', '.join(came)}"] if came else []
    if summary.get("borrows"):
        parts.append(
            f"training GPUs lent {_times(summary['borrows'])}{_mean(summary, 'activation_seconds_mean')}, "
            f"returned {_times(summary.get('returns') or 0)}{_mean(summary, 'deactivation_seconds_mean')}"
        )
    return "; ".join(parts)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _mean(summary: Line, key: str) -> str:
    mean = _number(summary, key)
    return f" ({mean:.2f} s each)" if mean else ""


def _from_to(summary: Line, what: str, first: str, last: str) -> str:
    """Empty when neither is known: a run that was cut short has nothing to say about it."""
    if summary.get(first) is None and summary.get(last) is None:
        return ""
    values = [f"{summary[key]:.2f}" if summary.get(key) is not None else "-" for key in (first, last)]
    return what + " -> ".join(values)


def _number(summary: Line, key: str) -> float:
    return float(summary.get(key) or 0)
