"""The paper's evaluation, simulated: figures as JSON and one page.

    python -m benchmarks.paper [--full] [--only fig5,fig7] [--processes 2] [--minutes 30] [--store FILE]

Interrupted, it goes on where it was. Exit code 1 while runs are missing.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import msgspec

from benchmarks.paper import beyond, fig2a, fig2c, fig4, fig5, fig6, fig7, fig8, page, regret, table2, table3
from benchmarks.paper.figure import Figure, Module, Scale
from benchmarks.paper.remarks import with_computed
from benchmarks.paper.runner import RESULTS, Run, Runs, run_missing

MODULES: tuple[Module, ...] = (
    fig2a.MODULE,
    fig2c.MODULE,
    fig4.MODULE,
    fig5.MODULE,
    fig6.MODULE,
    fig7.MODULE,
    fig8.BATCH_MODULE,
    fig8.LENGTH_MODULE,
    table2.MODULE,
    table3.MODULE,
    beyond.MODULE,
    regret.MODULE,
)

BESIDE = ("scaling", "validation")
"""Figures that scripts of their own make, since they measure this machine: benchmarks.paper.scaling, .validation."""


def planned(modules: tuple[Module, ...], scale: Scale) -> list[Run]:
    """Seeds in turn and the smaller model first, so that whatever is done so far is comparable."""
    runs = dict.fromkeys(run for module in modules for run in module.plan(scale))
    return sorted(runs, key=lambda run: (run.seed % regret.SEED_BASE, run.model != "8b"))


def evaluated(module: Module, runs: Runs, scale: Scale) -> Figure:
    """With the number of runs that it rests on, where some are missing."""
    figure, wanted = with_computed(module.evaluate(runs, scale)), dict.fromkeys(module.plan(scale))
    there = sum(run in runs.found for run in wanted)
    if there == len(wanted):
        return figure
    note = f"{figure.parameters}; so far {there} of {len(wanted)} runs, so that intervals are wide or not there yet"
    return msgspec.structs.replace(figure, parameters=note)


def write(figures: list[Figure], directory: Path) -> None:
    for figure in figures:
        encoded = msgspec.json.format(msgspec.json.encode(figure), indent=1)
        (directory / f"{figure.name}.json").write_bytes(encoded + b"\n")


def read(directory: Path) -> list[Figure]:
    """In the page's order, those that are there."""
    names = (*(module.name for module in MODULES), *BESIDE)
    paths = [directory / f"{name}.json" for name in names]
    return [msgspec.json.decode(path.read_bytes(), type=Figure) for path in paths if path.is_file()]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="more seeds, models, ratios and workloads")
    parser.add_argument("--only", default="", help="names of figures, with commas")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no run after so many")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    only = [name for name in arguments.only.split(",") if name]
    if unknown := set(only) - {module.name for module in MODULES}:
        parser.error(f"there is no figure {', '.join(sorted(unknown))}; {', '.join(m.name for m in MODULES)}")
    modules = tuple(module for module in MODULES if not only or module.name in only)
    scale, began = Scale(arguments.full), time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True)

    arguments.results.mkdir(parents=True, exist_ok=True)
    wanted = planned(modules, scale)
    runs: Runs = run_missing(
        wanted, arguments.results / "runs.jsonl", arguments.processes, say, arguments.minutes * 60
    )
    write([evaluated(module, runs, scale) for module in modules], arguments.results)
    (arguments.results / "index.html").write_text(page.render(read(arguments.results)), encoding="utf-8")
    missing = len(wanted) - len(runs.found)
    say(f"{arguments.results / 'index.html'}" + (f"; {missing} runs are missing yet" if missing else ""))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
