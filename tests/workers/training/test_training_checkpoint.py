import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from pearl.workers.training import checkpoint
from pearl.workers.training.checkpoint import CheckpointStore


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 2), float(step)), "b": torch.arange(5) + step}


def save(store: CheckpointStore, step: int) -> None:
    writer = store.writer(step)
    writer.add("model", tensors(step))
    writer.add("optimizer", tensors(step + 100))
    writer.commit(lineage=1, config_digest="digest")


def assert_whole(store: CheckpointStore, step: int) -> None:
    found = store.verified(step)
    assert found.parts() == {"model", "optimizer"}
    with found.reader("model") as read:
        assert read.names() == {"a", "b"}
        assert all(torch.equal(read(name), tensor) for name, tensor in tensors(step).items())


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 12)
    assert (tmp_path / "step-000012").is_dir()
    assert_whole(store, 12)
    assert store.open(12).description.lineage == 1


def test_the_newest_are_kept_and_never_fewer_than_two(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    for step in (1, 2, 3):
        save(store, step)
        store.prune()
    assert store.steps() == [2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


def test_steps_after_a_restore_are_discarded(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    for step in (1, 2, 3):
        save(store, step)
    assert store.discard_after(1) == [2, 3]
    assert store.steps() == [1]


def test_a_step_that_is_not_there_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 4)
    with pytest.raises(
        ValueError, match=r"step-000007 is not a complete checkpoint; complete are steps \[4\]"
    ):
        store.open(7)


class Crash(Exception):
    """The process is killed here."""


def crashing(original: Callable[..., Any], countdown: list[int]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise Crash
        return original(*arguments, **options)

    return call


WRITES = ((checkpoint, "save_file"), (os, "fsync"), (Path, "rename"), (Path, "mkdir"), (Path, "write_bytes"))


def crash_at(point: int, work: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run ``work`` and kill it at its ``point``-th write; False when it has fewer."""
    countdown = [point]
    with monkeypatch.context() as patch:
        for owner, name in WRITES:
            patch.setattr(owner, name, crashing(getattr(owner, name), countdown))
        try:
            work()
        except Crash:
            return True
    return False


@pytest.mark.scenario("CK-04")
def test_killed_at_any_moment_of_a_save_the_last_good_one_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for point in range(1, 20):
        root = tmp_path / str(point)
        store = CheckpointStore(root, keep=2)
        save(store, 1)
        is_killed = crash_at(point, lambda store=store: save(store, 2), monkeypatch)  # type: ignore[misc]
        newest = store.newest()
        assert newest in (1, 2)
        assert_whole(store, newest)
        if not is_killed:
            assert newest == 2
            assert point > 8  # each of the writes was a moment to die at
            return
        save(store, 2)  # the next life saves that step again
        assert_whole(store, 2)
    pytest.fail("a save has more writes than that")


@pytest.mark.parametrize("file", ["model.safetensors", "checkpoint.json"])
@pytest.mark.scenario("CK-04")
def test_truncated_file_makes_it_incomplete(tmp_path: Path, file: str) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    save(store, 2)
    path = tmp_path / "step-000002" / file
    path.write_bytes(path.read_bytes()[:-1])
    assert store.newest() == 1


@pytest.mark.scenario("CK-04")
def test_damaged_bytes_are_found(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    save(store, 2)
    path = tmp_path / "step-000002" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        store.verified(2)
    assert store.newest() == 1


def test_a_disk_that_fills_up_meanwhile_leaves_the_last_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)

    def full(_: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        save(store, 2)
    assert caught.value.errno == errno.ENOSPC
    assert store.steps() == [1]
    assert_whole(store, 1)
    store.prune()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
