"""Whole runs of the service with the real core, server, journal and token store, against a cluster in this process."""

import math
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from checker import check
from whole_run import WholeRun, once, run_whole

from pearl.runtime import journal
from pearl.runtime.wal import DamagedError
from pearl.service import recovery, replay
from pearl.service.console import Console
from pearl.service.run_files import RunFiles
from pearl.service.run_loop import RunFailedError
from pearl.testing.cluster import Cluster
from pearl.testing.fakes import FakeEnvironment, FakeRollout, FakeTraining, read_lines, small_config, unpack
from pearl.types import events
from pearl.types.commands import Report
from pearl.types.config import Config, RuntimeConfig
from pearl.types.messages import control, environment
from pearl.types.messages.rollout import Generate
from pearl.types.reports import NoteReport


async def test_a_run_leaves_its_results_and_a_journal_that_replays(tmp_path: Path) -> None:
    life = await run_whole(tmp_path)
    summary = msgspec.json.decode((tmp_path / "summary.json").read_bytes())
    assert summary["complete"]
    assert summary["steps"] == 3
    assert summary["error"] == ""
    assert life.cluster.num_demonstrations == 300
    kinds = [line["kind"] for line in read_lines(tmp_path / "metrics.jsonl")]
    assert kinds.count("step") == 3
    assert kinds.count("evaluation") == 2
    assert "step   2  reward" in life.stream.getvalue()
    assert "workers 2/2" in life.stream.getvalue()


@pytest.mark.scenario("TK-01")
async def test_samples_hold_exactly_what_was_generated(tmp_path: Path) -> None:
    life = await run_whole(tmp_path)
    made = {request.trajectory: request for request in life.cluster.requests}
    for version, samples in life.cluster.trained.items():
        assert [sample.trajectory for sample in samples] == list(
            range(version.step * 8, version.step * 8 + 8)
        )
        for sample in samples:
            last = made[sample.trajectory]  # the context of the last turn begins the sample
            assert sample.ids.startswith(last.ids)
            assert len(sample.mask) == len(sample.current) == sample.num_tokens == len(sample.ids) // 4
            assert sample.mask == bytes([0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1])
            assert {value for value, flag in zip(sample.mask, sample.current, strict=True) if flag} <= {1}


async def test_the_seed_of_a_trajectory_does_not_depend_on_the_attempt(tmp_path: Path) -> None:
    life = await run_whole(tmp_path)
    seeds: dict[int, set[int]] = {}
    for request in life.cluster.requests:
        seeds.setdefault(request.trajectory, set()).add(request.seed)
    assert all(len(each) == 1 for each in seeds.values())
    assert len({seed for each in seeds.values() for seed in each}) == len(seeds)


async def test_a_killed_worker_is_replaced_and_its_tokens_accounted_for(tmp_path: Path) -> None:
    def prepare(cluster: Cluster) -> None:
        cluster.on_frame = once(lambda: cluster.kill("rollout.0.1"), at=20)

    life = await run_whole(tmp_path, prepare=prepare)
    assert "rollout.0.2" in life.cluster.started
    summary = msgspec.json.decode((tmp_path / "summary.json").read_bytes())
    assert summary["workers_lost"] == 1
    assert summary["tokens_lost_unknown"] == 0


async def test_a_dead_environment_worker_is_replaced_and_its_episodes_replayed(tmp_path: Path) -> None:
    def prepare(cluster: Cluster) -> None:
        die = once(lambda: cluster.kill("environment.0.1"), at=1)
        cluster.on_step = lambda step: die(step) if step.turn == 1 else None

    life = await run_whole(tmp_path, prepare=prepare)
    assert "environment.0.2" in life.cluster.started
    assert life.cluster.replayed > 0


