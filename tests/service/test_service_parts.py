"""Mailbox, seeds, run files, console lines, pieces and groups: the parts that need no cluster."""

import asyncio
import io
import json
import math
from pathlib import Path

import msgspec
import pytest

from pearl.service.clients.training_client import pieces
from pearl.service.console import Console
from pearl.service.loop.inbox import Mailbox
from pearl.service.processes.process_specs import NotEnoughGpusError, ProcessSpecs, wants_prepared_process
from pearl.service.run_files import RunFiles
from pearl.service.trajectory_seeds import trajectory_seed
from pearl.types.commands import Report
from pearl.types.config import Config, ModelConfig, RolloutConfig, TrainingConfig
from pearl.types.ids import GpuId, TrajectoryId
from pearl.types.messages.control import AgentReport, Gpu
from pearl.types.messages.training import Demonstration
from pearl.types.reports import StepReport, WorkerReport
from pearl.types.splitmix import splitmix64


@pytest.mark.scenario("MQ-01")
async def test_a_full_mailbox_makes_its_producers_wait_and_loses_nothing() -> None:
    mailbox: Mailbox[int] = Mailbox(3)
    taken: list[int] = []

    async def produce() -> None:
        for number in range(20):
            await mailbox.put(number)
            assert len(mailbox) <= 3

    async with asyncio.TaskGroup() as group:
        group.create_task(produce())
        while len(taken) < 20:
            taken.extend(await mailbox.take(1.0, 2))
    assert taken == list(range(20))


async def test_an_idle_mailbox_waits_for_its_limit_only() -> None:
    mailbox: Mailbox[int] = Mailbox(3)
    assert await mailbox.take(0.0, 2) == []
    await mailbox.put(1)
    assert await mailbox.take(None, 2) == [1]


async def test_what_is_urgent_neither_waits_for_room_nor_is_done_with_the_rest() -> None:
    mailbox: Mailbox[int] = Mailbox(3)
    for number in range(3):
        await mailbox.put(number)
    mailbox.put_urgent(10)
    mailbox.put_urgent(11)
    assert await mailbox.take(None, 2) == [10, 11]
    assert await mailbox.take(None, 2) == [0, 1]
    assert await mailbox.take(None, 2) == [2]


def test_splitmix64_gives_the_published_values() -> None:
    # The generator's outputs for the state 0 are hash values of 0 and of the golden ratio constant.
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


def test_trajectory_seeds_differ_between_trajectories_and_runs() -> None:
    seeds = {trajectory_seed(run, TrajectoryId(one)) for run in range(20) for one in range(200)}
    assert len(seeds) == 4000
    assert all(0 <= seed < 1 << 64 for seed in seeds)


def step_report(step: int, reward: float | None, masked: int = 0, **metrics: float) -> StepReport:
    return StepReport(
        1.0,
        step=step,
        lineage=0,
        seconds=3.14,
        train_seconds=0.8,
        reward_mean=reward,
        outcome_done=4,
        masked=masked,
        turns_mean=1.0,
        tokens_generated=10,
        tokens_trained=10,
        throughput_tokens_per_s=12100.0,
        max_staleness=1,
        mean_staleness=0.5,
        mean_token_age=0.5,
        max_logprob_gap=0.0,
        logprob_gap_tokens=0,
        checkpoint_step=None,
        weights_changed=True,
        metrics=metrics,
    )


def worker_report(slot: int, activity: str, event: str, reason: str = "") -> WorkerReport:
    return WorkerReport(
        1.0,
        slot=slot,
        incarnation=1,
        role="colocated",
        zone="dedicated",
        activity=activity,
        event=event,
        version=1,
        lineage=0,
        gpus="local/1",
        reason=reason,
    )


