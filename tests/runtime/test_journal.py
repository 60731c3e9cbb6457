"""The journal keeps whole entries over crashes and refuses damage."""

from pathlib import Path

import msgspec
import pytest

from pearl.runtime import journal, wal
from pearl.runtime.journal import Journal

encode = msgspec.msgpack.encode


def entry(number: int) -> tuple[float, bytes, bytes]:
    return float(number), encode({"event": number}), encode(["command"] * number)


def events(segment: journal.Segment) -> list[int]:
    return [msgspec.msgpack.decode(item.event)["event"] for item in segment.entries]


def test_entries_come_back_as_they_were_given(tmp_path: Path) -> None:
    with_entries = Journal.create(tmp_path / "journal.msgpack", b"start")
    with_entries.append([entry(1), entry(2)])
    segment = journal.recover(tmp_path / "journal.msgpack")
    assert (segment.opening.snapshot, segment.opening.first_entry, segment.torn_bytes) == (b"start", 0, 0)
    assert [(item.now, bytes(item.event), bytes(item.commands)) for item in segment.entries] == [
        entry(1),
        entry(2),
    ]
    with_entries.close()


def test_a_full_segment_asks_for_a_snapshot_and_reading_goes_on_in_the_next(tmp_path: Path) -> None:
    writer = Journal.create(tmp_path, b"s0", segment_bytes=64)
    assert not writer.wants_snapshot
    writer.append([entry(1)])
    assert writer.wants_snapshot
    writer.roll(b"s1")
    assert not writer.wants_snapshot
    writer.append([entry(2)])
    writer.close()
    read = list(journal.read(tmp_path))
    assert [(item.opening.snapshot, item.opening.first_entry) for item in read] == [(b"s0", 0), (b"s1", 1)]
    assert [events(item) for item in read] == [[1], [2]]
    assert journal.recover(tmp_path) == read[-1]


@pytest.mark.scenario("CK-04")
def test_resume_after_a_crash_at_any_byte_of_the_last_entry(tmp_path: Path) -> None:
    directory = tmp_path / "whole"
    writer = Journal.create(directory, b"s0")
    writer.append([entry(1)])
    path = wal.segment_path(directory, 1)
    before = path.stat().st_size
    writer.append([entry(2)])
    writer.close()
    whole = path.read_bytes()
    for size in range(before, len(whole)):
        crashed = tmp_path / str(size)
        crashed.mkdir()
        wal.segment_path(crashed, 1).write_bytes(whole[:size])
        recovered = journal.recover(crashed)
        assert events(recovered) == [1]
        assert recovered.torn_bytes == size - before
        resumed = Journal.open_for_append(crashed, b"s1")
        resumed.append([entry(3)])
        resumed.close()
        read = list(journal.read(crashed))
        assert [events(item) for item in read] == [[1], [3]]
        assert [(item.opening.first_entry, item.torn_bytes) for item in read] == [(0, 0), (1, 0)]


@pytest.mark.scenario("CK-04")
def test_a_crash_while_a_segment_is_opened_leaves_the_one_before(tmp_path: Path) -> None:
    writer = Journal.create(tmp_path, b"s0")
    writer.append([entry(1)])
    writer.close()
    (tmp_path / "000002.tmp").write_bytes(b"half")
    assert events(journal.recover(tmp_path)) == [1]
    Journal.open_for_append(tmp_path, b"s1").close()
    assert [item.opening.snapshot for item in journal.read(tmp_path)] == [b"s0", b"s1"]


@pytest.mark.scenario("CK-04")
def test_an_older_segment_cut_short_is_damage(tmp_path: Path) -> None:
    writer = Journal.create(tmp_path, b"s0")
    writer.append([entry(1)])
    writer.roll(b"s1")
    writer.close()
    path = wal.segment_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-1])
    assert journal.recover(tmp_path).opening.snapshot == b"s1"
    with pytest.raises(wal.DamagedError, match=r"000001\.msgpack.*offset"):
        list(journal.read(tmp_path))


def test_reading_begins_at_the_oldest_segment_that_is_there(tmp_path: Path) -> None:
    writer = Journal.create(tmp_path, b"s0")
    for number in range(1, 4):
        writer.append([entry(number)])
        writer.roll(f"s{number}".encode())
    writer.append([entry(4)])
    writer.close()
    for number in (1, 2):
        wal.segment_path(tmp_path, number).unlink()
    read = list(journal.read(tmp_path))
    assert [(item.opening.snapshot, item.opening.first_entry, events(item)) for item in read] == [
        (b"s2", 2, [3]),
        (b"s3", 3, [4]),
    ]


def test_mistakes_are_refused_with_the_way_out(tmp_path: Path) -> None:
    Journal.create(tmp_path, b"s0").close()
    with pytest.raises(ValueError, match="already holds a journal: resume"):
        Journal.create(tmp_path, b"s0")
    with pytest.raises(ValueError, match="holds no journal"):
        journal.recover(tmp_path / "nowhere")


def test_a_journal_of_another_version_is_refused_with_both_versions_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "FORMAT", 1)
    old = Journal.create(tmp_path, b"another core's state")
    old.append([entry(1)])
    old.close()
    monkeypatch.undo()
    for read in (journal.recover, lambda directory: list(journal.read(directory))):
        with pytest.raises(ValueError, match=r"has format 1, .* reads format 2 only.*pearl report opens"):
            read(tmp_path)
