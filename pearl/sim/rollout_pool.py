"""Rollout workers on the virtual clock: their incarnations, their weights, and the frames that they send."""

from collections.abc import Callable

from pearl.sim.clock import Action, VirtualClock
from pearl.sim.engine import Engine
from pearl.sim.environments import Environments
from pearl.sim.hardware import Hardware
from pearl.sim.pairs import Pairs
from pearl.sim.random_streams import stream
from pearl.sim.requests import Progress, Request
from pearl.sim.training_world import checksum
from pearl.sim.transfers import SharedLink
from pearl.types import commands, events
from pearl.types.events import AnyEvent
from pearl.types.ids import GpuId, Incarnation, Slot, TrajectoryId
from pearl.types.trajectory import TokenDelta, VersionRun
from pearl.types.weights import UpdateMode, Version

FRAME_SECONDS = 0.02
"""What a worker made since its last frame is lost with it."""
TALLY_PERIOD_S = 5.0
"""How often frames carry sums over iterations: a real frame's would come every 20 ms and say no more."""


class Worker:
    """One incarnation of a slot. ``life`` changes when what was under way is void."""

    __slots__ = (
        "begin_s",
        "engine",
        "gpus",
        "incarnation",
        "life",
        "link",
        "role",
        "sampled",
        "slot",
        "tallied_s",
        "version",
    )

    def __init__(self, command: commands.StartWorker, begin_s: float) -> None:
        self.slot = command.slot
        self.incarnation = command.incarnation
        self.role = command.role
        self.gpus = command.gpus
        self.begin_s: float | None = begin_s  # since when it holds its GPUs; None while it does not
        self.version: Version | None = None
        self.engine: Engine
        self.link: SharedLink
        self.sampled = 0  # tokens sent
        self.tallied_s = 0.0
        self.life = 0


