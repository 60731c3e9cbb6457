"""File and overrides -> one checked ``Config``, and back to the resolved copies."""

import re
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from pearl.config.schema import KEYS, ConfigError, Table, accept_none, problems
from pearl.config.validation import misfits
from pearl.types.config import Config


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read ``path``, apply ``section.key=value`` overrides in order, check everything.

    Raises:
        ConfigError: with one line for each thing that is wrong.
    """
    table = _read(Path(path))
    wrong = [(problem, f"{path}: {problem}") for problem in problems(table)]
    for override in overrides:
        wrong.extend(_apply(table, override))
    faulty = {_key(problem) for problem, _ in wrong if problem}
    lines = [line for _, line in wrong]
    while True:
        # What is wrong by itself is set aside, so that the others are judged in the same round.
        config = _convert(table, faulty)
        more = [line for line in misfits(config) if line not in lines and not _mentions(line, faulty)]
        if not more:
            break
        lines += more
        faulty |= {_key(line) for line in more}
    if lines:
        raise ConfigError("\n".join(lines))
    return config


def resolved_toml(config: Config) -> str:
    """All settings as a file that ``load`` reads back to an equal ``Config``; unset keys are left out."""
    sections = msgspec.to_builtins(config)
    return tomli_w.dumps(
        {
            name: {key: value for key, value in section.items() if value is not None}
            for name, section in sections.items()
        }
    )


def resolved_json(config: Config) -> str:
    """All settings as one JSON object, for processes that are handed them."""
    return msgspec.json.encode(config).decode()


def _read(path: Path) -> Table:
    try:
        # A byte-order mark is what some editors leave; it is not part of the settings.
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or an integer of more digits than Python converts
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None


def _convert(table: Table, faulty: Collection[str]) -> Config:
    """Return the settings without those named in ``faulty``, which have their defaults."""
    sound = {
        name: {key: value for key, value in content.items() if f"{name}.{key}" not in faulty}
        for name, content in table.items()
        if name not in faulty
    }
    accept_none(sound)
    return msgspec.convert(sound, Config)


def _key(problem: str) -> str:
    """Return what a line is about: a section, or a key with its section."""
    return ".".join(problem.partition(":")[0].split(".")[:2])


def _mentions(line: str, faulty: Collection[str]) -> bool:
    """Return whether the line compares with a setting whose value is not the person's."""
    return any(re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", line) for key in faulty)


def _apply(table: Table, override: str) -> list[tuple[str, str]]:
    """Merge one override into ``table``, or say what is wrong with it."""
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys) or not (text.strip() or _is_text(keys)):
        return [("", f"override {override!r}: write section.key=value, for example run.num_steps=10")]
    value = _value(keys, text.strip())
    for key in reversed(keys):
        value = {key: value}
    wrong = [(problem, f"override {override!r}: {problem}") for problem in problems(value)]
    if not wrong:
        _merge(table, value)
    return wrong


def _value(keys: list[str], text: str) -> Any:
    """Parse a value as TOML would; a bare word is a string, and so is anything, or nothing, where a string is
    expected."""
    if _is_text(keys) and text[:1] not in ("'", '"'):
        return text
    try:
        parsed = tomllib.loads(f"value = {text}")
    except ValueError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _is_text(keys: list[str]) -> bool:
    return len(keys) == 2 and KEYS.get(keys[0], {}).get(keys[1]) is str


def _merge(table: Table, more: Table) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(table.get(key), dict):
            _merge(table[key], value)
        else:
            table[key] = value
