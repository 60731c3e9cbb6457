"""Rollout functions as people write them, and some that go wrong."""

import asyncio
import json
from contextlib import suppress
from typing import Any

from pearl.envs.agents import Client, OutOfContextError

TASKS = [{"name": name, "goal": number} for number, name in enumerate(["good", "raises", "nan", "silent"])]
TOOLS = [{"type": "function", "function": {"name": "guess", "parameters": {"type": "object"}}}]


def tasks(split: str) -> list[dict[str, Any]]:
    return TASKS if split == "train" else TASKS[:1]


async def guess(task: dict[str, Any], client: Client) -> float:
    if task["name"] == "silent":
        return 1.0
    messages: list[Any] = [{"role": "user", "content": f"Guess {task['name']}."}]
    while True:
        reply = await client.chat.completions.create(
            model="any", messages=messages, tools=TOOLS, temperature=0.2, stop=["STOP"]
        )
        message = reply.choices[0].message
        messages.append(message)
        if task["name"] == "raises":
            raise KeyError("no such file")
        if not message.tool_calls:
            messages.append({"role": "user", "content": "Use the tool."})
            continue
        call = message.tool_calls[0]
        if json.loads(call.function.arguments)["number"] == task["goal"]:
            return float("nan") if task["name"] == "nan" else 1
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "wrong"})


async def patient(task: Any, client: Client) -> float:
    """Says what it has when the context is full."""
    messages: list[Any] = [{"role": "user", "content": "Go."}]
    while True:
        try:
            reply = await client.chat.completions.create(messages=messages)
        except OutOfContextError:
            return len(messages) / 10
        messages += [
            reply.choices[0].message.model_dump(),
            {"role": "user", "content": "More, please: " + "x" * 200},
        ]


async def forgetful(task: Any, client: Client) -> float:
    """Edits what was said."""
    messages: list[Any] = [{"role": "user", "content": "Go."}]
    reply = await client.chat.completions.create(messages=messages)
    messages[0]["content"] = "Went."
    await client.chat.completions.create(
        messages=[*messages, reply.choices[0].message, {"role": "user", "content": "And?"}]
    )
    return 1.0


async def endless(task: Any, client: Client) -> float:
    messages: list[Any] = [{"role": "user", "content": "Go."}]
    while True:
        reply = await client.chat.completions.create(messages=messages, max_tokens=2)
        messages += [reply.choices[0].message, {"role": "user", "content": "More."}]


async def impatient(task: Any, client: Client) -> float:
    """Gives up its first call and asks again, as a client with a time-out does."""
    messages: list[Any] = [{"role": "user", "content": "Go."}]
    call = client.chat.completions.create(messages=messages)
    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            await call
    await client.chat.completions.create(messages=messages)
    return 1.0


def not_async(task: Any, client: Client) -> float:
    return 1.0
