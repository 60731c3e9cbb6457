"""A rollout function behind the environment worker's service: the agent owns its loop, the core sees turns."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from agent_bench import END, AgentBench, agent_bench

from pearl.envs.agents.completion import read_request
from pearl.envs.agents.errors import UnsupportedError
from pearl.envs.loader import load_environment
from pearl.envs.own_reward import Attempt, Reward
from pearl.testing.chat_models import make_directory
from pearl.types.messages.environment import EpisodeFailed, StepEpisodeReply

GUESS = '<tool_call>\n{"name": "guess", "arguments": {"number": %d}}\n</tool_call>' + END


@asynccontextmanager
async def running(directory: Path, function: str, **rollout: int) -> AsyncIterator[AgentBench]:
    with agent_bench(directory, f"rollouts:{function}", {}, None, **rollout) as bench:
        try:
            yield bench
        finally:
            await bench.service.stop()


async def test_a_rollout_function_from_its_prompt_to_its_reward(tmp_path: Path) -> None:
    async with running(tmp_path, "guess") as bench:
        assert "Guess good." in await bench.open(0)
        first = await bench.say("I wonder." + END)
        assert isinstance(first, StepEpisodeReply)
        assert (first.reward, first.done) == (0.0, False)
        await bench.say(GUESS % 3)
        last = await bench.say(GUESS % 0)
        assert isinstance(last, StepEpisodeReply)
        assert (last.observation, last.reward, last.done) == (b"", 1.0, True)
        tail = bench.texts[1].partition("Guess good.")[2]
        opened = f"{END}\n<|im_start|>assistant\n"
        assert tail == (
            f"{opened}I wonder.{END}\n<|im_start|>user\nUse the tool.{opened}"
            f"{GUESS % 3}\n<|im_start|>tool\nwrong{opened}{GUESS % 0}"
        )


async def test_a_reward_of_one_s_own_sees_the_task_and_the_conversation(tmp_path: Path) -> None:
    def by_length(attempt: Attempt) -> float:
        assert attempt.episode["name"] == "good"
        answers = sum(message["role"] == "assistant" for message in attempt.messages)
        return attempt.reward - 0.1 * answers if attempt.done else 0.0

    with agent_bench(tmp_path, "rollouts:guess", {}, Reward("own", by_length)) as bench:
        await bench.open(0)
        assert isinstance(first := await bench.say("I wonder." + END), StepEpisodeReply)
        assert isinstance(last := await bench.say(GUESS % 0), StepEpisodeReply)
        assert (first.reward, last.reward) == (0.0, 0.8)
        await bench.service.stop()


@pytest.mark.parametrize(
    ("task", "reason"),
    [(1, "the agent failed: KeyError: 'no such file'"), (2, "returned nan: a finite number is needed")],
)
async def test_what_goes_wrong_in_it_is_a_failure_and_no_reward(
    tmp_path: Path, task: int, reason: str
) -> None:
    async with running(tmp_path, "guess") as bench:
        await bench.open(task)
        failed = await bench.say(GUESS % 2)
        assert isinstance(failed, EpisodeFailed)
        assert reason in failed.reason
        assert "Guess good." in await bench.open(0, trajectory=2)


async def test_one_that_never_asks_is_a_failure(tmp_path: Path) -> None:
    async with running(tmp_path, "guess") as bench:
        assert "returned 1.0 without a call of the model" in await bench.open(3)


async def test_a_call_that_cannot_be_read_is_text_and_counted(tmp_path: Path) -> None:
    async with running(tmp_path, "guess") as bench:
        await bench.open(0)
        reply = await bench.say("<tool_call>{guess}</tool_call>" + END)
        assert isinstance(reply, StepEpisodeReply)
        assert "Use the tool." in bench.texts[1]
        assert bench.environment.counters.unread_calls == 1


async def test_a_full_context_ends_it_as_truncated_with_what_it_returns(tmp_path: Path) -> None:
    async with running(tmp_path, "patient", max_context_tokens=400) as bench:
        prompt = await bench.open(0)
        reply = await bench.say("ok" + END)
        assert isinstance(reply, StepEpisodeReply)
        assert not reply.done
        last = await bench.say("ok" + END)
        assert isinstance(last, StepEpisodeReply)
        assert (last.reward, last.done) == (0.5, False)
        num_answer = len(bench.tokenizer.encode("ok" + END))
        length = len(bench.tokenizer.encode(prompt)) + 2 * num_answer
        assert length + (len(reply.observation) + len(last.observation)) // 4 == 400


async def test_too_many_turns_end_it_as_truncated_with_nothing(tmp_path: Path) -> None:
    """The function passes the refusal on: there is no reward, and it is no failure."""
    async with running(tmp_path, "endless") as bench:
        await bench.open(0)
        last = await bench.play(["ok" + END] * 4)
        assert isinstance(last, StepEpisodeReply)
        assert (last.observation, last.reward, last.done) == (b"", 0.0, False)
        assert bench.environment.counters.truncated == 1


async def test_what_the_agent_cut_off_stays_in_the_context(tmp_path: Path) -> None:
    async with running(tmp_path, "endless") as bench:
        await bench.open(0)
        long = "quartz " * 9 + END
        reply = await bench.say(long)
        assert isinstance(reply, StepEpisodeReply)
        assert long + "\n<|im_start|>user\nMore." in bench.texts[1]
        assert bench.environment.counters.cut_answers == 1


async def test_an_edited_history_is_refused_and_never_trained(tmp_path: Path) -> None:
    async with running(tmp_path, "forgetful") as bench:
        await bench.open(0)
        failed = await bench.say("ok" + END)
        assert isinstance(failed, EpisodeFailed)
        assert "messages[0] is not what it was in the call before: branches of a trajectory" in failed.reason
        assert bench.environment.counters.edited_histories == 1


async def test_a_call_that_was_given_up_is_answered_all_the_same(tmp_path: Path) -> None:
    """Asking again would make another answer to the same messages: a branch."""
    async with running(tmp_path, "impatient") as bench:
        await bench.open(0)
        failed = await bench.say("ok" + END)
        assert isinstance(failed, EpisodeFailed)
        assert "1 messages go back to before the latest answer" in failed.reason


async def test_closing_ends_an_agent_that_waits(tmp_path: Path) -> None:
    async with running(tmp_path, "endless") as bench:
        await bench.open(0)
        agent = bench.service.episodes._rows[1].episode._agent  # type: ignore[attr-defined]
        await bench.close()
        await bench.open(0, trajectory=2)
        assert agent.cancelled()


def test_tasks_come_from_files_too(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    (tmp_path / "wrong.jsonl").write_text('{"a": 1}\n{"a"\n')
    options: dict[str, int | float | str | bool] = {"tasks": str(tmp_path / "train.jsonl")}
    options["template"] = "chatml-tools"
    spec = load_environment("rollouts:guess", options, str(make_directory(tmp_path, "hermes"))).describe()
    assert (spec.num_train_tasks, spec.num_evaluation_tasks, spec.can_restore) == (2, 1, False)
    options["tasks"] = str(tmp_path / "wrong.jsonl")
    with pytest.raises(ValueError, match=r'environment\.options\.tasks = ".*wrong\.jsonl": line 2'):
        load_environment("rollouts:guess", options, str(tmp_path))
    options["tasks"] = str(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"cannot be read: No such file"):
        load_environment("rollouts:guess", options, str(tmp_path))


def test_unknown_options_and_plain_functions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"environment\.options\.size: is unknown; a rollout function takes tasks"
    ):
        load_environment("rollouts:guess", {"size": 1}, str(tmp_path))
    with pytest.raises(
        ValueError, match=r"not_async is a plain function.*async def not_async\(task, client\)"
    ):
        load_environment("rollouts:not_async", {}, str(tmp_path))


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ({"n": 2}, "n: 2"),
        ({"logprobs": True}, "logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stop": [3]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"max_tokens": 0}, "max_tokens: 0"),
        ({"max_tokens": True}, "max_tokens: True"),
        ({"audio": {}}, "audio: is not supported"),
        ({"messages": []}, "at least one"),
        ({"tools": [{}]}, "tools[0]"),
    ],
)
def test_a_request_for_what_is_not_offered_is_refused_by_its_key(body: dict[str, object], wrong: str) -> None:
    with pytest.raises((UnsupportedError, ValueError)) as refused:
        read_request({"messages": [{"role": "user", "content": "x"}], **body})
    assert wrong in str(refused.value)


def test_an_answer_is_dumped_as_openai_does() -> None:
    from pearl.envs.agents.completion import AnswerMessage, FunctionCall, ToolCall

    call = ToolCall(id="c00000000", function=FunctionCall(name="f", arguments="{}"))
    dumped = AnswerMessage(tool_calls=[call]).model_dump(exclude_none=True)
    assert json.loads(json.dumps(dumped))["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
