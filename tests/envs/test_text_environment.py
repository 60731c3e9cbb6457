"""A text environment behind the environment worker's service: ids in and out, as any other environment."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from text_games import Guess

from pearl.envs.loader import load_environment
from pearl.envs.own_reward import Attempt, Reward
from pearl.envs.service import EnvironmentService
from pearl.envs.text import TextEpisode
from pearl.envs.text.environment import RenderedEnvironment
from pearl.testing import chat_models as made
from pearl.types.config import Config, EnvironmentConfig, RolloutConfig
from pearl.types.messages.environment import (
    EpisodeFailed,
    OpenEpisode,
    OpenEpisodeReply,
    StepEpisode,
    StepEpisodeReply,
)

CONFIG = Config(
    environment=EnvironmentConfig(max_observation_tokens=200),
    rollout=RolloutConfig(max_context_tokens=4096, max_new_tokens_per_turn=64),
)


class Bench:
    """A service over the game, spoken to in text."""

    def __init__(self, directory: Path, reward: Reward | None = None) -> None:
        made.make_directory(directory, "hermes")
        options: dict[str, int | float | str | bool] = {"template": "chatml-tools", "size": 10}
        environment = load_environment("text_games:Guess", options, str(directory))
        assert isinstance(environment, RenderedEnvironment)
        self.environment = environment
        self.tokenizer = environment._proven.chat.tokenizer
        self.service = EnvironmentService(CONFIG, environment, reward=reward)
        self.turn = 0

    @property
    def game(self) -> Guess:
        assert isinstance(self.environment._environment, Guess)
        return self.environment._environment

    async def open(self, task: int, actions: tuple[bytes, ...] = (), seen: tuple[bytes, ...] = ()) -> str:
        self.turn = len(actions)
        reply = await self.service.handle(OpenEpisode(1, "train", task, actions, seen))
        assert isinstance(reply, OpenEpisodeReply), reply
        return self.text(reply.ids)

    async def say(self, text: str) -> StepEpisodeReply:
        action = self.pack(text)
        reply = await self.service.handle(StepEpisode(1, self.turn, action, not text.endswith("<|im_end|>")))
        assert isinstance(reply, StepEpisodeReply), reply
        self.turn += 1
        return reply

    def pack(self, text: str) -> bytes:
        return np.array(self.tokenizer.encode(text), "<i4").tobytes()

    def text(self, packed: bytes) -> str:
        return self.tokenizer.decode(np.frombuffer(packed, "<i4").tolist())


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    bench.service.start()
    yield bench
    await bench.service.stop()


def guess(number: int) -> str:
    return f'<tool_call>\n{{"name": "guess", "arguments": {{"number": {number}}}}}\n</tool_call><|im_end|>'


async def test_a_reward_of_one_s_own_reads_the_conversation(tmp_path: Path) -> None:
    def num_assistant_messages(attempt: Attempt) -> int:
        assert isinstance(attempt.episode, TextEpisode)
        return sum(message["role"] == "assistant" for message in attempt.messages)

    bench = Bench(tmp_path, Reward("own", num_assistant_messages))
    bench.service.start()
    try:
        await bench.open(0)
        assert [(await bench.say(guess(number))).reward for number in (9, 8)] == [1.0, 2.0]
    finally:
        await bench.service.stop()


async def test_an_episode_in_text(bench: Bench) -> None:
    prompt = await bench.open(7)
    assert prompt.startswith("<|im_start|>system\nYou can call these functions")
    assert prompt.endswith("<|im_start|>user\nGuess a number up to 10.<|im_end|>\n<|im_start|>assistant\n")
    first = await bench.say(guess(3))
    assert bench.text(first.observation) == "\n<|im_start|>tool\nhigher<|im_end|>\n<|im_start|>assistant\n"
    assert (first.reward, first.done) == (0.1, False)
    last = await bench.say(guess(7))
    assert (last.observation, last.reward, last.done) == (b"", 1.0, True)


async def test_a_call_that_cannot_be_read_is_shown_to_the_model_and_counted(bench: Bench) -> None:
    await bench.open(7)
    reply = await bench.say("<tool_call>{guess 3}</tool_call><|im_end|>")
    assert "Error: the tool call is not valid JSON" in bench.text(reply.observation)
    assert not bench.game.seen
    assert bench.environment.counters.unread_calls == 1
    assert (await bench.say(guess(7))).reward == 1.0
    assert bench.environment.counters.answers == 2


async def test_an_answer_cut_at_its_limit_is_ended_by_the_template(bench: Bench) -> None:
    await bench.open(7)
    reply = await bench.say("I think that")
    assert bench.text(reply.observation).startswith("<|im_end|>\n<|im_start|>user\nUse the tool.")
    assert bench.game.seen[0]["content"] == "I think that"
    cut = await bench.say('<tool_call>{"name"')
    assert "not closed by </tool_call>; the answer was cut at its limit" in bench.text(cut.observation)


async def test_it_is_replayed_to_the_same_ids(bench: Bench) -> None:
    await bench.open(7)
    said = [guess(3), "Hm.<|im_end|>"]
    seen = tuple([(await bench.say(text)).observation for text in said])
    await bench.open(7, tuple(bench.pack(text) for text in said), seen)
    assert (await bench.say(guess(7))).done


async def test_messages_in_a_wrong_form_fail_their_episode_only(bench: Bench) -> None:
    await bench.open(7)
    episode = bench.service.episodes._rows[1].episode
    episode._episode.step = wrong_step  # type: ignore[attr-defined]
    failed = await bench.service.handle(StepEpisode(1, 0, bench.pack(guess(1)), False))
    assert isinstance(failed, EpisodeFailed)
    assert "messages[0].role: 'robot'" in failed.reason


async def wrong_step(message: object) -> object:
    return [{"role": "robot", "content": ""}], 0.0, False


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        load_environment("text_games:Guess", {}, str(tmp_path))
    with pytest.raises(ValueError, match=r'model\.path = "tiny-qwen3": is no directory'):
        load_environment("text_games:Guess", {}, "tiny-qwen3")
    with pytest.raises(
        ValueError, match=r'environment\.options\.template = "other": .*shipped: chatml-tools'
    ):
        load_environment(
            "text_games:Guess", {"template": "other"}, str(made.make_directory(tmp_path, "plain"))
        )
    with pytest.raises(ValueError, match=r"unexpected keyword argument 'depth'; text_games:Guess takes size"):
        load_environment("text_games:Guess", {"depth": 1}, str(tmp_path))
