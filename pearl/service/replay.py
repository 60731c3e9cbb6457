"""``pearl replay``: feeds a run's journal to a fresh core, which must give the same commands, byte for byte.

Also how a run is resumed: the newest segment's snapshot and events bring a core to where the last one was.
"""

from pathlib import Path

import msgspec

from pearl.config import load
from pearl.core.coordinator import Coordinator
from pearl.runtime import journal
from pearl.runtime.codec import encode
from pearl.service.own_router import load_router
from pearl.types.commands import AnyCommand
from pearl.types.config import Config
from pearl.types.events import AnyEvent

decode_event = msgspec.msgpack.Decoder(AnyEvent).decode
decode_commands = msgspec.msgpack.Decoder(list[AnyCommand]).decode
SHOWN_CHARACTERS = 400  # of a command in a message: what differs is near its start


def encode_event(event: AnyEvent) -> bytes:
    return encode(event)


def encode_commands(commands: list[AnyCommand]) -> bytes:
    return encode(commands)


def check(run_dir: Path) -> str | None:
    """The first difference between the journal and what a fresh core does, as readable text; None = there is none.

    Raises:
        ValueError: the directory holds no journal or no settings.
        DamagedError: a segment does not hold what was written.
    """
    config = load(run_dir / "config.toml")
    core: Coordinator | None = None
    for number, segment in enumerate(journal.read(run_dir / "journal.msgpack"), start=1):
        opening = segment.opening
        before = core or (
            Coordinator(config, router=load_router(config)) if opening.first_entry == 0 else None
        )
        if before is not None and before.snapshot() != opening.snapshot:
            return (
                f"segment {number}: its snapshot is not the state after entry {opening.first_entry - 1}\n"
                + _snapshot_difference(opening.snapshot, before.snapshot())
            )
        core = Coordinator.restore(config, opening.snapshot, load_router(config))
        difference = replay(core, segment)
        if difference is not None:
            return f"segment {number}, {difference}"
    return None


def torn_bytes(run_dir: Path) -> int:
    """Return how much of a last entry a crash cut short; its commands never ran, so it is no difference."""
    # A live run writes on while this reads.
    return max(0, journal.recover(run_dir / "journal.msgpack").torn_bytes)


def replay(core: Coordinator, segment: journal.Segment) -> str | None:
    """Feed the segment's entries to ``core``; the first difference, or None."""
    for offset, entry in enumerate(segment.entries):
        event = decode_event(entry.event)
        commands = core.handle(event, entry.now)
        if encode_commands(commands) != bytes(entry.commands):
            number = segment.opening.first_entry + offset
            expected = decode_commands(entry.commands)
            return f"entry {number} at {entry.now:.3f} s: {event}\n" + _difference(expected, commands)
    return None


def restore(config: Config, segment: journal.Segment) -> Coordinator:
    """The core as it was after the segment's last entry.

    Raises:
        ValueError: this version of PEARL decides otherwise than the one that wrote the journal.
    """
    core = Coordinator.restore(config, segment.opening.snapshot, load_router(config))
    difference = replay(core, segment)
    if difference is not None:
        raise ValueError(f"the run cannot be resumed, a fresh core does not follow its journal: {difference}")
    return core


def _difference(expected: list[AnyCommand], got: list[AnyCommand]) -> str:
    for index in range(max(len(expected), len(got))):
        old = expected[index] if index < len(expected) else None
        new = got[index] if index < len(got) else None
        if old != new:
            return f"  command {index} in the journal: {_show(old)}\n  command {index} now:            {_show(new)}"
    return f"  the {len(expected)} commands are equal, their encoding is not"


def _show(command: AnyCommand | None) -> str:
    text = "none" if command is None else repr(command)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ..."


def _snapshot_difference(journalled: bytes, got: bytes) -> str:
    old, new = msgspec.msgpack.decode(journalled), msgspec.msgpack.decode(got)
    if not isinstance(old, dict) or not isinstance(new, dict):
        return f"  {len(journalled)} bytes in the journal, {len(got)} now"
    for key in [*old, *(key for key in new if key not in old)]:
        if old.get(key) != new.get(key):
            return (
                f"  {key} in the journal: {_cut(old.get(key))}\n  {key} now:            {_cut(new.get(key))}"
            )
    return "  the values are equal, their encoding is not"


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ..."
