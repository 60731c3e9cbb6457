"""A core to talk to: say what happened, read what it wants done. Two trajectories a step, one turn each is enough."""

from typing import Any, TypeVar

from pearl.core.coordinator import Coordinator
from pearl.types import commands, events
from pearl.types.commands import AnyCommand, Command
from pearl.types.config import (
    Config,
    DataConfig,
    ElasticConfig,
    EnvironmentConfig,
    RolloutConfig,
    RunConfig,
    TrainingConfig,
)
from pearl.types.events import AnyEvent
from pearl.types.ids import GpuId, Incarnation, OpId, Slot, TrajectoryId
from pearl.types.trajectory import FinishReason, TokenDelta, VersionRun
from pearl.types.weights import Version

Kind = TypeVar("Kind", bound=Command)
FIRST = Incarnation(1)
PROMPT_TOKENS = 5


def one(done: list[AnyCommand], kind: type[Kind]) -> Kind:
    """Return the only command of that kind."""
    [found] = [command for command in done if isinstance(command, kind)]
    return found


def all_of(done: list[AnyCommand], kind: type[Kind]) -> list[Kind]:
    return [command for command in done if isinstance(command, kind)]


class Dialogue:
    """The time is ``now``; reports are left out of what the core answers."""

    def __init__(
        self,
        *,
        num_workers: int = 1,
        num_steps: int = 2,
        evaluation_tasks: int = 0,
        elastic: dict[str, Any] | None = None,
        training: dict[str, Any] | None = None,
        **rollout: Any,
    ) -> None:
        self.config = Config(
            run=RunConfig(num_steps=num_steps),
            data=DataConfig(batch_size=2, group_size=2),
            environment=EnvironmentConfig(num_evaluation_tasks=evaluation_tasks),
            rollout=RolloutConfig(**{"num_workers": num_workers, "staleness_bound": 0, **rollout}),
            training=TrainingConfig(**{"num_ranks": 1, **(training or {})}),
            elastic=ElasticConfig(**(elastic or {})),
        )
        self.core = Coordinator(self.config)
        self.now = 0.0
        self.version = Version(0, 0)
        self.reports: list[commands.Report] = []

    def say(self, event: AnyEvent) -> list[AnyCommand]:
        """Tell the core of an event; returns its commands without reports."""
        done = self.core.handle(event, self.now)
        self.core.check()
        self.reports += all_of(done, commands.Report)
        return [command for command in done if not isinstance(command, commands.Report)]

    # what a peer would answer

    def started(self) -> list[AnyCommand]:
        return self.say(events.Started(0, 0, True))

    def ready(self, start: commands.StartWorker) -> list[AnyCommand]:
        return self.say(events.WorkerReady(start.op, start.slot, start.incarnation, "host", 1))

    def trainer_ready(self, start: commands.StartTrainer) -> list[AnyCommand]:
        self.version = Version(start.lineage, start.restore_step or 0)
        return self.say(events.TrainerReady(start.op, start.incarnation, self.version, f"sum {self.version}"))

    def verified(
        self, update: commands.UpdateWeights | commands.ActivateWorker, checksum: str = ""
    ) -> list[AnyCommand]:
        found = checksum or f"sum {update.version}"
        return self.say(
            events.WeightsVerified(update.op, update.slot, update.incarnation, update.version, found, 0.1)
        )

    def opened(self, command: commands.OpenEpisode) -> list[AnyCommand]:
        return self.say(events.EpisodeOpened(command.op, command.trajectory, PROMPT_TOKENS, 0.1))

    def stepped(
        self, command: commands.StepEpisode, *, done: bool = True, reward: float = 1.0
    ) -> list[AnyCommand]:
        observation = 0 if done else 3
        return self.say(events.EpisodeStepped(command.op, command.trajectory, observation, reward, done, 0.1))

    def tokens(
        self,
        command: commands.Generate,
        count: int = 4,
        finish: FinishReason | None = "stop",
        version: Version | None = None,
    ) -> list[AnyCommand]:
        made = version or self.version
        runs = (VersionRun(made, count, made),) if count else ()
        delta = TokenDelta(command.attempt, count, runs, 0, finish)
        return self.say(events.TokensStreamed(command.slot, command.incarnation, (delta,)))

    def trained(self, command: commands.Train, checkpoint_step: int | None = None) -> list[AnyCommand]:
        self.version = Version(self.version.lineage, command.step + 1)
        return self.say(
            events.TrainFinished(
                command.op,
                command.incarnation,
                self.version,
                f"sum {self.version}",
                checkpoint_step,
                {},
                0.0,
                0,
            )
        )

    # where a conversation begins

    def serving(self) -> list[AnyCommand]:
        """Go on until every own worker serves version 0; returns the last answer, with the first episodes."""
        first = self.started()
        trainer = one(first, commands.StartTrainer)
        for start in all_of(first, commands.StartWorker):
            self.ready(start)
        done = self.trainer_ready(trainer)
        updates = all_of(done, commands.UpdateWeights)
        for update in updates:
            done = done + self.verified(update)
        return done

    def generating(self) -> list[commands.Generate]:
        """Go on until both trajectories of the first step generate."""
        done = self.serving()
        return [
            one(self.opened(opening), commands.Generate) for opening in all_of(done, commands.OpenEpisode)
        ]

    def trajectory(self, number: int = 0) -> TrajectoryId:
        return TrajectoryId(number)


def slot(number: int) -> Slot:
    return Slot(number)


def local(*numbers: int) -> tuple[GpuId, ...]:
    return tuple(GpuId(f"local/{number}") for number in numbers)


def op(number: int) -> OpId:
    return OpId(number)
