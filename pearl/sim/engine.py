"""One rollout worker's engine on the virtual clock, request by request and pass by pass.

An iteration gives every decoding sequence one token and prefills at most a chunk; it takes A + sum of b(context) + the
chunk's prefill time, so a prefill steals decode time from all that decode beside it. Between two changes all iterations
are alike but for contexts that grow by a token, so their time has a closed form: the cost here is a turn's, not a
token's. Everything joins and ends at an iteration's boundary, as in a real engine.
"""

from collections.abc import Callable
from functools import partial

from pearl.sim.clock import VirtualClock
from pearl.sim.decode_batch import DecodeBatch
from pearl.sim.hardware import WorkerSpeed
from pearl.sim.iteration_tally import IterationTally
from pearl.sim.iteration_times import SAME_TIME_S, iterations_seconds, iterations_within
from pearl.sim.kv_cache import KvCache
from pearl.sim.prefill_queue import PrefillQueue
from pearl.sim.requests import Progress, Request, Sequence
from pearl.types.ids import AttemptId
from pearl.types.splitmix import splitmix64
from pearl.types.trajectory import FinishReason

ADMISSION_RESERVE_TOKENS = 256
"""Room to decode that a sequence must find beside its context to be admitted: about one turn's tokens."""


class Engine:
    def __init__(
        self, clock: VirtualClock, speed: WorkerSpeed, on_ended: Callable[[list[Progress]], None]
    ) -> None:
        self._clock = clock
        self._fixed_s = speed.decode_fixed_seconds
        self._sequence_s = speed.decode_seconds_per_sequence
        self._token_s = speed.decode_seconds_per_context_token
        self._capacity = speed.kv_capacity_tokens
        self._hit_ratio = speed.prefix_hit_ratio
        self._on_ended = on_ended
        self.cache = KvCache(speed.kv_capacity_tokens)
        self.tally = IterationTally()
        self.busy_seconds = 0.0
        self.retractions = 0
        self._at = 0.0  # time of the batch's boundary
        self._batch = DecodeBatch()
        self._queue = PrefillQueue(speed)
        self._life = 0  # of the scheduled boundary; another is void
        self._wake_iterations = 0  # decode iterations until it

    # requests

    def add(self, request: Request) -> None:
        self._queue.waiting.append(Sequence(request))
        if not self._queue.chunk:  # a running chunk's boundary comes anyway
            self._wake_at_boundary()

    def abort(self, attempt: AttemptId) -> None:
        """End one attempt now, with what it made; does nothing when the attempt is not here."""
        ended = self._take_out(attempt)
        if ended is not None:
            self._resume()
            self._on_ended([ended])

    def abort_all(self) -> list[Progress]:
        """End all attempts now; prefixes are kept."""
        attempts = [sequence.request.attempt for sequence in self._all()]
        ended = [self._take_out(attempt) for attempt in attempts]
        self._stop()
        return [one for one in ended if one is not None]

    def stall(self, seconds: float) -> None:
        """Stop all iterations for that long, then continue."""
        self._catch_up()
        self._at = max(self._at, self._clock.now) + seconds
        self._resume()

    @property
    def is_idle(self) -> bool:
        return not (self._batch.sequences or self._queue.admitted or self._queue.waiting)

    def progress(self) -> list[Progress]:
        """Return the progress of every attempt, for the moment a worker dies."""
        self._catch_up()
        return [Progress(s.request, self._batch.made(s), s.prefilled, None) for s in self._all()]

    def stop(self) -> None:
        """Stop for good: the worker has exited."""
        self._catch_up()
        self._stop()

    def _all(self) -> list[Sequence]:
        return [*self._batch.sequences.values(), *self._queue.admitted, *self._queue.waiting]

    # iterations

    def _iteration_seconds(self) -> tuple[float, float]:
        """Return the seconds of the next decode iteration, and by how much each one after it is longer."""
        batch = self._batch
        count = len(batch.sequences)
        one = self._fixed_s + self._sequence_s * count + self._token_s * batch.context
        return one, self._token_s * count

    def _advance(self, iterations: int, seconds: float, prefill: int = 0) -> None:
        batch = self._batch
        self.tally.add(iterations, seconds, len(batch.sequences), prefill, batch.context)
        self.busy_seconds += seconds
        self._at += seconds
        batch.advance(iterations)

    def _catch_up(self) -> None:
        """Advance to the last boundary before now; a chunk that is being computed stays so."""
        elapsed = self._clock.now - self._at
        if not self._batch.sequences or self._queue.chunk or elapsed <= 0:
            return
        one, growth = self._iteration_seconds()
        iterations = iterations_within(elapsed, one, growth)
        if iterations:
            self._advance(iterations, iterations_seconds(iterations, one, growth))

    def _wake_at_boundary(self) -> None:
        """Wake at the next boundary, or now when this is one."""
        self._wake_iterations = 0
        if not self._batch.sequences:
            self._at = max(self._at, self._clock.now)
            self._wake(self._at)
            return
        self._catch_up()
        if self._at >= self._clock.now - SAME_TIME_S:
            self._wake(self._at)
        else:
            self._wake_iterations = 1
            self._wake(self._at + self._iteration_seconds()[0])

    def _wake(self, time: float) -> None:
        self._life += 1
        self._clock.at(time, partial(self._boundary, self._life))

    def _boundary(self, life: int) -> None:
        if life != self._life:
            return
        ended: list[Progress] = []
        queue = self._queue
        if queue.chunk:
            self._end_chunk(ended)
        elif self._wake_iterations:
            one, growth = self._iteration_seconds()
            self._advance(self._wake_iterations, iterations_seconds(self._wake_iterations, one, growth))
            self._at = self._clock.now
        if due := self._batch.due():
            ended += [self._end(sequence, sequence.request.finish) for sequence in due]
        self._make_room()
        if queue.waiting or queue.admitted:
            self._begin_chunk()
        self._schedule()
        if ended:
            self._on_ended(ended)

    def _end(self, sequence: Sequence, finish: FinishReason) -> Progress:
        """Take a decoding sequence out; its prefix is kept."""
        request = sequence.request
        self._batch.leave(sequence)
        self.cache.keep(request.trajectory, request.prompt, sequence.context)
        return Progress(request, sequence.made, sequence.prefilled, finish)

    def _schedule(self) -> None:
        """Set the timer to the next boundary at which something happens."""
        if self._queue.chunk:
            self._wake(self._at + self._iteration_seconds()[0] + self._queue.chunk_seconds)
            return
        next_end = self._batch.next_end()
        if next_end is None:
            self._life += 1
            return
        one, growth = self._iteration_seconds()
        iterations = next_end - self._batch.iterations
        free = self._capacity - self._running_tokens
        count = len(self._batch.sequences)
        if iterations * count > free:  # memory is full before
            iterations = max(1, min(iterations, free // count + 1))
        self._wake_iterations = iterations
        self._wake(self._at + iterations_seconds(iterations, one, growth))

    def _resume(self) -> None:
        """Reschedule after something was taken out between boundaries."""
        queue = self._queue
        if not queue.chunk and (queue.waiting or queue.admitted):
            self._wake_at_boundary()
        else:
            self._schedule()

    # memory

    @property
    def _running_tokens(self) -> int:
        return self._batch.context + self._queue.context

    def _make_room(self) -> None:
        """Free memory: kept prefixes first, then the newest sequences, which are computed again when there is
        room."""
        running = self._running_tokens
        if running + self.cache.cached_tokens <= self._capacity:
            return
        sequences = self._batch.sequences
        while len(sequences) > 1 and running > self._capacity:
            self._retract(next(reversed(sequences.values())))
            running = self._running_tokens
        self.cache.fit(running)

    def _retract(self, sequence: Sequence) -> None:
        self._batch.leave(sequence)
        self.cache.drop(sequence.request.prompt)
        self._queue.waiting.appendleft(sequence)
        self.retractions += 1

    def _admit(self) -> None:
        queue = self._queue
        while queue.waiting:
            sequence = queue.waiting[0]
            needed = self._running_tokens + sequence.context + ADMISSION_RESERVE_TOKENS
            if needed > self._capacity and (self._batch.sequences or queue.admitted):
                return
            queue.waiting.popleft()
            request = sequence.request
            hit = self.cache.claim(
                request.trajectory, request.prompt, request.prompt_tokens, sequence.context
            )
            if not self._finds_prefix(request):
                hit = 0
            is_computed = request.part == "decode" and not sequence.made
            sequence.to_prefill = 0 if is_computed else sequence.context - hit
            queue.admit(sequence)
            self.cache.fit(self._running_tokens)

    def _finds_prefix(self, request: Request) -> bool:
        """Draw whether the prefix is cached, from trajectory and context, so that every policy meets the same
        misses."""
        ratio = self._hit_ratio
        if ratio >= 1.0:
            return True
        return splitmix64((request.trajectory << 20) + request.context_tokens) < ratio * 2.0**64

    # prefill

    def _begin_chunk(self) -> None:
        queue = self._queue
        if queue.waiting:
            self._admit()
        while queue.admitted and queue.admitted[0].to_prefill == 0:
            self._batch.join(queue.leave())
        queue.fill_chunk()

    def _end_chunk(self, ended: list[Progress]) -> None:
        """Finish an iteration: sequences that are wholly prefilled get their first token and decode from here on."""
        queue = self._queue
        seconds = self._iteration_seconds()[0] + queue.chunk_seconds
        self._advance(1, seconds, queue.end_chunk())
        self._at = self._clock.now
        while queue.admitted and queue.admitted[0].to_prefill == 0:
            sequence = queue.leave()
            if sequence.request.part == "prefill":
                ended.append(self._end_prefill(sequence))
            else:
                self._batch.join(sequence)

    def _end_prefill(self, sequence: Sequence) -> Progress:
        """Take out a prefilled sequence. The prefix stays here for the next turn; another worker decodes this one."""
        request = sequence.request
        self.cache.keep(request.trajectory, request.prompt, sequence.context)
        return Progress(request, 0, sequence.prefilled, None)

    # ending early

    def _take_out(self, attempt: AttemptId) -> Progress | None:
        self._catch_up()
        sequence = self._batch.sequences.get(attempt)
        if sequence is not None:
            return self._end(sequence, "abort")
        sequence = self._queue.find(attempt)
        if sequence is None:
            return None
        if self._queue.take_out(sequence):
            self.cache.drop(sequence.request.prompt)
        return Progress(sequence.request, sequence.made, sequence.prefilled, "abort")

    def _stop(self) -> None:
        self._life += 1
        self._batch.clear()
        self._queue.clear()
