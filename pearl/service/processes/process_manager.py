"""Process groups on the node agents, one ``ManagedProcess`` each: started, watched, and gone before its loss is told.

A process belongs to exactly one task: it calls ``start``, then ``wait_exited``, which returns once. Whoever finds the
group dead, silent, stuck or unwanted only ``terminate``s the process; ending it is its task's work.
"""

import asyncio
import logging
from pathlib import Path
from typing import NamedTuple

from pearl.runtime import mmap_counter
from pearl.runtime.errors import PeerGoneError, QueueFullError, RemoteError
from pearl.runtime.rpc_server import RpcServer
from pearl.service.processes.liveness_monitor import LivenessMonitor
from pearl.types.messages.control import (
    GroupExited,
    Hello,
    PeerKind,
    StartGroup,
    StartGroupReply,
    StopGroup,
)

log = logging.getLogger(__name__)

LOCAL_HOST = "local"
"""Name of the coordinator's own host in GPU ids."""
AGENT_ANSWER_S = 10.0
"""For what the agent does at once: starting a process, reaping a killed one."""


class Termination(NamedTuple):
    """Why a process ends, and how much time its processes get to end by themselves."""

    reason: str
    grace_s: float
    is_final: bool = False


class Loss(NamedTuple):
    """A group is gone, with all its processes."""

    reason: str
    counter: int | None  # last value of the group's counter file
    is_final: bool = False  # no later try could succeed


class ManagedProcess:
    """One incarnation of a worker's process group."""

    def __init__(
        self, spec: StartGroup, kind: PeerKind, slot: int, incarnation: int, host: str = LOCAL_HOST
    ) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self.kind = kind
        self.slot = slot
        self.incarnation = incarnation
        self.host = host
        self.agent = ""  # that was asked to start it
        self.name = spec.group  # of the group and of the peer
        self.log_directory = Path(spec.log_directory) / spec.group
        self.greeted: asyncio.Future[Hello] = loop.create_future()
        self.exited: asyncio.Future[GroupExited] = loop.create_future()
        self.condemned: asyncio.Future[Termination] = loop.create_future()

    def terminate(self, reason: str, grace_s: float = 0.0, *, is_final: bool = False) -> None:
        """Have it ended; only the first call counts. ``is_final``: for a reason that another try would meet again."""
        if not self.condemned.done():
            self.condemned.set_result(Termination(reason, grace_s, is_final))


