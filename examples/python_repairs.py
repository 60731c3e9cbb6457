"""An agent that repairs one-line Python functions and may run the tests first.

    pearl run examples/python_repairs.toml model.path=MODEL_DIRECTORY

Its code runs the model's: in a process of its own with limits on time and memory, which is no sandbox.
"""

import asyncio
import json
import resource
import sys
from typing import Any

from pearl.envs.agents import Client, TruncatedError

FUNCTIONS = [
    ("add", "a, b", "a - b", "a + b", [(3, 4), (7, 2), (-5, 1)]),
    ("sub", "a, b", "a + b", "a - b", [(3, 4), (7, 2), (-5, 1)]),
    ("mul", "a, b", "a + b", "a * b", [(3, 4), (7, 2), (-5, 1)]),
    ("is_even", "n", "n % 2 == 1", "n % 2 == 0", [(4,), (7,), (-2,)]),
    ("is_positive", "n", "n < 0", "n > 0", [(4,), (7,), (-2,)]),
    ("square", "x", "x + x", "x * x", [(4,), (7,), (-2,)]),
    ("last", "xs", "xs[0]", "xs[-1]", [([3, 1, 2],), ([9, 8],)]),
    ("maximum", "a, b", "min(a, b)", "max(a, b)", [(3, 4), (7, 2), (-5, 1)]),
]
RUN_TESTS = {
    "type": "function",
    "function": {
        "name": "run_tests",
        "description": "Runs the tests on your version of the function and says what fails.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
LIMIT_S = 5.0
MEMORY_BYTES = 512 << 20


def tasks(split: str) -> list[dict[str, Any]]:
    """Functions are for training or for evaluation, never for both."""
    chosen = FUNCTIONS[:6] if split == "train" else FUNCTIONS[6:]
    return [
        {"code": f"def {name}({names}):\n    return {broken}\n", "tests": _tests(name, names, right, cases)}
        for name, names, broken, right, cases in chosen
    ]


async def rollout(task: dict[str, Any], client: Client) -> float:
    """1 for code that passes all tests, 0.1 for the use of the tool without success."""
    messages: list[Any] = [
        {"role": "system", "content": "You repair Python functions. Call run_tests with the whole function."},
        {"role": "user", "content": f"Repair this function:\n{task['code']}"},
    ]
    reward = 0.0
    while reward < 1.0:
        try:
            reply = await client.chat.completions.create(messages=messages, tools=[RUN_TESTS])
        except TruncatedError:  # out of turns or context: what it has reached counts
            return reward
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return reward
        for call in message.tool_calls:
            code = str(json.loads(call.function.arguments).get("code", ""))
            failure = await run(code, task["tests"])
            reward = max(reward, 0.1 if failure else 1.0)
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": failure or "All tests pass."}
            )
    return reward


async def run(code: str, tests: list[str]) -> str:
    """What went wrong, in one line; "" when all tests pass."""
    program = "\n".join((code, *tests, "print('all tests pass')"))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-c",
        program,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=_limit_memory,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            output, errors = await process.communicate()
    except TimeoutError:
        return f"no end after {LIMIT_S:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if output.rstrip().endswith(b"all tests pass"):
        return ""
    return errors.decode(errors="replace").strip().rpartition("\n")[2][:200] or "the tests did not run"


def _tests(name: str, names: str, right: str, cases: list[tuple[Any, ...]]) -> list[str]:
    wanted = eval(f"lambda {names}: {right}")
    return [
        f"assert {name}(*{case!r}) == {wanted(*case)!r}, '{name}{case!r} is not {wanted(*case)!r}'"
        for case in cases
    ]


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
