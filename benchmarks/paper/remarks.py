"""Sentences that compare a figure with the paper, made from the figure's own tables with their intervals.

    python -m benchmarks.paper.remarks     # writes them into the shipped results again, without any run

A comparison is of a 95 % interval with the paper's value or range: it lies above, below, or overlaps. A mean alone,
of one pair, is compared as it is and said to have no interval.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from benchmarks.paper import published
from benchmarks.paper.figure import Figure


class Cell(NamedTuple):
    """A table's cell: "8.8 ±5.4 %", or of the paper "9.8 to 26.5 %"."""

    text: str
    low: float
    high: float


def cell(text: str) -> Cell | None:
    """None for what holds no number."""
    numbers = [float(found) for found in re.findall(r"-?\d+(?:\.\d+)?", text)]
    if not numbers:
        return None
    if "±" in text:
        return Cell(text, numbers[0] - numbers[1], numbers[0] + numbers[1])
    return Cell(text, numbers[0], numbers[-1])


def compare(ours: str, paper: str) -> str:
    """ "8.8 ±5.4 % overlaps 9.8 to 26.5 %"; "" when one of them is not there."""
    mine, theirs = cell(ours), cell(paper)
    if mine is None or theirs is None:
        return ""
    if mine.low > theirs.high:
        verdict = "is above"
    elif mine.high < theirs.low:
        verdict = "is below"
    else:
        verdict = "overlaps"
    return f"{ours} {verdict} the paper's {paper}"


def _rows(figure: Figure) -> list[list[str]]:
    return figure.tables[0].rows


def _listed(title: str, parts: list[str]) -> list[str]:
    found = [part for part in parts if part]
    return [f"{title}: {'; '.join(found)}."] if found else []


def fig2c(figure: Figure) -> list[str]:
    rows = [row for row in _rows(figure) if cell(row[3])]
    if not rows:
        return []
    ratios = list(dict.fromkeys(row[1] for row in rows))
    which = f"{ratios[0]} at every batch size" if len(ratios) == 1 else ", ".join(ratios)
    apart = [row for row in rows if "±" in row[3] and ((c := cell(row[3])) and (c.low > 0 or c.high < 0))]
    told = ", ".join(f"at {row[0]}" for row in apart)
    verdict = (
        f"{told} only." if apart else "at no batch size: these runs support no statement on the best ratio."
    )
    return [
        f"The ratio with the largest mean is {which}; its gain over colocation is told apart from zero {verdict}",
        *_listed("Gain of the best ratio", [_at(f"batch {row[0]}", compare(row[3], row[4])) for row in rows]),
    ]


def fig5(figure: Figure) -> list[str]:
    rows = _rows(figure)
    return (
        _orderings(figure)
        + _listed(
            "PEARL times ROLL, over all segments",
            [_at(r[0], compare(r[4], r[5])) for r in rows if r[1] == "all"],
        )
        + _listed(
            "PEARL over RLBoost+",
            [_at(f"{r[0]}, segment {r[1]}", compare(r[6], r[7])) for r in rows if r[1] != "all"],
        )
        + _listed(
            "PEARL over RLBoost+ with cache-aware routing, which the paper does not report",
            [_at(r[0], r[8]) for r in rows if r[1] == "all" and cell(r[8])],
        )
    )


def _orderings(figure: Figure) -> list[str]:
    """Each of the paper's orderings of Fig. 5, and whether it holds here on means."""
    told = []
    for chart in figure.charts:
        means = {series.name: series.values for series in chart.series}
        policies = [means.get(name) for name in ("roll", "roll-large", "rlboost+", "pearl")]
        columns = list(zip(*(values for values in policies if values), strict=True))
        if len(columns) != len(chart.labels) or not all(value for column in columns for value in column):
            continue  # runs are missing
        for label, (roll, large, boost, pearl) in zip(chart.labels, columns, strict=True):
            holds = pearl > max(large, boost) and roll < min(large, boost)
            told.append(f"{chart.title}, {label}: pearl > roll-large, rlboost+ > roll: {_held(holds)}.")
        gains = [column[3] / column[2] for column in columns]
        largest = chart.labels[gains.index(max(gains))]
        told.append(f"{chart.title}: gain over rlboost+ largest in {largest} (paper: segment 2).")
    return told


def _held(holds: bool) -> str:
    return "holds" if holds else "does not hold"


