"""Talks with a live run's coordinator, as its peer of kind "admin"."""

import asyncio
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pearl.config import ConfigError
from pearl.runtime import run_registry
from pearl.runtime.errors import PeerGoneError, RefusedError, RemoteError
from pearl.runtime.rpc_client import RpcClient
from pearl.runtime.run_registry import LiveRun
from pearl.types.messages.control import (
    ControlMessage,
    Heartbeat,
    Hello,
    Preempt,
    PreemptReply,
    StatusReply,
    StatusRequest,
)

DEADLINE_S = 5.0
"""A coordinator answers in milliseconds unless its host is overloaded; a person would not wait longer."""

Talked = TypeVar("Talked")


class SilentError(Exception):
    """The coordinator did not answer; the text says what happened instead."""


class EndedError(SilentError):
    """The run has ended."""


class CoordinatorClient:
    """PendingCalls one question after the other over one connection."""

    def __init__(self, run: LiveRun, peer: RpcClient, deadline_s: float) -> None:
        self._run = run
        self._peer = peer
        self._deadline_s = deadline_s

    async def call(self, message: msgspec.Struct) -> msgspec.Struct:
        """The answer.

        Raises:
            RemoteError: the coordinator says why it does not do it.
            SilentError: there was none in time.
        """
        try:
            return await self._peer.call(message, deadline_s=self._deadline_s)
        except TimeoutError:
            raise SilentError(f"no answer from {self._run.address} within {self._deadline_s:g} s") from None
        except PeerGoneError as error:
            raise EndedError(f"no answer from {self._run.address}: {error}") from None

    async def status(self) -> bytes:
        """The JSON of the run's status.

        Raises:
            SilentError: there was none.
        """
        try:
            reply = await self.call(StatusRequest())
        except RemoteError as error:
            raise SilentError(f"no answer from {self._run.address}: {error}") from None
        assert isinstance(reply, StatusReply), f"a status request was answered with {type(reply).__name__}"
        return reply.json

    async def preempt(self, message: Preempt) -> PreemptReply:
        """Ask for GPUs to arrive or to be reclaimed; returns which. Raises as ``call`` does."""
        reply = await self.call(message)
        assert isinstance(reply, PreemptReply), f"a preemption was answered with {type(reply).__name__}"
        return reply


def select_run(run_dir: Path | None, *, changes_it: bool = False) -> LiveRun | None:
    """The live run of ``run_dir``, or the newest one; says on stderr when there is none, or several to choose from.

    Raises:
        ConfigError: ``run_dir`` is no directory, or none was named and it is not clear which run is to be changed.
    """
    if run_dir is not None:
        if not run_dir.is_dir():
            raise ConfigError(f"--run-dir {run_dir}: is no directory")
        run = run_registry.find(run_dir)
        if run is None:
            print(f"error: no live run in {run_dir}", file=sys.stderr)
        return run
    runs = run_registry.live_runs()
    if not runs:
        print("error: no live run on this host (of this user)", file=sys.stderr)
        return None
    if len(runs) > 1:
        if changes_it:
            names = ", ".join(run.run_dir for run in runs)
            raise ConfigError(f"{len(runs)} runs are live: say which one with --run-dir: {names}")
        others = ", ".join(run.run_dir for run in runs[1:])
        print(
            f"{len(runs)} runs are live; this is the newest. --run-dir names another: {others}",
            file=sys.stderr,
        )
    return runs[0]


def with_client(
    run: LiveRun, talk: Callable[[CoordinatorClient], Awaitable[Talked]], deadline_s: float | None = None
) -> Talked:
    """Connect, run ``talk`` and return its result; it is cancelled when the run ends."""
    try:
        return asyncio.run(_converse(run, talk, DEADLINE_S if deadline_s is None else deadline_s))
    except BaseExceptionGroup as group:
        raise _first(group) from None


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _converse(
    run: LiveRun, talk: Callable[[CoordinatorClient], Awaitable[Talked]], deadline_s: float
) -> Talked:
    peer = _peer(run, deadline_s)
    async with asyncio.TaskGroup() as tasks:
        connection = tasks.create_task(_connect(run, peer), name="connection")
        try:
            return await talk(CoordinatorClient(run, peer, deadline_s))
        except EndedError:
            await connection  # why it went says more
            raise
        finally:
            connection.cancel()


async def _connect(run: LiveRun, peer: RpcClient) -> None:
    """Keep the connection until it ends, which is an error for whoever talks over it."""
    try:
        outcome = await peer.run()
    except RefusedError as error:
        raise SilentError(f"no answer from {run.address}: {error}") from None
    what, _, reason = outcome.partition(": ")
    if what == "shutdown":
        raise EndedError(f"the run has ended: {reason}")
    raise SilentError(f"the connection to {run.address} is lost: {outcome}")


def _peer(run: LiveRun, deadline_s: float) -> RpcClient:
    async def ignore(message: Any) -> None:
        """Drop a message: an admin client expects none."""

    return RpcClient(
        run.address,
        # A name that was used is never let in again, and pids come round: the time makes it new.
        hello=Hello("admin", os.getpid(), time.monotonic_ns(), socket.gethostname(), os.getpid(), run.run_id),
        messages=ControlMessage,
        handler=ignore,
        heartbeat=lambda: Heartbeat(progress=0),
        heartbeat_period_s=1.0,
        lease_s=2 * deadline_s,
        queue_messages=16,
        max_frame_bytes=64 << 20,
    )
