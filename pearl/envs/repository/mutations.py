"""Changes of one operator or number in functions that have examples in their docstrings."""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from pearl.envs.repository.tasks import Edit

SWAPS = {
    "==": "!=",
    "!=": "==",
    "<": ">=",
    "<=": ">",
    ">": "<=",
    ">=": "<",
    "in": "not in",
    "not in": "in",
    "is": "is not",
    "is not": "is",
    "+": "-",
    "-": "+",
    "*": "+",
    "//": "*",
    "/": "*",
    "%": "//",
    "and": "or",
    "or": "and",
}


class Mutation(NamedTuple):
    function: str
    line: int
    edit: Edit
    examples: str  # the docstring


def mutations(path: str, source: str) -> Iterator[Mutation]:
    """Yield those of a file's functions and methods."""
    starts = _line_starts(source)
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        examples = ast.get_docstring(function)
        if examples is None or ">>>" not in examples:
            continue
        for statement in function.body[1:]:
            for node in ast.walk(statement):
                for start, old, new in _of_node(node, source, starts):
                    yield Mutation(function.name, node.lineno, Edit(path, start, old, new), examples)  # type: ignore[attr-defined]


def _of_node(node: ast.AST, source: str, starts: list[int]) -> Iterator[tuple[int, str, str]]:
    match node:
        case ast.Compare(left=left, comparators=[right]):
            yield from _between(left, right, source, starts)
        case ast.BinOp(left=left, right=right):
            yield from _between(left, right, source, starts)
        case ast.BoolOp(values=[first, second, *_]):
            yield from _between(first, second, source, starts)
        case ast.Constant(value=int() as value) if not isinstance(value, bool) and 0 <= value < 1000:
            start = _offset(node.lineno, node.col_offset, source, starts)
            old = str(value)
            if source[start : start + len(old)] == old:
                yield start, old, str(value + 1)


def _between(
    left: ast.expr, right: ast.expr, source: str, starts: list[int]
) -> Iterator[tuple[int, str, str]]:
    """The operator between two operands, when there is only that, blanks and brackets."""
    assert left.end_lineno is not None
    assert left.end_col_offset is not None
    start = _offset(left.end_lineno, left.end_col_offset, source, starts)
    end = _offset(right.lineno, right.col_offset, source, starts)
    found = re.fullmatch(r"[\s)\\]*(?P<operator>[^\s()]+(?: (?:in|not))?)[\s(\\]*", source[start:end])
    if found and found["operator"] in SWAPS:
        yield start + found.start("operator"), found["operator"], SWAPS[found["operator"]]


def _line_starts(source: str) -> list[int]:
    starts = [0]
    for line in source.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    return starts


def _offset(line: int, column: int, source: str, starts: list[int]) -> int:
    """Characters from the start; ``ast`` counts columns in bytes of UTF-8."""
    text = source[starts[line - 1] : starts[line]]
    return starts[line - 1] + len(text.encode()[:column].decode())
