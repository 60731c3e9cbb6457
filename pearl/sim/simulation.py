"""One simulated run: the production core, driven over virtual time by a world that answers its commands.

The same config, seed, workload, hardware and trace give the same journal, byte for byte.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pearl.core.coordinator import Coordinator
from pearl.sim.clock import VirtualClock
from pearl.sim.environments import Environments
from pearl.sim.hardware import Hardware
from pearl.sim.metrics_collector import MetricsCollector
from pearl.sim.preemption import Preemption
from pearl.sim.rollout_pool import RolloutPool
from pearl.sim.training_world import TrainingWorld
from pearl.sim.workload import Workload
from pearl.types import commands, events
from pearl.types.commands import AnyCommand
from pearl.types.config import Config
from pearl.types.events import AnyEvent
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
        self.core = Coordinator(config)
        self.metrics = MetricsCollector()
        self.finish: commands.Finish | None = None
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
        self.preemption = Preemption(clock, config, trace, post)
        self._answers = self._table()

    def run(self, horizon_s: float, on_progress: Callable[[float], None] | None = None) -> commands.Finish:
        """Run until the job is over or ``horizon_s`` has passed; a step that is cut off by the horizon is not
        counted."""
        self._pending.append(events.Started((0,), 0, 0, False))
        self.preemption.begin()
        self._drain()
        clock, next_report_s = self.clock, 0.0
        while self.finish is None:
            if on_progress is not None and clock.now >= next_report_s:
                on_progress(clock.now / horizon_s)
                next_report_s = clock.now + horizon_s / 100
            if not self._step(horizon_s):
                clock.now = horizon_s
                self._feed(events.StopRequested(SIGTERM))
        return self.finish

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
        while self._pending and self.finish is None:
            self._feed(self._pending.popleft())
            if not self._pending:
                self._wakeup = self.core.next_wakeup()  # changes with events only

    def _feed(self, event: AnyEvent) -> None:
        now = self.clock.now
        done = self.core.handle(event, now)
        if self._sink is not None:
            self._sink(now, event, done)
        answers = self._answers
        for command in done:
            answer = answers.get(type(command))
            if answer is not None:
                answer(command)

    def _table(self) -> dict[type[Any], Callable[[Any], None]]:
        """Who answers what. Commands that only write files need no answer and are not here."""
        pool, training, environments = self.pool, self.training, self.environments
        return {
            commands.StartWorker: pool.start,
            commands.StopWorker: pool.stop,
            commands.UpdateWeights: pool.update,
            commands.Generate: pool.generate,
            commands.Abort: pool.abort,
            commands.Interrupt: pool.interrupt,
            commands.SetRole: pool.set_role,
            commands.ReleaseWorker: pool.release,
            commands.ActivateWorker: pool.activate,
            commands.OpenEpisode: environments.open,
            commands.StepEpisode: environments.step,
            commands.CloseEpisode: lambda command: environments.close(command.trajectory),
            commands.VoidTokens: lambda command: environments.void(command.trajectory),
            commands.ForgetTokens: lambda command: environments.forget(command.trajectory),
            commands.StartTrainer: training.start,
            commands.Train: training.train,
            commands.OffloadTraining: training.offload,
            commands.RestoreTraining: training.restore,
            commands.StopTrainer: training.stop,
            commands.ReturnGpus: self.preemption.returned,
            commands.Report: self._report,
            commands.Finish: self._finished,
        }

    def _report(self, command: commands.Report) -> None:
        self.metrics.add(command.kind, command.values)
        if command.kind == "step":
            self.preemption.on_step(int(command.values["step"] or 0) + 1)

    def _finished(self, command: commands.Finish) -> None:
        self.finish = command
