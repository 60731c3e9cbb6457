"""A profile as JSON text: ``{"workload": {...}, "platform": {...}}`` (see ``pearl.types.profile``).

Every number is finite and in a range in which no prediction can overflow, so that what is computed from a profile
that was read is finite too.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pearl.types.profile import Platform, Profile, TrajectoryClass, Workload

LEAST, MOST = 1e-18, 1e18
"""A makespan multiplies or divides at most seven of these numbers: far from the end of floating point."""
POSITIVE = frozenset(
    {"batch_size", "num_turns", "kv_capacity_bytes", "kv_bandwidth_bytes_per_s", "class.share", "class.turns"}
)
"""Keys that must not be 0; all others may be."""
SECTIONS: dict[str, type[Workload | Platform]] = {"workload": Workload, "platform": Platform}

Table = dict[str, Any]


def read_profile(text: bytes, overrides: Sequence[str] = ()) -> Profile:
    """Parse, apply ``section.key=number`` overrides, check.

    Raises:
        ValueError: a line for each thing that is wrong, with key, value and the way out.
    """
    try:
        table = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    if not isinstance(table, dict):
        raise ValueError(f"{show(table)} is no object; write {{{_shape('workload')}, {_shape('platform')}}}")
    wrong = [problem for override in overrides for problem in _apply(table, override)]
    wrong += _problems(table)
    if wrong:
        raise ValueError("\n".join(wrong))
    return msgspec.convert(table, Profile)


def write_profile(profile: Profile) -> bytes:
    """Write a profile as indented JSON that ``read_profile`` reads back as an equal profile."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"


def _apply(table: Table, override: str) -> list[str]:
    name, _, text = override.partition("=")
    section, _, key = name.strip().partition(".")
    try:
        number = float(text)
    except ValueError:
        return [f"override {override!r}: write section.key=number, for example workload.batch_size=96"]
    known = section in SECTIONS and key in SECTIONS[section].__struct_fields__ and key != "classes"
    if known and isinstance(content := table.get(section), dict):
        content[key] = number
        return []
    return [f"override {override!r}: a profile has no {name.strip()}"]


def _problems(table: Table) -> Iterator[str]:
    for name in table.keys() - SECTIONS.keys():
        yield f"{name}: unknown key; a profile has workload and platform"
    for name, kind in SECTIONS.items():
        content = table.get(name)
        if not isinstance(content, dict):
            yield (
                f"{name}: "
                + ("is missing" if content is None else "is no object")
                + f"; write {_shape(name)}"
            )
            continue
        keys = kind.__struct_fields__
        for key in content.keys() - set(keys):
            yield f"{name}.{key}: unknown key; {name} has {', '.join(keys)}"
        optional = {field.name for field in msgspec.structs.fields(kind) if not field.required}
        for key in keys:
            if key not in content:
                if key not in optional:
                    yield f"{name}.{key}: is missing; give a number"
            elif key == "classes":
                yield from _class_problems(content[key])
            elif problem := _number_problem(key, content[key]):
                yield f"{name}.{key}: {show(content[key])} {problem}"


def _class_problems(classes: Any) -> Iterator[str]:
    """List what is wrong with the optional list of trajectory classes."""
    keys = TrajectoryClass.__struct_fields__
    if not isinstance(classes, list):
        yield f"workload.classes: {show(classes)} is no list; leave it out, or give objects with {', '.join(keys)}"
        return
    for number, one in enumerate(classes):
        name = f"workload.classes[{number}]"
        if not isinstance(one, dict) or one.keys() != set(keys):
            yield f"{name}: {show(one)} is no object with the keys {', '.join(keys)}"
            continue
        for key in keys:
            if problem := _number_problem(f"class.{key}", one[key]):
                yield f"{name}.{key}: {show(one[key])} {problem}"


def _number_problem(key: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "is not a number"
    is_positive = key in POSITIVE
    if 0 < value < LEAST:
        return f"is too small to mean anything; use {'' if is_positive else '0 or '}at least {LEAST:.0e}"
    if not (LEAST if is_positive else 0.0) <= value <= MOST:  # catches NaN too
        return f"must be {'greater than 0' if is_positive else '0 or more'} and at most {MOST:.0e}"
    return ""


def _shape(section: str) -> str:
    return f'"{section}": {{"{SECTIONS[section].__struct_fields__[0]}": ..., ...}}'


def show(value: Any) -> str:
    """A value as it looks in JSON, cut when long."""
    text = repr(value) if isinstance(value, float) else msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else text[:77] + "..."