@pytest.mark.scenario("LP-02")
def test_metrics_are_strict_json_whatever_the_numbers(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.report(Report(step_report(1, None, loss=math.nan, gap=math.inf, lr=0.5, seconds=7.0)))
    files.flush()
    files.close()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert list(line)[:3] == ["kind", "time_s", "step"]
    assert [line[key] for key in ("loss", "gap", "lr")] == [None, None, 0.5]
    assert (line["seconds"], line["trainer_seconds"]) == (3.14, 7.0), "a name that is taken gets a prefix"


def test_console_lines_are_aligned_and_say_what_matters() -> None:
    stream = io.StringIO()
    console = Console(stream, 2)
    for slot in (0, 1):
        console.report(worker_report(slot, "active", "serving"))
    console.report(step_report(7, 0.625))
    console.report(worker_report(1, "inactive", "gone", "killed by signal 9"))
    console.report(step_report(118, None, masked=4))
    assert stream.getvalue().splitlines() == [
        "step   7  reward  0.62   12.1k tok/s  staleness 1    3.1 s  train  0.8 s  workers 2/2",
        "worker 1: gone: killed by signal 9",
        "step 118  reward     -   12.1k tok/s  staleness 1    3.1 s  train  0.8 s  workers 1/2  masked 4",
    ]


def test_a_console_that_nobody_reads_any_more_is_silent() -> None:
    class Closed(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    console = Console(Closed(), 1)
    console.announce("one")
    console.announce("two")


def test_pieces_stay_below_the_limit_and_keep_the_order() -> None:
    items = [Demonstration(bytes([index]) * size, b"") for index, size in enumerate((3, 4, 9, 1, 1, 8))]
    cut = list(pieces(items, lambda one: len(one.ids), limit_bytes=8))
    assert [[len(one.ids) for one in piece] for piece in cut] == [[3, 4], [9], [1, 1], [8]]
    assert [one for piece in cut for one in piece] == items


def report(num_gpus: int, virtual: bool = False) -> AgentReport:
    return AgentReport("here", tuple(Gpu(f"here/{i + 2}", 1, virtual) for i in range(num_gpus)), 1)


def groups(device: str, tmp_path: Path) -> ProcessSpecs:
    config = Config(model=ModelConfig(device=device))  # type: ignore[arg-type]
    return ProcessSpecs(config, tmp_path, "tcp://127.0.0.1:1", "run")


async def test_every_rank_gets_its_own_gpu(tmp_path: Path) -> None:
    made = groups("auto", tmp_path)
    assert made.use(report(3)) == ""
    seen = [
        made.training(1),
        made.rollout(0, 1, "colocated", (GpuId("local/1"),)),
        made.rollout(1, 1, "colocated", (GpuId("local/2"),)),
    ]
    assert [life.spec.environment["CUDA_VISIBLE_DEVICES"] for life in seen] == ["2", "3", "4"]
    assert made.environment(0, 1).spec.environment["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("device", ["auto", "cuda"])
async def test_too_few_gpus_are_refused_with_their_counts(device: str, tmp_path: Path) -> None:
    counts = (
        r"3 GPUs are needed: 1 for training, 2 x 1 for rollout, 0 preemptible; this host has 1: lower rollout"
    )
    with pytest.raises(NotEnoughGpusError, match=counts):
        groups(device, tmp_path).use(report(1))


async def test_only_hosts_without_gpus_and_emulated_jobs_run_on_the_cpu_by_themselves(tmp_path: Path) -> None:
    made = groups("auto", tmp_path)
    assert made.use(report(3, virtual=True)) == ""
    assert made.training(1).spec.environment["CUDA_VISIBLE_DEVICES"] == ""
    emulated = Config(training=TrainingConfig(engine="emulated"), rollout=RolloutConfig(engine="emulated"))
    assert ProcessSpecs(emulated, tmp_path, "tcp://127.0.0.1:1", "run").use(report(1)) == ""
    assert groups("cpu", tmp_path).use(report(1)) == ""


async def test_a_group_has_its_arguments_its_counter_and_one_process_a_gpu(tmp_path: Path) -> None:
    made = groups("cpu", tmp_path)
    made.set_vocabulary(32)
    life = made.rollout(1, 4, "decode", (GpuId("local/1"), GpuId("local/2")))
    assert life.name == "rollout.1.4"
    assert life.spec.num_processes == 2
    place = ("--slot", "1", "--incarnation", "4", "--role", "decode")
    assert life.spec.arguments[-8:] == (*place, "--vocabulary-size", "32")
    assert life.spec.environment["PEARL_COUNTER_FILE"] == str(tmp_path / "logs" / "rollout.1.4" / "tokens")


async def test_groups_of_other_hosts_see_the_gpus_that_their_ids_name(tmp_path: Path) -> None:
    made = groups("auto", tmp_path)
    made.use(report(0))
    away = AgentReport("a", (Gpu("a/4", 1, False), Gpu("a/MIG-x", 1, False)), 1, "spot")
    made.learn(away)
    there = made.rollout(5, 1, "colocated", (GpuId("a/4"), GpuId("a/MIG-x"))).spec
    assert there.environment == {"CUDA_VISIBLE_DEVICES": "4,MIG-x"}  # and it counts in its own directory
    assert there.num_processes == 2
    here = made.rollout(6, 1, "colocated", (GpuId("local/1"),)).spec
    assert here.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert here.files == {}
    with pytest.raises(ValueError, match=r'model\.device = "cuda", but b offers virtual GPUs'):
        groups("cuda", tmp_path).learn(AgentReport("b", (Gpu("b/0", 1, True),), 1, "spot"))


async def test_gpus_of_overlap_workers_are_those_of_the_training_ranks(tmp_path: Path) -> None:
    made = groups("auto", tmp_path)
    made.use(report(3))
    trained = made.training(1).spec.environment["CUDA_VISIBLE_DEVICES"]
    lent = made.rollout(2, 1, "colocated", (GpuId("local/0"),)).spec.environment["CUDA_VISIBLE_DEVICES"]
    assert lent == trained == "2"


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [("auto", "cpu", True), ("auto", "auto", False), ("on", "auto", True), ("off", "cpu", False)],
)
async def test_torch_groups_may_fork_where_the_setting_says_so(
    tmp_path: Path, setting: str, device: str, expected: bool
) -> None:
    config = msgspec.convert(
        {"model": {"device": device}, "runtime": {"prepared_processes": setting}}, Config
    )
    made = ProcessSpecs(config, tmp_path, "tcp://127.0.0.1:1", "run")
    made.use(report(3))
    assert made.training(1).spec.may_fork is expected
    assert made.rollout(0, 1, "colocated", (GpuId("local/1"),)).spec.may_fork is expected
    assert not made.environment(0, 1).spec.may_fork
    assert wants_prepared_process(config) is expected
