"""A run directory has one coordinator and an id of its own, whatever is deleted in it or copied out of it."""

import json
import shutil
from pathlib import Path

import pytest

from pearl.service.run_lock import InUseError, claim


def test_one_coordinator_a_run_directory(tmp_path: Path) -> None:
    with claim(tmp_path) as first, pytest.raises(InUseError, match="a coordinator runs"), claim(tmp_path):
        pass
    with claim(tmp_path) as again:
        assert again == first
    assert (tmp_path / "run_id").read_text() == f"{first.run_id}\n"


@pytest.mark.parametrize("deleted", [["run_id"], ["identity.json"], ["run_id", "identity.json"]])
def test_no_deleted_or_replaced_file_lets_a_second_one_in(tmp_path: Path, deleted: list[str]) -> None:
    with claim(tmp_path) as first:
        for name in deleted:
            (tmp_path / name).unlink()
            (tmp_path / name).write_text("another")
            (tmp_path / name).unlink()
        with pytest.raises(InUseError), claim(tmp_path):
            pass
    with claim(tmp_path) as again:
        assert (again.run_id == first.run_id) == ("identity.json" not in deleted)


def test_a_copy_of_a_run_is_another_run(tmp_path: Path) -> None:
    original, copy, moved = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    original.mkdir()
    with claim(original) as first:
        shutil.copytree(original, copy)
        with claim(copy) as second:
            assert second.run_id != first.run_id
            assert second.copied_from == first.run_id
    original.rename(moved)
    with claim(moved) as third:
        assert third == first, "it is the same directory by another name"
    with claim(copy) as again:
        assert again == (second.run_id, "")


@pytest.mark.parametrize(
    "junk", [b"", b"{", b"[]", b"\xff", b'{"run_id": "../../etc", "device": %d, "inode": %d}']
)
def test_an_id_of_unknown_origin_is_not_used_again(tmp_path: Path, junk: bytes) -> None:
    with claim(tmp_path) as first:
        pass
    if b"%d" in junk:
        status = tmp_path.stat()
        junk = junk % (status.st_dev, status.st_ino)
    (tmp_path / "identity.json").write_bytes(junk)
    (tmp_path / "run_id").write_bytes(b"{braces} %d $x\n\n\xff")
    with claim(tmp_path) as again:
        assert again.run_id != first.run_id
        assert json.loads((tmp_path / "identity.json").read_bytes())["run_id"] == again.run_id
