"""``pearl trace inspect``: what would be played, for people and programs; nothing is started."""

import json
from pathlib import Path

import pytest

from pearl.cli import main
from pearl.cli.trace import plot

LOG = "2021-12-11, 11:11:30, 5\n2021-12-11, 11:12:30, 8\n2021-12-11, 11:13:30, 2\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "<log>.csv"
    path.write_text(LOG)
    return path


def test_it_prints_a_summary_and_a_plot(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "inspect", str(log)]) == 0
    said = capsys.readouterr().out
    assert "log of availability" in said
    assert "2 of 8 GPU(s), at most 5 at once" in said
    assert "1 of 6 GPU(s), at most 6 at once" in said
    assert "2 to 8, mean 6.5, 2 at the end" in said
    assert "8 ┤" in said


def test_json_has_every_level_after_the_cap_and_says_so(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "inspect", str(log), "--json", "--max-gpus", "6", "--speed", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["levels"] == [[0.0, 5], [30.0, 6], [60.0, 2]]
    assert found["max_gpus"] == 6
    assert found["notes"] == [
        "up to 8 GPUs are recorded; what goes beyond 6 neither arrives nor is reclaimed"
    ]
    assert main(["trace", "inspect", str(log), "--json", "--gpus-per-node", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["levels"] == [[0.0, 20], [60.0, 32], [120.0, 8]]


def test_html_is_one_static_page(log: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["trace", "inspect", str(log), "--html", str(page)]) == 0
    text = page.read_text()
    assert "<polyline" in text
    assert "&lt;log&gt;.csv" in text
    assert "<script" not in text
    assert len(text) < 10_000


def test_what_is_wrong_is_exit_2_with_the_line(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.write_text(LOG + "2021-12-11, 11:14:30, x\n")
    assert main(["trace", "inspect", str(log)]) == 2
    assert f'error: {log}, line 4: the number of instances "x" is no finite number' in capsys.readouterr().err
    assert main(["trace", "inspect", str(tmp_path / "absent")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["trace", "inspect", str(log), "--html", str(tmp_path)]) == 2
    assert "is a directory; name a file" in capsys.readouterr().err


def test_a_plot_needs_time_and_shows_the_most_of_each_column() -> None:
    assert plot([], 20) == []
    assert plot([(0.0, 3)], 20) == []
    lines = plot([(0.0, 8), (1.0, 0), (2.0, 4), (3.0, 2), (4.0, 2)], 4)
    assert [line.partition("┤")[2] for line in lines[:8]] == [
        "█",
        "█",
        "█",
        "█",
        "█ █",
        "█ █",
        "█ ██",
        "█ ██",
    ]
    assert lines[8].split() == ["0", "4"]
