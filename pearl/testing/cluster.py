"""An in-process stand-in for the node agents: each starts its stand-ins for workers as it is asked to."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from pearl.runtime.errors import PeerGoneError, RefusedError, RemoteError
from pearl.runtime.installation import installation, model_digest
from pearl.runtime.rpc_client import RpcClient
from pearl.testing.fakes import RUN_ID, FakeEnvironment, FakeRollout, FakeTraining, Group, make_peer, pack
from pearl.types.config import Config
from pearl.types.messages import control, environment, rollout, training
from pearl.types.weights import Version


class Node:
    """Another host's agent: joins, starts groups, gives notice, dies."""

    def __init__(self, cluster: "Cluster", host: str, num_gpus: int, slot: int, incarnation: int = 1) -> None:
        self.cluster = cluster
        self.host = host
        self.gpus = tuple(f"{host}/{index}" for index in range(num_gpus))
        self.pool: control.HostPool = "spot"
        self.groups: set[str] = set()
        self.specs: list[control.StartGroup] = []
        self.returned: list[str] = []
        self.error = ""  # why it was not taken in
        self.outcome = ""  # why its connection ended
        self.joined = asyncio.Event()
        self.all_returned = asyncio.Event()
        self.gone = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.peer = cluster.make_peer(
            "agent", slot, incarnation, control.ControlMessage, self.handle, lambda: control.Heartbeat(0), ""
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._introduce())
            try:
                self.outcome = await self.peer.run()
            except RefusedError as error:
                self.outcome = str(error)
        self._end_groups()
        self.gone.set()

    async def _introduce(self) -> None:
        gpus = tuple(control.Gpu(gpu, 1, True) for gpu in self.gpus)
        model = model_digest(self.cluster.config.model.path)
        report = control.AgentReport(self.host, gpus, 1, self.pool, model)
        try:
            await self.peer.call(report, deadline_s=10)
        except (RemoteError, PeerGoneError) as error:
            self.error = str(error)
        self.joined.set()

    async def handle(self, message: Any) -> Any:
        match message:
            case control.StartGroup():
                self.groups.add(message.group)
                self.specs.append(message)
                return self.cluster.start_group(message, self.peer)
            case control.StopGroup():
                self.cluster.kill(message.group)
                return control.StopGroupReply(message.group, -9)
            case control.GpusReturned():
                self.returned.extend(message.gpus)
                if set(self.returned) >= set(self.gpus):
                    self.all_returned.set()
        return None

    async def notice(self, grace_s: float) -> None:
        await self.peer.notify(control.Notice(grace_s, "spot"))

    async def leave(self) -> None:
        """Leave in order: its groups end first."""
        self._end_groups()
        await self.peer.notify(control.Leaving("done"))

    def vanish(self) -> None:
        """Go as a host that lost its power: nobody hears of it or its groups any more."""
        self.peer.faults.partition("coordinator")
        for name in self.groups & self.cluster.groups.keys():
            self.cluster.groups[name].peer.faults.partition("coordinator")

    def kill(self) -> None:
        """End as after ``kill -9``, by which its groups die too."""
        assert self.task is not None
        self.peer.faults.partition("coordinator")
        self.task.cancel()
        self._end_groups()

    def _end_groups(self) -> None:
        for name in self.groups:
            self.cluster.kill(name)


async def ignore(message: Any) -> None:
    """Drop it: nobody tells an admin anything that matters."""


async def at_once(worker: FakeRollout) -> None:
    """Do not delay a release."""


