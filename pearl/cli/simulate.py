"""``pearl simulate``: the same core on a virtual clock, several policies side by side."""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pearl.cli.numbers import shown
from pearl.cli.output import check_writable, wide_console
from pearl.cli.stacked_table import Column, Row, stacked_table
from pearl.config import ConfigError
from pearl.sim import policies
from pearl.sim.comparison import run_all, summarize
from pearl.sim.job import Job, Result, make_job
from pearl.traces import at_most, read_trace

MAX_SEEDS = 1000
Summary = dict[str, dict[str, Any]]


class Request(NamedTuple):
    """What the person typed."""

    config: Path
    overrides: tuple[str, ...]
    policies: str
    seeds: str
    trace: Path | None
    max_gpus: int | None
    workload: str
    hardware: str | None
    seconds: float
    json: Path | None


def simulate(request: Request) -> int:
    """Run, print a table, write JSON; the exit code.

    Raises:
        ConfigError: on a usage error.
    """
    names, seeds = _names(request.policies), parse_seeds(request.seeds)
    if not 0 < request.seconds < float("inf"):
        raise ConfigError(f"--seconds {request.seconds}: must be greater than 0 and finite")
    if request.json is not None:
        check_writable("--json", request.json)
    trace = None if request.trace is None else tuple(read_trace(request.trace))
    if trace is not None and request.max_gpus is not None:
        trace = tuple(at_most(trace, request.max_gpus))
    jobs = [
        make_job(
            request.config,
            name,
            seed,
            overrides=request.overrides,
            hardware_name=request.hardware,
            workload=request.workload,
            trace=trace,
            horizon_s=request.seconds,
        )
        for name in names
        for seed in seeds
    ]
    with _progress(jobs) as on_done:
        results = run_all(jobs, on_done)
    found = {name: results[i * len(seeds) : (i + 1) * len(seeds)] for i, name in enumerate(names)}
    summary = summarize(found)
    _show(request, jobs[0], summary, found)
    if request.json is not None:
        request.json.write_bytes(_json(request, jobs[0], seeds, summary))
    return 0


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--policy: name at least one of {', '.join(policies.names())}")
    for name in names:
        policies.find(name)
        if names.count(name) > 1:
            raise ConfigError(f"--policy: {name} is named twice")
    return names


def parse_seeds(text: str) -> list[int]:
    """ "3" or "0-9". ConfigError otherwise."""
    found = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", text.strip())
    if found is None:
        raise ConfigError(f'--seeds: "{shown(text)}" is neither a seed nor a range; write 3, or 0-9')
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise ConfigError(f"--seeds: {text} runs backwards; write {last}-{first}")
    if last - first >= MAX_SEEDS:
        raise ConfigError(f"--seeds: {text} holds more than {MAX_SEEDS}")
    return list(range(first, last + 1))


@contextlib.contextmanager
def _progress(jobs: list[Job]) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, where it is a terminal; nothing of it stays."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("simulating", total=len(jobs))

        def on_done(index: int) -> None:
            job = jobs[index]
            bar.update(task, advance=1, description=f"{job.policy}, seed {job.seed}")

        yield on_done


def _show(request: Request, job: Job, summary: Summary, found: dict[str, list[Result]]) -> None:
    from rich.box import SIMPLE

    console = wide_console()
    told = [
        f"{request.config}: {job.hardware.name} ({job.hardware.parameter_set}), workload {job.workload}",
        f"{job.horizon_s:g} s, trace {request.trace or job.config.elastic.trace or 'none'}, seeds {request.seeds}",
    ]
    for line in told:
        console.print(line, soft_wrap=True, highlight=False)
    columns = [Column("policy"), *(Column(title, is_number=True) for title, _ in _COLUMNS)]
    rows = [Row((name, *(text(values) for _, text in _COLUMNS))) for name, values in summary.items()]
    console.print(stacked_table(columns, rows, console.width, box=SIMPLE, show_edge=True, pad_edge=True))
    for name in summary:
        if caveat := policies.find(name).caveat:
            console.print(f"{name}: {caveat}", soft_wrap=True, highlight=False)
        for result in found[name]:
            if result.note:
                console.print(f"{name}, seed {result.seed}: {result.note}", soft_wrap=True, highlight=False)


def _ratio(values: dict[str, Any]) -> str:
    if values["ratio"] is None:
        return "-"
    spread = values["ratio_ci95"]
    return f"{values['ratio']:.3f}" + ("" if spread is None else f" ±{spread:.3f}")


_COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("tokens/s", lambda v: f"{v['throughput_tokens_per_s']:.0f}"),
    ("ratio", _ratio),
    ("steps", lambda v: f"{v['steps']:g}"),
    ("rollout busy", lambda v: f"{v['rollout_busy_ratio']:.0%}"),
    ("training busy", lambda v: f"{v['training_busy_ratio']:.0%}"),
    ("GPU-hours", lambda v: f"{v['gpu_hours']:.1f}"),
    ("switches", lambda v: f"{v['mode_switches'] + v['ratio_switches']:g}"),
    ("borrows", lambda v: f"{v['borrows']:g}"),
    ("tokens lost", lambda v: f"{v['tokens_lost']:g}"),
)


def _json(request: Request, job: Job, seeds: list[int], summary: Summary) -> bytes:
    answer = {
        "policies": summary,
        "seed": seeds[0],
        "seeds": seeds,
        "seconds": job.horizon_s,
        "config": str(request.config),
        "hardware": job.hardware.name,
        "parameter_set": job.hardware.parameter_set,
        "workload": job.workload,
        "trace": "" if request.trace is None else str(request.trace),
        "settings": {name: list(policies.find(name).overrides) for name in summary},
    }
    return msgspec.json.format(msgspec.json.encode(answer), indent=1) + b"\n"
