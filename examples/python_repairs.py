"""An agent that repairs one-line Python functions: it answers with code, sees which test fails, and may try again.

    pearl run examples/python_repairs.toml model.path=MODEL_DIRECTORY

It runs the model's code in a process of its own with limits on time and memory, which is no sandbox.
"""

import asyncio
import re
import resource
import sys
from typing import Any

from pearl.envs.agents import Client, TruncatedError

PAIRS, NUMBERS, LISTS = [(3, 4), (7, 2), (-5, 1)], [(4,), (7,), (-2,)], [([3, 1, 2],), ([9, 8],)]
FUNCTIONS: list[tuple[str, str, str, str, list[tuple[Any, ...]]]] = [
    ("add", "a, b", "a - b", "a + b", PAIRS),
    ("sub", "a, b", "a + b", "a - b", PAIRS),
    ("mul", "a, b", "a + b", "a * b", PAIRS),
    ("minimum", "a, b", "max(a, b)", "min(a, b)", PAIRS),
    ("is_even", "n", "n % 2 == 1", "n % 2 == 0", NUMBERS),
    ("is_positive", "n", "n < 0", "n > 0", NUMBERS),
    ("square", "x", "x + x", "x * x", NUMBERS),
    ("double", "x", "x * 3", "x * 2", NUMBERS),
    ("last", "xs", "xs[0]", "xs[-1]", LISTS),
    ("length", "xs", "len(xs) - 1", "len(xs)", LISTS),
    ("maximum", "a, b", "min(a, b)", "max(a, b)", PAIRS),
    ("is_negative", "n", "n > 0", "n < 0", NUMBERS),
    ("triple", "x", "x * 2", "x * 3", NUMBERS),
    ("first", "xs", "xs[-1]", "xs[0]", LISTS),
]
NUM_TRAIN = 10
NUM_TRIES = 2
LIMIT_S = 5.0
MEMORY_BYTES = 512 << 20


def tasks(split: str) -> list[dict[str, Any]]:
    """Functions are for training or for evaluation, never for both."""
    chosen = FUNCTIONS[:NUM_TRAIN] if split == "train" else FUNCTIONS[NUM_TRAIN:]
    return [
        {
            "name": name,
            "code": f"def {name}({names}):\n    return {broken}",
            "tests": _tests(name, names, right, cases),
        }
        for name, names, broken, right, cases in chosen
    ]


async def rollout(task: dict[str, Any], client: Client) -> float:
    """1 for code that passes all tests, half of it on the second try; a tenth for code of the right name."""
    messages: list[Any] = [
        {"role": "system", "content": "You are a coding assistant. Answer with code only."},
        {
            "role": "user",
            "content": f"Fix the bug in this Python function.\n```python\n{task['code']}\n```\n"
            f"It must pass: {task['tests'][0]}\nReply with the corrected function in a python code block.",
        },
    ]
    reward = 0.0
    for tries in range(NUM_TRIES):
        try:
            reply = await client.chat.completions.create(messages=messages)
        except TruncatedError:  # out of turns or context: what it has reached counts
            return reward
        answer = reply.choices[0].message.content or ""
        code = re.search(r"```(?:python)?\n(.*?)```", answer, re.DOTALL)
        if code is None:
            failure = "there is no python code block"
        elif not (failure := await run(code[1], task["tests"])):
            return 1.0 / (tries + 1)
        if code is not None and f"def {task['name']}(" in code[1]:
            reward = 0.1
        messages += [
            reply.choices[0].message,
            {"role": "user", "content": f"That fails: {failure}\nReply with the corrected function."},
        ]
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
