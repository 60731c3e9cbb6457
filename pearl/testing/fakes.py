"""Stand-ins for the workers, over the real server: every peer is real, every answer quick.

Tokens are a pure function of (seed, position), rewards of the tokens, weights of the version, so that what a run
leaves can be compared with another one's. Faults are methods and flags of the cluster they belong to.
"""

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pearl.runtime.errors import RefusedError
from pearl.runtime.rpc_client import RpcClient
from pearl.types.config import (
    Config,
    DataConfig,
    EnvironmentConfig,
    RolloutConfig,
    RunConfig,
    RuntimeConfig,
    TrainingConfig,
    WarmStartConfig,
)
from pearl.types.messages import control, environment, rollout, training
from pearl.types.trajectory import VersionRun
from pearl.types.weights import Snapshot, Version

if TYPE_CHECKING:
    from pearl.testing.cluster import Cluster

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


def make_peer(
    runtime: RuntimeConfig, address: str, hello: control.Hello, messages: Any, handler: Any, beat: Any
) -> RpcClient:
    return RpcClient(
        address,
        hello=hello,
        messages=messages,
        handler=handler,
        heartbeat=beat,
        heartbeat_period_s=runtime.heartbeat_period_s,
        lease_s=runtime.lease_s,
        queue_messages=runtime.queue_messages,
        max_frame_bytes=runtime.max_frame_bytes,
    )


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
        iterations = (rollout.IterationStat(0.01, 1, 0, 4),) if ids else ()
        await self.peer.notify(rollout.Deltas(self.sequence, (delta,), iterations))
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
            case environment.DecodeTokens():
                return environment.DecodeTokensReply(None)
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


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
