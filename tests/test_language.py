"""The code speaks the field's language: words that were replaced do not come back, docstrings are sentences.

``docs/structures.md`` has the glossary.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "pearl").rglob("*.py"))

REPLACED = {
    "admission": "ingest",
    "bury": "release in background",
    "condemn": "terminate",
    "forgive": "clear",
    "greet": "on_hello",
    "hub": "server",
    "outlive": "wait_exited",
    "refute": "reject",
    "settle": "resolve, reconcile or solve",
    "unsettle": "mark_dirty",
    "verdict": "health, decision or result",
}
"""Parts of identifiers that said nothing to a reader who had not written them, and what to write instead."""

NOT_A_VERB = re.compile(
    r"(also|among|as|at|because|before|beside|between|by|for|from|harmless|here|how|if|in|it|its|like|more|nobody|not"
    r"|nothing|of|on|over|same|since|so|that|their|them|there|they|those|to|under|unless|until|up|what|when|where|which"
    r"|while|who|with|within)\b",
    re.IGNORECASE,
)
"""First words of docstrings whose subject would be the function's own name."""

OUTSIDE = re.compile(r"\bDESIGN\b|\bshared/|\bissue #?\d")
"""References to documents that are not in the repository."""


def identifiers(path: Path) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def test_replaced_words_do_not_come_back() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}: say {REPLACED[part]}"
        for path in SOURCES
        for line, name in identifiers(path)
        for part in re.findall(r"[a-z]+", re.sub(r"([A-Z])", r" \1", name).lower())
        if part in REPLACED
    ]
    assert not found, "\n".join(found)


def docstrings(path: Path) -> Iterator[tuple[int, str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.lineno, node.name, text


def test_docstrings_of_functions_begin_with_what_they_do() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}: {text.splitlines()[0]}"
        for path in SOURCES
        for line, name, text in docstrings(path)
        if NOT_A_VERB.match(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["pearl", "tests", "docs", "launch", "examples", "benchmarks"])
def test_nothing_points_to_a_document_that_is_not_here(folder: str) -> None:
    files = [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".md", ".toml", ".sh", ".cfg")]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if OUTSIDE.search(line)
    ]
    assert not found, "\n".join(found)
