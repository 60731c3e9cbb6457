"""The schema of metrics.jsonl, made from the reports' own types: as JSON Schema for programs, as a page for people.

python -m pearl.report.metrics_schema        # writes both again after a change of pearl/types/reports.py
"""

from pathlib import Path
from typing import Any, get_args

import msgspec

from pearl.types.profile import Platform, Workload
from pearl.types.reports import PART_PREFIX, AnyReport, ProfileReport, StepReport

SCHEMA_PATH = Path(__file__).with_name("metrics.schema.json")
PAGE_PATH = Path(__file__).parents[2] / "docs" / "metrics.md"  # in a source tree only
KINDS: tuple[type[AnyReport], ...] = get_args(AnyReport)
NUMBER_OR_NULL = {"anyOf": [{"type": "number"}, {"type": "null"}]}

HEAD = """# metrics.jsonl

A run writes `metrics.jsonl` into its directory: a JSON object a line, in the order in which things happened. `kind`
says what a line is about. Keys are only ever added: a reader should pass over keys and kinds that it does not know. A
number that is not finite is written as `null`.

`pearl/report/metrics.schema.json` says the same as JSON Schema (2020-12), for the lines one by one. This page and that
file are made from `pearl/types/reports.py` by `python -m pearl.report.metrics_schema`.
"""
OPEN_KEYS = {
    "metrics": "and the trainer's own metrics, by their names",
    "parts": f"and the seconds of each stage: `{PART_PREFIX}` with the stage's name",
}


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a line."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of metrics.jsonl",
        "oneOf": [_kind_schema(kind) for kind in KINDS],
    }


def _kind_schema(kind: type[AnyReport]) -> dict[str, Any]:
    """Return the schema of a kind's flat line; what the struct nests lies beside the other keys."""
    made = _object(kind)
    properties, required = made["properties"], made["required"]
    if kind is StepReport:
        # Whatever the trainer measured may have run away.
        for name, value in properties.items():
            if name != "time_s" and value.get("type") == "number":
                properties[name] = {**_described(value), **NUMBER_OR_NULL}
        del properties["metrics"]
        required.remove("metrics")
        made["additionalProperties"] = NUMBER_OR_NULL
    elif "parts" in properties:
        del properties["parts"]
        made["patternProperties"] = {f"^{PART_PREFIX}": {"type": "number"}}
    elif kind is ProfileReport:
        for name, nested in (("workload", Workload), ("platform", Platform)):
            del properties[name]
            required.remove(name)
            inner = _object(nested)["properties"]
            inner.pop("classes", None)
            properties.update({key: {"type": value["type"]} for key, value in inner.items()})
            required += list(inner)
    return made


def _object(kind: type[Any]) -> dict[str, Any]:
    _, components = msgspec.json.schema_components([kind])
    return dict(components[kind.__name__])


def _described(value: dict[str, Any]) -> dict[str, Any]:
    return {"description": value["description"]} if "description" in value else {}


def page() -> str:
    """Return docs/metrics.md."""
    parts = [HEAD]
    for kind in KINDS:
        made = _kind_schema(kind)
        name = made["properties"]["kind"]["enum"][0]
        parts.append(f"\n## {name}\n\n{made['description']}\n\n| key | type | meaning |\n|---|---|---|\n")
        for key, value in made["properties"].items():
            if key != "kind":
                optional = "" if key in made["required"] else ", may be absent"
                meaning = value.get("description", "as in `profile.json`" if kind is ProfileReport else "")
                parts.append(f"| `{key}` | {_type_of(value)}{optional} | {meaning} |\n")
        open_keys = [text for field, text in OPEN_KEYS.items() if field in kind.__struct_fields__]
        if open_keys:
            parts.append(f"\n{open_keys[0]}.\n".replace("\na", "\nA", 1))
    return "".join(parts)


def _type_of(value: dict[str, Any]) -> str:
    if "enum" in value:
        return ", ".join(f"`{one}`" for one in value["enum"])
    if "anyOf" in value:
        return " or ".join(str(one["type"]) for one in value["anyOf"])
    return str(value["type"])


def schema_bytes() -> bytes:
    return msgspec.json.format(msgspec.json.encode(schema()), indent=2) + b"\n"


def main() -> None:
    SCHEMA_PATH.write_bytes(schema_bytes())
    PAGE_PATH.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
