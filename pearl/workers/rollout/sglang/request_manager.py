"""The attempts of an SGLang engine: those that wait here, those that are requests in SGLang, and how they end.

An attempt is in SGLang only while it may run there; what comes while the engine is paused or has no weights waits
here. Each ends once.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable
from typing import Any

from pearl.types.error_text import error_text
from pearl.types.splitmix import splitmix64
from pearl.types.trajectory import FinishReason
from pearl.types.weights import Version
from pearl.workers.rollout.attempts import UsedIds, known_attempt
from pearl.workers.rollout.protocol import Delta, Emit, GenerateRequest
from pearl.workers.rollout.sglang.api import SglangApi
from pearl.workers.rollout.sglang.attempt import Attempt, MalformedError, Piece
from pearl.workers.rollout.sglang.client import ServerError
from pearl.workers.rollout.sglang.iteration_meter import IterationMeter

log = logging.getLogger(__name__)

ABORT_AGAIN_S = 0.05
"""SGLang ignores the abort of a request that it does not know yet; whoever is not over by then is aborted again."""
ABORT_LIMIT_S = 10.0
"""Then its connection is closed, which ends it too, and what has come until then is all."""

CountTokens = Callable[[int], None]


class RequestManager:
    def __init__(
        self, group: asyncio.TaskGroup, meter: IterationMeter, count_tokens: CountTokens | None
    ) -> None:
        self.meter = meter
        self.on_landed: Callable[[Attempt], None] = lambda attempt: None
        """The first token of a decode stage came: its KV is here."""
        self.on_end: Callable[[Attempt, str], None] = lambda attempt, reason: None
        """Called before an attempt's last delta is delivered."""
        self._group = group
        self.live: dict[int, Attempt] = {}
        self.api: SglangApi | None = None
        """Of the server that runs; None while there is none."""
        self.version: Version | None = None
        """Under which new ones are handed over."""
        self.cache_key = ""
        """New ones share KV with those handed over under the same key only."""
        self.is_open = False
        """Requests may be handed to SGLang."""
        self.is_held = False
        """SGLang makes no iterations; all that it made is here, and what is aborted in it leaves it in a later pass."""
        self._count_tokens = count_tokens
        self._waiting: deque[Attempt] = deque()
        self._over: dict[str, asyncio.Event] = {}  # by rid, while it is in SGLang
        self._used = UsedIds()
        self._prefix = secrets.token_hex(4)
        self._num_requests = 0

    @property
    def in_sglang(self) -> list[Attempt]:
        return [attempt for attempt in self.live.values() if attempt.rid]

    @property
    def num_tokens(self) -> int:
        """Return the tokens of context and answer of requests in SGLang, whose KV it holds."""
        return sum(attempt.num_tokens for attempt in self.in_sglang)

    # In

    def add(self, request: GenerateRequest, emit: Emit) -> Attempt:
        """Raises ValueError when its id is known."""
        number = request.attempt
        if number in self.live or number in self._used:
            raise known_attempt(number)
        attempt = self.live[number] = Attempt(request, emit)
        return attempt

    def submit(self, attempt: Attempt, extra: dict[str, Any] | None = None) -> None:
        """Hand it to SGLang, or let it wait until it may be."""
        if not self.is_open:
            self._waiting.append(attempt)
            return
        assert self.version is not None
        rid = self._next_rid()
        attempt.begin(rid, self.version)
        self._over[rid] = asyncio.Event()
        self.meter.begin(asyncio.get_running_loop().time())
        body = self._body(attempt) | (extra or {})
        self._group.create_task(self._hand_over(attempt, rid, body), name=f"attempt {attempt.number}")

    async def _hand_over(self, attempt: Attempt, rid: str, body: dict[str, Any]) -> None:
        if attempt.rid == rid and (attempt.is_aborted or attempt.is_held):
            self._stop(attempt)
        if attempt.rid != rid:
            return
        assert self.api is not None
        attempt.was_sent = True
        try:
            stream = await self.api.generate(
                body,
                lambda event: self._said(attempt, rid, event),
                lambda reason: self._closed(attempt, rid, reason),
            )
        except ServerError as error:
            self._closed(attempt, rid, str(error))
            return
        # One request's body must not take the engine's task group, and all requests, with it.
        except Exception as error:
            log.exception("attempt %d could not be handed to SGLang", attempt.number)
            self._failed(attempt, rid, error)
            return
        if attempt.rid == rid:
            attempt.close = stream.close
        else:
            stream.close()

    def go_on(self) -> None:
        """Submit the requests that waited."""
        while self.is_open and self._waiting:
            attempt = self._waiting.popleft()
            if attempt.number in self.live:
                try:
                    self.submit(attempt)
                except Exception as error:  # as in _hand_over: the others that wait go on
                    log.exception("attempt %d could not be handed to SGLang", attempt.number)
                    self._failed(attempt, attempt.rid, error)

    def update(self, version: Version) -> None:
        """The weights have changed under those in SGLang."""
        for attempt in self.in_sglang:
            attempt.update(version)

    # Out

    async def abort(self, number: int) -> None:
        """End an attempt, with all that it made, before this returns."""
        attempt = self.live.get(number)
        if attempt is None:
            return
        attempt.is_aborted = True
        if not attempt.rid:
            self.end(attempt, "abort")
        else:
            await self._take_out(attempt)

    async def abort_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in list(self.live):
                group.create_task(self.abort(number), name=f"abort {number}")

    async def retract_all(self) -> None:
        """All go on later, from what they have. Those that were about to end, end; stages of pairs cannot go on alone
        and end too."""
        async with asyncio.TaskGroup() as group:
            for attempt in self.in_sglang:
                attempt.is_held = attempt.stage is None
                attempt.is_aborted |= attempt.stage is not None
                group.create_task(self._take_out(attempt), name=f"retract {attempt.number}")

    def lose_all(self, reason: str) -> None:
        """SGLang is gone: what has come until now is all there will be."""
        for attempt in list(self.live.values()):
            self._leave(attempt)
            self.end(attempt, "abort", reason)

    async def _take_out(self, attempt: Attempt) -> None:
        rid = attempt.rid
        if not attempt.was_sent:
            self._stop(attempt)
            return
        over = self._over[rid]
        assert self.api is not None
        try:
            if self.is_held:
                await self.api.abort(rid)
                self._stop(attempt)
                return
            async with asyncio.timeout(ABORT_LIMIT_S):
                while not over.is_set():
                    await self.api.abort(rid)
                    try:
                        async with asyncio.timeout(ABORT_AGAIN_S):
                            await over.wait()
                    except TimeoutError:
                        continue
        except (TimeoutError, ServerError) as error:
            if attempt.rid == rid:
                log.warning(
                    "attempt %d did not come out, its connection is closed: %s", attempt.number, error
                )
                self._stop(attempt)

    # What SGLang says

    def _said(self, attempt: Attempt, rid: str, event: Any) -> None:
        if attempt.rid != rid:
            return
        if isinstance(event, dict) and "error" in event:
            self._closed(attempt, rid, f"SGLang refused it: {str(event['error'])[:300]}", is_refused=True)
            return
        try:
            piece = attempt.read(event)
            self._take(attempt, piece)
        except Exception as error:  # MalformedError, or a form of answer that nobody foresaw
            # What was told on before is good; another worker may go on from there.
            log.error("attempt %d: %s", attempt.number, error, exc_info=not isinstance(error, MalformedError))
            self._leave(attempt)
            if attempt.number in self.live:
                self.end(attempt, "abort", f"SGLang's answer was not kept: {error_text(error)}")

    def _take(self, attempt: Attempt, piece: Piece) -> None:
        if attempt.stage == "prefill":
            self._take_prefilled(attempt, piece)
            return
        is_first = attempt.num_known == 0
        runs = attempt.take(piece)
        if piece.ids:
            self._count(attempt, piece)
            if is_first and attempt.stage == "decode":
                self.on_landed(attempt)
        finish = attempt.finish(piece)
        if finish is not None:
            self._leave(attempt)
        if finish == "abort" and attempt.is_held and not attempt.is_aborted and attempt.num_left > 0:
            finish = None
            self._waiting.appendleft(attempt)
        elif finish is not None:
            self._forget(attempt, piece.message or finish)
        if piece.ids or finish is not None:
            was_asked = attempt.is_aborted or finish not in ("abort", "error")
            error = "" if was_asked else piece.message
            prefilled = 0 if attempt.stage == "decode" else piece.prefilled_tokens
            attempt.emit(Delta(attempt.number, piece.ids, piece.logprobs, runs, prefilled, finish, error))

    def _take_prefilled(self, attempt: Attempt, piece: Piece) -> None:
        """SGLang ends a prefill stage with its first token, which the decode stage tells, once the KV is over."""
        finish = attempt.finish(piece)
        if finish is None:
            return
        self._leave(attempt)
        if finish in ("length", "stop"):
            now = asyncio.get_running_loop().time()
            self.meter.note(attempt.number, now, 0, piece.prefilled_tokens, attempt.num_tokens)
            self.on_landed(attempt)
            self._forget(attempt, "")
            attempt.emit(Delta(attempt.number, [], [], [], piece.prefilled_tokens, handed_over=True))
        else:
            self.end(attempt, finish, piece.message)

    def _count(self, attempt: Attempt, piece: Piece) -> None:
        """Count a piece's tokens before anybody else sees them."""
        attempt.was_prefilled = True
        if self._count_tokens is not None:
            self._count_tokens(len(piece.ids))
        now = asyncio.get_running_loop().time()
        prefilled = 0 if attempt.stage == "decode" else piece.prefilled_tokens
        self.meter.note(attempt.number, now, len(piece.ids), prefilled, attempt.num_tokens)

    def _closed(self, attempt: Attempt, rid: str, reason: str, is_refused: bool = False) -> None:
        """Handle the end of an attempt's stream; normally the attempt has ended before."""
        if attempt.rid == rid:
            self._leave(attempt)
            # A stage may fail by the other's fault, which another pair does not share.
            is_at_fault = (is_refused or reason.startswith("HTTP 400")) and attempt.stage is None
            self.end(attempt, "error" if is_at_fault else "abort", reason or "SGLang did not finish it")

    def _failed(self, attempt: Attempt, rid: str, error: Exception) -> None:
        """Something in this code raised over it."""
        if attempt.rid == rid and attempt.number in self.live:
            self._leave(attempt)
            self.end(attempt, "error", f"{type(error).__name__}: {error_text(error)}")

    def _stop(self, attempt: Attempt) -> None:
        self._leave(attempt)
        if attempt.is_held and not attempt.is_aborted:
            self._waiting.appendleft(attempt)
        else:
            self.end(attempt, "abort")

    def _leave(self, attempt: Attempt) -> None:
        """Note that the attempt has no request in SGLang any more."""
        over = self._over.pop(attempt.rid, None)
        attempt.rid = ""
        if over is not None:
            over.set()
        if attempt.close is not None:
            attempt.close()
            attempt.close = None
        if not self._over:
            self.meter.idle()

    def end(self, attempt: Attempt, finish: FinishReason | None, error: str = "") -> None:
        self._forget(attempt, error or str(finish))
        attempt.emit(Delta(attempt.number, [], [], [], 0, finish, error, handed_over=finish is None))

    def _forget(self, attempt: Attempt, reason: str) -> None:
        self.on_end(attempt, reason)
        del self.live[attempt.number]
        self._used.add(attempt.number)

    def _next_rid(self) -> str:
        # All of one length: an abort of SGLang ends every request whose id begins with the one it names.
        self._num_requests += 1
        return f"{self._prefix}{self._num_requests:016x}"

    def _body(self, attempt: Attempt) -> dict[str, Any]:
        params = attempt.request.params
        key = splitmix64(attempt.request.seed)
        return {
            "rid": attempt.rid,
            "input_ids": attempt.context.tolist(),
            "sampling_params": {
                "max_new_tokens": attempt.num_left,
                "temperature": params.temperature,
                "stop_token_ids": list(params.stop_ids),
                "sampling_seed": key - (1 << 64) if key >= 1 << 63 else key,
            },
            "return_logprob": True,
            "stream": True,
            "extra_key": self.cache_key,
        }
