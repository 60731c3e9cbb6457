"""A trace file as numbered lines of text, and the errors that point back into it.

However it was saved (gzip, byte-order mark, CRLF, comments, blank lines, no end of the last line), the lines are the
same.
"""

import math
import re
import zlib
from pathlib import Path
from typing import NamedTuple

from pearl.types.trace import TraceEvent

MAX_BYTES = 64 << 20
"""A year of a change every ten seconds is half of it; what is larger is some other file."""
MAX_COUNT = 1_000_000
_GZIP = b"\x1f\x8b"
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class TraceError(ValueError):
    """A trace that cannot be used: file, line, value and the way out."""


class TraceLine(NamedTuple):
    path: Path
    number: int  # from 1
    text: str  # without white space around it

    def error(self, problem: str) -> TraceError:
        return TraceError(f"{self.path}, line {self.number}: {problem}")

    def fields(self, num_fields: int, example: str) -> list[str]:
        """The comma-separated values, of which there must be ``num_fields``."""
        fields = [field.strip() for field in self.text.split(",")]
        if len(fields) != num_fields:
            raise self.error(
                f'"{shown(self.text)}" has {len(fields)} value(s), not {num_fields}; it must look like {example}'
            )
        return fields

    def number_from(self, text: str, what: str) -> float:
        """A finite number >= 0."""
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
        if not math.isfinite(value):
            raise self.error(f'{what} "{shown(text)}" is no finite number')
        if value < 0:
            raise self.error(f"{what} {shown(text)} is negative; it must be at least 0")
        return value

    def count_from(self, text: str, what: str) -> int:
        value = self.number_from(text, what)
        if value != int(value) or value > MAX_COUNT:
            raise self.error(
                f"{what} {shown(text)} is no count of GPUs; give a whole number up to {MAX_COUNT}"
            )
        return int(value)


class Order:
    """Refuses moments that go back: a file in disorder was cut or joined wrongly, and a guess would hide it."""

    def __init__(self) -> None:
        self._latest: float | None = None

    def check(self, line: TraceLine, moment: float, what: str) -> None:
        if self._latest is not None and moment < self._latest:
            raise line.error(
                f"{what} {moment:.15g} comes after {self._latest:.15g}; sort the lines by it, the earliest first"
            )
        self._latest = moment


class Trace(NamedTuple):
    """What a file says, and what a person may want to know of how it was read."""

    events: list[TraceEvent]
    format: str
    notes: list[str]


def read_text(path: Path) -> str:
    """Return what the file holds, unpacked.

    Raises:
        TraceError: the file cannot be read or is not text.
    """
    return _decode(path, _unpack(path, _read(path)))


def lines_of(path: Path, text: str) -> list[TraceLine]:
    """The lines that say something: no comments, no blank ones.

    Raises:
        TraceError: there is no such line.
    """
    numbered = (
        TraceLine(path, number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)
    )
    lines = [line for line in numbered if line.text and not line.text.startswith("#")]
    if not lines:
        raise TraceError(f"{path}: is empty; a trace has a line for each change of the GPUs there are")
    return lines


def shown(text: str) -> str:
    """Fit for an error message: one line, not the whole file."""
    cut = text if len(text) <= 60 else text[:60] + "…"
    return "".join(letter if letter.isprintable() else "?" for letter in cut)


def _read(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise TraceError(f"{path}: is a directory; name one trace in it")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise _too_large(path)
    return data


def _unpack(path: Path, data: bytes) -> bytes:
    if not data.startswith(_GZIP):
        return data
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        text = unpacker.decompress(data, MAX_BYTES + 1)
    except zlib.error as error:
        raise TraceError(f"{path}: is damaged gzip data: {error}") from None
    if len(text) > MAX_BYTES:
        raise _too_large(path)
    if not unpacker.eof:
        raise TraceError(f"{path}: its gzip data is cut short; fetch the file again")
    if unpacker.unused_data:
        raise TraceError(f"{path}: something comes after its gzip data; unpack it and look")
    return text


def _decode(path: Path, data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: is no trace: byte {error.start} is not UTF-8 text") from None
    if "\0" in text:
        raise TraceError(f"{path}: is no trace: it holds binary data")
    return text


def _too_large(path: Path) -> TraceError:
    return TraceError(f"{path}: is larger than {MAX_BYTES >> 20} MiB, which is no trace")
