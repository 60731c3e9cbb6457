"""Which keys there are and what their values may be, read from the types and bounds of ``pearl.types.config``.

``problems`` names every wrong key and value of a table at once: one start, one list, nothing found by trial.
"""

import math
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from pearl.config.suggestions import nearest, normal
from pearl.types.config import Config, Section

Table = dict[str, Any]
SECTIONS: dict[str, type[Section]] = get_type_hints(Config)
KEYS: dict[str, dict[str, Any]] = {name: get_type_hints(section) for name, section in SECTIONS.items()}
BOUNDED: dict[str, dict[str, Any]] = {
    name: get_type_hints(section, include_extras=True) for name, section in SECTIONS.items()
}
"""The same with the bounds of numbers."""
NONE = "none"
"""How "not set" is written for a key that may be unset; TOML has no null."""


class ConfigError(ValueError):
    """The person asked for something that cannot be: the message names it and the way out (exit code 2)."""


def problems(table: Table) -> list[str]:
    """List what is wrong with the keys and the values' types, one line each; empty means convertible to
    ``Config``."""
    found: list[str] = []
    for name, content in table.items():
        if name not in KEYS:
            found.append(_unknown_section(name, content))
        elif not isinstance(content, dict):
            found.append(f"{name}: is a section, not a value; write [{name}] and its keys below")
        else:
            for key, value in content.items():
                found.extend(_key_problems(name, key, value))
    return found


def accept_none(table: Table) -> None:
    """Turn "none" into no value where a key may be unset. In place."""
    for name, content in table.items():
        for key in [key for key, value in content.items() if value == NONE and _is_optional(KEYS[name][key])]:
            content[key] = None


def describe(kind: Any) -> str:
    """A type in the words of the person who writes the file."""
    plain = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    if kind in plain:
        return plain[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in arguments)
    if origin is tuple:
        return f"an array of {len(arguments)} values, each {describe(arguments[0])}"
    if origin is dict:
        return "a table"
    if origin in (Union, types.UnionType):
        return " or ".join(f'"{NONE}"' if part is type(None) else describe(part) for part in arguments)
    raise AssertionError(f"no words for {kind}")


def show(value: Any) -> str:
    """A value as it looks in TOML, cut when long."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = repr(value)
    else:
        text = msgspec.json.encode(value, enc_hook=str).decode()
    return text if len(text) <= 80 else text[:77] + "..."


def _unknown_section(name: str, content: Any) -> str:
    what = "section" if isinstance(content, dict) else "key"
    if what == "key" and (homes := _homes(name)):
        return f"{name}: keys live in sections; write {' or '.join(homes)}"
    guess = nearest(name, KEYS)
    hint = f"did you mean [{guess}]?" if guess else "sections are " + ", ".join(KEYS)
    return f"{name}: unknown {what}; {hint}"


def _key_problems(section: str, key: str, value: Any) -> list[str]:
    path = f"{section}.{key}"
    kind = KEYS[section].get(key)
    if kind is None:
        return [f"{path}: unknown key; {_hint(section, key)}"]
    if value == NONE and _is_optional(kind):
        return []
    if get_origin(kind) is dict and isinstance(value, dict):
        inner = get_args(kind)[1]
        return [
            problem
            for name, item in value.items()
            for problem in _value_problems(f"{path}.{name}", inner, inner, item)
        ]
    return _value_problems(path, kind, BOUNDED[section][key], value)


def _value_problems(path: str, kind: Any, bounded: Any, value: Any) -> list[str]:
    for number in value if isinstance(value, list | tuple) else (value,):
        if isinstance(number, float) and not math.isfinite(number):
            return [f"{path}: {number} is not a finite number"]
        if isinstance(number, int) and not -(1 << 63) <= number < 1 << 63:
            return [f"{path}: {show(number)} does not fit in 63 bits"]
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return [f"{path}: {show(value)} is not {describe(kind)}"]
    return [f"{path}: {problem}" for problem in out_of_bounds(bounded, value)]


def out_of_bounds(kind: Any, value: Any) -> list[str]:
    """List the bounds that a value breaks, each with the number and the bound."""
    if value is None:
        return []
    if isinstance(value, list | tuple):
        kinds = get_args(kind)
        return [
            problem for one, item in zip(kinds, value, strict=True) for problem in out_of_bounds(one, item)
        ]
    for part in (kind, *get_args(kind)):
        for bound in getattr(part, "__metadata__", ()):
            if isinstance(bound, msgspec.Meta):
                return _broken(bound, value)
    return []


def _broken(bound: msgspec.Meta, value: float) -> list[str]:
    if bound.ge is not None and value < bound.ge:
        return [f"{show(value)} is less than {_plain(bound.ge)}"]
    if bound.gt is not None and value <= bound.gt:
        return [f"{show(value)} must be greater than {_plain(bound.gt)}"]
    if bound.le is not None and value > bound.le:
        return [f"{show(value)} is more than {_plain(bound.le)}"]
    if bound.lt is not None and value >= bound.lt:
        return [f"{show(value)} must be less than {_plain(bound.lt)}"]
    return []


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def _hint(section: str, key: str) -> str:
    if normal(key) in KEYS[section]:
        return f"did you mean {section}.{normal(key)}?"
    if homes := _homes(key):
        return f"it belongs to another section: {' or '.join(homes)}"
    if guess := nearest(key, KEYS[section]):
        return f"did you mean {section}.{guess}?"
    everywhere = {f"{name}.{other}": other for name, keys in KEYS.items() for other in keys}
    if guess := nearest(key, everywhere.values()):
        return (
            "did you mean " + " or ".join(path for path, other in everywhere.items() if other == guess) + "?"
        )
    return f"keys of [{section}] are " + ", ".join(KEYS[section])


def _homes(key: str) -> list[str]:
    return [f"{name}.{normal(key)}" for name, keys in KEYS.items() if normal(key) in keys]


def _is_optional(kind: Any) -> bool:
    return type(None) in get_args(kind)