def fig7(figure: Figure) -> list[str]:
    rows = [row for row in _rows(figure) if cell(row[3])]
    gain = {(row[0], row[1], row[2]): row[3] for row in rows}
    alone = [row for row in rows if row[2] == "a"]
    same = [row for row in alone if gain.get((row[0], row[1], "roll, cache-aware")) == row[3]]
    both = [row for row in rows if row[2] == "a+b"]
    equal = sum(gain.get((row[0], row[1], "a+b+c")) == row[3] for row in both)
    found = _listed("A alone", [_named(row) for row in alone])
    if alone:
        found.append(
            f"In {len(same)} of {len(alone)} of these pools A gives the very figure of cache-aware routing alone, so "
            "the engine stayed colocated there. The paper's A is given its best ratio; this one has to find it within "
            "the few batches of a run. Table 2 has what a split would be worth."
        )
    found += _listed("With borrowing (A+B)", [_named(row) for row in both])
    found += _listed(
        "The forced split with 4 GPUs", [_named(row) for row in rows if row[2].startswith("a, forced")]
    )
    if both:
        found.append(
            f"The gate (A+B+C) gives the same figure as always lending (A+B) in {equal} of {len(both)} pools."
        )
    return found


def fig8a(figure: Figure) -> list[str]:
    rises = [
        series.name
        for series in figure.charts[0].series
        if (known := [v for v in series.values if v is not None])
        and known == sorted(known)
        and len(known) > 1
    ]
    peaks = []
    for series in figure.charts[0].series:
        if known := [v for v in series.values if v is not None]:
            peak = figure.charts[0].labels[series.values.index(max(known))]
            said = published.PEAK_BATCH[series.name]
            peaks.append(f"{series.name} has its highest mean throughput at batch {peak} (paper: {said}).")
    return (
        peaks
        + _listed(
            "Gain over RLBoost+", [_at(f"batch {row[0]}", compare(row[1], row[2])) for row in _rows(figure)]
        )
        + _listed("Mean throughput rises with every batch size that was run", rises)
    )


def fig8b(figure: Figure) -> list[str]:
    falls = [
        series.name
        for series in figure.charts[0].series
        if (known := [v for v in series.values[1:] if v is not None])
        and known == sorted(known, reverse=True)
        and len(known) > 1
    ]
    return _listed(
        "Gain over RLBoost+", [_at(f"{row[0]} tokens", compare(row[1], row[2])) for row in _rows(figure)]
    ) + _listed("Mean throughput falls with the limit from 16K on, as in the paper", falls)


def table2(figure: Figure) -> list[str]:
    rows = _rows(figure)

    def agreeing(column: int) -> int:
        return sum(row[column].partition(" ")[0] == row[1] for row in rows)

    return [
        f"Of {len(rows)} rows the paper's selection is that of the shipped profile in {agreeing(3)}, of the measured "
        f"profile in {agreeing(5)}, and of the measured profile with the network model in {agreeing(6)}."
    ]


def _at(where: str, comparison: str) -> str:
    return f"{where}: {comparison}" if comparison else ""


def _named(row: list[str]) -> str:
    name = f"{row[0]}, {row[1]} GPUs" + (f" ({row[2]})" if row[2].startswith("a, forced") else "")
    return _at(name, compare(row[3], row[4]) or row[3])


COMPUTED: dict[str, Callable[[Figure], list[str]]] = {
    "fig2c": fig2c,
    "fig5": fig5,
    "fig7": fig7,
    "fig8a": fig8a,
    "fig8b": fig8b,
    "table2": table2,
}


def with_computed(figure: Figure) -> Figure:
    """The figure with the sentences of its tables before its own remarks, which state no comparison."""
    make = COMPUTED.get(figure.name)
    if make is None:
        return figure
    return msgspec.structs.replace(figure, remarks=[*make(figure), *figure.remarks])


def main() -> None:
    """Write the remarks of the shipped figures again: the fixed ones of the code, the computed ones of the tables."""
    from benchmarks.paper import __main__ as command
    from benchmarks.paper import page
    from benchmarks.paper.figure import Scale
    from benchmarks.paper.runner import RESULTS, Runs

    fixed = {module.name: module.fixed_remarks(Runs({}), Scale()) for module in command.MODULES}
    figures = [
        with_computed(msgspec.structs.replace(figure, remarks=fixed[figure.name]))
        if figure.name in COMPUTED
        else figure
        for figure in command.read(RESULTS)
    ]
    command.write(figures, RESULTS)
    (RESULTS / "index.html").write_text(page.render(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