class RolloutPool:
    def __init__(
        self,
        clock: VirtualClock,
        hardware: Hardware,
        environments: Environments,
        seed: int,
        post: Callable[[AnyEvent], None],
    ) -> None:
        self._clock = clock
        self._hardware = hardware
        self._costs = hardware.costs
        self._environments = environments
        self._pairs = Pairs(clock, hardware.worker)
        self._deaths = stream(seed, "worker deaths")
        self._post = post
        self._workers: dict[Slot, Worker] = {}
        self._busy_s = 0.0  # of workers that are gone
        self._held_s = 0.0
        self.retractions = 0
        self.first_turn_s: float | None = None  # when a worker was first asked for one

    # lives

    def start(self, command: commands.StartWorker) -> None:
        worker = Worker(command, self._clock.now)
        worker.engine = Engine(self._clock, self._hardware.worker, lambda ended: self._send(worker, ended))
        worker.link = self._pairs.make_link()
        self._workers[command.slot] = worker
        ready = events.WorkerReady(command.op, command.slot, command.incarnation, _host(command.gpus), 0)
        self._later(worker, self._costs.preparation, lambda: self._post(ready))
        if self._hardware.failures.worker_hours:
            seconds = self._deaths.expovariate(1 / (3600 * self._hardware.failures.worker_hours))
            self._clock.after(seconds, lambda: self._die(worker, "died at random"))

    def _die(self, worker: Worker, reason: str) -> None:
        """End a worker suddenly; tokens that its frames had not carried are lost."""
        if self._workers.get(worker.slot) is not worker:
            return
        made_lately = self._flush(worker)
        self._end(worker)
        lost = events.WorkerLost(worker.slot, worker.incarnation, reason, worker.sampled + made_lately)
        self._clock.after(self._costs.reaction, lambda: self._post(lost))

    def _flush(self, worker: Worker) -> int:
        """Send all but the last frame's tokens and return how many those are."""
        frame_tokens = int(FRAME_SECONDS / self._hardware.worker.decode_fixed_seconds)
        deltas, lost = [], 0
        for one in worker.engine.progress():
            late = min(one.made, frame_tokens)
            lost += late
            if one.made > late or one.prefilled_tokens:
                deltas.append(self._delta(worker, one._replace(made=one.made - late)))
        if deltas:
            self._post_frame(worker, tuple(deltas))
        return lost

    def stop(self, command: commands.StopWorker) -> None:
        worker = self._current(command.slot, command.incarnation)
        if worker is None:
            return  # its loss is on the way
        if command.grace_s == 0.0:
            self._die(worker, command.reason)
            return
        self._send(worker, self._abort_all(worker))
        self._end(worker)
        lost = events.WorkerLost(worker.slot, worker.incarnation, command.reason, worker.sampled)
        self._clock.after(min(self._costs.exit, command.grace_s), lambda: self._post(lost))

    def _end(self, worker: Worker) -> None:
        worker.engine.stop()
        self._pairs.abort_all(worker)
        for decode, failed in self._pairs.break_off(worker):
            assert isinstance(decode, Worker)
            self._send(decode, [failed])
        worker.life += 1
        self._account(worker)
        self._busy_s += worker.engine.busy_seconds
        self.retractions += worker.engine.retractions
        del self._workers[worker.slot]

    # attempts

    def generate(self, command: commands.Generate) -> None:
        worker = self._current(command.slot, command.incarnation)
        if worker is None:
            return
        assert worker.version is not None, f"a request for slot {command.slot}, which holds no weights"
        if self.first_turn_s is None:
            self.first_turn_s = self._clock.now
        episode = self._environments.episodes[command.trajectory]
        assert command.context_tokens == episode.tokens, (command, episode.tokens)
        made = command.context_tokens - episode.turn_began_tokens
        wanted = max(1, episode.script.turns[command.turn].generated_tokens - made)
        request = Request(
            attempt=command.attempt,
            trajectory=command.trajectory,
            prompt=episode.group,
            prompt_tokens=episode.script.prompt_tokens,
            context_tokens=command.context_tokens,
            make_tokens=min(wanted, command.max_new_tokens),
            finish="stop" if wanted <= command.max_new_tokens else "length",
        )
        if command.prefill_slot is None:
            worker.engine.add(request)
        else:
            prefill = self._current(command.prefill_slot, command.prefill_incarnation)
            self._pairs.begin(request, prefill, worker)

    def abort(self, command: commands.Abort) -> None:
        worker = self._current(command.slot, command.incarnation)
        if worker is None:
            return
        waiting = self._pairs.abort(command.attempt, worker)
        if waiting is not None:
            self._send(worker, [waiting])
        else:
            worker.engine.abort(command.attempt)

    def _abort_all(self, worker: Worker) -> list[Progress]:
        return worker.engine.abort_all() + self._pairs.abort_all(worker)

    def interrupt(self, command: commands.Interrupt) -> None:
        worker = self._current(command.slot, command.incarnation)
        if worker is not None:
            self._send(worker, self._abort_all(worker))

    def _send(self, worker: Worker, ended: list[Progress]) -> None:
        if not ended:
            return
        self._post_frame(worker, tuple(self._delta(worker, one) for one in ended))
        for one in ended:
            if one.request.part == "prefill" and one.finish is None:
                self._pairs.prefilled(one.request.attempt)

    def _delta(self, worker: Worker, progress: Progress) -> TokenDelta:
        """Build the frame's delta and count its tokens where they are stored."""
        version, count, request = worker.version, progress.made, progress.request
        assert version is not None
        if not count:
            return TokenDelta(request.attempt, 0, (), progress.prefilled_tokens, progress.finish)
        worker.sampled += count
        self._environments.episodes[TrajectoryId(request.trajectory)].tokens += count
        runs = (VersionRun(version, count, version),)
        return TokenDelta(request.attempt, count, runs, progress.prefilled_tokens, progress.finish)

    def _post_frame(self, worker: Worker, deltas: tuple[TokenDelta, ...]) -> None:
        sums = None
        if self._clock.now - worker.tallied_s >= TALLY_PERIOD_S and worker.engine.tally.count:
            worker.tallied_s = self._clock.now
            sums = worker.engine.tally.take()
        self._post(events.TokensStreamed(worker.slot, worker.incarnation, deltas, sums))

    # weights

    def update(self, command: commands.UpdateWeights) -> None:
        """Update weights. The first ones come with all that joining takes; later ones arrive while the engine
        runs."""
        worker = self._current(command.slot, command.incarnation)
        if worker is None:
            return
        if worker.version is None:
            self._later(worker, self._costs.finalization, self._proof(worker, command))
        else:
            proof = self._proof(worker, command)
            self._later(worker, self._costs.weight_transfer, lambda: self._load(worker, command.mode, proof))

    def _load(self, worker: Worker, mode: UpdateMode, proof: Action) -> None:
        """Load transferred weights after bringing the engine to a stop as the mode says."""
        load_s = self._costs.weight_load
        if mode == "drain" and not worker.engine.is_idle:
            self._later(worker, FRAME_SECONDS, lambda: self._load(worker, mode, proof))
            return
        if mode == "in_place":
            worker.engine.stall(load_s)
        else:
            self._send(worker, self._abort_all(worker))
        self._later(worker, load_s, proof)

    def _proof(self, worker: Worker, command: commands.UpdateWeights | commands.ActivateWorker) -> Action:
        began_s = self._clock.now

        def prove() -> None:
            worker.version = version = command.version
            worker.engine.cache.flush()
            seconds = self._clock.now - began_s
            self._post(
                events.WeightsVerified(
                    command.op, worker.slot, worker.incarnation, version, checksum(version), seconds
                )
            )

        return prove

    # lending and returning

    def release(self, command: commands.ReleaseWorker) -> None:
        worker = self._current(command.slot, command.incarnation)
        if worker is None:
            return
        if worker.version is not None:
            self._send(worker, self._abort_all(worker))
        worker.engine.cache.flush()
        worker.version = None
        worker.life += 1  # an activation under way is void
        self._later(worker, self._costs.release, lambda: self._released(worker, command))

    def _released(self, worker: Worker, command: commands.ReleaseWorker) -> None:
        self._account(worker)
        self._post(events.WorkerReleased(command.op, worker.slot, worker.incarnation, self._costs.release))

    def activate(self, command: commands.ActivateWorker) -> None:
        worker = self._current(command.slot, command.incarnation)
        if worker is None:
            return
        worker.begin_s = self._clock.now
        self._later(worker, self._costs.activation, self._proof(worker, command))

    # roles

    def set_role(self, command: commands.SetRole) -> None:
        """Change the role of a drained worker; its KV is dropped."""
        worker = self._current(command.slot, command.incarnation)
        if worker is None:
            return
        assert worker.engine.is_idle, f"slot {command.slot} was not drained"
        is_mode = "colocated" in (worker.role, command.role)
        seconds = self._costs.mode_switch if is_mode else self._costs.role_switch
        self._later(worker, seconds, lambda: self._switched(worker, command, seconds))

    def _switched(self, worker: Worker, command: commands.SetRole, seconds: float) -> None:
        worker.role = command.role
        worker.engine.cache.flush()
        self._post(events.RoleSet(command.op, worker.slot, worker.incarnation, seconds))

    # shares

    def busy_and_held_seconds(self) -> tuple[float, float]:
        """Return engine seconds with work, and worker seconds with device memory, until now."""
        busy, held = self._busy_s, self._held_s
        for worker in self._workers.values():
            busy += worker.engine.busy_seconds
            held += 0.0 if worker.begin_s is None else self._clock.now - worker.begin_s
        return busy, held

    def _account(self, worker: Worker) -> None:
        if worker.begin_s is not None:
            self._held_s += self._clock.now - worker.begin_s
            worker.begin_s = None

    def _current(self, slot: Slot, incarnation: Incarnation) -> Worker | None:
        worker = self._workers.get(slot)
        return worker if worker is not None and worker.incarnation == incarnation else None

    def _later(self, worker: Worker, seconds: float, action: Action) -> None:
        """Schedule an action that is skipped when the incarnation has ended or what was under way became void."""
        life = worker.life

        def act() -> None:
            if worker.life == life:
                action()

        self._clock.after(seconds, act)


def _host(gpus: tuple[GpuId, ...]) -> str:
    return gpus[0].rpartition("/")[0]
