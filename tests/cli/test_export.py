"""``pearl export`` says what its process found; the process itself is tested beside the workers."""

import subprocess
from pathlib import Path

import msgspec
import pytest

from pearl.cli import export, main
from pearl.types.export_report import ExportReport


def test_a_directory_that_is_not_a_runs_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [["RUN"], ["RUN", "OUT", "--step", "-1"], ["RUN", "OUT", "--step", "x"]])
def test_wrong_words_are_a_usage_error(words: list[str]) -> None:
    assert main(["export", *words]) == 2


def answering(
    monkeypatch: pytest.MonkeyPatch, report: ExportReport | None, code: int, stderr: bytes = b""
) -> list[str]:
    asked: list[str] = []

    def probe(module: str, arguments: list[str], *, limit_s: float) -> subprocess.CompletedProcess[bytes]:
        asked.extend(arguments)
        stdout = msgspec.json.encode(report) if report is not None else b""
        return subprocess.CompletedProcess([module], code, stdout, stderr)

    monkeypatch.setattr(export, "probe", probe)
    return asked


def test_what_was_written_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = ExportReport(step=7, num_tensors=24, num_bytes=405408, notes=("no tokenizer",))
    asked = answering(monkeypatch, report, 0)
    assert main(["export", "runs/a", "--step", "7", "out"]) == 0
    assert asked == ["runs/a", "out", "--step", "7"]
    assert capsys.readouterr().out == "out: step 7, 24 tensors, 405,408 bytes\nnote: no tokenizer\n"


def test_a_failure_keeps_its_exit_code_and_its_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(monkeypatch, ExportReport(problem="out: the disk is full"), 1)
    assert main(["export", "runs/a", "out"]) == 1
    assert capsys.readouterr().err == "error: out: the disk is full\n"


def test_a_process_that_dies_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(monkeypatch, None, -9, b"Traceback\nMemoryError\n")
    assert main(["export", "runs/a", "out"]) == 1
    assert capsys.readouterr().err == "error: out: MemoryError\n"
