"""One question to a live run's coordinator, as its peer of kind "admin"."""

import asyncio
import os
import socket
import time

from pearl.runtime.errors import PeerGoneError, RefusedError, RemoteError
from pearl.runtime.peer import Peer
from pearl.runtime.registry import LiveRun
from pearl.state.messages.control import ControlMessage, Heartbeat, Hello, StatusReply, StatusRequest

DEADLINE_S = 5.0
"""A coordinator answers in milliseconds unless its host is overloaded; a person would not wait longer."""


class SilentError(Exception):
    """The coordinator did not answer; the text says what happened instead."""


def ask_status(run: LiveRun, deadline_s: float = DEADLINE_S) -> bytes:
    """The JSON of the answer.

    Raises:
        SilentError: there was none in time.
    """
    return asyncio.run(_ask(run, deadline_s))


async def _ask(run: LiveRun, deadline_s: float) -> bytes:
    peer = _peer(run, deadline_s)
    try:
        async with asyncio.TaskGroup() as tasks:
            connection = tasks.create_task(peer.run(), name="connection")
            try:
                reply = await peer.ask(StatusRequest(), deadline_s=deadline_s)
            except PeerGoneError:
                await connection  # why it went says more
                raise
            connection.cancel()
    except* TimeoutError:
        raise SilentError(f"no answer from {run.address} within {deadline_s:g} s") from None
    except* (PeerGoneError, RefusedError, RemoteError) as errors:
        raise SilentError(f"no answer from {run.address}: {errors.exceptions[0]}") from None
    assert isinstance(reply, StatusReply), f"a status request was answered with {type(reply).__name__}"
    return reply.json


def _peer(run: LiveRun, deadline_s: float) -> Peer:
    async def ignore(message: object) -> None:
        """Nobody tells an admin anything that matters to one question."""

    return Peer(
        run.address,
        # A name that was used is never let in again, and pids come round: the time makes it new.
        hello=Hello("admin", os.getpid(), time.monotonic_ns(), socket.gethostname(), os.getpid(), run.run_id),
        messages=ControlMessage,
        handler=ignore,
        heartbeat=lambda: Heartbeat(progress=0),
        heartbeat_period_s=deadline_s,
        lease_s=2 * deadline_s,
        queue_messages=16,
        max_frame_bytes=64 << 20,
    )
