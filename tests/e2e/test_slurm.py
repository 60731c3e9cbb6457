"""launch/slurm on a real Slurm: slurmctld, slurmd and munge of this host, with two nodes and a preempting partition."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "launch" / "slurm"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "srun")
LIMIT_S = 90.0
CONFIGURATION = """\
ClusterName=pearl
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock,cred_expire=5
SlurmctldPort={ports[0]}
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmdSpoolDir={root}/spool/%n
StateSaveLocation={root}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,requeue_delay=1
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
JobAcctGatherType=jobacct_gather/none
NodeName=na NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=nb NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=reserved Nodes=na PriorityTier=10 PreemptMode=off
PartitionName=preemptible Nodes=nb PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}
PartitionName=urgent Nodes=nb PriorityTier=20 PreemptMode=off
"""
VALUES = {
    "--cpus-per-task=32": "--cpus-per-task=1",
    "#SBATCH --gpus-per-node=8\n": "",
    "0-31%8": "0-0",
    "OPTIONS=() ": "OPTIONS=(--virtual-gpus 2) ",
    "GRACE_S=30": "GRACE_S=8",
    "0.0.0.0:0": "127.0.0.1:0",
}


def test_a_dry_run_prints_the_files_and_commands_and_submits_nothing(tmp_path: Path) -> None:
    job = tmp_path / "my $job's.toml"
    job.write_text("")
    run_dir = tmp_path / "a run"
    done = subprocess.run(
        [SCRIPTS / "submit.sh", "--dry-run", job, run_dir, "run.num_steps=3"],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    for name in ("train.sbatch", "spot.sbatch"):
        content = (SCRIPTS / name).read_text()
        assert content in done.stdout
        assert len(content.splitlines()) < 60
    commands = done.stdout.partition("would submit:\n")[2].splitlines()
    assert r"my\ \$job\'s.toml" in commands[0]
    assert commands[0].endswith("elastic.inter=true run.num_steps=3")
    assert "--dependency=after:TRAIN_JOB" in commands[1]
    assert [path.name for path in tmp_path.iterdir()] == [job.name]


@pytest.mark.parametrize("words", [[], ["--dry-run", "job.toml"], ["missing.toml", "runs/mine"]])
def test_a_usage_error_submits_nothing(words: list[str]) -> None:
    done = subprocess.run(
        [SCRIPTS / "submit.sh", *words], capture_output=True, text=True, check=False, timeout=20
    )
    assert done.returncode == 2
    assert "Usage: launch/slurm/submit.sh" in done.stderr or "missing.toml is no file" in done.stderr


class Slurm:
    def __init__(self, root: Path, grace_s: int) -> None:
        self.root = root
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(root / "slurm.conf"),
            "PYTHONPATH": str(REPOSITORY),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        for name in ("state", "spool"):
            (root / name).mkdir()
        key = root / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.daemons = (
            root / "munged.pid",
            root / "slurmctld.pid",
            root / "slurmd-na.pid",
            root / "slurmd-nb.pid",
        )
        text = CONFIGURATION.format(
            host=socket.gethostname(), root=root, ports=_free_ports(3), grace_s=grace_s
        )
        (root / "slurm.conf").write_text(text)

    def start(self) -> None:
        root, key = self.root, self.root / "munge.key"
        munge = (
            "--force",
            f"--socket={root}/munge.sock",
            f"--key-file={key}",
            f"--log-file={root}/munged.log",
        )
        self.call("munged", *munge, f"--pid-file={root}/munged.pid", f"--seed-file={root}/munge.seed")
        self.call("slurmctld", "-c", "-f", str(root / "slurm.conf"))
        for node in ("na", "nb"):
            self.call("slurmd", "-N", node, "-f", str(root / "slurm.conf"))
        self.until(lambda: self.call("sinfo", "-h", "-o", "%T").split() == ["idle"])

    def call(self, *words: str) -> str:
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=False, timeout=30
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout.strip()

    def until(self, holds: Callable[[], bool], what: Callable[[], str] = str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < deadline, what()
            time.sleep(0.2)

    def end(self) -> None:
        with suppress(AssertionError):
            self.call("scancel", "--full", "--user=root")
            self.until(lambda: not self.call("squeue", "-h"))
        for path in reversed(self.daemons):
            with suppress(OSError, ValueError):
                os.kill(int(path.read_text()), signal.SIGTERM)


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.getuid():
        pytest.skip(
            f"needs root and Debian's slurmctld, slurmd and munge (missing: {', '.join(missing) or 'root'})"
        )
    root = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: the path of a socket has a limit
    cluster = Slurm(root, grace_s=10)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(root, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_preempted_element_hands_back_is_requeued_and_all_end_with_the_run(
    slurm: Slurm, tmp_path: Path
) -> None:
    scripts = shutil.copytree(SCRIPTS, tmp_path / "slurm")
    for name in ("train.sbatch", "spot.sbatch"):
        text = (scripts / name).read_text()
        for before, after in VALUES.items():
            text = text.replace(before, after)
        (scripts / name).write_text(text)
    run_dir = tmp_path / "my $run's dïr"
    job = str(REPOSITORY / "launch" / "configs" / "emulated.toml")
    slurm.call(str(scripts / "submit.sh"), job, str(run_dir), "rollout.num_workers=2", "run.num_steps=14")

    def log() -> str:
        return "\n".join(path.read_text() for path in Path(f"{run_dir}.slurm").glob("*.log"))

    def arrived() -> list[str]:
        path = run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        found = [json.loads(line) for line in lines if '"event":"arrived"' in line]
        return [line["gpus"].partition("/")[0].rpartition(".")[2] for line in found]

    slurm.until(lambda: arrived() == ["0"] and "step   0" in log(), log)
    slurm.call("sbatch", "--partition=urgent", "--output=/dev/null", "--wrap=sleep 1")
    slurm.until(lambda: "has left: SIGTERM: all GPUs were given back" in log(), log)
    slurm.until(lambda: arrived() == ["0", "1"], log)  # under its restart count
    slurm.until(lambda: not slurm.call("squeue", "-h"), log)
    assert "left: the run is over" in log()
    assert json.loads((run_dir / "summary.json").read_text())["complete"], log()
    subprocess.run([sys.executable, REPOSITORY / "tests" / "checker.py", run_dir], check=True, timeout=60)