async def test_a_task_that_kills_its_environment_worker_is_named_and_its_neighbours_are_not_charged(
    tmp_path: Path,
) -> None:
    """Task 1's trajectories are masked, and no others; the run goes on, with a bounded number of new workers."""
    first = small_config().data.group_size  # of task 1; a group has one task
    killers = range(first, 2 * first)

    def prepare(cluster: Cluster) -> None:
        def die(step: environment.StepEpisode) -> None:
            if step.trajectory in killers:
                cluster.kill(max(name for name in cluster.groups if name.startswith("environment.")))

        cluster.on_step = die

    config = small_config()
    limits = msgspec.structs.replace(config.environment, max_failures=1)
    life = await run_whole(tmp_path, msgspec.structs.replace(config, environment=limits), prepare)
    lines = (tmp_path / "trajectories.jsonl").read_text().splitlines()
    records = [record for record in map(msgspec.json.decode, lines) if not record["discarded"]]
    masked = {record["trajectory"] for record in records if record["outcome"] == "infrastructure"}
    assert masked == set(killers)
    assert "under task 1 (train)" in life.stream.getvalue()
    assert sum(name.startswith("environment.") for name in life.cluster.started) <= 6


async def test_a_dead_trainer_restarts_from_its_checkpoint(tmp_path: Path) -> None:
    def prepare(cluster: Cluster) -> None:
        cluster.on_step = once(lambda: cluster.kill("training.0.1"), at=50)

    life = await run_whole(tmp_path, prepare=prepare)
    assert "training.0.2" in life.cluster.started
    assert max(version.lineage for version in life.cluster.trained) == 1


@pytest.mark.scenario("LP-02")
async def test_a_bad_logprob_ends_only_its_attempt(tmp_path: Path) -> None:
    bad = iter([math.nan, -math.inf])

    def logprob(request: Generate, token: int) -> float:
        return next(bad, -0.5) if request.trajectory in (3, 5) else -0.5

    def prepare(cluster: Cluster) -> None:
        cluster.logprob = logprob

    life = await run_whole(tmp_path, prepare=prepare)
    assert [name for name in life.cluster.started if name.startswith("rollout")] == [
        "rollout.0.1",
        "rollout.1.1",
    ]
    for samples in life.cluster.trained.values():
        for sample in samples:
            values = memoryview(sample.logprobs).cast("f")
            assert all(math.isfinite(value) for value in values)


async def test_a_hole_in_the_frames_of_a_worker_replaces_it(tmp_path: Path) -> None:
    def prepare(cluster: Cluster) -> None:
        def skip(worker: FakeRollout) -> None:
            if worker.name == "rollout.1.1" and worker.sequence == 6:
                worker.sequence += 1

        cluster.on_frame = skip

    life = await run_whole(tmp_path, prepare=prepare)
    assert "rollout.1.2" in life.cluster.started


async def test_ids_outside_the_vocabulary_mask_the_trajectory_only(tmp_path: Path) -> None:
    def prepare(cluster: Cluster) -> None:
        good = cluster.prompt
        cluster.prompt = lambda task: b"\xff\xff\xff\x7f" if task == 1 else good(task)

    life = await run_whole(tmp_path, prepare=prepare)
    masked = [
        line for line in read_lines(tmp_path / "trajectories.jsonl") if line["outcome"] == "infrastructure"
    ]
    assert {line["prompt"] for line in masked if line["evaluation"] is None} <= {1}
    assert len(masked) >= 4
    for samples in life.cluster.trained.values():
        assert all(max(unpack(sample.ids), default=0) < 16 for sample in samples)


async def test_a_stop_is_orderly_and_can_be_resumed(tmp_path: Path) -> None:
    config = small_config()
    cluster = Cluster(config)
    life = WholeRun(config, tmp_path, cluster)
    cluster.on_step = once(lambda: life.run_loop.request_stop(15), at=40)
    finish = await life.run()
    assert finish.exit_code == 143
    assert not msgspec.json.decode((tmp_path / "summary.json").read_bytes())["complete"]
    second = WholeRun(config, tmp_path, Cluster(config), resume=True)
    assert (await second.run()).exit_code == 0
    assert check(tmp_path) == []
    assert replay.check(tmp_path) is None
    assert second.cluster.num_demonstrations == 0  # the trainer came from its checkpoint


