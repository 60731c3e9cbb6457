"""``pearl decide``: what the decision engine makes of a profile and a number of workers, and why."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pearl.cli.output import wide_console
from pearl.cli.stacked_table import Column, Row, stacked_table
from pearl.config import ConfigError
from pearl.core.elastic.candidate_search import Candidate
from pearl.core.elastic.decision_engine import MODELS, Decision, decide
from pearl.core.elastic.profile_file import read_profile
from pearl.types.config import ElasticConfig
from pearl.types.plan import Allocation
from pearl.types.profile import Profile

MOST_WORKERS = 100_000
"""More is a typing mistake, and the table would not end."""
MOST_ROWS = 100
"""Of the table for people."""
TERMS = ("prefill", "transfer", "decode", "overhead", "env")

SUMS = {
    "closed-form": "disaggregated: the longer of prefill + transfer and decode, plus overhead and env",
    "fluid": "the terms add up",
    "network": "the terms are those of the slowest trajectories, and add up",
}


class Question(NamedTuple):
    """What the person typed."""

    profile: Path | None
    workers: int | None
    current: str | None
    makespan: str
    overrides: Sequence[str]
    as_json: bool


def run(question: Question) -> int:
    """Print the decision.

    Raises:
        ConfigError: on a usage error.
    """
    if question.profile is None or question.workers is None:
        raise ConfigError("give both: pearl decide --profile launch/profiles/qwen3-8b.json --workers 8")
    num_workers = _checked(question.workers)
    config = ElasticConfig(pd="adaptive", makespan=_model(question.makespan))
    current = _current(question.current)
    decision = decide(_read(question.profile, question.overrides), num_workers, current, config)
    if question.as_json:
        print(msgspec.json.encode(answer(decision)).decode())
    else:
        _show(decision, num_workers, config.makespan)
    return 0


def answer(decision: Decision) -> dict[str, Any]:
    """The decision as JSON; only finite numbers."""
    return {
        "target": str(decision.target),
        "seconds": decision.seconds,
        "candidates": [
            {
                "allocation": str(candidate.allocation),
                "seconds": candidate.seconds,
                "terms": candidate.terms,
                "feasible": candidate.feasible,
            }
            for candidate in decision.candidates
        ],
        "reason": decision.reason,
        "switch": decision.switch,
        "forced": decision.forced,
    }


def _read(path: Path, overrides: Sequence[str]) -> Profile:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return read_profile(text, overrides)
    except ValueError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None


def _checked(num_workers: int) -> int:
    if not 1 <= num_workers <= MOST_WORKERS:
        raise ConfigError(f"--workers {num_workers}: give a number from 1 to {MOST_WORKERS}")
    return num_workers


def _model(name: str) -> Any:
    if name not in MODELS:
        raise ConfigError(f'--makespan "{name}": is not one of {", ".join(MODELS)}')
    return name


def _current(text: str | None) -> Allocation | None:
    try:
        return None if text is None else Allocation.parse(text)
    except ValueError as error:
        raise ConfigError(f"--current: {error}") from None


def _show(decision: Decision, num_workers: int, makespan: str) -> None:
    from rich.box import HEAVY_HEAD

    feasible = [candidate for candidate in decision.candidates if candidate.feasible]
    shown = feasible
    if len(feasible) > MOST_ROWS:
        shown = sorted(feasible, key=lambda candidate: candidate.seconds)[:MOST_ROWS]
    columns = [Column("allocation"), *(Column(name, is_number=True) for name in ("seconds", *TERMS))]
    rows = [
        Row(_row(candidate), "bold" if candidate.allocation == decision.target else "") for candidate in shown
    ]
    console = wide_console()
    console.print(stacked_table(columns, rows, console.width, box=HEAVY_HEAD, show_edge=True, pad_edge=True))
    if len(shown) < len(feasible):
        console.print(f"the {len(shown)} quickest of {len(feasible)}; --json has them all", highlight=False)
    if cut := len(decision.candidates) - len(feasible):
        console.print(
            f"{cut} of {len(decision.candidates)} cannot hold the batch's KV cache on their decode workers"
        )
    console.print(SUMS[makespan], highlight=False)
    console.print(f"{num_workers} workers: [bold]{decision.target}[/bold]", highlight=False)
    console.print(decision.reason, soft_wrap=True, highlight=False)


def _row(candidate: Candidate) -> list[str]:
    parts = [getattr(candidate.terms, name) for name in TERMS]
    return [str(candidate.allocation), *(f"{seconds:.4g}" for seconds in (candidate.seconds, *parts))]
