"""A real run under fire: workers, trainer, environments, agents and coordinator are killed, stopped and cut off at
random while GPUs come, go and are lent; then everything that a run promises is checked.

    python benchmarks/chaos.py --seed 1 --minutes 5 [--actions N] [--engine torch|emulated] [--run-dir D]

The same seed draws the same actions, spaced by training steps. Two cores; about 1 minute at least. Prints a line an
action, then what was lost and PASS or FAIL a promise; exit code 1 when one is broken. The run is in its run directory.
"""

import argparse
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from chaos_actions import FAR_HOSTS, PREEMPTIBLE, Actions, Draw, draws

from pearl.config import load
from pearl.core.coordinator import Coordinator
from pearl.runtime import journal
from pearl.service.replay import decode_event, encode_commands
from pearl.testing.elastic_run import ELASTIC, free_port
from pearl.testing.live_run import SMALL, LiveRun, check_counters, ended

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = (str(ROOT / "benchmarks" / "chaos_coordinator.py"),)
STALL_LIMIT_S = 180.0  # without a step: longer than any limit of the run, a start on a busy machine included
GONE_LIMIT_S = 15.0
REPORT_LIMIT_S = 60.0  # for the coordinator's last work, when nothing else is left
PERIOD_S = 0.05
SILENT_S = 5.0
SETTINGS: dict[str, Any] = {
    **SMALL,
    **{name.replace("__", "."): value for name, value in ELASTIC.items()},
    "elastic.preemptible_gpus": PREEMPTIBLE,
    "elastic.release_limit_s": 5.0,
    "environment.max_failures": 20,
    "rollout.turn_deadline_s": 30.0,
    "weights.bucket_deadline_s": 2.0,
    "runtime.heartbeat_timeout_s": SILENT_S,
    "runtime.lease_s": SILENT_S,
    "runtime.progress_timeout_s": 20.0,
    "runtime.update_timeout_s": 10.0,
    "runtime.train_timeout_s": 30.0,
    "runtime.max_restarts": 1000,
}
EMULATED: dict[str, Any] = {
    "environment.options.env_seconds": 0.05,
    "emulated.train_seconds": 0.5,
    "rollout.max_in_flight": 16,
}
COUNTERS = (
    *("steps", "trajectories_trained", "trajectories_masked", "trajectories_restarted", "tokens_generated"),
    *("tokens_discarded", "tokens_lost", "tokens_lost_planned", "tokens_lost_unknown", "workers_lost"),
    *("trainers_lost", "updates_discarded", "environment_failures", "interrupted_trajectories", "arrivals"),
    *(
        "reclaims",
        "borrows",
        "returns",
        "expansions",
        "expansions_cancelled",
        "stale_events",
        "max_logprob_gap",
    ),
)
OF_BUGS = (" ERROR pearl.service.coordinator_process:", " ERROR asyncio:", " CRITICAL ")
MAX_LOGPROB_GAP = 1e-3
"""Between a token's log-prob from the rollout and from the trainer under the same version: more means other weights."""


