"""Performs the core's commands. Those with an outcome become a task each; the rest are done on return."""

from typing import assert_never

from pearl.runtime.token_store import TokenStore
from pearl.runtime.wal import DamagedError
from pearl.service.clients.environment_pool import EnvironmentPool
from pearl.service.clients.remote_hosts import RemoteHosts
from pearl.service.clients.rollout_workers import RolloutWorkers
from pearl.service.clients.training_client import TrainingClient
from pearl.service.clients.worker_control import WorkerControl
from pearl.service.console import Console
from pearl.service.loop.token_ingest import TokenIngest
from pearl.service.run_files import RunFiles
from pearl.types import commands
from pearl.types.commands import AnyCommand
from pearl.types.ids import TrajectoryId

CHANGES_TOKENS = (commands.VoidTokens, commands.TruncateTokens, commands.ForgetTokens)
"""Must be done before another event is admitted, whose tokens they would hit otherwise."""


class CommandExecutor:
    def __init__(
        self,
        store: TokenStore,
        frames: TokenIngest,
        environments: EnvironmentPool,
        workers: RolloutWorkers,
        handoff: WorkerControl,
        agents: RemoteHosts,
        trainer: TrainingClient,
        files: RunFiles,
        console: Console,
    ) -> None:
        self._store = store
        self._frames = frames
        self._environments = environments
        self._workers = workers
        self._worker_control = handoff
        self._agents = agents
        self._trainer = trainer
        self._files = files
        self._console = console
        self._kept: set[int] = set()  # trajectories that a resume has named
        self.finish: commands.Finish | None = None  # once the core has given it

    def perform(self, command: AnyCommand) -> None:
        match command:
            case commands.Generate():
                self._workers.generate(command)
            case commands.Abort():
                self._workers.abort(command.slot, command.incarnation, command.attempt)
            case commands.OpenEpisode():
                self._environments.open(command)
            case commands.StepEpisode():
                self._environments.step(command)
            case commands.CloseEpisode():
                self._environments.close(command.trajectory)
            case commands.VoidTokens():
                self._release(command.trajectory)
                self._store.restart(command.trajectory)
            case commands.TruncateTokens():
                self._truncate(command)
            case commands.ForgetTokens():
                self._release(command.trajectory)
                self._store.forget(command.trajectory)
            case commands.StartWorker():
                self._workers.start(command)
            case commands.StopWorker():
                self._workers.stop(command)
            case commands.UpdateWeights():
                self._worker_control.update(command, self._trainer.snapshot)
            case commands.Interrupt():
                self._workers.interrupt(command)
            case commands.ReleaseWorker():
                self._worker_control.release(command)
            case commands.ActivateWorker():
                self._worker_control.activate(command, self._trainer.snapshot)
            case commands.SetRole():
                self._worker_control.set_role(command)
            case commands.OffloadTraining():
                self._trainer.offload(command)
            case commands.RestoreTraining():
                self._trainer.restore(command)
            case commands.ReturnGpus():
                self._agents.return_gpus(command.gpus)
            case commands.StartTrainer():
                self._trainer.start(command)
            case commands.Train():
                self._trainer.train(command)
            case commands.StopTrainer():
                self._trainer.stop(command)
            case commands.RecordTrajectory():
                self._files.trajectory(command.record)
            case commands.Report():
                self._files.report(command)
                self._console.report(command)
            case commands.Finish():
                self.finish = command
            case _:
                assert_never(command)

    def _release(self, trajectory: TrajectoryId) -> None:
        """What is still on its way for the trajectory must not reach its next tokens."""
        self._frames.release(trajectory)
        self._environments.close(trajectory)

    def forget_the_rest(self) -> None:
        """After a resume has named all that lives: forget what was to be forgotten when the crash came."""
        for trajectory in self._store.trajectories():
            if trajectory not in self._kept:
                self._store.forget(trajectory)

    def _truncate(self, command: commands.TruncateTokens) -> None:
        self._kept.add(command.trajectory)
        there = self._store.length(command.trajectory)
        if there < command.tokens:
            raise DamagedError(
                f"{self._files.tokens}: has {there} tokens of trajectory {command.trajectory}, the journal says "
                f"{command.tokens}: files are missing there; restore them, or begin again in another directory"
            )
        if there > command.tokens:
            self._store.truncate(command.trajectory, command.tokens)
