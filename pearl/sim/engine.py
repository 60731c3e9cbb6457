"""One rollout worker's engine on the virtual clock, request by request and pass by pass.

A pass gives every decoding sequence one token and prefills at most a chunk; it takes A + sum of b(context) + the
chunk's prefill time, so a prefill steals decode time from all that decode beside it. Between two changes all passes
are alike but for contexts that grow by a token, so their time has a closed form: the cost here is a turn's, not a
token's. Everything joins and ends at a pass's boundary, as in a real engine.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

from pearl.sim.clock import VirtualClock
from pearl.sim.hardware import WorkerSpeed
from pearl.sim.iteration_tally import IterationTally
from pearl.sim.kv_cache import KvCache
from pearl.state.ids import AttemptId
from pearl.state.splitmix import splitmix64
from pearl.state.trajectory import FinishReason

ADMISSION_RESERVE_TOKENS = 256
"""Room to decode that a sequence must find beside its context to be admitted: about one turn's tokens."""


SAME_TIME_S = 1e-9
"""Times that differ by less are the same boundary: sums of floats in another order."""


def many_passes(passes: int, one: float, growth: float) -> float:
    """Seconds of ``passes`` passes, the first of ``one`` second and each ``growth`` longer than the one before."""
    return passes * one + growth * (passes * (passes - 1) / 2)


def whole_passes(seconds: float, one: float, growth: float) -> int:
    """How many such passes fit into ``seconds``."""
    if seconds < one - SAME_TIME_S:
        return 0
    half = one - growth / 2
    passes = int(2 * seconds / (half + math.sqrt(half * half + 2 * growth * seconds)))
    while many_passes(passes + 1, one, growth) <= seconds + SAME_TIME_S:
        passes += 1
    return passes


Part = Literal["whole", "prefill", "decode"]
"""How much of a turn is this worker's. A decode part comes with its keys, values and first token; a prefill part
ends with a progress whose ``finish`` is None."""


class Request(NamedTuple):
    attempt: AttemptId
    trajectory: int
    prompt: int
    prompt_tokens: int  # of the group
    context_tokens: int
    make_tokens: int  # that it will generate, at least 1
    finish: FinishReason
    part: Part = "whole"


class Progress(NamedTuple):
    """What an attempt has made and prefilled here; ``finish`` None while it goes on."""

    request: Request
    made: int
    prefilled_tokens: int
    finish: FinishReason | None


class Sequence:
    """A request on this worker. ``made`` counts up to ``joined``, its first token's boundary."""

    __slots__ = ("end", "joined", "made", "prefilled", "request", "to_prefill")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.made = 0
        self.prefilled = 0
        self.to_prefill = 0
        self.joined = 0  # boundary number
        self.end = -1  # the boundary of its last token, while it decodes

    @property
    def context(self) -> int:
        """At its last joining."""
        return self.request.context_tokens + self.made


