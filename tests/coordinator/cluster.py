"""An in-process stand-in for the node agent and all workers, over the real hub: every peer is real, every answer quick.

Tokens are a pure function of (seed, position), rewards of the tokens, weights of the version, so that what a run
leaves can be compared with another one's. Faults are methods and flags.
"""

import asyncio
import struct
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import msgspec

from pearl.runtime.errors import PeerGoneError, RefusedError, RemoteError
from pearl.runtime.peer import Peer
from pearl.state.config import (
    Config,
    DataConfig,
    EnvironmentConfig,
    RolloutConfig,
    RunConfig,
    TrainingConfig,
    WarmStartConfig,
)
from pearl.state.messages import control, environment, rollout, training
from pearl.state.trajectory import VersionRun
from pearl.state.weights import Snapshot, Version

RUN_ID = "run"
VOCABULARY = 16
STOP = 1
NUM_TURNS = 2


def small_config(**rollout_settings: Any) -> Config:
    return Config(
        run=RunConfig(num_steps=3),
        data=DataConfig(batch_size=8, group_size=4),
        environment=EnvironmentConfig(num_evaluation_tasks=3, max_turns=4),
        rollout=RolloutConfig(max_requests_per_worker=4, **rollout_settings),
        training=TrainingConfig(checkpoint_every=1),
        warm_start=WarmStartConfig(num_steps=2, warmup_steps=0, num_demonstrations=300),
    )


def pack(ids: Iterable[int]) -> bytes:
    values = list(ids)
    return struct.pack(f"<{len(values)}i", *values)


def floats(values: Iterable[float]) -> bytes:
    numbers = list(values)
    return struct.pack(f"<{len(numbers)}f", *numbers)


def unpack(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}i", packed))


def checksum(version: Version) -> str:
    return f"sum-{version}"


def snapshot(version: Version) -> Snapshot:
    return Snapshot(version, 0, (), (), (), checksum(version))


class Group:
    """One fake worker: a peer in a task."""

    kind: control.PeerKind = "rollout"
    messages: Any = None

    def __init__(self, cluster: "Cluster", name: str) -> None:
        self.cluster = cluster
        self.name = name
        _, slot, incarnation = name.split(".")
        self.slot, self.incarnation = int(slot), int(incarnation)
        self.progress = 0
        self.counter: int | None = None
        self.peer = cluster.make_peer(
            self.kind, self.slot, self.incarnation, self.messages, self.handle, self.beat
        )
        self.log_tail = ""

    def beat(self) -> control.Heartbeat:
        return control.Heartbeat(self.progress)

    async def handle(self, message: Any) -> Any:
        raise NotImplementedError

    async def run(self) -> None:
        try:
            await self.peer.run()
        except RefusedError:
            return


class FakeRollout(Group):
    kind = "rollout"
    messages = rollout.RolloutMessage

    def __init__(self, cluster: "Cluster", name: str) -> None:
        super().__init__(cluster, name)
        self.counter = 0
        self.sequence = 0
        self.version: Version | None = None
        self.aborted: set[int] = set()
        self.held: dict[int, rollout.Generate] = {}  # attempts that end when they are interrupted
        self.is_asleep = False

    async def handle(self, message: Any) -> Any:
        self.progress += 1
        match message:
            case rollout.UpdateWeights():
                assert not self.is_asleep
                self.version = message.snapshot.version
                return rollout.UpdateWeightsReply(self.version, checksum(self.version), 0.0, 0.0)
            case rollout.Generate():
                await self.generate(message)
            case rollout.Abort():
                self.aborted.add(message.attempt)
            case rollout.Interrupt():
                await self.interrupt()
            case rollout.Release():
                await self.cluster.before_release(self)
                await self.interrupt()
                self.is_asleep, self.version = True, None
                return rollout.ReleaseReply(1000, {"release": 0.25})
            case rollout.Activate():
                self.is_asleep, self.version = False, message.snapshot.version
                return rollout.ActivateReply(self.version, checksum(self.version), {"load": 0.5})
            case rollout.SetRole():
                return rollout.SetRoleReply(message.role, 0.0)
        return None

    async def interrupt(self) -> None:
        for request in [*self.held.values()]:
            assert self.version is not None
            await self.stream(request, [3], self.version, "abort")
        self.held.clear()

    async def generate(self, request: rollout.Generate) -> None:
        """All tokens of the turn in two frames; the last token is an end token."""
        version = self.version
        assert version is not None, "asked before it had weights"
        assert not self.is_asleep, "asked while it was asleep"
        self.cluster.requests.append(request)
        if self.cluster.holds(self):
            self.held[request.attempt] = request
            return
        start = len(request.ids) // 4
        count = min(request.params.max_new_tokens, 3)
        ids = [2 + (request.seed >> (8 * i % 56)) % (VOCABULARY - 2) for i in range(start, start + count - 1)]
        ids.append(request.params.stop_ids[0])
        for part, finish in ((ids[:1], None), (ids[1:], "stop")):
            await self.stream(request, part, version, finish)
            self.cluster.on_frame(self)

    async def stream(self, request: rollout.Generate, ids: list[int], version: Version, finish: Any) -> None:
        logprobs = [self.cluster.logprob(request, token) for token in ids]
        runs = (VersionRun(version, len(ids), version),) if ids else ()
        assert self.counter is not None
        self.counter += len(ids)
        delta = rollout.AttemptDelta(request.attempt, pack(ids), floats(logprobs), runs, 1, finish)
        passes = (rollout.IterationStat(0.01, 1, 0, 4),) if ids else ()
        await self.peer.tell(rollout.Deltas(self.sequence, (delta,), passes))
        self.sequence += 1