class Stage:
    """One run with its surroundings, through one death of its coordinator."""

    def __init__(self, seed: int, engine: str, run_dir: Path) -> None:
        self._began = time.monotonic()
        self._run_dir = run_dir
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        port = free_port()  # a fixed one, so that agents find the run again once it is resumed
        transport = random.Random(f"{seed}/transport").choice(("auto", "link"))
        settings = {**SETTINGS, "run.seed": seed, "runtime.address": f"tcp://127.0.0.1:{port}"}
        config = "launch/configs/quickstart.toml"
        if engine == "emulated":
            config = "launch/configs/emulated.toml"
            settings = {k: v for k, v in settings.items() if not k.startswith(("warm_start.", "training."))}
            settings |= EMULATED
        else:
            settings["weights.transport"] = transport
        words = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
        self.run = LiveRun(run_dir, config, *words, program=PROGRAM)
        self.actions = Actions(self.run, f"tcp://127.0.0.1:{port}", silent_s=SILENT_S)
        self.tally: Counter[str] = Counter()
        self.say(f"seed {seed}, {engine} engine, weights by {transport}, run directory {run_dir}")

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  step {len(self.run.steps()):4d}  {text}", flush=True)

    def wait_for(self, what: str, holds: Callable[[], Any]) -> None:
        """What follows from earlier actions happens meanwhile."""

        def look() -> Any:
            for told in self.actions.due():
                self.say(told)
            return holds()

        self.run.wait_for(what, look, STALL_LIMIT_S)

    def pass_steps(self, count: int) -> None:
        target = len(self.run.steps()) + count
        self.wait_for(f"{count} more step(s)", lambda: len(self.run.steps()) >= target)

    def begin(self) -> None:
        self.wait_for("the first step", lambda: self.run.steps())
        for name in FAR_HOSTS:
            self.say(self.actions.join(name))
        hosts = self.actions.hosts.values()
        self.wait_for("the hosts to have joined", lambda: all(host.has_joined for host in hosts))
        self.say("both far hosts have joined")

    def act(self, draw: Draw) -> None:
        self.pass_steps(draw.wait_steps)
        done = self.actions.do(draw)
        if done:
            self.tally[draw.kind] += 1
        self.say(f"{draw.kind}: {done or 'there was nothing to do it to'}")

    def kill_and_resume(self) -> None:
        self.tally["kill the coordinator, resume"] += 1
        self.say(f"kill -9 coordinator ({self.run.process.pid})")
        self.run.kill()
        self.run.process.wait()
        began = time.monotonic()
        self.actions.calm()  # whoever stands still cannot see that its coordinator is gone
        self.run.assert_nothing_left(GONE_LIMIT_S)
        self.say(f"nothing is left after {time.monotonic() - began:.1f} s; resuming")
        self.run = self.actions.run = LiveRun(self._run_dir, "--resume", program=PROGRAM)
        self.pass_steps(1)
        self.say("the resumed run trains")

    def recover(self) -> None:
        """After the last action all is as it should be: dedicated workers serve, and steps are made."""
        self.actions.calm()
        for told in self.actions.due(everything=True):
            self.say(told)
        hosts = self.actions.hosts.values()
        self.wait_for("the hosts to have joined", lambda: all(host.has_joined for host in hosts))
        self.pass_steps(1)
        whole = f"workers {SETTINGS['rollout.num_workers']}/{SETTINGS['rollout.num_workers']}"
        self.wait_for("all workers to serve again", lambda: whole in self.run.text().splitlines()[-1])
        self.say(f"recovered: {whole}")

    def end(self) -> list[str]:
        """Ctrl-C; what is wrong with how the run ends."""
        began = time.monotonic()
        self.run.kill(signal.SIGINT)
        self.run.assert_nothing_left(GONE_LIMIT_S)
        self.say(f"nothing is left after {time.monotonic() - began:.1f} s")
        code = self.run.wait(REPORT_LIMIT_S)
        wrong = [] if code == 130 else [f"exit code {code} after Ctrl-C, not 130"]
        wrong += self.actions.end_hosts(GONE_LIMIT_S)
        left = self.run.processes()
        wrong += [f"left running: {process.cmdline()[:6]}" for process in left]
        return wrong

    def close(self) -> None:
        self.actions.calm()
        for host in self.actions.hosts.values():
            if host.process.poll() is None:
                host.kill()
        with ended(self.run):
            """Whatever happened, nothing of the run stays."""


def torment(stage: Stage, seed: int, minutes: float, num_actions: int) -> list[str]:
    """Everything from the first step to the end of the run; what is wrong with its end."""
    stage.begin()
    until = time.monotonic() + 60 * minutes
    first_half = 60 * minutes * random.Random(f"{seed}/crash").uniform(0.3, 0.7)
    crash_at_s, crash_after = until - first_half, num_actions // 2
    has_crashed = False
    for number, draw in enumerate(draws(seed, stage.actions.kinds)):
        if time.monotonic() > until or number >= num_actions:
            break
        if not has_crashed and (time.monotonic() > crash_at_s or number >= crash_after):
            has_crashed = True
            stage.kill_and_resume()
        stage.act(draw)
    stage.recover()
    return stage.end()


# what must hold


def wrong_in_journal(run_dir: Path) -> Iterator[str]:
    """A fresh core gives the same commands, and its invariants hold after every event."""
    config = load(run_dir / "config.toml")
    for segment in journal.read(run_dir / "journal.msgpack"):
        core = Coordinator.restore(config, segment.opening.snapshot)
        for offset, entry in enumerate(segment.entries):
            event = decode_event(entry.event)
            number = segment.opening.first_entry + offset
            if encode_commands(core.handle(event, entry.now)) != bytes(entry.commands):
                yield f"entry {number}: a fresh core does otherwise on {event}"
                return
            try:
                core.check()
            except AssertionError as error:
                yield f"entry {number}, after {type(event).__name__}: {error}"
                return


def wrong_in_replay(run_dir: Path) -> Iterator[str]:
    words = [sys.executable, "-m", "pearl.cli", "replay", str(run_dir)]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    if result.returncode:
        yield result.stdout + result.stderr


