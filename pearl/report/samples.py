"""The trajectories that a run kept as text, as one section of its page. Bounded, however many there are."""

from html import escape
from typing import Any

from pearl.report.run_data import Line

MAX_SHOWN = 100
MAX_CHARACTERS = 2_000_000
"""Of all texts together: the page stays one that can be mailed."""


def listing(samples: list[Line]) -> str:
    """The newest samples, the newest first."""
    shown: list[str] = []
    size = 0
    for sample in reversed(samples[-MAX_SHOWN:]):
        html = _sample(sample)
        size += len(html)
        if size > MAX_CHARACTERS:
            break
        shown.append(html)
    rest = len(samples) - len(shown)
    note = f"<p>{rest:,} older ones: pearl show RUN_DIR TRAJECTORY</p>" if rest else ""
    return "".join(shown) + note


def part_text(part: Line) -> str:
    """The text of a part of a sample; its first ids where it has no text."""
    text = part.get("text")
    if isinstance(text, str):
        return text
    ids = part.get("ids")
    numbers = [str(number) for number in ids] if isinstance(ids, list) else []
    more = " ..." if len(numbers) < _whole(part.get("tokens")) else ""
    return "ids " + " ".join(numbers) + more


def title(line: Line) -> str:
    """Say in one line which trajectory it is and how it ended."""
    where = (
        f"step {line.get('step')}" if line.get("evaluation") is None else f"evaluation {line['evaluation']}"
    )
    discarded = f", discarded: {line['discarded']}" if line.get("discarded") else ""
    reward = line.get("reward")
    value = f"{reward:g}" if isinstance(reward, int | float) else "?"
    return (
        f"trajectory {line.get('trajectory')}: {where}, prompt {line.get('prompt')}, reward {value}, "
        f"{line.get('outcome', '?')}{discarded}"
    )


def _sample(sample: Line) -> str:
    parts = sample.get("parts")
    body = "".join(_part(part) for part in parts if isinstance(part, dict)) if isinstance(parts, list) else ""
    return f'<details class="sample"><summary>{escape(title(sample))}</summary>{body}</details>'


def _part(part: Line) -> str:
    kind = "generated" if part.get("kind") == "generated" else "given"
    head = f"{part.get('kind')}, turn {part.get('turn')}, {_whole(part.get('tokens')):,} tokens"
    return f'{escape(head)}<pre class="{kind}">{escape(part_text(part))}</pre>'


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0