class FakeTraining(Group):
    kind = "training"
    messages = training.TrainingMessage

    def __init__(self, cluster: "Cluster", name: str) -> None:
        super().__init__(cluster, name)
        self.version = Version(0, 0)
        self.samples: list[training.Sample] = []
        self.is_away = False

    async def handle(self, message: Any) -> Any:
        cluster = self.cluster
        match message:
            case training.AddDemonstrations():
                cluster.num_demonstrations += len(message.demonstrations)
            case training.StartTraining():
                self.version = Version(message.lineage, message.restore_step or 0)
                return training.StartTrainingReply(
                    snapshot(self.version), message.restore_step is not None, {}
                )
            case training.AddSamples():
                self.samples.extend(message.samples)
            case training.Offload():
                cluster.before_offload(self)
                self.is_away = True
                return training.OffloadReply(2000, {"backup": 0.125})
            case training.Restore():
                assert self.is_away
                self.is_away = False
                return training.RestoreReply({"restore": 0.0625})
            case training.TrainStep():
                assert not self.is_away
                assert message.num_samples == len(self.samples)
                assert message.step == self.version.step
                cluster.trained[self.version] = sorted(self.samples, key=lambda sample: sample.trajectory)
                self.samples = []
                self.version = Version(self.version.lineage, self.version.step + 1)
                checkpoint = self.version.step if message.checkpoint else None
                return training.TrainStepReply(snapshot(self.version), checkpoint, {"loss": 0.5}, 0.0, 0)
        return None


class FakeEnvironment(Group):
    kind = "environment"
    messages = environment.EnvironmentMessage | control.StatusReply

    def __init__(self, cluster: "Cluster", name: str) -> None:
        super().__init__(cluster, name)
        self.open: dict[int, int] = {}  # answered turns an episode

    async def handle(self, message: Any) -> Any:
        match message:
            case environment.Describe():
                return environment.DescribeReply(VOCABULARY, (STOP,), 0, 0, 0, True)
            case environment.Demonstrate():
                one = training.Demonstration(pack([2, 3]), floats([0.0, 1.0]))
                return environment.DemonstrateReply((one,) * message.count)
            case environment.OpenEpisode():
                self.open[message.trajectory] = len(message.actions)
                self.cluster.replayed += bool(message.actions)
                return environment.OpenEpisodeReply(self.cluster.prompt(message.task), 0.001)
            case environment.StepEpisode():
                return self.step(message)
            case environment.CloseEpisode():
                self.open.pop(message.trajectory, None)
        return None

    def step(
        self, message: environment.StepEpisode
    ) -> environment.StepEpisodeReply | environment.EpisodeFailed:
        if self.open.get(message.trajectory) != message.turn:
            return environment.EpisodeFailed(
                "gone", f"no episode of {message.trajectory} at turn {message.turn}"
            )
        self.cluster.on_step(message)
        self.open[message.trajectory] += 1
        done = message.turn + 1 == NUM_TURNS
        reward = sum(unpack(message.action)) % 2
        return environment.StepEpisodeReply(b"" if done else pack([5, 6]), float(reward), done, 0.001)


