"""The command line: what it accepts, what it refuses with exit code 2, and that help needs no heavy import."""

import json
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pearl.cli import main, run
from pearl.config import ConfigError, resolved_toml
from pearl.report.terminal_summary import closing_lines
from pearl.types.config import Config


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.toml"
    path.write_text("[run]\nnum_steps = 3\n")
    return path


def request(config: Path | None, *, run_dir: Path | None = None, resume: bool = False) -> run.Request:
    return run.Request(config, [], run_dir, dry_run=False, resume=resume)


def make_run(run_dir: Path, config: Config | None = None) -> Path:
    run_dir.mkdir(parents=True)
    (run_dir / "config.toml").write_text(resolved_toml(config or Config()))
    return run_dir


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stats"], "did you mean pearl status?"),
        (["zzz"], "see pearl --help"),
        (["decide"], "give both: pearl decide --profile"),
        (["run"], "give the job's CONFIG file"),
        (["run", "a.toml", "b.toml"], "one CONFIG, please, not 2"),
        (["run", "absent.toml"], "absent.toml: cannot be read"),
        (["run", "job.toml", "run.num_step=3"], "did you mean run.num_steps?"),
        (
            ["run", "job.toml", "rollout.engine=sglang", "sglang.python=/bin/false"],
            "launch/install-sglang-cpu.sh VENV",
        ),
        (["run", "job.toml", "run.num_steps"], "settings are key=value"),
        (["run", "job.toml", "run.num_steps=99999999999999999999"], "does not fit in 63 bits"),
        (["run", "job.toml", "environment.options.foo=3", "--dry-run"], "environment.options"),
        (
            ["run", "job.toml", "elastic.trace=no.csv", "elastic.inter=true", "--dry-run"],
            "elastic.trace: no.csv",
        ),
        (["run", "job.toml", "--run-dir", "x" * 300], "File name too long"),
        (["run", "--resume", "run.seed=1"], "remove the overrides"),
        (["run", "--resume"], "holds no run to resume"),
        (["run", "--resume", "--run-dir", "absent"], "has no config.toml"),
        (["run", "job.toml", "--run-dir", "job.toml"], "is a file"),
        (["run", "job.toml", "--run-dir", "job.toml/x"], "cannot be made"),
        (["report", "."], "is no run directory"),
        (["replay", "."], "is no run directory"),
    ],
)
def test_wrong_asking_is_exit_2_with_the_way_out(
    words: list[str], said: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.scenario("CF-01")
def test_a_misspelt_key_starts_nothing(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job.write_text("[rollout]\nmax_stalenes = 1\n")
    assert main(["run", "job.toml", "--run-dir", "new"]) == 2
    assert "did you mean rollout.staleness_bound?" in capsys.readouterr().err
    assert not Path("new").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["job.toml", "run.seed=7", "--run-dir", "new", "--dry-run"],
        ["--run-dir", "new", "job.toml", "--dry-run", "run.seed=7"],
        ["run.seed=7", "--dry-run", "job.toml", "--run-dir=new"],
    ],
)
def test_dry_run_prints_the_settings_and_makes_nothing(
    words: list[str], job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *words]) == 0
    printed = capsys.readouterr().out
    assert tomllib.loads(printed)["run"] == {
        "seed": 7,
        "num_steps": 3,
        "run_root": "runs",
        "num_samples": 4,
    }
    assert "# would start, in new:" in printed
    assert "#     this host: 1 GPU(s) for training, 2 for rollout" in printed
    assert not Path("new").exists()
    assert not Path("runs").exists()


@pytest.mark.parametrize("how", [["--dry-run"], ["--run-dir", "new"]])
def test_an_address_of_others_is_refused_before_anything_is_made(
    how: list[str], job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "job.toml", "runtime.address=tcp://203.0.113.9:7000", *how]) == 2
    said = 'runtime.address: "tcp://203.0.113.9:7000": 203.0.113.9 is no address of this host; name one of its own'
    assert said in capsys.readouterr().err
    assert not Path("new").exists()


