"""The node agent's work: start process groups for the coordinator, tell of their ends, leave nothing behind.

It leaves when it is told to, when its connection ends (which it does once the coordinator has been silent for the
lease), and when its host is taken away: then it gives notice first, and stays until nothing of the run is on its GPUs
any more or the grace is over. Whatever the cause, all its groups have ended when it has left.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from pearl.runtime.errors import PeerGoneError, RefusedError, RemoteError
from pearl.runtime.installation import model_digest
from pearl.runtime.orphans import Orphans
from pearl.runtime.prepared_process import PreparedProcess
from pearl.runtime.process_group import ProcessGroup
from pearl.types.messages.control import (
    COORDINATOR_PLACEHOLDER,
    DIRECTORY_PLACEHOLDER,
    AgentReport,
    ControlMessage,
    GpusReturned,
    GroupExited,
    Heartbeat,
    Leaving,
    Notice,
    StartGroup,
    StartGroupReply,
    StopGroup,
    StopGroupReply,
)

LAST_WORDS_S = 2.0  # for telling of a group's end while leaving: perhaps nobody listens any more

log = logging.getLogger(__name__)

Handler = Callable[[ControlMessage], Awaitable[ControlMessage | None]]
Cause = Literal["asked", "refused", "lost"]
"""Why it left: it was told to or signalled, it was never let in, or the connection ended."""


class Connection(Protocol):
    """What the agent needs of its peer of the coordinator."""

    @property
    def address(self) -> str:
        """Return the coordinator's address, as this host reaches it."""

    @property
    def run_id(self) -> str:
        """Known once it is let in."""

    @property
    def model_path(self) -> str:
        """Return the job's model path, known once the agent has joined; "" means that it does not matter."""

    @property
    def has_joined(self) -> bool:
        """Whether it was let in, whatever happened then."""

    @property
    def was_shut_down(self) -> bool:
        """Whether it ended because the coordinator said so."""

    async def wait_joined(self) -> None:
        """Wait until it is let in, or has ended."""

    async def run(self) -> str:
        """Run until told to shut down, dropped, or the coordinator has been silent for the lease; returns which."""

    async def notify(self, message: ControlMessage) -> None:
        """Waits until it is let in and while the coordinator does not read. PeerGoneError once it has ended."""

    async def call(self, message: ControlMessage, *, deadline_s: float) -> msgspec.Struct:
        """The answer; TimeoutError, RemoteError or PeerGoneError when there is none."""


