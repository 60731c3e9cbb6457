"""Performs the core's commands. Those with an outcome become a task each; the rest are done on return."""

from pearl.runtime.token_store import TokenStore
from pearl.runtime.wal import DamagedError
from pearl.service.clients.environment_pool import EnvironmentPool
from pearl.service.clients.remote_hosts import RemoteHosts
from pearl.service.clients.rollout_workers import RolloutWorkers
from pearl.service.clients.training_client import TrainingClient
from pearl.service.clients.worker_control import WorkerControl
from pearl.service.console import Console
from pearl.service.loop.pending_preempts import PendingPreempts
from pearl.service.loop.token_ingest import TokenIngest
from pearl.service.run_files import RunFiles
from pearl.service.samples import SampleWriter
from pearl.types import commands
from pearl.types.command_handler import dispatch
from pearl.types.commands import AnyCommand
from pearl.types.ids import TrajectoryId

CHANGES_TOKENS = (commands.VoidTokens, commands.TruncateTokens, commands.ForgetTokens)
"""Must be done before another event is admitted, whose tokens they would hit otherwise."""


class CommandExecutor:
    def __init__(
        self,
        store: TokenStore,
        tokens: TokenIngest,
        environments: EnvironmentPool,
        workers: RolloutWorkers,
        worker_control: WorkerControl,
        hosts: RemoteHosts,
        trainer: TrainingClient,
        preempts: PendingPreempts,
        files: RunFiles,
        console: Console,
        samples: SampleWriter,
    ) -> None:
        self._store = store
        self._tokens = tokens
        self._environments = environments
        self._workers = workers
        self._worker_control = worker_control
        self._hosts = hosts
        self._trainer = trainer
        self._preempts = preempts
        self._files = files
        self._console = console
        self._samples = samples
        self._kept: set[int] = set()  # trajectories that a resume has named
        self.finished: commands.Finish | None = None  # once the core has given it

    def perform(self, command: AnyCommand) -> None:
        dispatch(command, self)

    def start_worker(self, command: commands.StartWorker) -> None:
        self._workers.start(command)

    def stop_worker(self, command: commands.StopWorker) -> None:
        self._workers.stop(command)

    def update_weights(self, command: commands.UpdateWeights) -> None:
        self._worker_control.update(command, self._trainer.snapshot)

    def generate(self, command: commands.Generate) -> None:
        self._workers.generate(command)

    def abort(self, command: commands.Abort) -> None:
        self._workers.abort(command.slot, command.incarnation, command.attempt)

    def open_episode(self, command: commands.OpenEpisode) -> None:
        self._environments.open(command)

    def step_episode(self, command: commands.StepEpisode) -> None:
        self._environments.step(command)

    def close_episode(self, command: commands.CloseEpisode) -> None:
        self._environments.close(command.trajectory)

    def void_tokens(self, command: commands.VoidTokens) -> None:
        self._release(command.trajectory)
        self._store.restart(command.trajectory)

    def truncate_tokens(self, command: commands.TruncateTokens) -> None:
        self._kept.add(command.trajectory)
        there = self._store.length(command.trajectory)
        if there < command.tokens:
            raise DamagedError(
                f"{self._files.tokens}: has {there} tokens of trajectory {command.trajectory}, the journal says "
                f"{command.tokens}: files are missing there; restore them, or begin again in another directory"
            )
        if there > command.tokens:
            self._store.truncate(command.trajectory, command.tokens)

    def forget_tokens(self, command: commands.ForgetTokens) -> None:
        self._release(command.trajectory)
        self._store.forget(command.trajectory)

    def start_trainer(self, command: commands.StartTrainer) -> None:
        self._trainer.start(command)

    def train(self, command: commands.Train) -> None:
        self._trainer.train(command)

    def interrupt(self, command: commands.Interrupt) -> None:
        self._workers.interrupt(command)

    def set_role(self, command: commands.SetRole) -> None:
        self._worker_control.set_role(command)

    def release_worker(self, command: commands.ReleaseWorker) -> None:
        self._worker_control.release(command)

    def activate_worker(self, command: commands.ActivateWorker) -> None:
        self._worker_control.activate(command, self._trainer.snapshot)

    def offload_training(self, command: commands.OffloadTraining) -> None:
        self._trainer.offload(command)

    def restore_training(self, command: commands.RestoreTraining) -> None:
        self._trainer.restore(command)

    def return_gpus(self, command: commands.ReturnGpus) -> None:
        self._hosts.return_gpus(command.gpus)

    def answer_preempt(self, command: commands.AnswerPreempt) -> None:
        self._preempts.answer(command)

    def stop_trainer(self, command: commands.StopTrainer) -> None:
        self._trainer.stop(command)

    def record_trajectory(self, command: commands.RecordTrajectory) -> None:
        self._files.trajectory(command.record)
        self._samples.offer(command.record)

    def report(self, command: commands.Report) -> None:
        self._files.report(command)
        self._console.report(command.report)

    def finish(self, command: commands.Finish) -> None:
        self.finished = command

    def _release(self, trajectory: TrajectoryId) -> None:
        """Drop what is still under way for the trajectory: it must not reach its next tokens."""
        self._tokens.release(trajectory)
        self._environments.close(trajectory)

    def forget_the_rest(self) -> None:
        """After a resume has named all that lives: forget what was to be forgotten when the crash came."""
        for trajectory in self._store.trajectories():
            if trajectory not in self._kept:
                self._store.forget(trajectory)
