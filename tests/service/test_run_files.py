"""The results of a run on disk: cut back, written again, and compared with what was written."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from whole_run import WholeRun, once, run_whole

from pearl.runtime.journal import Journal
from pearl.service import recovery
from pearl.service.run_files import NotAsWrittenError, RunFiles
from pearl.service.verification import checkpoint_damage, verify
from pearl.testing.cluster import Cluster
from pearl.testing.fakes import small_config
from pearl.types.commands import Report
from pearl.types.reports import NoteReport

NAMES = ("metrics.jsonl", "trajectories.jsonl")


def test_a_rewind_takes_back_what_came_after_the_mark(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.save_offsets(0, 0.0)
    files.report(Report(NoteReport(0.0, text="before")))
    files.save_offsets(10, 2.5)
    files.report(Report(NoteReport(0.0, text="after")))
    assert files.truncate_to_offsets(10).now == 2.5
    assert [json.loads(line)["text"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        "before"
    ]
    files.truncate_to_offsets(0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    with pytest.raises(NotAsWrittenError, match="no mark of journal entry 7"):
        files.truncate_to_offsets(7)


@pytest.mark.parametrize("junk", ["{}", "[1]", "nonsense", '[{"first_entry": 0}]'])
def test_marks_that_are_none_are_named_and_replaced_by_the_next(tmp_path: Path, junk: str) -> None:
    files = RunFiles(tmp_path)
    (tmp_path / "marks.json").write_text(junk)
    with pytest.raises(NotAsWrittenError, match=r"marks\.json does not hold the marks of a run"):
        files.truncate_to_offsets(0)
    files.save_offsets(3, 1.0)
    assert files.truncate_to_offsets(3).first_entry == 3


def deleted(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def changed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replaced(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data + b"more")


HARM = (deleted, cut, emptied, changed, replaced)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("harm", HARM)
async def test_what_was_harmed_during_the_run_is_written_again_from_the_journal(
    tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    life = await run_whole(tmp_path)
    files, journal = reopened(life, tmp_path)
    before = {path: path.read_bytes() for path in map(tmp_path.joinpath, NAMES)}
    files.summary({"steps": 1})
    harm(tmp_path / name)
    deleted(tmp_path / "summary.json")
    said: list[str] = []
    assert verify(files, journal, said.append) == []
    assert {path: path.read_bytes() for path in before} == before
    assert any(name in line and "written again from the journal" in line for line in said)
    assert json.loads((tmp_path / "summary.json").read_bytes()) == {"steps": 1}
    assert verify(files, journal, said.append) == []


async def test_what_cannot_be_written_again_is_said(tmp_path: Path) -> None:
    life = await run_whole(tmp_path)
    files, journal = reopened(life, tmp_path)
    deleted(tmp_path / "trajectories.jsonl")
    for path in (tmp_path / "journal.msgpack").glob("*.msgpack"):
        deleted(path)
    lost = verify(files, journal, lambda text: None)
    assert len(lost) == 2
    assert "journal.msgpack" in lost[0]
    assert "can neither be replayed nor resumed" in lost[0]
    assert "trajectories.jsonl was deleted: not written again from the journal" in lost[1]


@pytest.mark.parametrize("harm", [*HARM, "marks"])
async def test_a_resume_writes_harmed_results_again(
    tmp_path: Path, harm: Callable[[Path], None] | str
) -> None:
    config = small_config()
    cluster = Cluster(config)
    life = WholeRun(config, tmp_path, cluster, segment_bytes=20_000)
    cluster.on_step = once(lambda: life.run_loop.request_stop(15), at=40)
    await life.run()
    before = {path: path.read_bytes() for path in map(tmp_path.joinpath, NAMES)}
    if callable(harm):
        harm(tmp_path / "metrics.jsonl")
    else:
        (tmp_path / "marks.json").write_text('{"first_entry": 3}')
    files = RunFiles(tmp_path)
    beginning = recovery.recover(config, files)
    beginning.journal.close()
    assert {path: path.read_bytes() for path in before} == before
    assert beginning.now > 0


def reopened(life: WholeRun, run_dir: Path) -> tuple[RunFiles, Journal]:
    """As they are when the run has ended: what is on disk is what was written."""
    return RunFiles(run_dir), life.beginning.journal


async def test_settings_that_were_edited_are_refused_with_both_values(tmp_path: Path) -> None:
    config = small_config()
    files = RunFiles(tmp_path)
    recovery.fresh(config, files).journal.close()
    edited = msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, seed=41),
        training=msgspec.structs.replace(config.training, learning_rate=0.5),
    )
    with pytest.raises(ValueError, match="the run was started with") as caught:
        recovery.recover(edited, files)
    lines = str(caught.value).splitlines()
    assert f"config.toml: run.seed = 41, but the run was started with {config.run.seed}" in lines[0]
    assert "training.learning_rate = 0.5" in lines[1]
    assert "put back what it was started with" in lines[2]
    patient = msgspec.structs.replace(
        config, runtime=msgspec.structs.replace(config.runtime, start_timeout_s=77.0)
    )
    recovery.recover(patient, files).journal.close()


def test_a_checkpoint_is_compared_with_its_description(tmp_path: Path) -> None:
    directory = tmp_path / "step-000012"
    directory.mkdir()
    assert "checkpoint.json was deleted" in checkpoint_damage(tmp_path, 12)
    (directory / "model.safetensors").write_bytes(b"1234")
    files = [{"name": "model.safetensors", "num_bytes": 4, "digest": ""}]
    description = directory / "checkpoint.json"
    description.write_text(json.dumps({"step": 12, "lineage": 1, "config_digest": "", "files": files}))
    assert checkpoint_damage(tmp_path, 12) == ""
    (directory / "model.safetensors").write_bytes(b"123")
    assert "has 3 bytes, 4 were written" in checkpoint_damage(tmp_path, 12)
    (directory / "model.safetensors").unlink()
    assert "model.safetensors was deleted" in checkpoint_damage(tmp_path, 12)
    description.write_text("{}")
    assert "cannot be read" in checkpoint_damage(tmp_path, 12)
