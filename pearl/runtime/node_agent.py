"""The node agent's work: start process groups for the coordinator, tell of their ends, leave nothing behind.

It ends all its groups and itself when it is told to, on a signal of ``LEAVE_SIGNALS``, and when its connection ends,
which it does once the coordinator has been silent for the lease.
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Protocol

from pearl.runtime.errors import PeerGoneError, RefusedError
from pearl.runtime.process import ProcessGroup
from pearl.state.messages.control import (
    AgentReport,
    ControlMessage,
    GroupExited,
    Heartbeat,
    StartGroup,
    StartGroupReply,
    StopGroup,
    StopGroupReply,
)

LAST_WORDS_S = 2.0  # for telling of a group's end while leaving: perhaps nobody listens any more
LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""SIGUSR1 is what Slurm sends as notice of a preemption; SIGHUP says that the terminal or ssh connection is gone."""

log = logging.getLogger(__name__)

Handler = Callable[[ControlMessage], Awaitable[ControlMessage | None]]


class Connection(Protocol):
    """What the agent needs of its peer of the coordinator."""

    async def run(self) -> str:
        """Until told to shut down, dropped, or the coordinator has been silent for the lease; returns which.
        RefusedError when it was never let in."""

    async def tell(self, message: ControlMessage) -> None:
        """Waits until it is let in and while the coordinator does not read. PeerGoneError once it has ended."""


class NodeAgent:
    """Serves one coordinator until it leaves; not to be run twice."""

    def __init__(self, run_id: str, report: AgentReport, lease_s: float) -> None:
        self._run_id = run_id
        self._report = report
        self._lease_s = lease_s
        self._groups: dict[str, ProcessGroup] = {}
        self._num_handled = 0
        self._leaving = asyncio.Event()
        self._reason = ""
        self._watchers = asyncio.TaskGroup()
        self._connection: Connection | None = None

    async def run(self, connection: Connection) -> str:
        """Serve until there is a reason to leave, and return it; every group is gone by then."""
        self._connection = connection
        self._watch_signals()
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(self._serve(connection), name="serve")
                async with self._watchers:  # left when the coordinator has been told of every end
                    await self._leaving.wait()
                    await self._end_groups()
                serving.cancel()
        finally:
            # Only a bug leaves any here: the groups must not outlive the tasks that it ended.
            for group in list(self._groups.values()):
                await group.stop(0)
        return self._reason

    async def handle(self, message: ControlMessage) -> ControlMessage | None:
        """Serve one message; calls may overlap. ValueError or OSError says why it could not be done."""
        self._num_handled += 1
        match message:
            case StartGroup():
                return await self._start(message)
            case StopGroup():
                return await self._stop(message)
            case _:
                raise ValueError(f"a node agent does not serve {type(message).__name__}")

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(progress=self._num_handled)

    def leave(self, reason: str) -> None:
        """Begin to leave; a second reason is logged only."""
        log.info(
            "%s: %s", reason, "leaving already" if self._leaving.is_set() else "ending all groups and leaving"
        )
        self._reason = self._reason or reason
        self._leaving.set()

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in LEAVE_SIGNALS:
            loop.add_signal_handler(number, self.leave, number.name)
        loop.add_signal_handler(signal.SIGUSR2, log.info, "SIGUSR2: nothing to do")

    async def _serve(self, connection: Connection) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tell(self._report), name="report")
            try:
                self.leave(await connection.run())
            except RefusedError as error:
                self.leave(str(error))

    async def _start(self, spec: StartGroup) -> StartGroupReply:
        if self._leaving.is_set():
            raise ValueError(f"group {spec.group}: this node agent is leaving ({self._reason})")
        if spec.group in self._groups:
            raise ValueError(f"group {spec.group} runs here already")
        group = ProcessGroup(spec, self._run_id)
        self._groups[spec.group] = group
        try:
            pid = await group.start()
        except OSError:
            del self._groups[spec.group]
            raise
        log.info("group %s started, pid %d: %s", spec.group, pid, spec.module)
        self._watchers.create_task(self._watch(group), name=f"watch {spec.group}")
        return StartGroupReply(spec.group, pid)

    async def _stop(self, request: StopGroup) -> StopGroupReply:
        group = self._groups.get(request.group)
        if group is None:
            # Its end went unheard, or it never began: whoever asks is told, so as not to wait for it.
            await self._tell(GroupExited(request.group, None, "does not run here", ""))
            return StopGroupReply(request.group, None, 0)
        num_killed = await group.stop(request.grace_s)
        exit_ = await group.wait()
        return StopGroupReply(request.group, exit_.code, num_killed)

    async def _watch(self, group: ProcessGroup) -> None:
        exit_ = await group.wait()
        name = group.spec.group
        del self._groups[name]
        log.info("group %s is gone: %s", name, exit_.reason)
        await self._tell(GroupExited(name, exit_.code, exit_.reason, exit_.log_tail, exit_.counter))

    async def _tell(self, message: AgentReport | GroupExited) -> None:
        assert self._connection is not None
        try:
            async with asyncio.timeout(LAST_WORDS_S if self._leaving.is_set() else self._lease_s):
                await self._connection.tell(message)
        except (PeerGoneError, TimeoutError) as error:
            log.info("%s was not told: %s", message, error)

    async def _end_groups(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for group in self._groups.values():
                grace_s = group.spec.shutdown_grace_s
                stop = group.stop(grace_s, f"the node agent left: {self._reason}")
                tasks.create_task(stop, name=f"end {group.spec.group}")