class ProcessManager:
    def __init__(self, server: RpcServer, liveness: LivenessMonitor, start_timeout_s: float) -> None:
        self._server = server
        self._liveness = liveness
        self._agents: dict[str, str] = {}  # host -> its agent
        self._start_timeout_s = start_timeout_s
        self._lifecycle: dict[str, ManagedProcess] = {}

    # agents

    def add_agent(self, host: str, agent: str) -> None:
        """Lives of that host are started by it from now on."""
        assert host not in self._agents, host
        self._agents[host] = agent

    def lose_agent(self, host: str, reason: str) -> None:
        """Note that an agent is gone, and with it all that it started."""
        agent = self._agents.pop(host)
        for process in self._lifecycle.values():
            if process.agent == agent:
                process.terminate(reason)

    # what is heard

    def on_hello(self, hello: Hello) -> None:
        process = self._lifecycle.get(f"{hello.kind}.{hello.slot}.{hello.incarnation}")
        if process is not None and not process.greeted.done():
            process.greeted.set_result(hello)

    def on_exit(self, agent: str, told: GroupExited) -> None:
        """Note that a group that this agent was asked to start has exited."""
        process = self._lifecycle.get(told.group)
        if process is None or process.exited.done():
            return
        if process.agent != agent:
            log.warning("%s says that %s has ended, which is another agent's", agent, told.group)
            return
        process.exited.set_result(told)

    def terminate(self, name: str, reason: str) -> None:
        """The process of that name, if there is one."""
        process = self._lifecycle.get(name)
        if process is not None:
            log.warning("%s %s", name, reason)
            process.terminate(reason)

    def find(self, kind: PeerKind, slot: int, incarnation: int) -> ManagedProcess | None:
        """The process when its task has not ended yet."""
        return self._lifecycle.get(f"{kind}.{slot}.{incarnation}")

    # a process

    async def start(self, process: ManagedProcess) -> Hello | None:
        """Start the group and wait for its hello; None when it is not coming, ``wait_exited`` then says why."""
        self._lifecycle[process.name] = process
        limit_s = self._start_timeout_s
        process.agent = self._agents.get(process.host, "")
        if not process.agent:
            process.terminate(f"host {process.host} has no agent in the run")
            return None
        try:
            async with asyncio.timeout(limit_s):
                await self._server.call(
                    process.agent, process.spec, deadline_s=limit_s, reply_type=StartGroupReply
                )
                await asyncio.wait(
                    (process.greeted, process.exited, process.condemned), return_when=asyncio.FIRST_COMPLETED
                )
        except TimeoutError:
            process.terminate(f"not up within runtime.start_timeout_s = {limit_s:g} s")
        except (PeerGoneError, QueueFullError, RemoteError) as error:
            process.terminate(f"the node agent could not start it: {error}")
        if process.exited.done() or process.condemned.done() or not process.greeted.done():
            return None
        self._liveness.add(process.name, process.terminate)
        return process.greeted.result()

    async def wait_exited(self, process: ManagedProcess) -> Loss:
        """Wait until the group ended or was condemned; on return nothing of it runs and its peer is dropped. Nothing is
        left to end where the agent is gone: its children die with it, and whoever is cut off from us ends by its lease.
        """
        await asyncio.wait((process.exited, process.condemned), return_when=asyncio.FIRST_COMPLETED)
        self._liveness.remove(process.name)
        if not process.exited.done() and process.agent == self._agents.get(process.host):
            await self._stop(process, process.condemned.result().grace_s)
        loss = self._loss(process)
        self._server.drop(process.name, loss.reason)
        del self._lifecycle[process.name]
        return loss

    async def _stop(self, process: ManagedProcess, grace_s: float) -> None:
        limit_s = grace_s + AGENT_ANSWER_S
        try:
            await self._server.call(process.agent, StopGroup(process.name, grace_s), deadline_s=limit_s)
            # Its GroupExited brings the counter and the end of the log.
            await asyncio.wait((process.exited,), timeout=AGENT_ANSWER_S)
        except (PeerGoneError, QueueFullError, RemoteError, TimeoutError) as error:
            # A silent agent is given up in its turn; without its agent nothing of that host is ours any more.
            log.error("%s: the node agent did not end it: %s", process.name, error)

    def _loss(self, process: ManagedProcess) -> Loss:
        exited = process.exited.result() if process.exited.done() else None
        wanted = process.condemned.result() if process.condemned.done() else None
        is_final = wanted.is_final if wanted is not None else False
        reason = wanted.reason if wanted is not None else (exited.reason if exited else "gone")
        if exited is not None and wanted is None:
            is_final = exited.is_final
            first = exited.failure.strip()
            reason = f"{reason}: {first}" if first else _with_last_line(reason, exited.log_tail)
            log.warning(
                "%s %s; the end of its log:\n%s", process.name, exited.reason, exited.log_tail or "(empty)"
            )
        value = exited.counter if exited is not None else None
        if value is None:
            # Nobody could tell it; the file is there where the host shares our directory.
            named = process.spec.environment.get(mmap_counter.ENVIRONMENT_KEY)
            value = mmap_counter.read(
                Path(named) if named else process.log_directory / mmap_counter.DEFAULT_NAME
            )
        return Loss(reason, value, is_final)


def _is_heading(line: str) -> bool:
    """Return whether a line is the heading of a file's part of the log's end."""
    return line.startswith("[") and line.endswith(".log]")


def _with_last_line(reason: str, log_tail: str) -> str:
    """Usually the exception: what a person needs first. What a process merely said of its work explains nothing."""
    lines = [line.strip() for line in log_tail.splitlines() if any(map(str.isalpha, line))]
    lines = [line for line in lines if " INFO " not in line and not _is_heading(line)]
    return f"{reason}: {lines[-1][:300]}" if lines else reason
