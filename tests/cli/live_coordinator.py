"""A server on its own loop and thread that is registered as a live run and answers as a coordinator does."""

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pearl.runtime import run_registry
from pearl.runtime.clock import MonotonicClock
from pearl.runtime.inbound import Call
from pearl.runtime.rpc_server import RpcServer
from pearl.types.messages.control import (
    ControlMessage,
    Preempt,
    PreemptReply,
    Shutdown,
    StatusReply,
    StatusRequest,
)

Answer = Callable[[], dict[str, Any]]


class LiveCoordinator:
    """Use as a context manager. ``status`` gives the answer to each question for it; None = silence.

    A preemption of GPUs whose id begins with "no" is refused as a coordinator does.
    """

    def __init__(self, run_dir: Path, status: Answer | None, run_id: str = "r") -> None:
        self.preempted: list[Preempt] = []
        self.num_asked = 0
        self._run_dir = run_dir
        self._status = status
        self._run_id = run_id
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> "LiveCoordinator":
        self._run_dir.mkdir(exist_ok=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def end(self) -> None:
        """The run is over; its peers are told."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = RpcServer(
            "tcp://127.0.0.1:0",
            run_id=self._run_id,
            messages=ControlMessage,
            queue_messages=64,
            max_frame_bytes=1 << 20,
            clock=MonotonicClock(),
        )
        async with server:
            run = run_registry.register(self._run_dir, server.address, self._run_id, os.getpid())
            async with asyncio.TaskGroup() as tasks:
                answering = tasks.create_task(self._answer(server), name="answer")
                self._ready.set()
                await self._stop.wait()
                answering.cancel()
            run_registry.unregister(run)
            for peer in server.peers():
                server.notify(peer, Shutdown("the run is over"))

    async def _answer(self, server: RpcServer) -> None:
        while True:
            match await server.receive():
                case Call(_, StatusRequest(), reply, _) if self._status is not None:
                    self.num_asked += 1
                    reply(StatusReply(json.dumps(self._status()).encode()))
                case Call(_, Preempt() as message, reply, fail):
                    if any(gpu.startswith("no") for gpu in message.gpus):
                        fail(ValueError(f"{message.gpus[0]} is no GPU of this run"))
                        continue
                    self.preempted.append(message)
                    reply(PreemptReply(message.gpus or tuple(f"local/{n}" for n in range(message.count))))
