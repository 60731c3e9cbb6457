"""``python -m pearl.envs.jsonl.reward_server FUNCTION MEMORY_BYTES``: answers a line of JSON with a reward each.

A question has ``task`` and ``answer``, a reply ``reward`` and ``parts``, or ``error``. The first line says that the
function is loaded. It ends with its input, and with its parent.
"""

import asyncio
import inspect
import json
import math
import os
import resource
import sys
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from pearl.runtime.extensions import describe_error, load_extension
from pearl.runtime.parent_death import watch_parent

KEY = "environment.options.reward"


def main(function_name: str, memory_bytes: int) -> None:
    watch_parent()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the function prints is no reply
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))

    def reply(value: dict[str, Any]) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    try:
        function = load_extension(KEY, function_name)
    except ValueError as error:
        reply({"error": str(error)})
        return
    reply({"ready": True})
    for line in sys.stdin:
        question = json.loads(line)
        reply(score(function, question["task"], question["answer"]))


def score(function: Callable[..., Any], task: object, answer: str) -> dict[str, Any]:
    """Call the function; what it raises is an error, never a reward."""
    try:
        given = function(task, answer)
        if inspect.isawaitable(given):
            given = asyncio.run(_awaited(given))
    except BaseException as error:  # noqa: BLE001 - a person's code may raise anything, SystemExit included
        return {"error": describe_error(error)}
    parts = given if isinstance(given, Mapping) else {"reward": given}
    wrong = [f"{name!r}: {value!r}"[:100] for name, value in parts.items() if not _is_finite(value)]
    if wrong or not parts:
        shown = wrong[0] if wrong else "{}"
        return {
            "error": f"it returned {shown}; a finite number is needed, or a dict of such, which are added up"
        }
    values = {str(name): float(value) for name, value in parts.items()}
    return {"reward": math.fsum(values.values()), "parts": values}


async def _awaited(given: Any) -> Any:
    return await given


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
