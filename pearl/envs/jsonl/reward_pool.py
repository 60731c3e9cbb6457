"""Processes that run the reward function: what it raises, how long it takes and what it fills is its own matter.

Nothing that goes wrong in them is a reward: it is a failure of the infrastructure, and a process that is late or gone
is killed with all that it started and replaced.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from pearl.envs.protocol import InfrastructureError
from pearl.runtime.parent_death import PARENT_VARIABLE

log = logging.getLogger(__name__)

KEY = "environment.options.reward"
START_LIMIT_S = 60.0
"""To import what the function needs."""
MAX_REPLY_BYTES = 1 << 20
SERVER = "pearl.envs.jsonl.reward_server"


class RewardLimits(msgspec.Struct, frozen=True):
    timeout_s: float  # of one call
    memory_bytes: int  # of one process
    num_processes: int


class RewardPool:
    def __init__(self, function: str, limits: RewardLimits) -> None:
        """ValueError when the function cannot be loaded, or a limit is out of range."""
        _check_limits(limits)
        self._function = function
        self._limits = limits
        self._free: asyncio.Queue[_RewardProcess] | None = None
        self._processes: list[_RewardProcess] = []
        _try(function, limits)

    async def score(self, task: Mapping[str, Any], answer: str) -> float:
        """The function's reward; waits for a process that is free.

        Raises:
            InfrastructureError: the function raised, was late, or returned no finite number.
        """
        if self._free is None:  # here, since it belongs to the loop of the episodes
            self._free = asyncio.Queue()
            self._processes = [
                _RewardProcess(self._function, self._limits) for _ in range(self._limits.num_processes)
            ]
            for process in self._processes:
                self._free.put_nowait(process)
        process = await self._free.get()
        try:
            return await process.score(task, answer)
        finally:
            self._free.put_nowait(process)

    async def close(self) -> None:
        """End the processes. They end with this one too."""
        for process in self._processes:
            await process.end()


class _RewardProcess:
    def __init__(self, function: str, limits: RewardLimits) -> None:
        self._function = function
        self._limits = limits
        self._process: asyncio.subprocess.Process | None = None

    async def score(self, task: Mapping[str, Any], answer: str) -> float:
        question = json.dumps({"task": task, "answer": answer}).encode() + b"\n"
        is_whole = False
        try:
            process = await self._started()
            async with asyncio.timeout(self._limits.timeout_s):
                process.stdin.write(question)  # type: ignore[union-attr]
                await process.stdin.drain()  # type: ignore[union-attr]
                line = await process.stdout.readline()  # type: ignore[union-attr]
            is_whole = line.endswith(b"\n")
        except TimeoutError:
            raise InfrastructureError(
                f"{self._function}: no reward within {self._limits.timeout_s:g} s "
                "(environment.options.reward_timeout_s)"
            ) from None
        except (OSError, ValueError) as error:
            raise InfrastructureError(f"{self._function}: its process does not answer: {error}") from error
        finally:
            if not is_whole:
                await self.end()
        if not is_whole:
            raise InfrastructureError(
                f"{self._function}: its process ended (killed, out of memory, or it exited)"
            )
        reply = json.loads(line)
        if "error" in reply:
            raise InfrastructureError(f"{self._function}: {reply['error']}")
        return float(reply["reward"])

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        self._process = await asyncio.create_subprocess_exec(
            *_command(self._function, self._limits),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_environment(),
            start_new_session=True,
            limit=MAX_REPLY_BYTES,
        )
        async with asyncio.timeout(START_LIMIT_S):
            assert self._process.stdout is not None
            ready = json.loads(
                await self._process.stdout.readline() or b'{"error": "it ended while it started"}'
            )
        if "error" in ready:
            raise InfrastructureError(f"{self._function}: {ready['error']}")
        return self._process

    async def end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _try(function: str, limits: RewardLimits) -> None:
    """Load the function in a process of its own, so that a mistake is known before the run."""
    if not function:
        raise ValueError(
            f'{KEY}: is missing; name the function that gives the reward as "package.module:function"; it is called '
            "with the task and the answer's text"
        )
    try:
        done = subprocess.run(
            _command(function, limits),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=_environment(),
            timeout=START_LIMIT_S,
            check=False,
        )
        ready = json.loads(done.stdout.splitlines()[0])
    except subprocess.TimeoutExpired:
        raise ValueError(f'{KEY} = "{function}": was not imported within {START_LIMIT_S:g} s') from None
    except (IndexError, ValueError):
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["without a word"]
        raise ValueError(
            f'{KEY} = "{function}": its process ended while it started: {last[0]}; '
            f"environment.options.reward_memory_bytes is {limits.memory_bytes}"
        ) from None
    if "error" in ready:
        raise ValueError(ready["error"])


def _command(function: str, limits: RewardLimits) -> list[str]:
    return [sys.executable, "-m", SERVER, function, str(limits.memory_bytes)]


def _environment() -> dict[str, str]:
    return {**os.environ, PARENT_VARIABLE: str(os.getpid())}


def _check_limits(limits: RewardLimits) -> None:
    bounds = {
        "reward_timeout_s": (limits.timeout_s, 0.01, 86_400),
        "reward_memory_bytes": (limits.memory_bytes, 64 << 20, 1 << 50),
        "reward_processes": (limits.num_processes, 1, 256),
    }
    for key, (value, low, high) in bounds.items():
        if not low <= value <= high:
            raise ValueError(f"environment.options.{key} = {value}: use {low} to {high}")
