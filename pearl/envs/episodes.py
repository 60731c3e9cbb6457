"""The open episodes of an environment worker. Each is on its own: whatever its code does ends that episode only,
with an ``EpisodeFailed`` that says what happened, never with a reward.

A turn is played once. Asking for the last one again gives the same answer; any other turn out of order fails.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np

from pearl.envs.own_reward import Reward, RewardedEpisode
from pearl.envs.protocol import Environment, EnvironmentSpec, Episode, Observation
from pearl.envs.response_validator import BadAnswerError, ResponseValidator, ValidatedObservation
from pearl.envs.sandbox_thread import (
    CodeError,
    LimitError,
    SandboxThread,
    Stop,
    StoppedError,
    finished,
)
from pearl.runtime.extensions import format_error
from pearl.runtime.rate_limited_log import RateLimitedLogger
from pearl.types.config import EnvironmentConfig
from pearl.types.messages.environment import (
    CloseEpisode,
    EnvironmentFailure,
    EpisodeFailed,
    OpenEpisode,
    OpenEpisodeReply,
    StepEpisode,
    StepEpisodeReply,
)

log = logging.getLogger(__name__)

MAX_OPEN_EPISODES = 4096
"""On one worker: far more than trajectories in flight, few enough that a leak is noticed before memory is gone."""
CLOSE_LIMIT_S = 10.0
"""For one episode to release what it holds; nobody waits for it."""
CALL_ERRORS = (LimitError, StoppedError, CodeError, BadAnswerError)
MAX_TRACEBACKS = 100
"""Different ones, in the log of one environment worker."""
END_LIMIT_S = 2.0
"""For all episodes together when the worker ends."""


class OpenRow(msgspec.Struct, eq=False):
    """An open episode. ``turns`` are answered; the lock is held while it is asked something, which has a limit."""

    episode: Episode
    lock: asyncio.Lock
    stop: Stop  # set when it is closed
    turns: int = 0
    done: bool = False
    last_action: bytes = b""
    last_reply: StepEpisodeReply | None = None


class _FailedError(Exception):
    """Ends an operation on an episode with this answer."""

    def __init__(self, kind: EnvironmentFailure, reason: str) -> None:
        super().__init__(reason)
        self.kind: EnvironmentFailure = kind
        self.reason = reason


class Episodes:
    def __init__(
        self,
        environment: Environment,
        spec: EnvironmentSpec,
        check: ResponseValidator,
        thread: SandboxThread,
        limits: EnvironmentConfig,
        max_open: int = MAX_OPEN_EPISODES,
        deadline_s: float = math.inf,
        reward: Reward | None = None,
    ) -> None:
        """``deadline_s`` is that of a whole trajectory: no call takes longer, nor does bringing an episode back.

        ``reward`` takes the place of the environment's own.
        """
        self._environment = environment
        self._spec = spec
        self._check = check
        self._thread = thread
        self._limits = limits
        self._max_open = max_open
        self._deadline_s = deadline_s
        self._reward = reward
        self._opening: dict[int, Stop] = {}
        self._rows: dict[int, OpenRow] = {}
        self._num_opening = 0
        self._failures = RateLimitedLogger(log)
        self._logged: set[str] = set()  # reasons whose traceback is in the log

    @property
    def num_open(self) -> int:
        return len(self._rows) + self._num_opening

    # opening

    async def open(self, request: OpenEpisode) -> OpenEpisodeReply | EpisodeFailed:
        self.close(CloseEpisode(request.trajectory))  # of an earlier try whose end was not told
        if self.num_open >= self._max_open:
            reason = (
                f"{self.num_open} episodes are open on this environment worker, its limit is {self._max_open}: "
                "raise environment.num_workers or lower rollout.max_in_flight"
            )
            return self._failed(request.trajectory, "error", reason)
        self._num_opening += 1
        began_s = time.monotonic()
        stop = self._opening[request.trajectory] = Stop()
        try:
            ids = await self._open(request, stop)
        except _FailedError as failure:
            return self._failed(request.trajectory, failure.kind, failure.reason, failure.__cause__)
        finally:
            self._num_opening -= 1
            if self._opening.get(request.trajectory) is stop:
                del self._opening[request.trajectory]
        return OpenEpisodeReply(ids, time.monotonic() - began_s)

    async def _open(self, request: OpenEpisode, stop: Stop) -> bytes:
        end_s = time.monotonic() + self._deadline_s
        made: list[Episode] = []

        async def reset() -> list[int]:
            episode = self._environment.episode(request.split, request.task)
            if self._reward is not None:
                episode = RewardedEpisode(episode, self._reward, request.split, request.task)
            made.append(episode)
            return await finished(made[0].reset())

        is_open = False
        try:
            try:
                limit_s, key = self._limit(self._limits.reset_timeout_s, "environment.reset_timeout_s", end_s)
                prompt = self._check.prompt(await self._thread.call(reset, limit_s, stop))
            except CALL_ERRORS as error:
                raise _failed_by(error, "reset", key) from error
            row = OpenRow(made[0], asyncio.Lock(), stop)
            await self._replay(row, request, end_s)
            self._release(
                self._rows.get(request.trajectory)
            )  # another open of it was quicker: the last one counts
            self._rows[request.trajectory] = row
            is_open = True
        finally:
            if made and not is_open:
                self._release(OpenRow(made[0], asyncio.Lock(), stop))
        return prompt

    def _limit(self, limit_s: float, key: str, end_s: float) -> tuple[float, str]:
        """Return the limit of a call that begins now, and the key that sets it."""
        left_s = max(0.0, end_s - time.monotonic())
        return (limit_s, key) if limit_s <= left_s else (left_s, "rollout.trajectory_deadline_s")

    async def _replay(self, row: OpenRow, request: OpenEpisode, end_s: float) -> None:
        if len(request.actions) != len(request.observations):
            raise _FailedError(
                "error", f"{len(request.actions)} actions to replay, {len(request.observations)} observations"
            )
        for turn, (action, wanted) in enumerate(zip(request.actions, request.observations, strict=True)):
            if row.done:
                raise _FailedError("mismatch", f"the replay ended at turn {turn}, before its actions did")
            reply = await self._play(row, action, self._is_truncated(action), end_s)
            if reply.observation != wanted:
                raise _FailedError("mismatch", f"the replay observed something else at turn {turn}")

    def _is_truncated(self, action: bytes) -> bool:
        return not action or int(np.frombuffer(action[-4:], "<i4")[0]) not in self._spec.stop_ids

    # turns

    async def step(self, request: StepEpisode) -> StepEpisodeReply | EpisodeFailed:
        row = self._rows.get(request.trajectory)
        if row is None:
            return EpisodeFailed("gone", f"trajectory {request.trajectory} has no open episode here")
        try:
            async with row.lock:
                return await self._step(row, request)
        except _FailedError as failure:
            if self._rows.get(request.trajectory) is row:
                self.close(CloseEpisode(request.trajectory))
            return self._failed(request.trajectory, failure.kind, failure.reason, failure.__cause__)

    async def _step(self, row: OpenRow, request: StepEpisode) -> StepEpisodeReply:
        if self._rows.get(request.trajectory) is not row:
            raise _FailedError("gone", f"the episode of trajectory {request.trajectory} was closed meanwhile")
        is_repeat = request.turn == row.turns - 1 and request.action == row.last_action
        if is_repeat and row.last_reply is not None:
            return row.last_reply
        if request.turn != row.turns or row.done:
            due = "it is done" if row.done else f"turn {row.turns} is due"
            raise _FailedError("error", f"turn {request.turn} of trajectory {request.trajectory}: {due}")
        return await self._play(row, request.action, request.truncated, time.monotonic() + self._deadline_s)

    async def _play(self, row: OpenRow, action: bytes, truncated: bool, end_s: float) -> StepEpisodeReply:
        if len(action) % 4:
            raise _FailedError("error", f"an action of {len(action)} bytes holds no int32 ids")
        ids: list[int] = np.frombuffer(action, "<i4").tolist()

        async def step() -> Observation:
            return await finished(row.episode.step(ids, truncated))

        began_s = time.monotonic()
        limit_s, key = self._limit(self._limits.step_timeout_s, "environment.step_timeout_s", end_s)
        try:
            answer = await self._thread.call(step, limit_s, row.stop)
            observed: ValidatedObservation = self._check.observation(answer)
        except CALL_ERRORS as error:
            raise _failed_by(error, "step", key) from error
        seconds = time.monotonic() - began_s
        row.last_reply = StepEpisodeReply(observed.ids, observed.reward, observed.done, seconds)
        row.last_action, row.done = action, observed.done
        row.turns += 1
        return row.last_reply

    # ending

    def close(self, request: CloseEpisode) -> None:
        """Close an episode; does nothing when there is none, or twice."""
        if (stop := self._opening.pop(request.trajectory, None)) is not None:
            stop.set()
        self._release(self._rows.pop(request.trajectory, None))

    async def close_all(self) -> None:
        """Close all episodes, within a limit, when the worker ends."""
        rows = list(self._rows.values())
        self._rows.clear()
        try:
            async with asyncio.timeout(END_LIMIT_S), asyncio.TaskGroup() as group:
                for row in rows:
                    group.create_task(self._close_quietly(row), name="close")
        except TimeoutError:
            log.warning("some of %d episodes were not closed within %g s", len(rows), END_LIMIT_S)

    async def _close_quietly(self, row: OpenRow) -> None:
        try:
            await self._thread.call(_closing(row.episode), END_LIMIT_S)
        except (LimitError, CodeError) as error:
            log.warning("an episode could not be closed: %s", error)

    def _release(self, row: OpenRow | None) -> None:
        if row is not None:
            row.stop.set()
            self._thread.post(_closing(row.episode), CLOSE_LIMIT_S, "an episode could not be closed")

    def _failed(
        self, trajectory: int, kind: EnvironmentFailure, reason: str, cause: BaseException | None = None
    ) -> EpisodeFailed:
        self._failures.warning(time.monotonic(), "episode %d failed: %s: %s", trajectory, kind, reason)
        self._log_traceback(reason, cause)
        return EpisodeFailed(kind, reason)

    def _log_traceback(self, reason: str, cause: BaseException | None) -> None:
        """Once for each place that raises: thousands of episodes fail in the same line."""
        raised = cause.__cause__ if isinstance(cause, CodeError) else None
        if raised is None or reason in self._logged or len(self._logged) >= MAX_TRACEBACKS:
            return
        self._logged.add(reason)
        log.warning("%s", format_error(raised))


def _closing(episode: Episode) -> Callable[[], Awaitable[None]]:
    """Call ``close``, which may be a plain method, or missing."""

    async def close() -> None:
        method = getattr(episode, "close", None)
        if method is not None:
            await finished(method())

    return close


def _failed_by(error: Exception, method: str, limit_key: str) -> _FailedError:
    if isinstance(error, LimitError):
        return _FailedError("timeout", f"{method}: {error} ({limit_key})")
    if isinstance(error, StoppedError):
        return _FailedError("gone", f"{method}: its episode was closed meanwhile")
    return _FailedError("error", f"{method}: {error}" if isinstance(error, CodeError) else str(error))
