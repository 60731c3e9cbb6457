"""A small world that answers the core's commands in virtual time, with failures on request.

It stands for workers, environments and the trainer: every command is answered after a random delay, in any order.
It counts tokens on its own, so that tests can compare what the core believes with what was made.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from pearl.core.coordinator import Coordinator
from pearl.types import commands, events
from pearl.types.commands import AnyCommand
from pearl.types.config import Config
from pearl.types.events import AnyEvent
from pearl.types.ids import AttemptId, GpuId, Incarnation, Slot, TrajectoryId
from pearl.types.profile import IterationSums
from pearl.types.reports import AnyReport, NoteReport
from pearl.types.trajectory import FinishReason, TokenDelta, TrajectoryRecord, VersionRun
from pearl.types.weights import Version


def checksum(version: Version) -> str:
    return f"sum-{version}"


@dataclass
class Running:
    command: commands.Generate
    left: int
    prefill: int
    waits_for_kv: bool = False


@dataclass
class Worker:
    incarnation: Incarnation
    version: Version | None = None
    running: dict[AttemptId, Running] = field(default_factory=dict)
    sampled: int = 0
    holds_memory: bool = True
    role: str = "colocated"
    halves: dict[AttemptId, commands.Generate] = field(default_factory=dict)  # prefill stages it has


class World:
    """``run`` drives the core to its end; ``entries`` is the journal. Faults are methods; rates are fractions."""

    def __init__(
        self, config: Config, seed: int = 0, can_restore: bool = True, num_train_tasks: int = 0
    ) -> None:
        self.config = config
        self.rng = random.Random(f"{seed}/world")
        self.core = Coordinator(config)
        self.now = 0.0
        self.sequence = 0
        self.queue: list[tuple[float, int, AnyEvent | Callable[[], None]]] = []
        self.token_s = 0.0  # between the tokens of an attempt; 0 = all are made when it is asked for
        self.entries: list[tuple[float, AnyEvent, list[AnyCommand]]] = []
        self.workers: dict[Slot, Worker] = {}
        self.trainer: Incarnation | None = None
        self.lineage = 0
        self.checkpoints: set[int] = set()
        self.envs: set[TrajectoryId] = set()
        self.records: list[TrajectoryRecord] = []
        self.reports: list[AnyReport] = []
        self.finish: commands.Finish | None = None
        self.trained: list[tuple[int, tuple[TrajectoryId, ...]]] = []
        self.env_failure_rate = 0.0
        self.attempt_error_rate = 0.0
        self.update_failure_rate = 0.0
        self.start_failure_rate = 0.0
        self.slow_start_s = 0.0  # of a rollout worker, besides the usual
        self.speed: tuple[float, float, float] | None = None  # A, b and t_prefill that frames tell
        self.logprob_gap = 1e-7  # mean, of each step
        self.stuck_rate = 0.0  # releases that take too long: the worker is killed
        self.training_holds_memory = False
        self.returned: list[commands.ReturnGpus] = []
        self.answers: list[commands.AnswerPreempt] = []
        self.started = events.Started(num_train_tasks, 0, can_restore)
        self.tokens: dict[TrajectoryId, int] = {}  # what a token store would hold
        self.attempts: dict[AttemptId, tuple[Slot, TrajectoryId]] = {}  # whose frames it would accept

    # driving

    def post(self, event: AnyEvent | Callable[[], None], delay: float | None = None) -> None:
        delay = self.rng.uniform(0.001, 0.2) if delay is None else delay
        self.sequence += 1
        heapq.heappush(self.queue, (self.now + delay, self.sequence, event))

    def feed(self, event: AnyEvent) -> list[AnyCommand]:
        self._store(event)
        done = self.core.handle(event, self.now)
        self.entries.append((self.now, event, done))
        self.core.check()
        for command in done:
            self.perform(command)
        return done

    def _store(self, event: AnyEvent) -> None:
        """Store tokens as the service does: they are stored before the event, frames of the dead are not."""
        if isinstance(event, events.TokensStreamed):
            for delta in event.deltas:
                if delta.attempt in self.attempts and self.attempts[delta.attempt][0] == event.slot:
                    self.tokens[self.attempts[delta.attempt][1]] += delta.count
                    if delta.finish is not None:
                        del self.attempts[delta.attempt]
        elif isinstance(event, events.WorkerLost):
            self.attempts = {a: st for a, st in self.attempts.items() if st[0] != event.slot}

    def start(self) -> None:
        self.feed(self.started)

    @property
    def notes(self) -> list[str]:
        """Remarks for people, in order."""
        return [report.text for report in self.reports if isinstance(report, NoteReport)]

    def step(self) -> bool:
        """Deliver the next event; False when nothing is left to happen."""
        wakeup = self.core.next_wakeup()
        if not self.queue and wakeup is None:
            return False
        if wakeup is not None and (not self.queue or wakeup < self.queue[0][0]):
            self.now = max(self.now, wakeup)
            self.feed(events.Tick())
            return True
        self.now, _, item = heapq.heappop(self.queue)
        if callable(item):
            item()
        else:
            self.feed(item)
        return True

    def run(self, limit: int = 200_000) -> commands.Finish:
        if not self.entries:
            self.start()
        for _ in range(limit):
            if self.finish is not None:
                return self.finish
            if not self.step():
                raise AssertionError(f"stalled at {self.now}: {self.core.status()}")
        raise AssertionError(f"no end after {limit} events: {self.core.status()}")

    # answering

    def perform(self, command: AnyCommand) -> None:
        match command:
            case commands.StartWorker():
                self._start_worker(command)
            case commands.StopWorker():
                self._stop_worker(command)
            case commands.Interrupt():
                self._interrupt(command.slot)
            case commands.SetRole():
                self._set_role(command)
            case commands.ReleaseWorker():
                self._release(command)
            case commands.ActivateWorker():
                self._activate(command)
            case commands.OffloadTraining():
                self._offload(command)
            case commands.RestoreTraining():
                self._restore(command)
            case commands.ReturnGpus():
                self._check_given_back(command)
            case commands.UpdateWeights():
                self._update(command)
            case commands.Generate():
                self._generate(command)
            case commands.Abort():
                self._end(command.slot, command.attempt, "abort")
            case commands.OpenEpisode():
                self._open(command)
            case commands.StepEpisode():
                self._step(command)
            case commands.CloseEpisode():
                self.envs.discard(command.trajectory)
            case commands.VoidTokens():
                self.tokens[command.trajectory] = 0
            case commands.TruncateTokens():
                assert self.tokens.get(command.trajectory, 0) >= command.tokens
                self.tokens[command.trajectory] = command.tokens
            case commands.ForgetTokens():
                self.tokens.pop(command.trajectory, None)
                self.attempts = {a: st for a, st in self.attempts.items() if st[1] != command.trajectory}
            case commands.StartTrainer():
                self._start_trainer(command)
            case commands.Train():
                self._train(command)
            case commands.RecordTrajectory():
                self.records.append(command.record)
            case commands.Report():
                self.reports.append(command.report)
            case commands.Finish():
                self.finish = command
            case commands.AnswerPreempt():
                self.answers.append(command)
            case commands.StopTrainer():
                self.lose_trainer(command.reason)
            case _:
                assert_never(command)

    def _is_overlap(self, slot: Slot) -> bool:
        return self.core._state.table.rows[slot].zone == "overlap"

    def _start_worker(self, command: commands.StartWorker) -> None:
        assert command.slot not in self.workers, "a slot has one life at a time"
        assert not (self._is_overlap(command.slot) and self.training_holds_memory), "memory is taken"
        self.workers[command.slot] = Worker(command.incarnation, role=command.role)
        if self.rng.random() < self.start_failure_rate:
            self.post(events.WorkerLost(command.slot, command.incarnation, "did not start", 0), 1.0)
            del self.workers[command.slot]
            return
        ready = events.WorkerReady(command.op, command.slot, command.incarnation, "host", 1)
        self.post(ready, self.rng.uniform(1, 3) + self.slow_start_s)

    def _stop_worker(self, command: commands.StopWorker) -> None:
        worker = self.workers.get(command.slot)
        if worker is not None and worker.incarnation == command.incarnation:
            self.lose_worker(command.slot, command.reason, self.rng.uniform(0, command.grace_s))

    def _interrupt(self, slot: Slot) -> None:
        worker = self.workers.get(slot)
        for attempt in [*worker.running, *worker.halves] if worker is not None else []:
            self._end(slot, attempt, "abort")

    def _set_role(self, command: commands.SetRole) -> None:
        worker = self.workers.get(command.slot)
        if worker is not None:
            assert not worker.running, "a worker changes its role with requests running"
            assert not worker.halves, "a worker changes its role with prefills running"
            worker.role = command.role
            self.post(events.RoleSet(command.op, command.slot, command.incarnation, 0.1), 0.1)

    def _release(self, command: commands.ReleaseWorker) -> None:
        worker = self.workers.get(command.slot)
        if worker is None:
            return
        if self.rng.random() < self.stuck_rate:
            self.lose_worker(command.slot, "did not let go", command.limit_s)
            return
        self._interrupt(command.slot)
        worker.holds_memory, worker.version = False, None
        self.post(events.WorkerReleased(command.op, command.slot, command.incarnation, 0.1), 0.3)

    def _activate(self, command: commands.ActivateWorker) -> None:
        worker = self.workers.get(command.slot)
        assert not self.training_holds_memory, "memory is taken"
        if worker is None:
            return
        worker.holds_memory = True
        if self.rng.random() < self.update_failure_rate:
            self.post(events.WeightsFailed(command.op, command.slot, command.incarnation, "no memory"))
            return
        worker.version = command.version
        proof = checksum(command.version)
        self.post(
            events.WeightsVerified(command.op, command.slot, command.incarnation, command.version, proof, 0.1)
        )

    def _offload(self, command: commands.OffloadTraining) -> None:
        if self.trainer == command.incarnation:
            self.training_holds_memory = False
            self.post(events.TrainingOffloaded(command.op, command.incarnation, 0.1))

    def _restore(self, command: commands.RestoreTraining) -> None:
        self._take_training_memory()
        if self.trainer == command.incarnation:
            self.post(events.TrainingRestored(command.op, command.incarnation, 0.1))

    def _take_training_memory(self) -> None:
        lent = [
            slot for slot, worker in self.workers.items() if worker.holds_memory and self._is_overlap(slot)
        ]
        assert not lent, f"training takes memory that slots {lent} hold"
        self.training_holds_memory = True

    def _check_given_back(self, command: commands.ReturnGpus) -> None:
        for slot in self.workers:
            used = set(self.core._state.table.rows[slot].gpus)
            assert not used & set(command.gpus), f"slot {slot} runs on GPUs that were given back"
        self.returned.append(command)

    def _update(self, command: commands.UpdateWeights) -> None:
        worker = self.workers.get(command.slot)
        if worker is None:
            return  # it died; its loss is on the way
        if command.mode == "interrupt":
            self._interrupt(command.slot)
        if self.rng.random() < self.update_failure_rate:
            self.post(events.WeightsFailed(command.op, command.slot, command.incarnation, "bucket 4 refused"))
            return
        worker.version = command.version
        self.post(
            events.WeightsVerified(
                command.op, command.slot, command.incarnation, command.version, checksum(command.version), 0.1
            )
        )

    def _generate(self, command: commands.Generate) -> None:
        worker = self.workers.get(command.slot)
        if worker is None:
            return  # it died; its loss is on the way
        assert worker.incarnation == command.incarnation
        assert worker.version is not None, "a request reached a worker without proven weights"
        assert worker.holds_memory, "a request reached a worker that has released its memory"
        assert command.max_new_tokens > 0
        assert command.context_tokens == self.tokens[command.trajectory], command
        self.attempts[command.attempt] = (command.slot, command.trajectory)
        running = Running(command, self.rng.randint(1, command.max_new_tokens), command.context_tokens)
        worker.running[command.attempt] = running
        if command.prefill_slot is None:
            assert worker.role == "colocated", (worker.role, command)
            self._schedule_token(command.slot, worker.incarnation, command.attempt)
            return
        assert worker.role == "decode", (worker.role, command)
        running.waits_for_kv, running.prefill = True, 0
        prefill = self.workers.get(command.prefill_slot)
        if prefill is None:
            return  # it died; its loss is on the way
        assert prefill.role == "prefill", (prefill.role, command)
        assert prefill.incarnation == command.prefill_incarnation
        assert prefill.version == worker.version, "a pair serves one version"
        prefill.halves[command.attempt] = command
        self.post(lambda: self._hand_over(command), self.rng.uniform(0.01, 0.3))

    def _hand_over(self, command: commands.Generate) -> None:
        """The prefill stage is done, unless it was ended or died meanwhile; the KV may find nobody."""
        assert command.prefill_slot is not None
        prefill = self.workers.get(command.prefill_slot)
        if prefill is None or command.attempt not in prefill.halves:
            return
        if self.rng.random() < self.attempt_error_rate:
            self._end(command.prefill_slot, command.attempt, "error")
            return
        del prefill.halves[command.attempt]
        self._notify_stage(command.prefill_slot, prefill, command.attempt, command.context_tokens, None)
        worker = self.workers.get(command.slot)
        running = worker.running.get(command.attempt) if worker is not None else None
        if worker is not None and running is not None:
            running.waits_for_kv = False
            self._schedule_token(command.slot, worker.incarnation, command.attempt)

    def _notify_stage(
        self, slot: Slot, worker: Worker, attempt: AttemptId, prefilled: int, finish: FinishReason | None
    ) -> None:
        delta = TokenDelta(attempt, 0, (), prefilled, finish)
        told = events.TokensStreamed(slot, worker.incarnation, (delta,), self._iteration(0, prefilled))
        self.post(told, 0.01 + 1e-6 * self.sequence)

    def _schedule_token(self, slot: Slot, incarnation: Incarnation, attempt: AttemptId) -> None:
        worker = self.workers[slot]
        running = worker.running[attempt]
        if self.rng.random() < self.attempt_error_rate:
            self._end(slot, attempt, "error")
            return
        running.left -= 1
        finish: FinishReason | None = None
        if running.left <= 0:
            finish = "length" if self.rng.random() < 0.2 else "stop"
        self._emit(slot, attempt, 1, finish)
        if finish is None and self.token_s:
            self.post(lambda: self._next_token(slot, incarnation, attempt), self.token_s)
        elif finish is None:
            self._schedule_token(slot, incarnation, attempt)

    def _next_token(self, slot: Slot, incarnation: Incarnation, attempt: AttemptId) -> None:
        worker = self.workers.get(slot)
        if worker is not None and worker.incarnation == incarnation and attempt in worker.running:
            self._schedule_token(slot, incarnation, attempt)

    def _emit(self, slot: Slot, attempt: AttemptId, count: int, finish: FinishReason | None) -> None:
        """TokenIngest of a worker keep their order: all are delivered with a delay that grows."""
        worker = self.workers[slot]
        running = worker.running[attempt]
        assert worker.version is not None
        worker.sampled += count
        runs = (VersionRun(worker.version, count, worker.version),) if count else ()
        delta = TokenDelta(attempt, count, runs, running.prefill, finish)
        running.prefill = 0
        if finish is not None:
            del worker.running[attempt]
        sums = self._iteration(len(worker.running) + 1, delta.prefilled_tokens)
        told = events.TokensStreamed(slot, worker.incarnation, (delta,), sums)
        self.post(told, 0.01 + 1e-6 * self.sequence)

    def _iteration(self, decoding: int, prefill: int) -> IterationSums | None:
        if self.speed is None:
            return None
        fixed, per_seq, per_token = self.speed
        n, p = float(decoding), float(prefill)
        y = (fixed + per_seq * n + per_token * p) * self.rng.uniform(0.99, 1.01)
        return IterationSums(1, y, n, p, n * n, p * p, n * p, y * n, y * p, y * y, 10.0 * n)

    def _end(self, slot: Slot, attempt: AttemptId, finish: FinishReason) -> None:
        worker = self.workers.get(slot)
        if worker is not None and attempt in worker.running:
            self._emit(slot, attempt, 0, finish)
        elif worker is not None and attempt in worker.halves:
            del worker.halves[attempt]
            self._notify_stage(slot, worker, attempt, 0, finish)

    def _open(self, command: commands.OpenEpisode) -> None:
        if self.rng.random() < self.env_failure_rate:
            self.post(events.EpisodeFailed(command.op, command.trajectory, "error", "disk full"))
            return
        self.envs.add(command.trajectory)
        prompt = 5 + command.task % 3
        if not self.tokens.get(command.trajectory):
            self.tokens[command.trajectory] = prompt
        self.post(events.EpisodeOpened(command.op, command.trajectory, prompt, 0.01))

    def _step(self, command: commands.StepEpisode) -> None:
        if command.trajectory not in self.envs:
            self.post(events.EpisodeFailed(command.op, command.trajectory, "gone", "no such episode"))
            return
        if self.rng.random() < self.env_failure_rate:
            self.envs.discard(command.trajectory)
            kind = self.rng.choice(["error", "timeout", "gone"])
            self.post(events.EpisodeFailed(command.op, command.trajectory, kind, "failed"))  # type: ignore[arg-type]
            return
        done = self.rng.random() < 0.3
        observation = 0 if done else 3
        self.tokens[command.trajectory] += observation
        reward = float(self.rng.random() < 0.5) if done else 0.0
        self.post(events.EpisodeStepped(command.op, command.trajectory, observation, reward, done, 0.05))

    def _start_trainer(self, command: commands.StartTrainer) -> None:
        self._take_training_memory()
        self.trainer, self.lineage = command.incarnation, command.lineage
        step = command.restore_step
        assert step is None or step in self.checkpoints, f"no checkpoint of step {step}"
        self.checkpoints.add(0)
        version = Version(command.lineage, step or 0)
        ready = events.TrainerReady(command.op, command.incarnation, version, checksum(version))
        self.post(ready, 2.0)

    def _train(self, command: commands.Train) -> None:
        if self.trainer != command.incarnation:
            return  # it died; its loss is on the way
        assert self.training_holds_memory, "training without its memory"
        for sample in command.samples:
            assert sample.tokens == self.tokens[sample.trajectory], sample
        self.trained.append((command.step, tuple(s.trajectory for s in command.samples)))
        version = Version(self.lineage, command.step + 1)
        if command.checkpoint:
            self.checkpoints.add(command.step + 1)
        self.post(
            events.TrainFinished(
                command.op,
                command.incarnation,
                version,
                checksum(version),
                command.step + 1 if command.checkpoint else None,
                {"loss": 0.1, "logprob_gap_mean": self.logprob_gap},
                1e-6,
                10,
            ),
            0.5,
        )

    # faults

    def lose_worker(self, slot: Slot, reason: str = "killed", delay: float = 0.0) -> None:
        """kill -9: frames on their way may still arrive, after the loss they are stale."""
        worker = self.workers.pop(slot, None)
        if worker is not None:
            delay += self.rng.uniform(0.001, 0.2)
            self.post(events.WorkerLost(slot, worker.incarnation, reason, worker.sampled), delay)

    def lose_host(self, host: str) -> None:
        """Lose its agent and all its workers at once; what is heard first is chance."""
        for slot in list(self.workers):
            if any(gpu.startswith(f"{host}/") for gpu in self.core._state.table.rows[slot].gpus):
                self.lose_worker(slot, "its host is gone")
        self.post(events.HostLost(host, "silent"))

    def lose_trainer(self, reason: str = "killed") -> None:
        if self.trainer is not None:
            self.post(events.TrainerLost(self.trainer, reason), 0.05)
            self.trainer = None
            self.training_holds_memory = False

    def lose_environments(self) -> None:
        self.envs.clear()

    def crash(self, reserved: tuple[GpuId, ...] = ()) -> None:
        """kill -9 of the coordinator, then a resume: the core comes back from its snapshot, all else is gone."""
        snapshot = self.core.snapshot()
        self.queue.clear()
        self.workers.clear()
        self.attempts.clear()
        self.envs.clear()
        self.trainer = None
        self.training_holds_memory = False
        self.core = Coordinator.restore(self.config, snapshot)
        self.feed(events.Resumed(reserved))
