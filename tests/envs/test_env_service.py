"""The environment worker's service: what one episode does, however odd, stays with that episode."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import odd_environments as odd
import pytest

from pearl.envs import sandbox_thread
from pearl.envs.response_validator import BadAnswerError
from pearl.envs.sandbox_thread import CodeError
from pearl.envs.service import EnvironmentService
from pearl.types.config import Config, EnvironmentConfig, RolloutConfig
from pearl.types.messages.environment import (
    CloseEpisode,
    Demonstrate,
    DemonstrateReply,
    Describe,
    DescribeReply,
    EpisodeFailed,
    OpenEpisode,
    OpenEpisodeReply,
    StepEpisode,
    StepEpisodeReply,
)

LIMIT_S = 0.05
MAX_OBSERVATION = 64
CONFIG = Config(
    environment=EnvironmentConfig(
        reset_timeout_s=5.0, step_timeout_s=LIMIT_S, max_observation_tokens=MAX_OBSERVATION
    ),
    rollout=RolloutConfig(max_context_tokens=256),
)


class Bench:
    """A service and short words for talking to it."""

    def __init__(self, environment: odd.OddEnvironment, config: Config = CONFIG, max_open: int = 100) -> None:
        self.environment = environment
        self.service = EnvironmentService(config, environment, max_open)

    async def open(self, trajectory: int, task: int) -> OpenEpisodeReply | EpisodeFailed:
        reply = await self.service.handle(OpenEpisode(trajectory, "train", task))
        assert isinstance(reply, OpenEpisodeReply | EpisodeFailed)
        return reply

    async def step(self, trajectory: int, turn: int, *ids: int) -> StepEpisodeReply | EpisodeFailed:
        reply = await self.service.handle(StepEpisode(trajectory, turn, pack(*ids), False))
        assert isinstance(reply, StepEpisodeReply | EpisodeFailed)
        return reply

    async def failure(self, task: int) -> EpisodeFailed:
        """Of a first step, with a good neighbour that must not notice."""
        assert isinstance(await self.open(1, odd.GOOD), OpenEpisodeReply)
        assert isinstance(await self.open(2, task), OpenEpisodeReply)
        failed = await self.step(2, 0, 7, odd.END)
        assert isinstance(failed, EpisodeFailed)
        assert isinstance(await self.step(1, 0, 8, odd.END), StepEpisodeReply)
        assert await self.step(2, 0, 7, odd.END) == EpisodeFailed(
            "gone", "trajectory 2 has no open episode here"
        )
        await self.settle()
        assert self.environment.num_closed == 1
        return failed

    async def settle(self) -> None:
        """Returns when the thread has done what was posted to it."""
        await self.service.handle(Demonstrate(0, 0, 0))


def pack(*ids: int) -> bytes:
    return np.array(ids, "<i4").tobytes()


def unpack(packed: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(packed, "<i4").tolist()
    return ids


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench(odd.OddEnvironment())
    made.service.start()
    yield made
    made.environment.released = True
    await made.service.stop()


async def test_an_episode_from_open_to_close(bench: Bench) -> None:
    opened = await bench.open(1, odd.GOOD)
    assert isinstance(opened, OpenEpisodeReply)
    assert unpack(opened.ids) == [1, 2, 3]
    first = await bench.step(1, 0, 8, odd.END)
    assert isinstance(first, StepEpisodeReply)
    assert (unpack(first.observation), first.reward, first.done) == ([4, 5], 0.5, False)
    last = await bench.step(1, 1, 7, odd.END)
    assert isinstance(last, StepEpisodeReply)
    assert last.done
    await bench.service.handle(CloseEpisode(1))
    await bench.service.handle(CloseEpisode(1))
    await bench.settle()
    assert bench.environment.num_closed == 1
    assert bench.service.episodes.num_open == 0


async def test_a_repeat_of_the_last_turn_gets_its_answer_again(bench: Bench) -> None:
    await bench.open(1, odd.GOOD)
    first = await bench.step(1, 0, 8, odd.END)
    assert await bench.step(1, 0, 8, odd.END) == first
    assert bench.environment.num_steps == 1


async def test_a_repeat_while_it_is_played_is_not_played_twice(bench: Bench) -> None:
    await bench.open(1, odd.GOOD)
    async with asyncio.TaskGroup() as group:
        both = [group.create_task(bench.step(1, 0, 8, odd.END)) for _ in range(2)]
    assert both[0].result() == both[1].result()
    assert bench.environment.num_steps == 1


@pytest.mark.parametrize("turn", [2, 0])
async def test_a_turn_out_of_order_is_an_error(bench: Bench, turn: int) -> None:
    await bench.open(1, odd.GOOD)
    await bench.step(1, 0, 8, odd.END)
    failed = await bench.step(1, turn, 9, odd.END)
    assert isinstance(failed, EpisodeFailed)
    assert (failed.kind, failed.reason) == ("error", f"turn {turn} of trajectory 1: turn 1 is due")


async def test_nothing_is_played_after_the_end(bench: Bench) -> None:
    await bench.open(1, odd.GOOD)
    await bench.step(1, 0, 7, odd.END)
    failed = await bench.step(1, 1, 8, odd.END)
    assert isinstance(failed, EpisodeFailed)
    assert failed.reason == "turn 1 of trajectory 1: it is done"


async def test_opening_again_takes_the_place_of_the_first(bench: Bench) -> None:
    await bench.open(1, odd.GOOD)
    await bench.step(1, 0, 8, odd.END)
    await bench.open(1, odd.GOOD)
    assert isinstance(await bench.step(1, 0, 8, odd.END), StepEpisodeReply)
    await bench.settle()
    assert (bench.environment.num_closed, bench.service.episodes.num_open) == (1, 1)


async def test_restore_replays_the_actions(bench: Bench) -> None:
    request = OpenEpisode(1, "train", odd.GOOD, (pack(8, odd.END), pack(9)), (pack(4, 5), pack(4, 5)))
    assert isinstance(await bench.service.handle(request), OpenEpisodeReply)
    assert isinstance(await bench.step(1, 2, 8, odd.END), StepEpisodeReply)


@pytest.mark.parametrize(
    ("task", "actions", "observations", "reason"),
    [
        (odd.OTHER_REPLAY, (pack(8), pack(8)), (pack(1), pack(1)), "something else at turn 1"),
        (odd.GOOD, (pack(7, odd.END), pack(8)), (pack(4, 5), pack(4, 5)), "ended at turn 1"),
    ],
)
async def test_a_replay_that_goes_another_way_is_a_mismatch(
    bench: Bench, task: int, actions: tuple[bytes, ...], observations: tuple[bytes, ...], reason: str
) -> None:
    failed = await bench.service.handle(OpenEpisode(1, "train", task, actions, observations))
    assert isinstance(failed, EpisodeFailed)
    assert failed.kind == "mismatch"
    assert reason in failed.reason
    await bench.settle()
    assert (bench.environment.num_closed, bench.service.episodes.num_open) == (1, 0)


# trouble


@pytest.mark.scenario("EN-05")
async def test_infrastructure_failure_is_a_failure_never_a_reward(bench: Bench) -> None:
    failed = await bench.failure(odd.RAISES)
    assert failed.kind == "error"
    assert "InfrastructureError: the sandbox is gone" in failed.reason
    assert not hasattr(failed, "reward")


@pytest.mark.scenario("EN-04")
async def test_a_sandbox_that_is_gone_ends_its_episode_at_the_next_action(bench: Bench) -> None:
    await bench.open(1, odd.RAISES)
    first = await bench.step(1, 0, 8, odd.END)
    second = await bench.step(1, 1, 8, odd.END)
    assert isinstance(first, EpisodeFailed)
    assert isinstance(second, EpisodeFailed)
    assert (first.kind, second.kind) == ("error", "gone")
    assert bench.environment.num_steps == 1


@pytest.mark.scenario("EN-04")
async def test_an_episode_whose_start_fails_is_closed(bench: Bench) -> None:
    failed = await bench.open(1, odd.RESET_FAILS)
    assert isinstance(failed, EpisodeFailed)
    assert (failed.kind, "no sandbox" in failed.reason) == ("error", True)
    await bench.settle()
    assert (bench.environment.num_closed, bench.service.episodes.num_open) == (1, 0)


@pytest.mark.scenario("ST-05")
async def test_an_environment_that_never_answers_is_a_timeout(bench: Bench) -> None:
    failed = await bench.failure(odd.HANGS)
    assert (failed.kind, failed.reason) == (
        "timeout",
        f"step: no answer within {LIMIT_S:g} s (environment.step_timeout_s)",
    )


@pytest.mark.scenario("ST-05")
async def test_one_that_cannot_be_cancelled_is_a_timeout_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_thread, "BLOCKED_GRACE_S", 0.05)
    bench = Bench(odd.OddEnvironment())
    bench.service.start()
    try:
        await bench.open(1, odd.STUBBORN)
        failed = await bench.step(1, 0, 8, odd.END)
        assert isinstance(failed, EpisodeFailed)
        assert failed.kind == "timeout"
        assert "cannot be cancelled" in failed.reason
        await bench.open(2, odd.GOOD)
        assert isinstance(await bench.step(2, 0, 8, odd.END), StepEpisodeReply)
    finally:
        bench.environment.released = True
        await bench.service.stop()


async def test_blocking_code_shows_as_missing_progress_while_heartbeats_go_on() -> None:
    config = msgspec.structs.replace(CONFIG, environment=EnvironmentConfig(step_timeout_s=5.0))
    bench = Bench(odd.OddEnvironment(), config)
    bench.service.start()
    try:
        await bench.open(1, odd.BLOCKS)
        async with asyncio.TaskGroup() as group:
            stepping = group.create_task(bench.step(1, 0, 8, odd.END))
            await asyncio.to_thread(bench.environment.entered.wait, 5.0)
            beats = [bench.service.heartbeat() for _ in range(3)]
            assert not stepping.done()
            bench.environment.gate.set()
        assert beats[1].progress == beats[2].progress
        assert beats[2].pending > 0
        await bench.settle()
        assert bench.service.heartbeat().progress > beats[2].progress
    finally:
        await bench.service.stop()


async def test_waiting_code_counts_as_progress(bench: Bench) -> None:
    """A slow test suite is not a stuck worker: the limit of its step ends it."""
    await bench.open(1, odd.HANGS)
    async with asyncio.TaskGroup() as group:
        stepping = group.create_task(bench.step(1, 0, 8, odd.END))
        await asyncio.to_thread(bench.environment.entered.wait, 5.0)
        first = bench.service.heartbeat()
        await bench.settle()
        second = bench.service.heartbeat()
        assert not stepping.done()
    assert second.progress > first.progress


@pytest.mark.parametrize("cut_id", [None, 200])
@pytest.mark.scenario("EN-03")
async def test_a_flood_keeps_its_head_and_tail(cut_id: int | None) -> None:
    bench = Bench(odd.OddEnvironment(cut_id=cut_id))
    bench.service.start()
    try:
        await bench.open(1, odd.FLOODS)
        reply = await bench.step(1, 0, 8, odd.END)
        assert isinstance(reply, StepEpisodeReply)
        seen = unpack(reply.observation)
        marker = [] if cut_id is None else [cut_id]
        num_head = (MAX_OBSERVATION - len(marker)) // 2
        num_tail = MAX_OBSERVATION - len(marker) - num_head
        assert seen == [*range(num_head), *marker, *range(100 - num_tail, 100)]
    finally:
        await bench.service.stop()


@pytest.mark.scenario("EN-01")
async def test_bytes_that_are_not_utf8_hurt_only_the_episode_that_decodes_them(bench: Bench) -> None:
    failed = await bench.failure(odd.BROKEN_TEXT)
    assert (failed.kind, "UnicodeDecodeError" in failed.reason) == ("error", True)
    await bench.open(3, odd.RAW_BYTES)
    reply = await bench.step(3, 0, 8, odd.END)
    assert isinstance(reply, StepEpisodeReply)
    assert (
        bytes(unpack(reply.observation)) == odd.TOOL_OUTPUT
    )  # as ids, nothing is decoded and nothing is lost


@pytest.mark.scenario("TK-02")
async def test_a_template_that_rewrites_is_refused(bench: Bench) -> None:
    failed = await bench.failure(odd.REWRITES)
    assert failed.kind == "error"
    assert "rewrites its history: position 1 was id 2 and is now 3" in failed.reason


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (odd.FOREIGN_ID, "step returned 257 at position 1: ids are integers from 0 to 256"),
        (odd.NO_INTEGERS, "step returned str at position 1: ids are integers from 0 to 256"),
        (odd.NOT_FINITE, "step returned the reward nan: a finite real number is needed"),
        (odd.EXITS, "SystemExit: 3"),
        (odd.CANCELS, "CancelledError"),
    ],
)
async def test_what_no_environment_may_do_ends_its_episode(bench: Bench, task: int, reason: str) -> None:
    failed = await bench.failure(task)
    assert failed.kind == "error"
    assert reason in failed.reason


async def test_a_prompt_beyond_the_context_is_refused_by_key(bench: Bench) -> None:
    failed = await bench.open(1, odd.HUGE_PROMPT)
    assert failed == EpisodeFailed("error", "the prompt has 5000 ids, rollout.max_context_tokens = 256")


async def test_open_episodes_are_bounded() -> None:
    bench = Bench(odd.OddEnvironment(), max_open=2)
    bench.service.start()
    try:
        await bench.open(1, odd.GOOD)
        await bench.open(2, odd.GOOD)
        failed = await bench.open(3, odd.GOOD)
        assert isinstance(failed, EpisodeFailed)
        assert "its limit is 2: raise environment.num_workers or lower rollout.max_in_flight" in failed.reason
        await bench.service.handle(CloseEpisode(1))
        assert isinstance(await bench.open(3, odd.GOOD), OpenEpisodeReply)
    finally:
        await bench.service.stop()
    assert bench.environment.num_closed == 3


async def test_demonstrations_and_description(bench: Bench) -> None:
    described = await bench.service.handle(Describe())
    assert described == DescribeReply(odd.VOCABULARY, (odd.END,), 0, 0, 10, True)
    reply = await bench.service.handle(Demonstrate(0, 4, 2))
    assert isinstance(reply, DemonstrateReply)
    assert [unpack(one.ids) for one in reply.demonstrations] == [[1, 2, 4], [1, 2, 5]]
    assert np.frombuffer(reply.demonstrations[0].weights, "<f4").tolist() == [0.0, 0.5, 1.0]
    with pytest.raises(CodeError, match="no expert"):
        await bench.service.handle(Demonstrate(0, -1, 1))
    with pytest.raises(CodeError, match=r"ValueError: half a pair: \\ud83d"):
        await bench.service.handle(Demonstrate(0, -2, 1))
    with pytest.raises(BadAnswerError, match="demonstrations returned 300"):
        await bench.service.handle(Demonstrate(0, 300, 1))


async def closed_while_asked(task: int, *, is_open: bool) -> EpisodeFailed:
    """An episode that never answers is closed; what it was asked for a minute is answered at once."""
    limits = EnvironmentConfig(step_timeout_s=60.0, reset_timeout_s=60.0)
    bench = Bench(odd.OddEnvironment(), msgspec.structs.replace(CONFIG, environment=limits))
    bench.service.start()
    try:
        if is_open:
            await bench.open(1, task)
        async with asyncio.timeout(10.0), asyncio.TaskGroup() as group:
            asked = group.create_task(bench.step(1, 0, 8, odd.END) if is_open else bench.open(1, task))
            await asyncio.to_thread(bench.environment.entered.wait, 5.0)
            await bench.service.handle(CloseEpisode(1))
        await bench.settle()
        assert bench.environment.num_closed == 1
        assert bench.service.episodes.num_open == 0
        if task != odd.STUBBORN:
            assert bench.service.heartbeat().pending <= 1  # the look at the loop itself
        failed = asked.result()
        assert isinstance(failed, EpisodeFailed)
        return failed
    finally:
        bench.environment.released = True
        await bench.service.stop()


async def test_closing_an_episode_cancels_its_step() -> None:
    failed = await closed_while_asked(odd.HANGS, is_open=True)
    assert failed == EpisodeFailed("gone", "step: its episode was closed meanwhile")


async def test_closing_an_episode_cancels_its_reset() -> None:
    failed = await closed_while_asked(odd.RESET_HANGS, is_open=False)
    assert failed == EpisodeFailed("gone", "reset: its episode was closed meanwhile")


async def test_closing_an_episode_frees_who_asked_one_that_cannot_be_cancelled() -> None:
    failed = await closed_while_asked(odd.STUBBORN, is_open=True)
    assert failed.kind == "gone"


async def test_no_call_outlasts_a_trajectorys_deadline() -> None:
    limits = EnvironmentConfig(step_timeout_s=60.0, reset_timeout_s=60.0)
    rollout = RolloutConfig(trajectory_deadline_s=0.05, turn_deadline_s=0.05)
    bench = Bench(odd.OddEnvironment(), msgspec.structs.replace(CONFIG, environment=limits, rollout=rollout))
    bench.service.start()
    try:
        reset = await bench.open(2, odd.RESET_HANGS)
        assert isinstance(reset, EpisodeFailed)
        assert reset.kind == "timeout"
        assert reset.reason.endswith("(rollout.trajectory_deadline_s)")
        await bench.open(1, odd.HANGS)
        step = await bench.step(1, 0, 8, odd.END)
        assert isinstance(step, EpisodeFailed)
        assert step.kind == "timeout"
        assert step.reason.endswith("(rollout.trajectory_deadline_s)")
    finally:
        await bench.service.stop()
