"""docs/failure_scenarios.md and the tests' marks say the same."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "failure_scenarios.md"
ROW = re.compile(r"^\| ([A-Z]{2}-\d{2}) \| (.+) \| (.+) \|$", re.MULTILINE)
CODE_IN_NAME = re.compile(r"test_[a-z]{2}_\d{2}_")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> list[tuple[str, Function]]:
    """Return all functions in ``tests/`` with their file."""
    return [
        (path.relative_to(ROOT / "tests").as_posix(), node)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, Function)
    ]


def marked() -> dict[str, list[str]]:
    """Return the files of each scenario's tests."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path, function in functions():
        for mark in function.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.scenario":
                for code in mark.args:
                    found[ast.literal_eval(code)].add(path)
    return {code: sorted(paths) for code, paths in found.items()}


def test_the_page_names_the_files_that_hold_each_scenario() -> None:
    rows = ROW.findall(PAGE.read_text())
    written = {code: re.findall(r"`(.+?)`", held) for code, _, held in rows}
    assert len(written) == len(rows), "a code stands twice"
    assert written == marked()


def test_a_scenario_is_a_mark_and_not_part_of_a_name() -> None:
    assert [f"{path}: {node.name}" for path, node in functions() if CODE_IN_NAME.match(node.name)] == []
