"""One simulated run: the production core, driven over virtual time by a world that answers its commands.

The same config, seed, workload, hardware and trace give the same journal, byte for byte.
"""

from collections import deque
from collections.abc import Callable, Sequence

from pearl.core.coordinator import Coordinator
from pearl.service.own_router import load_router
from pearl.sim.clock import VirtualClock
from pearl.sim.environments import Environments
from pearl.sim.hardware import Hardware
from pearl.sim.metrics_collector import MetricsCollector
from pearl.sim.preemption import Preemption
from pearl.sim.rollout_pool import RolloutPool
from pearl.sim.training_world import TrainingWorld
from pearl.sim.workload import Workload
from pearl.types import commands, events
from pearl.types.command_handler import dispatch
from pearl.types.commands import AnyCommand
from pearl.types.config import Config
from pearl.types.events import AnyEvent
from pearl.types.ids import GpuId
from pearl.types.reports import StepReport
from pearl.types.trace import TraceEvent

Sink = Callable[[float, AnyEvent, list[AnyCommand]], None]
"""Takes what a journal holds: (now, event, commands)."""
SIGTERM = 15


class Simulation:
    def __init__(
        self,
        config: Config,
        workload: Workload,
        hardware: Hardware,
        seed: int,
        *,
        trace: Sequence[TraceEvent] = (),
        sink: Sink | None = None,
    ) -> None:
        self.clock = clock = VirtualClock()
        self.core = Coordinator(config, router=load_router(config))
        self.metrics = MetricsCollector()
        self.finished: commands.Finish | None = None
        self._sink = sink
        self._pending: deque[AnyEvent] = deque()
        self._wakeup: float | None = None
        post = self._pending.append
        self.environments = Environments(
            clock,
            workload,
            seed,
            config.data.group_size,
            config.environment.max_observation_tokens,
            hardware,
            post,
        )
        self.pool = RolloutPool(clock, hardware, self.environments, seed, post)
        self.training = TrainingWorld(clock, hardware, config.training.num_ranks, post)
        self._reserved = tuple(GpuId(f"reserved/{index}") for index in range(config.rollout.reserved_gpus))
        self.preemption = Preemption(clock, config, trace, post)

    def run(self, horizon_s: float, on_progress: Callable[[float], None] | None = None) -> commands.Finish:
        """Run until the job is over or ``horizon_s`` has passed; a step that is cut off by the horizon is not
        counted."""
        self._pending.append(events.Started(0, 0, False, self._reserved))
        self.preemption.begin()
        self._drain()
        clock, next_report_s = self.clock, 0.0
        while self.finished is None:
            if on_progress is not None and clock.now >= next_report_s:
                on_progress(clock.now / horizon_s)
                next_report_s = clock.now + horizon_s / 100
            if not self._step(horizon_s):
                clock.now = horizon_s
                self._feed(events.StopRequested(SIGTERM))
        return self.finished

    def _step(self, horizon_s: float) -> bool:
        """Run the next action; False when there is none before the horizon."""
        due, wakeup = self.clock.next_time(), self._wakeup
        if wakeup is not None and (due is None or wakeup < due):
            if wakeup >= horizon_s:
                return False
            self.clock.now = max(self.clock.now, wakeup)
            self._pending.append(events.Tick())
        elif due is None or due >= horizon_s:
            return False
        else:
            self.clock.step()
        self._drain()
        return True

    def _drain(self) -> None:
        while self._pending and self.finished is None:
            self._feed(self._pending.popleft())
            if not self._pending:
                self._wakeup = self.core.next_wakeup()  # changes with events only

    def _feed(self, event: AnyEvent) -> None:
        now = self.clock.now
        done = self.core.handle(event, now)
        if self._sink is not None:
            self._sink(now, event, done)
        for command in done:
            dispatch(command, self)

    # what the commands do in the simulated world

    def start_worker(self, command: commands.StartWorker) -> None:
        self.pool.start(command)

    def stop_worker(self, command: commands.StopWorker) -> None:
        self.pool.stop(command)

    def update_weights(self, command: commands.UpdateWeights) -> None:
        self.pool.update(command)

    def generate(self, command: commands.Generate) -> None:
        self.pool.generate(command)

    def abort(self, command: commands.Abort) -> None:
        self.pool.abort(command)

    def open_episode(self, command: commands.OpenEpisode) -> None:
        self.environments.open(command)

    def step_episode(self, command: commands.StepEpisode) -> None:
        self.environments.step(command)

    def close_episode(self, command: commands.CloseEpisode) -> None:
        self.environments.close(command.trajectory)

    def void_tokens(self, command: commands.VoidTokens) -> None:
        self.environments.void(command.trajectory)

    def truncate_tokens(self, command: commands.TruncateTokens) -> None:
        """Do nothing: a simulation is never resumed, and holds no tokens."""

    def forget_tokens(self, command: commands.ForgetTokens) -> None:
        self.environments.forget(command.trajectory)

    def start_trainer(self, command: commands.StartTrainer) -> None:
        self.training.start(command)

    def train(self, command: commands.Train) -> None:
        self.training.train(command)

    def interrupt(self, command: commands.Interrupt) -> None:
        self.pool.interrupt(command)

    def set_role(self, command: commands.SetRole) -> None:
        self.pool.set_role(command)

    def release_worker(self, command: commands.ReleaseWorker) -> None:
        self.pool.release(command)

    def activate_worker(self, command: commands.ActivateWorker) -> None:
        self.pool.activate(command)

    def offload_training(self, command: commands.OffloadTraining) -> None:
        self.training.offload(command)

    def restore_training(self, command: commands.RestoreTraining) -> None:
        self.training.restore(command)

    def return_gpus(self, command: commands.ReturnGpus) -> None:
        """Do nothing: the GPUs count as gone since the notice."""

    def answer_preempt(self, command: commands.AnswerPreempt) -> None:
        self.preemption.answered(command)

    def stop_trainer(self, command: commands.StopTrainer) -> None:
        self.training.stop(command)

    def record_trajectory(self, command: commands.RecordTrajectory) -> None:
        """Do nothing: a simulation writes no files."""

    def report(self, command: commands.Report) -> None:
        self.metrics.add(command.report)
        if isinstance(command.report, StepReport):
            self.preemption.on_step(command.report.step + 1)

    def finish(self, command: commands.Finish) -> None:
        self.finished = command
