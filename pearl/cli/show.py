"""``pearl show``: the trajectories of a run as text: a list with filters, one of them, or two siblings."""

import shutil
import sys
import textwrap
import unicodedata
from pathlib import Path
from typing import NamedTuple

import msgspec

from pearl.cli.output import PIPE_COLUMNS
from pearl.cli.transcript import Part, Transcript, read_transcripts
from pearl.config.schema import ConfigError
from pearl.envs.text.tools import TOOL_FORMATS, parse_calls
from pearl.report.run_data import Line
from pearl.types.trajectory import Outcome

MASKED = {outcome.value for outcome in Outcome if outcome.is_masked}
MIN_COLUMNS, GAP = 20, " | "
_decode = msgspec.json.Decoder().decode


class Filters(NamedTuple):
    step: int | None = None
    reward: tuple[float, float] | None = None
    outcome: str | None = None
    prompt: int | None = None


class Request(NamedTuple):
    run_dir: Path
    trajectory: int | None
    beside: int | None  # another trajectory; -1 = the next sibling
    filters: Filters
    limit: int
    characters: int  # of a part; 0 = all
    as_ids: bool


def show(request: Request) -> int:
    lines = read_records(request.run_dir)
    if request.trajectory is None:
        text = listing(lines, request.filters, request.limit)
    else:
        by_number = {line["trajectory"]: line for line in lines}
        chosen = [_find(by_number, request.trajectory, request.run_dir)]
        if request.beside is not None:
            chosen.append(_other(by_number, chosen[0], request))
        numbers = [line["trajectory"] for line in chosen]
        transcripts = read_transcripts(request.run_dir, numbers, as_ids=request.as_ids)
        text = _side_by_side(chosen, transcripts, request.characters)
    sys.stdout.write(text)
    sys.stdout.flush()
    return 0


def read_records(run_dir: Path) -> list[Line]:
    """The lines of trajectories.jsonl; incomplete ones are left out.

    Raises:
        ConfigError: there is no such file.
    """
    path = run_dir / "trajectories.jsonl"
    if not path.is_file():
        raise ConfigError(f"{path}: is not there; no trajectory of this run has ended yet")
    found = []
    for line in path.read_bytes().splitlines():
        try:
            value = _decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(value, dict) and isinstance(value.get("trajectory"), int):
            found.append(value)
    return found


def listing(lines: list[Line], filters: Filters, limit: int) -> str:
    """A line for each of the newest ``limit`` trajectories that pass."""
    passed = [line for line in lines if _passes(line, filters)]
    shown = passed[-limit:]
    width = _columns()
    rows = [
        f"{'trajectory':>10} {'step':>6} {'prompt':>7} {'reward':>8} {'turns':>5} {'tokens':>7}  outcome, versions"
    ]
    for line in shown:
        evaluation = line.get("evaluation")
        where = f"eval {evaluation}" if evaluation is not None else str(line.get("cohort", "?"))
        rows.append(
            f"{line['trajectory']:>10} {where:>6} {line.get('prompt', '?'):>7} {_number(line.get('reward')):>8} "
            f"{len(line.get('turns', [])):>5} {_num_tokens(line):>7}  {_outcome(line)}, {_versions(line)}"
        )
    count = f"{len(shown)} of {len(passed)} that pass, {len(lines)} in all"
    return "".join(_cut(row, width) + "\n" for row in (*rows, count))


def _passes(line: Line, filters: Filters) -> bool:
    if filters.step is not None and (
        line.get("evaluation") is not None
        or filters.step not in (line.get("cohort"), line.get("trained_step"))
    ):
        return False
    if filters.prompt is not None and line.get("prompt") != filters.prompt:
        return False
    if filters.reward is not None:
        low, high = filters.reward
        reward = line.get("reward")
        if not isinstance(reward, int | float) or not low <= reward <= high:
            return False
    wanted = filters.outcome
    return wanted is None or wanted in (line.get("outcome"), *(["masked"] if _is_masked(line) else []))


def _find(by_number: dict[int, Line], number: int, run_dir: Path) -> Line:
    if number in by_number:
        return by_number[number]
    if not by_number:
        raise ConfigError(f"{run_dir}: no trajectory has ended yet")
    near = sorted(sorted(by_number, key=lambda other: abs(other - number))[:5])
    raise ConfigError(
        f"{run_dir}: has no trajectory {number}; it has {len(by_number)} from {min(by_number)} to {max(by_number)}, "
        f"near it {', '.join(map(str, near))} (pearl show {run_dir} lists them)"
    )


def _other(by_number: dict[int, Line], line: Line, request: Request) -> Line:
    if request.beside == line["trajectory"]:
        raise ConfigError(f"--beside {request.beside}: is the same trajectory; name another, or give no N")
    if request.beside is not None and request.beside >= 0:
        return _find(by_number, request.beside, request.run_dir)
    siblings = [
        other
        for other in by_number.values()
        if other["trajectory"] != line["trajectory"]
        and (other.get("prompt"), other.get("evaluation")) == (line.get("prompt"), line.get("evaluation"))
    ]
    if not siblings:
        raise ConfigError(
            f"trajectory {line['trajectory']} has no sibling that has ended; name one: --beside N"
        )
    # One that fared differently says most.
    return max(siblings, key=lambda other: abs(_reward(other) - _reward(line)))


