"""Process groups on the node agents, one ``Life`` each: started, watched, and gone before its loss is told.

A life belongs to exactly one task: it calls ``start``, then ``outlive``, which returns once. Whoever finds the group
dead, silent, stuck or unwanted only ``condemn``s the life; ending it is its task's work.
"""

import asyncio
import logging
from pathlib import Path
from typing import NamedTuple

from pearl.coordinator.watch import Watch
from pearl.runtime import counter
from pearl.runtime.hub import Hub, PeerGoneError, QueueFullError, RemoteError
from pearl.state.messages.control import (
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


class Verdict(NamedTuple):
    """Why a life ends, and how much time its processes get to end by themselves."""

    reason: str
    grace_s: float


class Loss(NamedTuple):
    """A group is gone, with all its processes."""

    reason: str
    counter: int | None  # last value of the group's counter file


class Life:
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
        self.condemned: asyncio.Future[Verdict] = loop.create_future()

    def condemn(self, reason: str, grace_s: float = 0.0) -> None:
        """Have it ended; only the first call counts."""
        if not self.condemned.done():
            self.condemned.set_result(Verdict(reason, grace_s))


class Processes:
    def __init__(self, hub: Hub, watch: Watch, start_timeout_s: float) -> None:
        self._hub = hub
        self._watch = watch
        self._agents: dict[str, str] = {}  # host -> its agent
        self._start_timeout_s = start_timeout_s
        self._lives: dict[str, Life] = {}

    # agents

    def add_agent(self, host: str, agent: str) -> None:
        """Lives of that host are started by it from now on."""
        assert host not in self._agents, host
        self._agents[host] = agent

    def lose_agent(self, host: str, reason: str) -> None:
        """It is gone, and with it all that it started; the lives end at once."""
        agent = self._agents.pop(host)
        for life in self._lives.values():
            if life.agent == agent:
                life.condemn(reason)

    # what is heard

    def greet(self, hello: Hello) -> None:
        life = self._lives.get(f"{hello.kind}.{hello.slot}.{hello.incarnation}")
        if life is not None and not life.greeted.done():
            life.greeted.set_result(hello)

    def left(self, agent: str, told: GroupExited) -> None:
        """Of the groups that this agent was asked to start, one is gone."""
        life = self._lives.get(told.group)
        if life is None or life.exited.done():
            return
        if life.agent != agent:
            log.warning("%s says that %s has ended, which is another agent's", agent, told.group)
            return
        life.exited.set_result(told)

    def condemn(self, name: str, reason: str) -> None:
        """The life of that name, if there is one."""
        life = self._lives.get(name)
        if life is not None:
            log.warning("%s %s", name, reason)
            life.condemn(reason)

    def find(self, kind: PeerKind, slot: int, incarnation: int) -> Life | None:
        """The life when its task has not ended yet."""
        return self._lives.get(f"{kind}.{slot}.{incarnation}")

    # a life

    async def start(self, life: Life) -> Hello | None:
        """Start the group and wait for its hello; None when it is not coming, ``outlive`` then says why."""
        self._lives[life.name] = life
        limit_s = self._start_timeout_s
        life.agent = self._agents.get(life.host, "")
        if not life.agent:
            life.condemn(f"host {life.host} has no agent in the run")
            return None
        try:
            async with asyncio.timeout(limit_s):
                await self._hub.ask(life.agent, life.spec, deadline_s=limit_s, reply_type=StartGroupReply)
                await asyncio.wait(
                    (life.greeted, life.exited, life.condemned), return_when=asyncio.FIRST_COMPLETED
                )
        except TimeoutError:
            life.condemn(f"not up within runtime.start_timeout_s = {limit_s:g} s")
        except (PeerGoneError, QueueFullError, RemoteError) as error:
            life.condemn(f"the node agent could not start it: {error}")
        if life.exited.done() or life.condemned.done() or not life.greeted.done():
            return None
        self._watch.add(life.name, life.condemn)
        return life.greeted.result()

    async def outlive(self, life: Life) -> Loss:
        """Wait until the group ended or was condemned; on return nothing of it runs and its peer is dropped. Nothing is
        left to end where the agent is gone: its children die with it, and whoever is cut off from us ends by its lease.
        """
        await asyncio.wait((life.exited, life.condemned), return_when=asyncio.FIRST_COMPLETED)
        self._watch.remove(life.name)
        if not life.exited.done() and life.agent == self._agents.get(life.host):
            await self._stop(life, life.condemned.result().grace_s)
        loss = self._loss(life)
        self._hub.drop(life.name, loss.reason)
        del self._lives[life.name]
        return loss

    async def _stop(self, life: Life, grace_s: float) -> None:
        limit_s = grace_s + AGENT_ANSWER_S
        try:
            await self._hub.ask(life.agent, StopGroup(life.name, grace_s), deadline_s=limit_s)
            # Its GroupExited brings the counter and the end of the log.
            await asyncio.wait((life.exited,), timeout=AGENT_ANSWER_S)
        except (PeerGoneError, QueueFullError, RemoteError, TimeoutError) as error:
            # A silent agent is given up in its turn; without its agent nothing of that host is ours any more.
            log.error("%s: the node agent did not end it: %s", life.name, error)

    def _loss(self, life: Life) -> Loss:
        exited = life.exited.result() if life.exited.done() else None
        wanted = life.condemned.result().reason if life.condemned.done() else ""
        reason = wanted or (exited.reason if exited else "gone")
        if exited is not None and not wanted:
            reason = _with_last_line(reason, exited.log_tail)
            log.warning(
                "%s %s; the end of its log:\n%s", life.name, exited.reason, exited.log_tail or "(empty)"
            )
        value = exited.counter if exited is not None else None
        if value is None:
            # Nobody could tell it; the file is there where the host shares our directory.
            named = life.spec.environment.get(counter.ENVIRONMENT_KEY)
            value = counter.read(Path(named) if named else life.log_directory / counter.DEFAULT_NAME)
        return Loss(reason, value)


def _is_heading(line: str) -> bool:
    """Of a file's part of the log's end."""
    return line.startswith("[") and line.endswith(".log]")


def _with_last_line(reason: str, log_tail: str) -> str:
    """Usually the exception: what a person needs first. What a process merely said of its work explains nothing."""
    lines = [line.strip() for line in log_tail.splitlines() if any(map(str.isalpha, line))]
    lines = [line for line in lines if " INFO " not in line and not _is_heading(line)]
    return f"{reason}: {lines[-1][:300]}" if lines else reason
