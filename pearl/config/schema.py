"""Which keys there are and what their values may be, read from the types of ``pearl.types.config``.

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
    text = msgspec.json.encode(value, enc_hook=str).decode() if not isinstance(value, float) else repr(value)
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
            for problem in _value_problems(f"{path}.{name}", inner, item)
        ]
    return _value_problems(path, kind, value)


def _value_problems(path: str, kind: Any, value: Any) -> list[str]:
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{path}: {value} is not a finite number"]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return [f"{path}: {value} does not fit in 63 bits"]
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return [f"{path}: {show(value)} is not {describe(kind)}"]
    return []


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
