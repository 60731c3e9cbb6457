"""An endpoint inside the environment worker, for agents that are programs: OpenAI's chat completions and Anthropic's
messages.

The API key names the trajectory and nothing else does. A call is held until its answer is there, whatever happens to
workers and weights meanwhile; its connection may break, and only a retry that says it is one (the ``openai`` package's
header, or the same idempotency key) with the same body gets the answer of the call that it repeats. Refusals carry
``x-should-retry: false``, since asking again is no use.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from pearl.envs.agents.anthropic import AnthropicDialect
from pearl.envs.agents.completion import Completion
from pearl.envs.agents.dialect import Dialect, OpenAiDialect
from pearl.envs.agents.errors import RequestError, TrajectoryEndedError
from pearl.envs.agents.exchange import AgentCounters, Exchange
from pearl.envs.agents.keys import Keys
from pearl.envs.protocol import InfrastructureError
from pearl.runtime.rate_limited_log import RateLimitedLogger

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 5.0
"""Between comment lines of a stream whose answer is not there yet: proxies and clients give up on silence."""
MAX_BODY_BYTES = 64 << 20
MAX_WAITING_CALLS = 64
"""Of one trajectory: subagents wait in order, a loop gone wild does not fill the memory."""
STOP_LIMIT_S = 1.0
"""For connections to end when the worker ends."""
MODEL = "pearl"
_OPENAI = OpenAiDialect()
DIALECTS: dict[str, Dialect] = {"/v1/chat/completions": _OPENAI, "/v1/messages": AnthropicDialect()}


class Call(msgspec.Struct, eq=False):
    """One logical request, however often it is sent. ``refusal`` is (status, code, text)."""

    digest: bytes
    idempotency_key: str | None
    done: asyncio.Event
    completion: Completion | None = None
    refusal: tuple[int, str, str] | None = None


class OpenTrajectory(msgspec.Struct, eq=False):
    exchange: Exchange
    latest: Call | None = None
    waiting: int = 0


class Gateway:
    """``start`` before the first key is used, ``stop`` at the end; all on one loop."""

    def __init__(self, counters: AgentCounters, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        self._counters = counters
        self._keep_alive_s = keep_alive_s
        self._keys = Keys()
        self._open: dict[str, OpenTrajectory] = {}
        self._group: asyncio.TaskGroup
        self._runner: web.AppRunner | None = None
        self._notes = RateLimitedLogger(log)
        self.url = ""  # of the API, without a slash at its end

    # for the environment

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Listen on this host's own interface. OSError when that cannot be."""
        self._group = group
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_refusals])
        for path in DIALECTS:
            application.router.add_post(path, self._chat)
        application.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=STOP_LIMIT_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"
        log.info("agents are answered at %s", self.url)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def admit(self, exchange: Exchange) -> str:
        """The key whose calls go to this trajectory, until ``dismiss``."""
        key = self._keys.make()
        self._open[key] = OpenTrajectory(exchange)
        return key

    def dismiss(self, key: str) -> None:
        """End a trajectory's key: from now on its calls are late. Repeated calls do nothing."""
        self._open.pop(key, None)

    # requests

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._authenticate(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "pearl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        trajectory = self._authenticate(request)
        dialect = _dialect(request)
        raw = await request.read()
        body = _read_body(raw)
        call = self._joined(trajectory, request, raw) or self._begin(trajectory, request, raw, body)
        if body.get("stream"):
            return await self._stream(request, call, dialect, body)
        await call.done.wait()  # ends with the answer or with the trajectory
        if call.completion is None:
            return _refusal(dialect, call)
        return web.json_response(body=dialect.answer(call.completion))

    def _authenticate(self, request: web.Request) -> OpenTrajectory:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        trajectory = self._open.get(key)
        if trajectory is not None and not trajectory.exchange.is_closed:
            return trajectory
        if self._keys.is_ours(key):
            self._counters.late_calls += 1
            raise _Refused(409, "trajectory_ended", "the trajectory of this API key has ended")
        raise _Refused(
            401, "invalid_api_key", "the API key is missing or does not belong to a trajectory in progress"
        )

    def _joined(self, trajectory: OpenTrajectory, request: web.Request, raw: bytes) -> Call | None:
        """The call that this request says it repeats."""
        call = trajectory.latest
        if call is None or call.digest != _digest(raw):
            return None
        is_marked = request.headers.get("x-stainless-retry-count", "0") != "0"
        if not is_marked and (
            call.idempotency_key is None or call.idempotency_key != request.headers.get("idempotency-key")
        ):
            return None
        self._counters.joined_retries += 1
        return call

    def _begin(
        self, trajectory: OpenTrajectory, request: web.Request, raw: bytes, body: Mapping[str, Any]
    ) -> Call:
        if trajectory.waiting >= MAX_WAITING_CALLS:
            raise _Refused(
                429, "too_many_calls", f"{MAX_WAITING_CALLS} calls of this trajectory wait already"
            )
        call = Call(_digest(raw), request.headers.get("idempotency-key"), asyncio.Event())
        trajectory.latest = call
        trajectory.waiting += 1
        self._group.create_task(self._perform(trajectory, call, _dialect(request), body), name="agent's call")
        return call

    async def _perform(
        self, trajectory: OpenTrajectory, call: Call, dialect: Dialect, body: Mapping[str, Any]
    ) -> None:
        """Run a call without tying it to a connection: what is generated is kept for a retry."""
        try:
            call.completion = await trajectory.exchange.ask(dialect.read(body))
        except RequestError as error:
            call.refusal = (error.status, error.code, str(error))
        except ValueError as error:  # messages in a wrong form, or refused by the chat template
            call.refusal = (400, "invalid_request", str(error))
        except InfrastructureError as error:
            call.refusal = (500, "infrastructure", str(error))
        finally:
            trajectory.waiting -= 1
            call.done.set()
        if call.refusal is not None and call.refusal[0] != TrajectoryEndedError.status:
            status, code, text = call.refusal
            self._notes.warning(time.monotonic(), "a call is refused: %d %s: %s", status, code, text)

    async def _stream(
        self, request: web.Request, call: Call, dialect: Dialect, body: Mapping[str, Any]
    ) -> web.StreamResponse:
        # An answer that takes longer begins with its headers; a refusal comes at once and keeps its status.
        if await _within(call.done, self._keep_alive_s) and call.completion is None:
            return _refusal(dialect, call)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        try:
            while not await _within(call.done, self._keep_alive_s):
                await response.write(dialect.keep_alive)
            if call.completion is None:
                await response.write(dialect.stream_refusal(*(call.refusal or _UNANSWERED)))
            else:
                await response.write(dialect.stream(call.completion, body))
            await response.write_eof()
        except ConnectionError:
            log.debug("a client left its stream; its answer is kept for a retry")
        return response


class _Refused(Exception):
    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status, self.code = status, code


@web.middleware
async def _refusals(request: web.Request, handler: Any) -> web.StreamResponse:
    """Every refusal is JSON in the form of its dialect, aiohttp's own (404, 405, 413) too."""
    try:
        response: web.StreamResponse = await handler(request)
    except _Refused as error:
        return _error(_dialect(request), error.status, error.code, str(error))
    except web.HTTPException as error:
        return _error(_dialect(request), error.status, "not_offered", error.text or error.reason)
    return response


def _read_body(raw: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _Refused(400, "invalid_request", f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise _Refused(400, "invalid_request", "the body is no JSON object")
    return body


def _dialect(request: web.Request) -> Dialect:
    return DIALECTS.get(request.path, _OPENAI)


def _refusal(dialect: Dialect, call: Call) -> web.Response:
    return _error(dialect, *(call.refusal or _UNANSWERED))


_UNANSWERED = (409, "trajectory_ended", "the worker ended before the answer")


def _error(dialect: Dialect, status: int, code: str, text: str) -> web.Response:
    body = dialect.refusal(status, code, text)
    return web.json_response(body, status=status, headers={"x-should-retry": "false"})


def _digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=16).digest()


async def _within(event: asyncio.Event, limit_s: float) -> bool:
    """Whether it is set within the limit."""
    try:
        async with asyncio.timeout(limit_s):
            return await event.wait()
    except TimeoutError:
        return event.is_set()