def _side_by_side(lines: list[Line], transcripts: list[Transcript], characters: int) -> str:
    width = _columns()
    if len(lines) == 1:
        return "\n".join(_trajectory(lines[0], transcripts[0], characters, width)) + "\n"
    half = (width - len(GAP)) // 2
    if half < MIN_COLUMNS:  # too narrow for columns: one below the other
        both = [
            _trajectory(line, transcript, characters, width)
            for line, transcript in zip(lines, transcripts, strict=True)
        ]
        return "\n".join([*both[0], "=" * width, *both[1]]) + "\n"
    left, right = (
        _trajectory(line, transcript, characters, half)
        for line, transcript in zip(lines, transcripts, strict=True)
    )
    rows = max(len(left), len(right))
    left += [""] * (rows - len(left))
    right += [""] * (rows - len(right))
    return "".join(f"{_padded(a, half)}{GAP}{b}".rstrip() + "\n" for a, b in zip(left, right, strict=True))


def _trajectory(line: Line, transcript: Transcript, characters: int, width: int) -> list[str]:
    heads = [
        f"trajectory {line['trajectory']}  prompt {line.get('prompt')}  step {line.get('cohort')}"
        + ("" if line.get("evaluation") is None else f"  evaluation {line['evaluation']}"),
        f"reward {_number(line.get('reward'))}  {_outcome(line)}  versions {_versions(line)}",
        f"{_num_tokens(line)} tokens, {sum(turn['generated_tokens'] for turn in line.get('turns', []))} generated, "
        f"{len(line.get('turns', []))} turns",
        transcript.note,
    ]
    text = [row for head in heads for row in _wrapped(head, width)]
    for part in transcript.parts:
        text += ["", *_wrapped(_part_head(part, line), width)]
        text += _wrapped(_bounded(part.text, characters), width)
        if part.kind == "generated":
            text += [row for call in _calls(part.text) for row in _wrapped(call, width)]
    return text


def _part_head(part: Part, line: Line) -> str:
    head = f"--- {part.kind}, turn {part.turn}, {part.num_tokens} tokens"
    turns = line.get("turns", [])
    if part.kind != "generated" or part.turn >= len(turns):
        return head
    turn = turns[part.turn]
    versions = ", ".join(f"{step}.{lineage}" if lineage else str(step) for step, lineage in _runs(turn))
    return f"{head}, version {versions or '?'}, worker {turn.get('worker')}"


def _runs(turn: Line) -> list[tuple[int, int]]:
    """The versions of a turn's tokens in order, each once in a row: (step, lineage)."""
    found: list[tuple[int, int]] = []
    for (lineage, step), *_ in turn.get("versions", []):
        if not found or found[-1] != (step, lineage):
            found.append((step, lineage))
    return found


def _calls(text: str) -> list[str]:
    for form in TOOL_FORMATS:
        parsed = parse_calls(form, text.removesuffix("<|im_end|>").removesuffix("</s>"))
        if parsed.failure:
            return [f"    tool call that cannot be read: {parsed.failure}"]
        if parsed.calls:
            return [f"    tool call {call.name}({', '.join(call.arguments)})" for call in parsed.calls[:100]]
    return []


def _bounded(text: str, characters: int) -> str:
    if not characters or len(text) <= characters:
        return text
    half = characters // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters; --full shows them ...]\n{text[-half:]}"


def _wrapped(text: str, width: int) -> list[str]:
    """Rows of at most ``width``; what would steer a terminal is shown, not obeyed."""
    clean = "".join(c if c == "\n" or unicodedata.category(c)[0] != "C" else _escaped(c) for c in text)
    rows: list[str] = []
    for row in clean.split("\n"):
        rows += textwrap.wrap(row, width, drop_whitespace=False, replace_whitespace=False) or [""]
    return rows


def _escaped(letter: str) -> str:
    return "    " if letter == "\t" else letter.encode("unicode_escape").decode()


def _padded(row: str, width: int) -> str:
    cells = sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in row)
    return row + " " * (width - cells)


def _cut(row: str, width: int) -> str:
    return row if len(row) <= width else row[: width - 1] + "…"


def _columns() -> int:
    if sys.stdout.isatty():
        return max(MIN_COLUMNS, shutil.get_terminal_size().columns)
    return max(MIN_COLUMNS, shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns)


def _versions(line: Line) -> str:
    start, end = line.get("start_version"), line.get("end_version")
    if not start:
        return "version -"
    steps = f"{start[1]}" if not end or end == start else f"{start[1]}-{end[1]}"
    return f"version {steps}" + (f" of lineage {line['lineage']}" if line.get("lineage") else "")


def _outcome(line: Line) -> str:
    masked = " (masked)" if _is_masked(line) else ""
    discarded = f" (discarded: {line['discarded']})" if line.get("discarded") else ""
    return f"{line.get('outcome') or '-'}{masked}{discarded}"


def _is_masked(line: Line) -> bool:
    return line.get("outcome") in MASKED


def _num_tokens(line: Line) -> int:
    return sum(turn["new_prompt_tokens"] + turn["retained_tokens"] for turn in line.get("turns", []))


def _reward(line: Line) -> float:
    reward = line.get("reward")
    return float(reward) if isinstance(reward, int | float) else 0.0


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"