class Node:
    """Another host's agent: joins, starts groups, gives notice, dies."""

    def __init__(self, cluster: "Cluster", host: str, num_gpus: int, slot: int, incarnation: int = 1) -> None:
        self.cluster = cluster
        self.host = host
        self.gpus = tuple(f"{host}/{index}" for index in range(num_gpus))
        self.preemptible = True
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
        report = control.AgentReport(self.host, gpus, 1, 1, self.preemptible)
        try:
            await self.peer.ask(report, deadline_s=10)
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
                return control.StopGroupReply(message.group, -9, 1)
            case control.GpusReturned():
                self.returned.extend(message.gpus)
                if set(self.returned) >= set(self.gpus):
                    self.all_returned.set()
        return None

    async def notice(self, grace_s: float) -> None:
        await self.peer.tell(control.Notice(grace_s, "spot"))

    async def leave(self) -> None:
        """As it should: its groups end first."""
        self._end_groups()
        await self.peer.tell(control.Leaving("done"))

    def vanish(self) -> None:
        """As a host that lost its power: nobody hears of it or its groups any more."""
        self.peer.faults.partition("coordinator")
        for name in self.groups & self.cluster.groups.keys():
            self.cluster.groups[name].peer.faults.partition("coordinator")

    def kill(self) -> None:
        """As ``kill -9``, by which its groups die too."""
        assert self.task is not None
        self.peer.faults.partition("coordinator")
        self.task.cancel()
        self._end_groups()

    def _end_groups(self) -> None:
        for name in self.groups:
            self.cluster.kill(name)


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
    ) -> Peer:
        runtime = self.config.runtime
        return Peer(
            self.address,
            hello=control.Hello(kind, slot, incarnation, "here", 1000 + len(self.started), run_id),
            messages=messages,
            handler=handler,
            heartbeat=beat,
            heartbeat_period_s=runtime.heartbeat_period_s,
            lease_s=runtime.lease_s,
            queue_messages=runtime.queue_messages,
            max_frame_bytes=runtime.max_frame_bytes,
        )

    # the part of LocalAgent

    async def launch(self, address: str) -> None:
        self.address = address
        self.agent = self.make_peer(
            "agent", 0, 1, control.ControlMessage, self._handle, lambda: control.Heartbeat(0)
        )
        self._launched.set()

    async def report(self) -> control.AgentReport:
        await self._reported.wait()
        return control.AgentReport("here", (), 1, 1 << 30)

    def reported(self, report: control.AgentReport) -> None:
        self._reported.set()

    async def outlive(self) -> str:
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
            group.create_task(self._tell_report())
            await self.agent.run()
            if self._nodes:
                await asyncio.wait(self._nodes, timeout=0.2)  # they are told to end, too
            for task in [*self._tasks.values(), *self._nodes]:
                task.cancel()
        self._over.set()

    async def _tell_report(self) -> None:
        await self.agent.tell(control.AgentReport("here", (), 1, 1 << 30))

    def join(self, host: str, num_gpus: int, *, slot: int = 0, incarnation: int = 1) -> Node:
        """Another host joins; agents are told apart by their slots."""
        assert self._group is not None
        self.num_nodes += 1
        node = self.nodes[host] = Node(self, host, num_gpus, slot or 100 + self.num_nodes, incarnation)
        node.task = self._group.create_task(node.run(), name=host)
        self._nodes.append(node.task)
        return node

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Something that happens while the run goes on; its failure is the cluster's."""
        assert self._group is not None
        return self._group.create_task(coroutine)

    def start_group(self, spec: control.StartGroup, agent: Peer) -> control.StartGroupReply:
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
                return control.StopGroupReply(message.group, -9, 1)
        return None

    async def _live(self, group: Group, agent: Peer) -> None:
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
            await agent.tell(told)
        except PeerGoneError:
            return

    def kill(self, name: str) -> None:
        """As ``kill -9``; what the peer has sent is on its way."""
        task = self._tasks.pop(name, None)
        if task is not None:
            self.groups[name].peer.faults.partition("coordinator")  # the dead hear nothing
            task.cancel()


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
