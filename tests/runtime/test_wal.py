"""Records, torn tails and damage."""

from pathlib import Path

import msgpack
import pytest

from pearl.runtime import wal


def write(directory: Path, payloads: list[bytes]) -> Path:
    path = wal.segment_path(directory, 1)
    writer = wal.SegmentWriter(path, payloads[:1])
    writer.write(payloads[1:])
    writer.close()
    return path


def read(path: Path, *, may_be_torn: bool = True) -> list[bytes]:
    return [record.payload for record in wal.read_segment(path, may_be_torn=may_be_torn)]


def test_records_come_back_and_any_messagepack_reader_streams_them(tmp_path: Path) -> None:
    payloads = [b"one", b"", bytes(300)]
    path = write(tmp_path, payloads)
    assert read(path, may_be_torn=False) == payloads
    with open(path, "rb") as file:
        assert [record[2] for record in msgpack.Unpacker(file)] == payloads


@pytest.mark.scenario("CK-04")
def test_a_tail_cut_at_any_byte_loses_that_record_only(tmp_path: Path) -> None:
    payloads = [b"one", b"", b"three"]
    path = write(tmp_path, payloads)
    whole = path.read_bytes()
    ends = [record.end for record in wal.read_segment(path, may_be_torn=False)]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        num_whole = sum(end <= size for end in ends)
        assert read(path) == payloads[:num_whole]
        is_torn = size != ([0, *ends])[num_whole]
        if is_torn:
            with pytest.raises(wal.DamagedError, match="cut short"):
                read(path, may_be_torn=False)
        assert (wal.cut_torn_tail(path) > 0) == is_torn
        assert read(path, may_be_torn=False) == payloads[:num_whole]


@pytest.mark.scenario("CK-04")
def test_a_changed_byte_anywhere_is_refused_with_file_and_offset(tmp_path: Path) -> None:
    payloads = [b"one", b"second", b"3"]
    path = write(tmp_path, payloads)
    whole = path.read_bytes()
    starts = [record.offset for record in wal.read_segment(path, may_be_torn=False)]
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        offset = max(start for start in starts if start <= position)
        with pytest.raises(wal.DamagedError, match=rf"000001\.msgpack.* offset {offset}\b"):
            read(path)


@pytest.mark.scenario("CK-04")
def test_zeros_left_by_a_power_cut_are_a_torn_tail(tmp_path: Path) -> None:
    path = write(tmp_path, [b"one"])
    with open(path, "ab") as file:
        file.write(bytes(100))
    assert read(path) == [b"one"]
    assert wal.cut_torn_tail(path) == 100


def test_a_segment_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    draft = tmp_path / "000001.tmp"
    draft.write_bytes(b"half a snap")
    assert wal.segment_numbers(tmp_path) == []
    wal.remove_drafts(tmp_path)
    assert not draft.exists()


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    for number in (2, 3, 6):
        wal.SegmentWriter(wal.segment_path(tmp_path, number)).close()
    with pytest.raises(ValueError, match=r"\[4, 5\] are missing"):
        wal.segment_numbers(tmp_path)
