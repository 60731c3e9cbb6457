"""Numbers on the command line: whatever is typed is taken or is a usage error that names option and bounds."""

import pytest

from pearl.cli import main

HUGE = "100000000000000000000"
EXTREMES = ("1e-300", "1e300", "-1", "nan", "inf", "-inf", HUGE, "9" * 5000, "", "x", "²")
OPTIONS = [
    (["preempt", "reclaim", "--gpus", "1"], "--grace"),
    (["preempt", "replay", "trace.csv"], "--speed"),
    (["preempt", "replay", "trace.csv"], "--max-gpus"),
    (["preempt", "replay", "trace.csv"], "--gpus-per-node"),
    (["status"], "--watch"),
    (["decide", "--profile", "p.json"], "--workers"),
    (["simulate", "job.toml", "--policy", "pearl"], "--seconds"),
    (["simulate", "job.toml", "--policy", "pearl"], "--seeds"),
    (["agent", "--coordinator", "localhost:1"], "--virtual-gpus"),
    (["agent", "--coordinator", "localhost:1"], "--grace"),
    (["agent", "--coordinator", "localhost:1"], "--lifetime"),
    (["agent", "--coordinator", "localhost:1"], "--rejoin"),
    (["agent", "--coordinator", "localhost:1"], "--lease"),
    (["agent", "--coordinator", "localhost:1"], "--heartbeat"),
]


@pytest.mark.parametrize(
    ("words", "option"), OPTIONS, ids=lambda value: value if isinstance(value, str) else value[0]
)
def test_an_extreme_number_is_a_usage_error_that_names_the_option(
    words: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for extreme in EXTREMES:
        if extreme == "1e-300" and option in ("--grace", "--lifetime", "--rejoin"):
            continue  # no time at all is a time
        assert main([*words, f"{option}={extreme}"]) == 2, extreme
        said = capsys.readouterr().err
        assert option in said
        assert len(said) < 2000


@pytest.mark.parametrize("action", ["arrive", "reclaim"])
@pytest.mark.parametrize("count", [HUGE, "65537", "0", "-1", "9" * 5000])
def test_a_number_of_gpus_that_cannot_be_is_a_usage_error(
    action: str, count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["preempt", action, f"--gpus={count}"]) == 2
    assert "give a whole number from 1 to 65536, or ids like local/3" in capsys.readouterr().err


def test_an_allocation_of_absurd_size_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["decide", "--profile", "launch/profiles/qwen3-8b.json", "--workers", "8"]
    assert main([*words, "--current", "9" * 5000 + "C"]) == 2
    assert "is no allocation" in capsys.readouterr().err


def test_an_agent_that_beats_less_often_than_its_lease_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["agent", "--coordinator", "localhost:1", "--virtual-gpus", "1"]
    assert main([*words, "--lease", "1", "--heartbeat", "0.6"]) == 2
    assert "--lease 1: is less than two heartbeats" in capsys.readouterr().err