def wrong_in_logs(run_dir: Path) -> Iterator[str]:
    """Tracebacks alone say nothing: the ends of the killed's logs are in there too."""
    for line in (run_dir / "coordinator.log").read_text(errors="replace").splitlines():
        if any(mark in line for mark in OF_BUGS):
            yield f"coordinator.log: {line}"


def wrong_in_weights(run: LiveRun) -> Iterator[str]:
    gap = run.summary()["max_logprob_gap"]
    if gap > MAX_LOGPROB_GAP:
        yield f"max_logprob_gap {gap}: tokens were made with other weights than said"


def wrong_in_gpus(run: LiveRun) -> Iterator[str]:
    """What was reclaimed has been returned, unless the run ended before."""
    open_reclaims: set[str] = set()
    for line in run.metrics("gpus"):
        gpus = set(str(line["gpus"]).split(","))
        if line["event"] == "reclaimed":
            open_reclaims |= gpus
        elif line["event"] == "returned":
            open_reclaims -= gpus
        elif open_reclaims & gpus:
            yield f"{gpus & open_reclaims} arrived before it was returned"


def collateral(run: LiveRun, hurt: set[str]) -> list[str]:
    """Lives that ended unwanted though no action met them: their surroundings were, or this machine was too busy."""
    found = []
    for line in run.metrics("worker"):
        name, reason = f"rollout.{line['slot']}.{line['incarnation']}", str(line["reason"])
        if line["event"] == "gone" and name not in hurt and not reason.startswith(PLANNED):
            found.append(f"{name}: {reason}")
    return found


PLANNED = (
    "reclaimed",
    "its expansion",
    "training needs",
    "the run was resumed",
    "its host",
    "its GPUs are gone",
)


def hurt_by_faults(run: LiveRun) -> set[str]:
    """Peers whose frames were touched, as the coordinator itself has told."""
    told = [line for line in run.text().splitlines() if line.startswith("fault: ")]
    return {line.rpartition(" ")[2] for line in told}


def report(stage: Stage, failures: dict[str, list[str]]) -> bool:
    print("\nactions")
    for kind, count in sorted(stage.tally.items()):
        print(f"  {count:4d}  {kind}")
    with contextlib.suppress(OSError):
        summary = stage.run.summary()
        print("counters")
        for name in COUNTERS:
            print(f"  {summary[name]!s:>12}  {name}")
    others = collateral(stage.run, stage.actions.hurt | hurt_by_faults(stage.run))
    print(f"lives that ended though no action met them: {len(others)}")
    for text in others:
        print(f"  {text}")
    print("promises")
    for name, found in failures.items():
        print(f"  {'FAIL' if found else 'PASS'}  {name}")
        for text in found:
            print(f"        {text}")
    return not any(failures.values())


def examine(stage: Stage, wrong_at_end: list[str]) -> dict[str, list[str]]:
    run, run_dir = stage.run, stage.run.run_dir
    course = {"it goes on after every action, ends in order, leaves nothing": wrong_at_end}
    if not (run_dir / "summary.json").exists():
        return course
    return {
        **course,
        "every counter and rule of the independent checker": check_counters(run_dir),
        "pearl replay: a fresh core does the same": list(wrong_in_replay(run_dir)),
        "the core's invariants after every event": list(wrong_in_journal(run_dir)),
        "no internal error": list(wrong_in_logs(run_dir)),
        "log-probs of rollout and trainer agree": list(wrong_in_weights(run)),
        "reclaimed GPUs are returned": list(wrong_in_gpus(run)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--minutes", type=float, required=True, help="of actions; start and end come on top")
    parser.add_argument("--actions", type=int, default=1 << 30, metavar="N", help="end after so many")
    parser.add_argument("--engine", choices=("torch", "emulated"), default="torch")
    parser.add_argument("--run-dir", type=Path, help="new; default: a temporary one")
    options = parser.parse_args()
    run_dir = options.run_dir or Path(tempfile.mkdtemp(prefix="pearl-chaos-")) / "run"
    stage = Stage(options.seed, options.engine, run_dir.resolve())
    try:
        wrong = torment(stage, options.seed, options.minutes, options.actions)
    except AssertionError as error:
        wrong = [str(error)]
        print(f"\nthe run's last words:\n{stage.run.text()[-3000:]}")
    finally:
        stage.close()
    is_good = report(stage, examine(stage, wrong))
    print(f"seed {options.seed}: {'PASS' if is_good else 'FAIL'}, in {run_dir}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