class Engine:
    def __init__(
        self, clock: VirtualClock, speed: WorkerSpeed, on_ended: Callable[[list[Progress]], None]
    ) -> None:
        self._clock = clock
        self._speed = speed
        self._on_ended = on_ended
        self.cache = KvCache(speed.kv_capacity_tokens)
        self.tally = IterationTally()
        self.busy_seconds = 0.0
        self.retractions = 0
        self._at = 0.0  # time of boundary number `_passes`
        self._passes = 0
        self._context = 0  # of all decoding sequences at that boundary
        self._decoding: dict[AttemptId, Sequence] = {}  # in the order in which they joined
        self._ends: list[
            tuple[int, AttemptId]
        ] = []  # heap of (boundary, attempt); may hold some that are void
        self._waiting: deque[Sequence] = deque()
        self._prefilling: deque[Sequence] = deque()  # admitted, in order
        self._prefill_context = 0  # of those
        self._chunk: list[tuple[Sequence, int]] = []  # what the running pass prefills
        self._chunk_seconds = 0.0
        self._life = 0  # of the scheduled boundary; another is void
        self._wake_passes = 0  # decode passes until it

    # requests

    def add(self, request: Request) -> None:
        self._waiting.append(Sequence(request))
        if not self._chunk:  # a running chunk's boundary comes anyway
            self._wake_at_boundary()

    def abort(self, attempt: AttemptId) -> None:
        """End one attempt now, with what it made; nothing when it is not here."""
        ended = self._take_out(attempt)
        if ended is not None:
            self._resume()
            self._on_ended([ended])

    def abort_all(self) -> list[Progress]:
        """End all now. Prefixes are kept."""
        attempts = [*self._decoding]
        attempts += [s.request.attempt for s in self._prefilling] + [s.request.attempt for s in self._waiting]
        ended = [self._take_out(attempt) for attempt in attempts]
        self._stop()
        return [one for one in ended if one is not None]

    def stall(self, seconds: float) -> None:
        """Stop all passes for that long, then go on."""
        self._catch_up()
        self._at = max(self._at, self._clock.now) + seconds
        self._resume()

    @property
    def is_idle(self) -> bool:
        return not (self._decoding or self._prefilling or self._waiting)

    def progress(self) -> list[Progress]:
        """Of every attempt, for the moment a worker dies."""
        self._catch_up()
        live = [*self._decoding.values(), *self._prefilling, *self._waiting]
        return [Progress(s.request, self._made(s), s.prefilled, None) for s in live]

    def stop(self) -> None:
        """The worker is gone: nothing happens here any more."""
        self._catch_up()
        self._stop()

    # passes

    def _pass_seconds(self) -> tuple[float, float]:
        """Of the next decode pass, and how much longer each one after it takes."""
        speed, count = self._speed, len(self._decoding)
        per_token = speed.decode_seconds_per_context_token
        one = (
            speed.decode_fixed_seconds + speed.decode_seconds_per_sequence * count + per_token * self._context
        )
        return one, per_token * count

    def _advance(self, passes: int, seconds: float, prefill: int = 0) -> None:
        count = len(self._decoding)
        self.tally.add(passes, seconds, count, prefill, self._context)
        self.busy_seconds += seconds
        self._passes += passes
        self._at += seconds
        self._context += passes * count

    def _catch_up(self) -> None:
        """To the last boundary before now. A chunk's pass under way stays under way."""
        elapsed = self._clock.now - self._at
        if not self._decoding or self._chunk or elapsed <= 0:
            return
        one, growth = self._pass_seconds()
        passes = whole_passes(elapsed, one, growth)
        if passes:
            self._advance(passes, many_passes(passes, one, growth))

    def _wake_at_boundary(self) -> None:
        """At the next, or now when this is one."""
        self._wake_passes = 0
        if not self._decoding:
            self._at = max(self._at, self._clock.now)
            self._wake(self._at)
            return
        self._catch_up()
        if self._at >= self._clock.now - SAME_TIME_S:
            self._wake(self._at)
        else:
            self._wake_passes = 1
            self._wake(self._at + self._pass_seconds()[0])

    def _wake(self, time: float) -> None:
        self._life += 1
        life = self._life
        self._clock.at(time, lambda: self._boundary(life))

    def _boundary(self, life: int) -> None:
        if life != self._life:
            return
        ended: list[Progress] = []
        if self._chunk:
            self._end_chunk(ended)
        elif self._wake_passes:
            one, growth = self._pass_seconds()
            self._advance(self._wake_passes, many_passes(self._wake_passes, one, growth))
            self._at = self._clock.now
        ends = self._ends
        if ends and ends[0][0] <= self._passes:
            self._end_finished(ended)
        self._make_room()
        if self._waiting or self._prefilling:
            self._begin_chunk()
        self._schedule()
        if ended:
            self._on_ended(ended)

    def _end_finished(self, ended: list[Progress]) -> None:
        ends = self._ends
        while ends and ends[0][0] <= self._passes:
            end, attempt = heapq.heappop(ends)
            sequence = self._decoding.get(attempt)
            if sequence is not None and sequence.end == end:
                ended.append(self._end(sequence, sequence.request.finish))

    def _end(self, sequence: Sequence, finish: FinishReason) -> Progress:
        """Take a decoding sequence out; its prefix is kept."""
        request = sequence.request
        made = self._made(sequence)
        del self._decoding[request.attempt]
        context = request.context_tokens + made
        self._context -= context
        self.cache.keep(request.trajectory, request.prompt, context)
        return Progress(request, made, sequence.prefilled, finish)

    def _made(self, sequence: Sequence) -> int:
        if sequence.request.attempt in self._decoding:
            return sequence.made + self._passes - sequence.joined
        return sequence.made

    def _schedule(self) -> None:
        """The next boundary at which something happens."""
        one, growth = self._pass_seconds()
        if self._chunk:
            self._wake(self._at + one + self._chunk_seconds)
            return
        next_end = self._next_end()
        if next_end is None:
            self._life += 1
            return
        passes = next_end - self._passes
        if self._running_tokens + passes * len(self._decoding) > self._speed.kv_capacity_tokens:
            passes = max(1, min(passes, self._passes_until_full()))
        self._wake_passes = passes
        self._wake(self._at + many_passes(passes, one, growth))

    def _next_end(self) -> int | None:
        ends = self._ends
        while ends:
            sequence = self._decoding.get(ends[0][1])
            if sequence is not None and sequence.end == ends[0][0]:
                return sequence.end
            heapq.heappop(ends)
        return None

    def _resume(self) -> None:
        """After something was taken out between boundaries."""
        if not self._chunk and (self._waiting or self._prefilling):
            self._wake_at_boundary()
        else:
            self._schedule()

    # memory

    @property
    def _running_tokens(self) -> int:
        return self._context + self._prefill_context

    def _passes_until_full(self) -> int:
        free = self._speed.kv_capacity_tokens - self._running_tokens
        return free // len(self._decoding) + 1

    def _make_room(self) -> None:
        """Kept prefixes go first; then the newest sequences, which are computed again when there is room."""
        while len(self._decoding) > 1 and self._running_tokens > self._speed.kv_capacity_tokens:
            self._retract(next(reversed(self._decoding.values())))
        self.cache.fit(self._running_tokens)

    def _retract(self, sequence: Sequence) -> None:
        made = self._made(sequence)
        del self._decoding[sequence.request.attempt]
        sequence.made = made
        self._context -= sequence.context
        self.cache.drop(sequence.request.prompt)
        self._waiting.appendleft(sequence)
        self.retractions += 1

    def _admit(self) -> None:
        while self._waiting:
            sequence = self._waiting[0]
            needed = self._running_tokens + sequence.context + ADMISSION_RESERVE_TOKENS
            if needed > self._speed.kv_capacity_tokens and (self._decoding or self._prefilling):
                return
            self._waiting.popleft()
            request = sequence.request
            hit = self.cache.claim(
                request.trajectory, request.prompt, request.prompt_tokens, sequence.context
            )
            if not self._finds_prefix(request):
                hit = 0
            sequence.to_prefill = (
                0 if request.part == "decode" and not sequence.made else sequence.context - hit
            )
            self._prefill_context += sequence.context
            self._prefilling.append(sequence)
            self.cache.fit(self._running_tokens)

    def _finds_prefix(self, request: Request) -> bool:
        """Drawn from trajectory and context, so that it is the same turns under every policy."""
        ratio = self._speed.prefix_hit_ratio
        if ratio >= 1.0:
            return True
        return splitmix64((request.trajectory << 20) + request.context_tokens) < ratio * 2.0**64

    # prefill

    def _begin_chunk(self) -> None:
        """Fill the next pass with up to a chunk of what is to be prefilled, in the order of arrival."""
        if self._waiting:
            self._admit()
        while self._prefilling and self._prefilling[0].to_prefill == 0:
            self._join(self._prefilling.popleft())
        speed, room, seconds = self._speed, self._speed.prefill_chunk_tokens, 0.0
        for sequence in self._prefilling:
            tokens = min(room, sequence.to_prefill)
            done = sequence.context - sequence.to_prefill
            middle = done + (tokens - 1) / 2
            seconds += tokens * (
                speed.prefill_seconds_per_token + speed.prefill_seconds_per_context_token * middle
            )
            self._chunk.append((sequence, tokens))
            room -= tokens
            if room == 0:
                break
        self._chunk_seconds = seconds

    def _end_chunk(self, ended: list[Progress]) -> None:
        """The pass is over: whoever is wholly prefilled has its first token and decodes from here on."""
        prefill = sum(tokens for _, tokens in self._chunk)
        self._advance(1, self._pass_seconds()[0] + self._chunk_seconds, prefill)
        self._at = self._clock.now
        chunk, self._chunk = self._chunk, []
        for sequence, tokens in chunk:
            sequence.prefilled += tokens
            sequence.to_prefill -= tokens
            if sequence.to_prefill == 0:
                self._prefilling.popleft()
                if sequence.request.part == "prefill":
                    ended.append(self._end_prefill(sequence))
                else:
                    self._join(sequence)

    def _end_prefill(self, sequence: Sequence) -> Progress:
        """The prefix stays here for the next turn; the rest of this one is another worker's."""
        request = sequence.request
        self._prefill_context -= sequence.context
        self.cache.keep(request.trajectory, request.prompt, sequence.context)
        return Progress(request, 0, sequence.prefilled, None)

    def _join(self, sequence: Sequence) -> None:
        request = sequence.request
        self._prefill_context -= sequence.context
        sequence.made += 1
        sequence.joined = self._passes
        self._decoding[request.attempt] = sequence
        self._context += sequence.context
        sequence.end = self._passes + request.make_tokens - sequence.made
        heapq.heappush(self._ends, (sequence.end, request.attempt))

    # ending early

    def _take_out(self, attempt: AttemptId) -> Progress | None:
        self._catch_up()
        sequence = self._decoding.get(attempt)
        if sequence is not None:
            return self._end(sequence, "abort")
        for queue in (self._prefilling, self._waiting):
            for sequence in queue:
                if sequence.request.attempt == attempt:
                    queue.remove(sequence)
                    if queue is self._prefilling:
                        self._leave_chunk(sequence)
                    return Progress(sequence.request, sequence.made, sequence.prefilled, "abort")
        return None

    def _leave_chunk(self, sequence: Sequence) -> None:
        """The pass that computes it goes on without it, for no less time."""
        self._prefill_context -= sequence.context
        self.cache.drop(sequence.request.prompt)
        self._chunk = [(other, tokens) for other, tokens in self._chunk if other is not sequence]
        if not self._chunk:
            self._chunk_seconds = 0.0

    def _stop(self) -> None:
        self._life += 1
        self._decoding.clear()
        self._ends.clear()
        self._waiting.clear()
        self._prefilling.clear()
        self._chunk = []
        self._chunk_seconds = 0.0
        self._context = self._prefill_context = 0