@pytest.mark.scenario("CK-01")
async def test_a_run_whose_files_are_lost_is_not_begun_again_over_its_results(tmp_path: Path) -> None:
    config = small_config()
    cluster = Cluster(config)
    life = WholeRun(config, tmp_path, cluster)
    cluster.on_step = once(lambda: life.run_loop.request_stop(15), at=40)
    await life.run()

    (tmp_path / "tokens").rename(tmp_path / "elsewhere")
    with pytest.raises(ExceptionGroup) as caught:
        await WholeRun(config, tmp_path, Cluster(config), resume=True).run()
    assert caught.group_contains(
        DamagedError, match=r"tokens: has \d+ tokens of trajectory \d+, the journal says"
    )

    shutil.rmtree(tmp_path / "journal.msgpack")
    with pytest.raises(ValueError, match=r"holds no journal, but .* has results of the run; restore it"):
        recovery.refuse_without_journal(RunFiles(tmp_path))


SMALL_SEGMENT = 20_000  # bytes: several segments a run


class DeathError(Exception):
    """The coordinator's own end, at a chosen point."""


@pytest.mark.parametrize("is_journalled", [True, False])
@pytest.mark.parametrize(
    "at", [3, 40, 90, 150]
)  # journal entries; how many make a batch is a matter of timing
@pytest.mark.scenario("CK-01")
async def test_a_coordinator_that_dies_anywhere_is_resumed_without_loss(
    tmp_path: Path, at: int, is_journalled: bool
) -> None:
    """It dies with tokens stored but not journalled, or with an event journalled whose commands did not run."""

    config = small_config()
    life = WholeRun(config, tmp_path, Cluster(config), segment_bytes=SMALL_SEGMENT)
    append = life.beginning.journal.append
    written = 0

    def dying_append(entries: Any) -> None:
        nonlocal written
        written += len(entries)
        if is_journalled or written < at:
            append(entries)
        if written >= at:
            raise DeathError

    life.beginning.journal.append = dying_append  # type: ignore[method-assign]
    with pytest.raises(ExceptionGroup) as raised:
        await life.run()
    assert raised.group_contains(DeathError)
    second = WholeRun(config, tmp_path, Cluster(config), resume=True, segment_bytes=SMALL_SEGMENT)
    assert (await second.run()).exit_code == 0
    assert len(list((tmp_path / "journal.msgpack").glob("*.msgpack"))) > 2
    assert check(tmp_path) == []
    assert replay.check(tmp_path) is None
    with pytest.raises(recovery.FinishedError):
        WholeRun(config, tmp_path, Cluster(config), resume=True)


def test_replay_names_the_first_difference(tmp_path: Path) -> None:
    config = small_config()
    files = RunFiles(tmp_path)
    files.write_config(config)
    beginning = recovery.fresh(config, files)
    event = events.Started(0, 0, True)
    commands = beginning.core.handle(event, 1.0)
    beginning.journal.append([(1.0, replay.encode_event(event), replay.encode_commands(commands[:-1]))])
    beginning.journal.close()
    files.close()
    difference = replay.check(tmp_path)
    assert difference is not None
    assert difference.startswith("segment 1, entry 0 at 1.000 s: Started(")
    assert "in the journal: none" in difference
    with pytest.raises(ValueError, match="cannot be resumed"):
        recovery.recover(config, RunFiles(tmp_path))


def live_config() -> Config:
    runtime = RuntimeConfig(heartbeat_period_s=0.05, heartbeat_timeout_s=1.0, progress_timeout_s=1.0)
    return msgspec.structs.replace(small_config(), runtime=runtime)


async def test_a_silent_worker_is_given_up_and_replaced(tmp_path: Path) -> None:
    def prepare(cluster: Cluster) -> None:
        def cut(worker: FakeRollout) -> None:
            if worker.name == "rollout.1.1" and worker.sequence == 6:
                worker.peer.faults.partition("coordinator")

        cluster.on_frame = cut

    life = await run_whole(tmp_path, live_config(), prepare)
    assert "rollout.1.2" in life.cluster.started
    assert "worker 1: gone: silent for" in life.stream.getvalue()


