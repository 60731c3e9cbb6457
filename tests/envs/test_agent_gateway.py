"""The gateway as the ``openai`` package sees it: its own retries, streams and time-outs, with a scripted model."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from pearl.envs.agents.exchange import AgentCounters, Exchange, Prompt, Truncation
from pearl.envs.agents.gateway import Gateway
from pearl.envs.agents.keys import Keys
from pearl.envs.protocol import EpisodeLimits
from pearl.envs.text.options import ProvenChat
from pearl.envs.text.proof import TOOLS
from pearl.testing import chat_models as made

END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "probe", "arguments": {"word": "é"}}\n</tool_call>' + END
ANY_TOOLS: Any = list(TOOLS)
HELLO: list[Any] = [{"role": "user", "content": "Hello."}]


class Side:
    """The environment's side of one trajectory: the test says when the model has answered."""

    def __init__(
        self, gateway: Gateway, proven: ProvenChat, counters: AgentCounters, limits: EpisodeLimits
    ) -> None:
        self.gateway = gateway
        self.counters = counters
        self.tokenizer = proven.chat.tokenizer
        self.exchange = Exchange(proven, limits, counters)
        self.key = gateway.admit(self.exchange)
        self.text = ""

    def client(self, **options: Any) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.gateway.url, api_key=options.pop("api_key", self.key), **options)

    async def asked(self) -> str:
        """The text that the next request adds."""
        offered = await self.exchange.next()
        assert isinstance(offered, Prompt), offered
        added = self.tokenizer.decode(offered.ids)
        self.text += added
        return added

    def say(self, text: str) -> None:
        self.text += text
        self.exchange.answer(self.tokenizer.encode(text), not text.endswith(END))

    async def answer(self, *texts: str) -> None:
        for text in texts:
            await self.asked()
            self.say(text)


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory) -> ProvenChat:
    return made.make_proven(tmp_path_factory.mktemp("model"), "hermes")


Make = Callable[..., Side]


@pytest.fixture
async def make(proven: ProvenChat) -> AsyncIterator[Make]:
    counters = AgentCounters()
    gateway = Gateway(counters, keep_alive_s=0.02)
    sides: list[Side] = []

    def make_side(limits: EpisodeLimits = made.LIMITS) -> Side:
        sides.append(Side(gateway, proven, counters, limits))
        return sides[-1]

    async with asyncio.TaskGroup() as group:
        await gateway.start(group)
        yield make_side
        for side in sides:
            side.exchange.close()
        await gateway.stop()
    # The group has ended: no call has outlived its trajectory.


@asynccontextmanager
async def answering(side: Side, *texts: str) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        group.create_task(side.answer(*texts))
        yield


async def test_a_tool_loop_of_the_openai_package(make: Make) -> None:
    side = make()
    async with answering(side, CALL, "Done." + END), side.client() as client:
        messages = list(HELLO)
        first = await client.chat.completions.create(
            model="pearl",
            messages=messages,
            tools=ANY_TOOLS,
            temperature=0.3,
            max_tokens=32000,
        )
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        call = choice.message.tool_calls[0]
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("probe", '{"word": "é"}')
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
        second = await client.chat.completions.create(
            model="pearl",
            messages=messages,
            tools=ANY_TOOLS,
        )
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("Done.", "stop")
    assert second.usage is not None
    assert second.usage.total_tokens == len(side.tokenizer.encode(side.text))
    assert side.text.endswith(f"{CALL}\n<|im_start|>tool\n42{END}\n<|im_start|>assistant\nDone.{END}")