class Cluster:
    """The fake node agent; stands in for ``LocalAgent``. Other hosts are nodes."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.kinds: dict[str, type[Group]] = {
            "rollout": FakeRollout,
            "training": FakeTraining,
            "environment": FakeEnvironment,
        }
        self.groups: dict[str, Group] = {}
        self.started: list[str] = []
        self.requests: list[rollout.Generate] = []
        self.trained: dict[Version, list[training.Sample]] = {}
        self.num_demonstrations = 0
        self.replayed = 0
        self.logprob: Callable[[rollout.Generate, int], float] = lambda request, token: -0.5
        self.prompt: Callable[[int], bytes] = lambda task: pack([2, 3, 4 + task % 8])
        self.on_frame: Callable[[FakeRollout], None] = lambda worker: None
        self.on_step: Callable[[environment.StepEpisode], None] = lambda step: None
        self.holds: Callable[[FakeRollout], bool] = lambda worker: False
        self.before_release: Callable[[FakeRollout], Awaitable[None]] = at_once
        self.before_offload: Callable[[FakeTraining], None] = lambda world: None
        self.nodes: dict[str, Node] = {}
        self.num_nodes = 0
        self.address = ""
        self._launched = asyncio.Event()
        self._reported = asyncio.Event()
        self.is_running = asyncio.Event()
        self._over = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._nodes: list[asyncio.Task[None]] = []
        self._group: asyncio.TaskGroup | None = None

    def make_peer(
        self,
        kind: control.PeerKind,
        slot: int,
        incarnation: int,
        messages: Any,
        handler: Any,
        beat: Any,
        run_id: str = RUN_ID,
    ) -> RpcClient:
        hello = control.Hello(
            kind,
            slot,
            incarnation,
            "here",
            1000 + len(self.started),
            run_id,
            installation=installation(self.config),
        )
        return make_peer(self.config.runtime, self.address, hello, messages, handler, beat)

    # the part of LocalAgent

    async def launch(self, address: str) -> None:
        self.address = address
        self.agent = self.make_peer(
            "agent", 0, 1, control.ControlMessage, self._handle, lambda: control.Heartbeat(0)
        )
        self.admin = self.make_peer(
            "admin", 1, 1, control.ControlMessage, ignore, lambda: control.Heartbeat(0)
        )
        self._launched.set()

    async def report(self) -> control.AgentReport:
        await self._reported.wait()
        return control.AgentReport("here", (), 1 << 30)

    def reported(self, report: control.AgentReport) -> None:
        self._reported.set()

    async def wait_exited(self) -> str:
        await self._over.wait()
        return "the fake agent ended"

    async def end(self, limit_s: float) -> bool:
        async with asyncio.timeout(limit_s):
            await self._over.wait()
        return True

    # running

    async def run(self) -> None:
        """Serve from the launch until the agent is told to end."""
        await self._launched.wait()
        async with asyncio.TaskGroup() as group:
            self._group = group
            self.is_running.set()
            group.create_task(self._tell_report())
            admin = group.create_task(self.admin.run(), name="admin")
            await self.agent.run()
            if self._nodes:
                await asyncio.wait(self._nodes, timeout=0.2)  # they are told to end, too
            for task in [*self._tasks.values(), *self._nodes, admin]:
                task.cancel()
        self._over.set()

    async def _tell_report(self) -> None:
        await self.agent.notify(control.AgentReport("here", (), 1 << 30))

    def join(
        self,
        host: str,
        num_gpus: int,
        *,
        slot: int = 0,
        incarnation: int = 1,
        pool: control.HostPool = "spot",
    ) -> Node:
        """Another host joins; agents are told apart by their slots."""
        assert self._group is not None
        self.num_nodes += 1
        node = self.nodes[host] = Node(self, host, num_gpus, slot or 100 + self.num_nodes, incarnation)
        node.pool = pool
        node.task = self._group.create_task(node.run(), name=host)
        self._nodes.append(node.task)
        return node

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Something that happens while the run goes on; its failure is the cluster's."""
        assert self._group is not None
        return self._group.create_task(coroutine)

    def start_group(self, spec: control.StartGroup, agent: RpcClient) -> control.StartGroupReply:
        assert self._group is not None
        self.started.append(spec.group)
        group = self.groups[spec.group] = self.kinds[spec.group.split(".")[0]](self, spec.group)
        self._tasks[spec.group] = self._group.create_task(self._live(group, agent), name=spec.group)
        return control.StartGroupReply(spec.group, 1)

    async def _handle(self, message: Any) -> Any:
        match message:
            case control.StartGroup():
                return self.start_group(message, self.agent)
            case control.StopGroup():
                self.kill(message.group)
                return control.StopGroupReply(message.group, -9)
        return None

    async def _live(self, group: Group, agent: RpcClient) -> None:
        reason = "exited with code 0"
        try:
            await group.run()
        except asyncio.CancelledError:
            if group.name in self._tasks:
                raise  # the end of the cluster
            reason = "killed by signal 9"
        self._tasks.pop(group.name, None)
        del self.groups[group.name]
        told = control.GroupExited(group.name, -9, reason, group.log_tail, group.counter)
        try:
            await agent.notify(told)
        except PeerGoneError:
            return

    def kill(self, name: str) -> None:
        """End as after ``kill -9``; what the peer has sent is on its way."""
        task = self._tasks.pop(name, None)
        if task is not None:
            self.groups[name].peer.faults.partition("coordinator")  # the dead hear nothing
            task.cancel()
