"""The shipped schema of metrics.jsonl: it is what the code makes, and the lines of whole runs keep to it."""

import json
import re
from typing import Any

import msgspec
import pytest
from sim_runs import small_job
from test_simulation import COMINGS_AND_GOINGS, ELASTIC

from pearl.report import metrics_schema
from pearl.sim.job import build
from pearl.types.commands import Report
from pearl.types.reports import AnyReport, line_of

KINDS = {kind["properties"]["kind"]["enum"][0]: kind for kind in metrics_schema.schema()["oneOf"]}
TYPES: dict[str, type | tuple[type, ...]] = {
    "number": (int, float),
    "integer": int,
    "string": str,
    "boolean": bool,
    "null": type(None),
}


def problems_of(line: dict[str, Any]) -> list[str]:
    """Check a line by the JSON Schema's words that the file uses."""
    schema = KINDS[line["kind"]]
    found = [f"{key} is missing" for key in schema["required"] if key not in line]
    for key, value in line.items():
        rule = schema["properties"].get(key) or schema.get("additionalProperties")
        for pattern, other in schema.get("patternProperties", {}).items():
            rule = rule or (other if re.search(pattern, key) else None)
        if rule is None:
            found.append(f"{key} is unknown")
        elif "enum" in rule:
            found += [] if value in rule["enum"] else [f"{key} = {value}"]
        else:
            names = [one["type"] for one in rule.get("anyOf", [rule])]
            fits = any(
                isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool))
                for name in names
            )
            found += [] if fits else [f"{key} = {value!r} is no {names}"]
    return found


def test_the_shipped_schema_and_the_page_are_up_to_date() -> None:
    made_again = "run python -m pearl.report.metrics_schema"
    assert metrics_schema.SCHEMA_PATH.read_bytes() == metrics_schema.schema_bytes(), made_again
    assert metrics_schema.PAGE_PATH.read_text() == metrics_schema.page(), made_again


@pytest.fixture(scope="module")
def reports() -> list[AnyReport]:
    """Of a simulated run with arrivals, reclaims, loans and roles that change."""
    job = small_job(overrides=ELASTIC, trace=COMINGS_AND_GOINGS, pd="adaptive")
    simulation = build(job)
    found: list[AnyReport] = []

    def sink(now: float, event: object, commands: list[Any]) -> None:
        found.extend(command.report for command in commands if isinstance(command, Report))

    simulation._sink = sink
    simulation.run(job.horizon_s)
    return found


def test_the_lines_of_a_run_keep_to_the_schema(reports: list[AnyReport]) -> None:
    lines = [json.loads(msgspec.json.encode(line_of(report))) for report in reports]
    seen = {line["kind"] for line in lines}
    assert seen >= {"step", "worker", "training", "gpus", "handoff", "plan", "decision", "profile"}
    assert [problem for line in lines for problem in problems_of(line)] == []


def test_a_line_that_does_not_keep_to_it_is_found(reports: list[AnyReport]) -> None:
    line = line_of(next(report for report in reports if line_of(report)["kind"] == "worker"))
    assert problems_of({**line, "slot": "1", "more": 1}) == [
        "slot = '1' is no ['integer']",
        "more is unknown",
    ]
    del line["gpus"]
    assert problems_of(line) == ["gpus is missing"]


def test_a_resumed_run_writes_the_lines_that_the_first_life_would_have(reports: list[AnyReport]) -> None:
    """From the journal they come back through MessagePack: neither a key nor a digit may differ."""
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(AnyReport).decode
    for report in reports:
        again = line_of(decode(encode(report)))
        assert msgspec.json.encode(again) == msgspec.json.encode(line_of(report))
