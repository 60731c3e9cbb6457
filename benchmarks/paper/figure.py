"""What a figure's module makes: values only, so that the page is drawn from files alone."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from benchmarks.paper.runner import Outcome, Run, Runs
from pearl.sim.comparison import half_width_95


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One value for each of the chart's labels, or an ``x`` of its own; None where there is none."""

    name: str
    values: list[float | None]
    errors: list[float | None] = []
    x: list[float] = []
    paper: bool = False


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    kind: Literal["bars", "lines", "steps"]
    series: list[Series]
    labels: list[str] = []
    x_title: str = ""
    y_title: str = ""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    header: list[str]
    rows: list[list[str]]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    title: str
    parameters: str
    charts: list[Chart] = []
    tables: list[Table] = []
    remarks: list[str] = []


class Scale(NamedTuple):
    """How much is run."""

    full: bool = False

    @property
    def trace_seeds(self) -> range:
        return range(10 if self.full else 3)

    @property
    def few_trace_seeds(self) -> range:
        """Of the larger model and of variants, which are judged over all segments together."""
        return range(10 if self.full else 2)

    @property
    def seeds(self) -> range:
        """Of runs with fixed resources."""
        return range(6 if self.full else 2)

    @property
    def steps(self) -> int:
        """Of runs with fixed resources; the first is not counted."""
        return 6 if self.full else 3


class Module(NamedTuple):
    name: str
    plan: Callable[[Scale], list[Run]]
    evaluate: Callable[[Runs, Scale], Figure]

    def fixed_remarks(self, runs: Runs, scale: Scale) -> list[str]:
        """What the figure's code says whatever the runs gave."""
        return self.evaluate(runs, scale).remarks


class Estimate(NamedTuple):
    mean: float
    half_width: float | None  # of the 95 % confidence interval

    def percent(self) -> "Estimate":
        """A ratio as percent more than 1."""
        return Estimate(100 * (self.mean - 1), None if self.half_width is None else 100 * self.half_width)

    def text(self, digits: int = 1) -> str:
        spread = "" if self.half_width is None else f" ±{self.half_width:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


def estimate(values: Sequence[float]) -> Estimate | None:
    return Estimate(sum(values) / len(values), half_width_95(values)) if values else None


def throughput_ratio(pairs: Sequence[tuple[Outcome, Outcome]]) -> Estimate | None:
    """Of traces: over whole runs of equal seed."""
    both = [(a.result.throughput_tokens_per_s, b.result.throughput_tokens_per_s) for a, b in pairs]
    return estimate([a / b for a, b in both if b])


def step_ratio(pairs: Sequence[tuple[Outcome, Outcome]]) -> Estimate | None:
    """Of fixed pools: the same batches under both, batch by batch, without the first, in which nothing is known yet.

    The mean is of the sums; the interval is that of the batches' ratios.
    """
    both = [
        (one, other) for a, b in pairs for one, other in zip(step_seconds(a), step_seconds(b), strict=False)
    ]
    if not both:
        return None
    mean = sum(other for _, other in both) / sum(one for one, _ in both)
    return Estimate(mean, half_width_95([other / one for one, other in both]))


def step_seconds(outcome: Outcome) -> list[float]:
    return [line.seconds for line in outcome.result.per_step[1:]]


def throughput(outcome: Outcome) -> float:
    """Of a fixed pool's steps but the first."""
    lines = outcome.result.per_step[1:]
    seconds = sum(line.seconds for line in lines)
    return sum(line.throughput_tokens_per_s * line.seconds for line in lines) / seconds if seconds else 0.0


def mean_of(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.mean


def width_of(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.half_width


def shown(estimate: Estimate | None, digits: int = 1) -> str:
    return "-" if estimate is None else estimate.text(digits)