class NodeAgent:
    """Serves one coordinator until it leaves; not to be run twice.

    Args:
        report: a host that joins asks to be taken in; the coordinator's own just tells what it has.
        choose_logs: where groups log whose log directory is not to be had on this host; gets it, returns the other.
        adopts_orphans: all descendants of this process are its own, as ``subreaper.adopt_orphans`` says.
        prepares: starts the prepared process at once, not with the first group that may be forked from it.
    """

    def __init__(
        self,
        report: AgentReport,
        lease_s: float,
        choose_logs: Callable[[Path, str], Path] | None = None,
        *,
        adopts_orphans: bool = False,
        prepares: bool = False,
    ) -> None:
        self._report = report
        self._lease_s = lease_s
        self._choose_logs = choose_logs
        self._prepared = PreparedProcess()
        if prepares:
            self._prepared.want()
        self._orphans = Orphans(adopts_orphans, lambda: self._prepared.pid)
        self._groups: dict[str, ProcessGroup] = {}
        self._num_handled = 0
        self._leaving = asyncio.Event()
        self._reason = ""
        self._kills = False  # leaves without giving its groups time
        self._used: set[str] | None = None  # GPUs that are not back yet; None before notice was given
        self._returned = asyncio.Event()  # all are, or it leaves anyhow
        self._watchers = asyncio.TaskGroup()
        self._connection: Connection | None = None
        self.cause: Cause = "asked"
        self.has_joined = False  # as a host that joins: it was taken in

    async def run(self, connection: Connection) -> str:
        """Serve until there is a reason to leave, and return it; every group is gone by then."""
        self._connection = connection
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(self._serve(connection), name="serve")
                preparing = tasks.create_task(self._keep_prepared(connection), name="prepared process")
                async with self._watchers:  # left when the coordinator has been told of every end
                    await self._leaving.wait()
                    await self._end_groups()
                if self._report.pool != "local" and connection.has_joined:
                    await self._notify(Leaving(self._reason))
                serving.cancel()
                preparing.cancel()
        finally:
            # Only a bug leaves any here: the groups must not outlive the tasks that started them.
            for group in list(self._groups.values()):
                await group.stop(0)
            await self._orphans.end(())
        return self._reason

    @property
    def survivors(self) -> tuple[str, ...]:
        """Describe the processes that did not end on SIGKILL."""
        return self._orphans.survivors

    async def handle(self, message: ControlMessage) -> ControlMessage | None:
        """Serve one message; calls may overlap. ValueError or OSError says why it could not be done."""
        self._num_handled += 1
        match message:
            case StartGroup():
                return await self._start(message)
            case StopGroup():
                return await self._stop(message)
            case GpusReturned(gpus):
                self._take_back(gpus)
                return None
            case _:
                raise ValueError(f"a node agent does not serve {type(message).__name__}")

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(progress=self._num_handled)

    async def _keep_prepared(self, connection: Connection) -> None:
        await connection.wait_joined()
        if connection.has_joined:
            await self._prepared.keep(connection.run_id)

    # leaving

    def leave(self, reason: str, cause: Cause = "asked", *, kills: bool = False) -> None:
        """Begin to leave; a second reason is logged only. ``kills``: its groups get no time to end by themselves."""
        already = self._leaving.is_set()
        log.info("%s: %s", reason, "leaving already" if already else "ending all groups and leaving")
        if already:
            return
        self._reason, self.cause, self._kills = reason, cause, kills
        self._leaving.set()
        self._returned.set()

    def give_notice(self, grace_s: float, reason: str) -> None:
        """Give notice that the host is taken away in ``grace_s``; a second notice, or one that could not be
        delivered, leaves at once."""
        if self._used is not None or not self.has_joined:
            self.leave(reason, kills=True)
        elif not self._leaving.is_set():
            log.info("%s: giving the GPUs back within %g s", reason, grace_s)
            self._used = {gpu.gpu for gpu in self._report.gpus}
            self._watchers.create_task(self._depart(grace_s, reason), name="notice")

    async def _depart(self, grace_s: float, reason: str) -> None:
        try:
            async with asyncio.timeout(grace_s):
                await self._notify(Notice(grace_s, reason))
                await self._returned.wait()
        except TimeoutError:
            self.leave(f"{reason}: the grace of {grace_s:g} s is over", kills=True)
            return
        if not self._leaving.is_set():
            self.leave(f"{reason}: all GPUs were given back")

    def _take_back(self, gpus: tuple[str, ...]) -> None:
        log.info("%s: the run does not use them any more", ", ".join(gpus))
        if self._used is not None:
            self._used.difference_update(gpus)
            if not self._used:
                self._returned.set()

    # serving

    async def _serve(self, connection: Connection) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._introduce(connection), name="report")
            try:
                reason = await connection.run()
                self.leave(reason, "asked" if connection.was_shut_down else "lost")
            except RefusedError as error:
                self.leave(str(error), "refused")

    async def _introduce(self, connection: Connection) -> None:
        if self._report.pool == "local":
            await self._notify(self._report)
            return
        try:
            report = self._report
            await connection.wait_joined()
            if connection.model_path:
                model = await asyncio.to_thread(model_digest, connection.model_path)
                report = msgspec.structs.replace(report, model=model)
            await connection.call(report, deadline_s=self._lease_s)
        except RemoteError as error:
            self.leave(error.text, "refused")
        except TimeoutError:
            self.leave(f"no answer from {connection.address} within {self._lease_s:g} s", "lost")
        except PeerGoneError as error:
            log.info("not taken in: %s", error)  # why the connection ended says more
        else:
            self.has_joined = True
            gpus = ", ".join(gpu.gpu for gpu in self._report.gpus)
            log.info(
                "joined run %s at %s as %s: %s",
                connection.run_id,
                connection.address,
                self._report.host,
                gpus,
            )

    async def _start(self, wanted: StartGroup) -> StartGroupReply:
        if self._leaving.is_set():
            raise ValueError(f"group {wanted.group}: this node agent is leaving ({self._reason})")
        if wanted.group in self._groups:
            raise ValueError(f"group {wanted.group} runs here already")
        assert self._connection is not None
        spec = self._localized(wanted, self._connection)
        group = ProcessGroup(spec, self._connection.run_id, self._prepared)
        _write_files(group.directory, spec.files)
        self._groups[spec.group] = group
        try:
            pid = await group.start()
        except OSError:
            del self._groups[spec.group]
            raise
        log.info(
            "group %s started, pid %d: %s; its log is in %s", spec.group, pid, spec.module, group.directory
        )
        self._watchers.create_task(self._watch(group), name=f"watch {spec.group}")
        return StartGroupReply(spec.group, pid)

    def _localized(self, spec: StartGroup, connection: Connection) -> StartGroup:
        """Fill in what only this host knows of a group to be started."""
        logs = Path(spec.log_directory)
        if self._choose_logs is not None:
            logs = self._choose_logs(logs, connection.run_id)
        directory = str(logs / spec.group)
        arguments = tuple(_fill_in(argument, connection.address, directory) for argument in spec.arguments)
        return msgspec.structs.replace(spec, arguments=arguments, log_directory=str(logs))

    async def _stop(self, request: StopGroup) -> StopGroupReply:
        group = self._groups.get(request.group)
        if group is None:
            # Its end went unheard, or it never began: whoever asks is told, so as not to wait for it.
            await self._notify(GroupExited(request.group, None, "does not run here", ""))
            return StopGroupReply(request.group, None)
        await group.stop(request.grace_s)
        exit_ = await group.wait()
        return StopGroupReply(request.group, exit_.code)

    async def _watch(self, group: ProcessGroup) -> None:
        exit_ = await group.wait()
        name = group.spec.group
        del self._groups[name]
        await self._orphans.end(self._groups.values())
        log.info("group %s is gone: %s", name, exit_.reason)
        told = GroupExited(name, exit_.code, exit_.reason, exit_.log_tail, exit_.counter)
        if exit_.failure is not None:
            told = msgspec.structs.replace(
                told, failure=exit_.failure.reason, is_final=exit_.failure.is_final
            )
        await self._notify(told)

    async def _notify(self, message: AgentReport | GroupExited | Notice | Leaving) -> None:
        assert self._connection is not None
        try:
            async with asyncio.timeout(LAST_WORDS_S if self._leaving.is_set() else self._lease_s):
                await self._connection.notify(message)
        except (PeerGoneError, TimeoutError) as error:
            log.debug("%s was not told: %s", type(message).__name__, error)

    async def _end_groups(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for group in self._groups.values():
                grace_s = 0.0 if self._kills else group.spec.shutdown_grace_s
                stop = group.stop(grace_s, f"the node agent left: {self._reason}")
                tasks.create_task(stop, name=f"end {group.spec.group}")


def _fill_in(argument: str, address: str, directory: str) -> str:
    """Only a whole argument, or a file directly in the directory, is a placeholder: a name that a person has chosen may
    hold any characters."""
    if argument == COORDINATOR_PLACEHOLDER:
        return address
    head, slash, name = argument.partition("/")
    if head == DIRECTORY_PLACEHOLDER and slash and "/" not in name:
        return f"{directory}/{name}"
    return argument


def _write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        if not name or "/" in name or name.startswith("."):
            raise ValueError(f"file name {name!r}: give a plain one")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
