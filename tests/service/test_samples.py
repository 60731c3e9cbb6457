"""Samples of a run: bounded, decoded by the environment, and never in the run's way."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pearl.runtime.errors import RemoteError
from pearl.runtime.token_store import TokenStore
from pearl.service import samples
from pearl.service.samples import SampleWriter
from pearl.types.ids import PromptId, TrajectoryId
from pearl.types.trajectory import TrajectoryRecord


def record(number: int, cohort: int = 0, evaluation: int | None = None) -> TrajectoryRecord:
    return TrajectoryRecord(
        prompt=PromptId(0),
        group=0,
        trajectory=TrajectoryId(number),
        cohort=cohort,
        lineage=0,
        trained_step=cohort,
        start_version=None,
        end_version=None,
        reward=0.5,
        outcome="done",
        turns=[],
        evaluation=evaluation,
    )


async def decode(parts: tuple[bytes, ...]) -> tuple[str, ...]:
    return tuple(f"{len(part) // 4} words" for part in parts)


async def written(
    tmp_path: Path, records: list[TrajectoryRecord], decode: Any, num_samples: int = 2
) -> list[Any]:
    store = TokenStore(tmp_path / "tokens")
    for one in records:
        store.append(one.trajectory, "prompt", 0, bytes(400))
        store.append(one.trajectory, "observation", 0, bytes(8))
    async with asyncio.TaskGroup() as group:
        writer = SampleWriter(
            tmp_path, num_samples, store, decode, lambda name, work: group.create_task(work, name=name)
        )
        for one in records:
            writer.offer(one)
            store.forget(one.trajectory)
        await writer.drain()
    store.close()
    path = tmp_path / "samples.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_so_many_of_each_step_and_round_are_kept(tmp_path: Path) -> None:
    records = [record(number, number // 3) for number in range(6)]
    records += [record(10 + number, evaluation=1) for number in range(3)]
    found = await written(tmp_path, records, decode)
    assert [line["trajectory"] for line in found] == [0, 1, 3, 4, 10, 11]
    assert [part["text"] for part in found[0]["parts"]] == ["100 words", "2 words"]


async def test_none_are_kept_when_none_are_wanted(tmp_path: Path) -> None:
    assert await written(tmp_path, [record(0)], decode, num_samples=0) == []


async def test_what_cannot_be_decoded_is_kept_as_its_first_ids(tmp_path: Path) -> None:
    async def refuse(_: tuple[bytes, ...]) -> tuple[str, ...]:
        raise RemoteError("decode raised KeyError")

    async def none(_: tuple[bytes, ...]) -> None:
        return None

    for number, wrong in enumerate((refuse, none)):
        directory = tmp_path / str(number)
        directory.mkdir()
        (line,) = await written(directory, [record(0)], wrong)
        assert [len(part["ids"]) for part in line["parts"]] == [samples.MAX_IDS, 2]
        assert "text" not in line["parts"][0]


async def test_a_file_that_cannot_be_written_ends_the_samples_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "samples.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):  # by the test's own reading
        await written(tmp_path, [record(0), record(1)], decode)
    assert sum("no more samples are kept" in line.getMessage() for line in caplog.records) == 1


async def test_the_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_FILE_BYTES", 1000)
    await written(tmp_path, [record(number, number) for number in range(20)], decode)
    sizes = [(tmp_path / name).stat().st_size for name in (samples.NAME, samples.OLDER_NAME)]
    assert all(0 < size <= 1000 for size in sizes)
    newest = json.loads((tmp_path / samples.NAME).read_text().splitlines()[-1])
    assert newest["trajectory"] == 19
