"""Anthropic's messages API at the gateway, as its clients speak it."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from pearl.envs.agents.anthropic import AnthropicDialect
from pearl.envs.agents.errors import UnsupportedError
from pearl.envs.agents.exchange import AgentCounters, Exchange, Prompt
from pearl.envs.agents.gateway import Gateway
from pearl.envs.text.tokenizer import TextTokenizer
from pearl.testing import chat_models as made

END = "<|im_end|>"
CALL = 'I look.\n<tool_call>\n{"name": "probe", "arguments": {"word": "é"}}\n</tool_call>' + END
TOOL = {"name": "probe", "description": "Looks up.", "input_schema": {"type": "object"}}


class Talk:
    def __init__(self, gateway: Gateway, exchange: Exchange, tokenizer: TextTokenizer) -> None:
        self._gateway, self._exchange, self._tokenizer = gateway, exchange, tokenizer
        self._headers = {"x-api-key": gateway.admit(exchange), "anthropic-version": "2023-06-01"}
        self.text = ""

    async def post(self, body: dict[str, Any], **headers: str) -> tuple[int, bytes]:
        async with (
            aiohttp.ClientSession(headers=self._headers | headers) as session,
            session.post(f"{self._gateway.url}/messages", json=body) as response,
        ):
            return response.status, await response.read()

    async def answered(self, body: dict[str, Any], text: str) -> bytes:
        async with asyncio.TaskGroup() as group:
            call = group.create_task(self.post(body))
            offered = await self._exchange.next()
            assert isinstance(offered, Prompt)
            self.text += self._tokenizer.decode(offered.ids) + text
            self._exchange.answer(self._tokenizer.encode(text), False)
        status, answered = call.result()
        assert status == 200, answered
        return answered


@pytest.fixture
async def talk(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Talk]:
    proven = made.make_proven(tmp_path_factory.mktemp("model"), "hermes")
    counters = AgentCounters()
    gateway = Gateway(counters, keep_alive_s=0.02)
    exchange = Exchange(proven, made.LIMITS, counters)
    async with asyncio.TaskGroup() as group:
        await gateway.start(group)
        yield Talk(gateway, exchange, proven.chat.tokenizer)
        exchange.close()
        await gateway.stop()


def first() -> dict[str, Any]:
    return {
        "model": "pearl",
        "max_tokens": 32000,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": "Hello."}],
        "tools": [TOOL],
    }


async def test_a_tool_loop(talk: Talk) -> None:
    body = first()
    reply = json.loads(await talk.answered(body, CALL))
    assert (reply["role"], reply["stop_reason"]) == ("assistant", "tool_use")
    text, use = reply["content"]
    assert text == {"type": "text", "text": "I look."}
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "probe", {"word": "é"})
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "42"}]}
    said = [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": [result]}]
    body["messages"] += said
    last = json.loads(await talk.answered(body, "Done." + END))
    assert (last["content"], last["stop_reason"]) == ([{"type": "text", "text": "Done."}], "end_turn")
    assert last["usage"]["input_tokens"] > reply["usage"]["input_tokens"]
    assert talk.text.startswith("<|im_start|>system\nBe brief.\n\nYou can call")
    assert talk.text.endswith(f"{CALL}\n<|im_start|>tool\n42{END}\n<|im_start|>assistant\nDone.{END}")


async def test_a_stream_of_events(talk: Talk) -> None:
    raw = await talk.answered(first() | {"stream": True}, CALL)
    events = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: ")]
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds == ["message_start", *block, *block, "message_delta", "message_stop"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert deltas[0] == {"type": "text_delta", "text": "I look."}
    assert json.loads(deltas[1]["partial_json"]) == {"word": "é"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_refusals_have_the_form_of_the_api(talk: Talk) -> None:
    status, raw = await talk.post(first(), **{"x-api-key": "none"})
    assert (status, json.loads(raw)["error"]["type"]) == (401, "authentication_error")
    status, raw = await talk.post({"messages": [{"role": "robot"}], "max_tokens": 1})
    refused = json.loads(raw)
    assert (status, refused["type"], refused["error"]["type"]) == (400, "error", "invalid_request_error")
    assert "messages[0]" in refused["error"]["message"]


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"container": "x"}, "container: is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ({"tools": [{"type": "web_search", "name": "web_search"}]}, "tools[0]"),
        ({"messages": "x"}, "messages: str"),
        ({"system": 3}, "system: int"),
    ],
)
def test_what_is_not_offered_is_refused_by_its_key(change: dict[str, Any], wrong: str) -> None:
    with pytest.raises((UnsupportedError, ValueError)) as refused:
        AnthropicDialect().read(first() | change)
    assert wrong in str(refused.value)
