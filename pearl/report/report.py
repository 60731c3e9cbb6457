"""A run directory -> ``report.html``: headline numbers, plots, counters, settings."""

from collections import Counter
from collections.abc import Callable
from html import escape
from pathlib import Path

from pearl.report import elasticity, figures, samples, timeline_events
from pearl.report.page import page, section, table, tile
from pearl.report.run_data import Line, RunData, read_run

PLOTS: tuple[Callable[[RunData], str], ...] = (
    figures.workers,
    figures.reward,
    figures.throughput,
    figures.staleness,
    figures.logprob_gap,
    figures.makespan,
)


def build(run_dir: Path) -> Path:
    """Write ``run_dir/report.html`` from what the run left there so far; its path."""
    run = read_run(run_dir)
    path = run_dir / "report.html"
    draft = path.with_suffix(".html.tmp")
    try:
        draft.write_text(render(run), encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)  # a full disk must not be kept full by half a page
    return path


def render(run: RunData) -> str:
    drawn = [figure for plot in PLOTS if (figure := plot(run))]
    body = "".join(tile(name, value) for name, value in headlines(run))
    body = f'<div class="tiles">{body}</div>' + _remarks(run)
    body += "".join(f'<div class="plot">{figure}</div>' for figure in drawn)
    if not drawn:
        body += "<p>Nothing was recorded yet: the run ended before its first event.</p>"
    body += section("Elasticity", elasticity.tables(run))
    body += section(
        "How the trajectories ended", table(("outcome", "trajectories"), outcomes(run.trajectories))
    )
    body += section("Samples (samples.jsonl)", samples.listing(run.samples))
    body += section("Counters (summary.json)", table(("counter", "value"), _counters(run.summary)))
    body += section("Settings (config.toml)", f"<pre>{escape(run.config)}</pre>")
    return page(f"PEARL run {run.name}", body)


def headlines(run: RunData) -> list[tuple[str, str]]:
    """Name and value of what a person looks for first; what is not known is left out."""
    steps, evaluations = run.steps, run.evaluations
    numbers = [("steps trained", str(len(steps))), ("duration", f"{run.end_s:.1f} s")]
    if steps:
        numbers.append(("sampled reward", _from_to(steps, "reward_mean")))
    if evaluations:
        numbers.append(("greedy reward, held out", _from_to(evaluations, "reward_mean")))
    if rate := _tokens_per_second(steps):
        numbers.append(("tokens / s, generated + trained", f"{rate:,.0f}"))
    ages = [line["max_staleness"] for line in steps if line.get("max_staleness") is not None]
    if ages:
        numbers.append(("largest staleness", str(max(ages))))
    numbers.append(("workers lost", str(run.summary.get("workers_lost", timeline_events.num_lost(run)))))
    return numbers


def outcomes(trajectories: list[Line]) -> list[tuple[str, str]]:
    counts = Counter(_outcome(line) for line in trajectories)
    return [(name, f"{count:,}") for name, count in counts.most_common()]


def _outcome(line: Line) -> str:
    name = str(line.get("outcome", "?"))
    if line.get("evaluation") is not None:
        return f"evaluation: {name}"
    return f"discarded: {line['discarded']}" if line.get("discarded") else name


def _from_to(lines: list[Line], key: str) -> str:
    values = [line[key] for line in lines if isinstance(line.get(key), int | float)]
    return f"{values[0]:.2f} → {values[-1]:.2f}" if values else "-"


def _tokens_per_second(steps: list[Line]) -> float | None:
    """Divide the tokens generated and trained in all steps by the steps' whole duration."""
    seconds = sum(line.get("seconds") or 0 for line in steps)
    tokens = sum((line.get("tokens_generated") or 0) + (line.get("tokens_trained") or 0) for line in steps)
    return tokens / seconds if seconds > 0 else None


def _remarks(run: RunData) -> str:
    remarks = []
    if not run.summary:
        remarks.append("The run has no summary.json: it was cut short, or it is still going on.")
    elif run.summary.get("error"):
        remarks.append(f"The run ended with an error: {run.summary['error']}")
    if run.torn_lines:
        remarks.append(f"{run.torn_lines} incomplete line(s) were skipped.")
    return "".join(f'<p class="remark">{escape(remark)}</p>' for remark in remarks)


def _counters(summary: Line) -> list[tuple[str, str]]:
    return [
        (name, f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))
        for name, value in summary.items()
        if not isinstance(value, list | dict)
    ]