async def test_a_stream_says_the_same_and_stays_awake_meanwhile(make: Make) -> None:
    side = make()
    body = {
        "messages": HELLO,
        "stream": True,
        "tools": ANY_TOOLS,
        "stream_options": {"include_usage": True},
    }
    headers = {"Authorization": f"Bearer {side.key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(f"{side.gateway.url}/chat/completions", json=body) as response:
            await side.asked()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert await response.content.readline() == b": the answer is not there yet\n"
            side.say(CALL)
            rest = await response.content.read()
        assert rest.rstrip().endswith(b"data: [DONE]")
    again = make()
    async with answering(again, "I look.\n" + CALL), again.client() as client:
        stream = await client.chat.completions.create(
            model="pearl",
            messages=HELLO,
            tools=ANY_TOOLS,
            stream=True,
            stream_options={"include_usage": True},
        )
        parts = [part async for part in stream]
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "I look."
    [call] = [
        part.choices[0].delta.tool_calls
        for part in parts
        if part.choices and part.choices[0].delta.tool_calls
    ]
    assert call[0].function is not None
    assert call[0].function.arguments == '{"word": "é"}'
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == "tool_calls"
    assert parts[-1].usage is not None
    assert parts[-1].usage.prompt_tokens > 0


async def test_without_a_key_there_is_no_service_and_after_the_end_none_either(make: Make) -> None:
    side = make()
    for key in ("", "none", "pearl-1-" + "0" * 48, side.key + "0"):
        with pytest.raises(openai.AuthenticationError):
            async with side.client(api_key=key or "x") as client:
                await client.models.list()
    async with side.client() as client:
        assert [model.id async for model in client.models.list()] == ["pearl"]
        side.exchange.close()
        with pytest.raises(openai.ConflictError, match="has ended"):
            await client.chat.completions.create(model="pearl", messages=HELLO)
        side.gateway.dismiss(side.key)
        with pytest.raises(openai.ConflictError, match="has ended"):
            await client.chat.completions.create(model="pearl", messages=HELLO)
    assert side.counters.late_calls == 2  # so it was not tried again


async def test_a_call_that_waits_when_its_trajectory_ends_is_late(make: Make) -> None:
    side = make()
    async with asyncio.TaskGroup() as group, side.client() as client:
        call = group.create_task(_failing(client))
        await side.asked()
        side.exchange.close()
        assert isinstance(await call, openai.ConflictError)


async def _failing(client: AsyncOpenAI, **options: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as refused:
        await client.chat.completions.create(
            model="pearl", messages=options.pop("messages", HELLO), **options
        )
    return refused.value


async def test_the_packages_own_retry_after_a_time_out_gets_the_same_answer(make: Make) -> None:
    side = make()
    tries: asyncio.Queue[str] = asyncio.Queue()

    async def note(request: Any) -> None:
        tries.put_nowait(request.headers["x-stainless-retry-count"])

    http_client = openai.DefaultAsyncHttpxClient(event_hooks={"request": [note]}, timeout=0.3)
    async with asyncio.TaskGroup() as group, side.client(http_client=http_client, timeout=0.3) as client:
        call = group.create_task(client.chat.completions.create(model="pearl", messages=HELLO))
        await side.asked()
        assert [await tries.get(), await tries.get()] == ["0", "1"]
        side.say("Once." + END)
        assert (await call).choices[0].message.content == "Once."
    assert (side.exchange.num_answers, side.counters.joined_retries) == (1, 1)


async def test_the_same_body_again_without_a_mark_is_another_call(make: Make) -> None:
    """It would be a second answer to the same messages: a branch."""
    side = make()
    async with answering(side, "Once." + END), side.client() as client:
        await client.chat.completions.create(model="pearl", messages=HELLO)
        refused = await _failing(client)
        assert (refused.status_code, refused.code) == (400, "history_edited")
        assert "not built yet" in refused.message
        assert side.counters.edited_histories == 1
    again = make()
    async with answering(again, "Once." + END), again.client() as client:
        for _ in range(2):
            headers = {"Idempotency-Key": "a"}
            reply = await client.chat.completions.create(model="pearl", messages=HELLO, extra_headers=headers)
            assert reply.choices[0].message.content == "Once."


async def test_a_client_that_leaves_loses_nothing(make: Make) -> None:
    side = make()
    body = {"messages": HELLO, "stream": True}
    headers = {"Authorization": f"Bearer {side.key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(f"{side.gateway.url}/chat/completions", json=body) as response:
            await side.asked()
            await response.content.readline()
        # The connection is closed here, before the answer.
        side.say("Kept." + END)
        marked = {"x-stainless-retry-count": "1"}
        async with session.post(
            f"{side.gateway.url}/chat/completions", json=body, headers=marked
        ) as response:
            assert b"Kept." in await response.content.read()


async def test_more_than_the_context_ends_the_trajectory_as_truncated(make: Make) -> None:
    side = make(EpisodeLimits(100, 120, 64, 4096))
    async with answering(side, "ok" + END), side.client() as client:
        reply = await client.chat.completions.create(model="pearl", messages=HELLO)
        more = [*HELLO, reply.choices[0].message, {"role": "user", "content": "x" * 500}]
        refused = await _failing(client, messages=more)
        assert (refused.status_code, refused.code) == (400, "context_length_exceeded")
        assert "maximum context length is 120 tokens" in refused.message
        offered = await side.exchange.next()
        assert isinstance(offered, Truncation)
        assert len(side.tokenizer.encode(side.text)) + len(offered.ids) == 120
        assert (await _failing(client)).code == "context_length_exceeded"


async def test_calls_at_once_wait_in_order(make: Make) -> None:
    side = make()
    async with asyncio.TaskGroup() as group, side.client() as client:
        first = group.create_task(client.chat.completions.create(model="pearl", messages=HELLO))
        await side.asked()
        second = group.create_task(_failing(client, messages=[{"role": "user", "content": "Another."}]))
        side.say("ok" + END)
        assert (await first).choices[0].message.content == "ok"
        assert (await second).code == "history_edited"


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"n": 2}, "n: 2"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "image_url",
        ),
        ({"messages": []}, "at least one"),
    ],
)
async def test_what_is_not_offered_is_refused_with_its_key(
    make: Make, options: dict[str, Any], wrong: str
) -> None:
    async with make().client() as client:
        refused = await _failing(client, **options)
        assert refused.status_code == 400
        assert wrong in refused.message


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/chat/completions", b"{", 400),
        ("POST", "/chat/completions", b"[]", 400),
        ("POST", "/chat/completions", b"[" * 100_000, 400),
        ("POST", "/responses", b"{}", 404),
        ("GET", "/chat/completions", b"", 405),
    ],
)
async def test_other_requests_are_refused_in_json(
    make: Make, method: str, path: str, body: bytes, status: int
) -> None:
    side = make()
    headers = {"Authorization": f"Bearer {side.key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.request(method, side.gateway.url + path, data=body) as response,
    ):
        assert response.status == status
        assert (await response.json())["error"]["message"]
        assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("key", ["pearl-²-x", "pearl-1-\udcff", "pearl--", "pearl-" + "9" * 5000, ""])
def test_no_key_is_too_odd_to_be_refused(key: str) -> None:
    keys = Keys()
    assert keys.is_ours(keys.make())
    assert not keys.is_ours(key)


async def test_stop_and_max_tokens_shorten_what_the_agent_sees(make: Make) -> None:
    side = make()
    long = "Thought. Observation: made up. " + "quartz " * 8 + END
    async with answering(side, long, long), side.client() as client:
        reply = await client.chat.completions.create(model="pearl", messages=HELLO, stop=["Observation:"])
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("Thought. ", "stop")
        more = [*HELLO, reply.choices[0].message, {"role": "user", "content": "Go on."}]
        reply = await client.chat.completions.create(model="pearl", messages=more, max_tokens=4)
        assert reply.choices[0].finish_reason == "length"
        assert long.startswith(str(reply.choices[0].message.content))
    assert side.text.count(long) == 2
    assert side.counters.cut_answers == 2