def test_an_address_that_is_no_host_is_refused(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert main(["run", "job.toml", "runtime.address=tcp://nowhere:7000"]) == 2
    assert "nowhere cannot be resolved (Name or service not known)" in capsys.readouterr().err


def test_a_used_directory_is_refused_unless_resumed(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("used"))
    assert main(["run", "job.toml", "--run-dir", "used"]) == 2
    assert "add --resume to go on with the run in it" in capsys.readouterr().err
    assert main(["run", "--run-dir", "used", "--resume", "--dry-run"]) == 0


def test_the_directory_of_a_run_that_never_began_is_free(job: Path) -> None:
    left = job.parent / "left"
    (left / "logs").mkdir(parents=True)
    for name in ("run_id", "coordinator.log", "metrics.jsonl"):
        (left / name).touch()
    assert run._fresh(request(job, run_dir=left))[1] == left


def test_resume_goes_on_with_the_runs_own_settings(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("used"))
    assert main(["run", "job.toml", "--run-dir", "used", "--resume"]) == 2
    assert "was started with other settings (run.num_steps)" in capsys.readouterr().err
    job.write_text("")
    assert main(["run", "job.toml", "--run-dir", "used", "--resume", "--dry-run"]) == 0


def test_settings_of_a_run_that_are_junk_are_named_with_the_way_out(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (make_run(Path("used")) / "config.toml").write_text("{junk %s")
    assert main(["run", "--resume", "--run-dir", "used"]) == 2
    said = capsys.readouterr().err
    assert "used/config.toml: is not valid TOML" in said
    assert "used/config.json has the same settings" in said


def test_resume_without_a_directory_takes_the_newest(job: Path) -> None:
    for age, name in enumerate(("new", "old")):
        path = make_run(Path("runs") / name) / "config.toml"
        os.utime(path, (1000 - age, 1000 - age))
    _, run_dir = run._resumed(request(None, resume=True))
    assert run_dir == Path("runs/new")


def test_two_runs_at_once_get_their_own_directories(tmp_path: Path) -> None:
    names = [run._claim(tmp_path / "runs" / "a", by_name=False).name for _ in range(3)]
    assert names == ["a", "a-2", "a-3"]
    with pytest.raises(ConfigError, match="is not empty"):
        run._fresh(request(_empty(tmp_path / "job.toml"), run_dir=tmp_path))


def _empty(path: Path) -> Path:
    path.write_text("")
    return path


def test_help_and_refusals_import_nothing_heavy() -> None:
    code = "import sys, pearl.cli; pearl.cli.main(['zzz']); print(sorted(sys.modules))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    assert "'torch'" not in out
    assert "'zmq'" not in out


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "run CONFIG [key=value ...]" in capsys.readouterr().out
    assert main([]) == 2
    with pytest.raises(SystemExit) as caught:
        main(["run", "--help"])
    assert caught.value.code == 0


def test_closing_lines(tmp_path: Path) -> None:
    summary = {"steps": 40, "seconds": 31.4, "reward_first": 0.24, "reward_last": 0.961, "max_staleness": 1}
    counts = {
        "trajectories_trained": 7680,
        "tokens_generated": 130000,
        "workers_lost": 2,
        "eval_reward": None,
    }
    (tmp_path / "summary.json").write_text(json.dumps({**summary, **counts}))
    assert closing_lines(tmp_path) == [
        "40 steps in 31 s, sampled reward 0.24 -> 0.96",
        "7,680 trajectories trained, 130,000 tokens generated, staleness at most 1",
        "lost and replaced: workers 2",
    ]
    assert closing_lines(tmp_path / "absent") == [
        f"no summary: the run in {tmp_path / 'absent'} was cut short"
    ]


def test_dry_run_prints_which_host_gives_which_gpus(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "rollout.num_workers=4",
        "rollout.reserved_gpus=4",
        "elastic.inter=true",
        "runtime.reserved_timeout_s=90",
    ]
    assert main(["run", "job.toml", *words, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "#     this host: 1 GPU(s) for training, 0 for rollout" in printed
    assert (
        "#     reserved hosts (pearl agent --pool rollout): 4 GPU(s) for 4 worker(s), awaited for 90 s"
        in printed
    )
    assert "#     spot hosts (pearl agent --pool spot): as many as join" in printed


def test_a_training_world_over_hosts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["agent", "--coordinator", "h:1", "--pool", "training", "--virtual-gpus", "1"]
    assert main(words) == 2
    assert "--pool training: a training world over several hosts is not built yet" in capsys.readouterr().err


def test_resume_if_there_begins_a_run_and_goes_on_with_it(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "job.toml", "--run-dir", "mine", "--resume-if-there", "--dry-run"]
    assert main(words) == 0
    settings = capsys.readouterr().out
    assert "# would start, in mine:" in settings
    Path("mine").mkdir()
    Path("mine/config.toml").write_text(settings)
    assert main(words) == 0
    assert "# would resume, in mine:" in capsys.readouterr().out
    assert main([*words, "run.seed=77"]) == 2
    assert "was started with other settings (run.seed)" in capsys.readouterr().err
    assert main(["run", "job.toml", "--resume-if-there"]) == 2
    assert "--resume-if-there needs CONFIG and --run-dir D" in capsys.readouterr().err