async def test_the_agent_of_this_host_may_be_silent_as_long_as_its_process_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is stopped for a while: everything that it had started goes on."""
    config = live_config()
    config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, num_steps=100_000))
    cluster = Cluster(config)
    life = WholeRun(config, tmp_path, cluster)
    said: list[str] = []

    def announce(self: Console, line: str) -> None:
        said.append(line)
        if "is silent for" in line:
            cluster.agent.faults.heal("coordinator")
        elif "is heard again" in line:
            life.run_loop.request_stop(15)

    monkeypatch.setattr(Console, "announce", announce)
    cluster.on_step = once(lambda: cluster.agent.faults.partition("coordinator"))
    assert (await life.run()).exit_code == 143
    assert [line for line in said if "node agent" in line] == [
        next(line for line in said if "the node agent of this host is silent for" in line),
        "the node agent of this host is heard again",
    ]
    assert all(name.endswith(".1") for name in cluster.started)


@pytest.mark.scenario("MB-04")
async def test_nobody_is_dead_because_the_coordinator_slept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare(cluster: Cluster) -> None:
        cluster.on_step = once(lambda: time.sleep(2.0), at=20)

    life = await run_whole(tmp_path, live_config(), prepare)
    assert all(name.endswith(".1") for name in life.cluster.started)
    assert "the coordinator itself stood still for" in caplog.text


async def test_small_queues_slow_a_run_down_and_lose_nothing(tmp_path: Path) -> None:
    config = msgspec.structs.replace(small_config(), runtime=RuntimeConfig(queue_messages=8))
    life = await run_whole(tmp_path, config)
    assert all(name.endswith(".1") for name in life.cluster.started)


async def test_status_is_answered_while_the_run_goes_on(tmp_path: Path) -> None:
    class Asking(FakeEnvironment):
        async def handle(self, message: Any) -> Any:
            if isinstance(message, environment.StepEpisode) and not answers:
                answers.append(None)
                answers[0] = await self.cluster.admin.call(control.StatusRequest(), deadline_s=5)
            return await super().handle(message)

    answers: list[Any] = []

    def prepare(cluster: Cluster) -> None:
        cluster.kinds["environment"] = Asking

    await run_whole(tmp_path, prepare=prepare)
    status = msgspec.json.decode(answers[0].json)
    assert [worker["slot"] for worker in status["workers"]] == [0, 1]
    assert status["weight_version"] == 0


async def test_what_fails_before_the_core_runs_is_said_with_its_log(tmp_path: Path) -> None:
    class Broken(FakeEnvironment):
        async def run(self) -> None:
            self.log_tail = "[rank0.log]\nImportError: no module named games"

    config = small_config()
    cluster = Cluster(config)
    cluster.kinds["environment"] = Broken
    with pytest.raises(ExceptionGroup) as raised:
        await WholeRun(config, tmp_path, cluster).run()
    assert raised.group_contains(
        RunFailedError, match=r"did not start.*ImportError: no module named games.*log"
    )


async def test_a_trainer_that_cannot_start_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    class Broken(FakeTraining):
        async def handle(self, message: Any) -> Any:
            raise ValueError("the model has no attention")

    config = small_config()
    cluster = Cluster(config)
    cluster.kinds["training"] = Broken
    finish = await WholeRun(config, tmp_path, cluster).run()
    assert finish.exit_code == 1
    assert "the model has no attention" in finish.error


def test_a_journal_of_another_version_is_not_resumed_and_its_results_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config()
    files = RunFiles(tmp_path)
    monkeypatch.setattr(journal, "FORMAT", 1)
    recovery.fresh(config, files).journal.close()
    monkeypatch.undo()
    files.report(Report(NoteReport(0.0, text="of the version before")))
    files.flush()
    with pytest.raises(ValueError, match="has format 1, and this version of PEARL reads format 2 only"):
        recovery.recover(config, files)
    files.close()
    assert [line["text"] for line in read_lines(tmp_path / "metrics.jsonl")] == ["of the version before"]
