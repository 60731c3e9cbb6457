"""Environment workers: kept alive, loaded evenly, asked with a limit. A trajectory's episode stays on one worker.

A worker that dies takes its episodes with it: each operation on them answers "gone", and the core decides whether
to replay. An answer to an episode that was taken back meanwhile is dropped and its episode closed.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from pearl.runtime.errors import PeerGoneError, QueueFullError, RemoteError
from pearl.runtime.rpc_server import RpcServer
from pearl.runtime.supervisor import RestartLimit
from pearl.runtime.token_store import TokenStore
from pearl.service.loop.inbox import EnvironmentResult, Inbox
from pearl.service.processes.process_manager import Loss, ManagedProcess, ProcessManager
from pearl.service.suspicion import DEATHS_TO_REFUSE, Suspicion
from pearl.types import commands, events
from pearl.types.config import Config
from pearl.types.ids import OpId, TrajectoryId
from pearl.types.messages import environment as messages
from pearl.types.messages.training import Demonstration

log = logging.getLogger(__name__)

ANSWER_MARGIN_S = 5.0
"""Beyond the environment's own limits, which its worker keeps; past it the worker itself is at fault."""
DEMONSTRATIONS_PER_ASK = 256
Spawn = Callable[[str, Coroutine[Any, Any, None]], object]


class Episode(msgspec.Struct, eq=False):
    """An open or opening episode. ``op`` is what it is asked for now (0 = nothing)."""

    trajectory: TrajectoryId
    op: OpId
    task: str  # as it is called where it is blamed; "" = not known
    peer: str = ""  # the worker it is bound to


class EnvironmentPool:
    def __init__(
        self,
        config: Config,
        server: RpcServer,
        processes: ProcessManager,
        store: TokenStore,
        inbox: Inbox,
        spawn: Spawn,
        say: Callable[[str], None] = log.info,
    ) -> None:
        """``say`` speaks to the person."""
        self._say = say
        self._logs: dict[str, Path] = {}  # of workers without a failure so far
        self._config = config
        self._server = server
        self._processes = processes
        self._store = store
        self._inbox = inbox
        self._spawn = spawn
        self._load: dict[str, int] = {}  # episodes a living worker
        self._up = asyncio.Event()
        self._episodes: dict[TrajectoryId, Episode] = {}
        self._suspicion = Suspicion()
        self._suspects: dict[str, asyncio.Lock] = {}  # a worker; held while a suspect is asked something

    # workers

    async def keep(self, make_life: Callable[[int], ManagedProcess], say: Callable[[str], None]) -> str:
        """Keep one worker alive under new incarnations. Returns what to tell the person when it died too often."""
        runtime = self._config.runtime
        loop = asyncio.get_running_loop()
        restarts = RestartLimit(runtime.max_restarts, runtime.restart_window_s)
        # Deaths with a culprit are bounded by its refusal; so are those of many culprits together.
        by_tasks = RestartLimit(DEATHS_TO_REFUSE * runtime.max_restarts, runtime.restart_window_s)
        incarnation = 0
        while True:
            incarnation += 1
            process = make_life(incarnation)
            loss, guilty = await self._live(process)
            where = f"{loss.reason}. Its log is in {process.log_directory}"
            if incarnation == 1 and not process.greeted.done():
                return f"environment worker {process.slot} did not start: {where}"
            limit = by_tasks if guilty else restarts
            if not limit.allows(loop.time()):
                window = f"{limit.max_restarts} restarts within {runtime.restart_window_s:.0f} s"
                culprits = f"; {named}" if (named := self._suspicion.described()) else ""
                return f"environment worker {process.slot} died after {window}: {where}{culprits}"
            under = f" under task {guilty}" if guilty else ""
            say(f"environment worker {process.slot} died{under}: {loss.reason}; starting again")

    async def _live(self, process: ManagedProcess) -> tuple[Loss, str]:
        """Run one environment worker; returns how it ended, and the task that is to blame for that, if any is."""
        if await self._processes.start(process) is not None:
            self._load[process.name] = 0
            self._logs[process.name] = process.log_directory
            self._up.set()
        loss = await self._processes.wait_exited(process)
        self._load.pop(process.name, None)
        self._suspects.pop(process.name, None)
        return loss, self._suspicion.judge(process.name)

    async def describe(self) -> messages.DescribeReply:
        described: messages.DescribeReply = await self._ask_any(messages.Describe(), messages.DescribeReply)
        return described

    async def demonstrations(self, first: int, count: int) -> tuple[Demonstration, ...]:
        """Deterministic in the run's seed, ``first`` and ``count``."""
        request = messages.Demonstrate(self._config.run.seed, first, count)
        reply: messages.DemonstrateReply = await self._ask_any(request, messages.DemonstrateReply)
        return reply.demonstrations

    async def decode(self, parts: tuple[bytes, ...]) -> tuple[str, ...] | None:
        """Turn ids into text for people; None when the environment cannot."""
        request = messages.DecodeTokens(parts)
        reply: messages.DecodeTokensReply = await self._ask_any(request, messages.DecodeTokensReply)
        return reply.texts

    async def _ask_any(self, request: Any, reply_type: type[Any]) -> Any:
        """Any worker can answer it; when one dies over it another is asked. RemoteError when it is refused."""
        async with asyncio.timeout(self._config.runtime.start_timeout_s):
            while True:
                peer = await self._least_loaded()
                try:
                    return await self._server.call(
                        peer,
                        request,
                        deadline_s=self._config.runtime.start_timeout_s,
                        reply_type=reply_type,
                    )
                except PeerGoneError:
                    self._load.pop(peer, None)

    # episodes: each command is one task, whose outcome goes to the inbox

    def open(self, command: commands.OpenEpisode) -> None:
        self.close(command.trajectory)
        task = f"{command.task} ({'evaluation' if command.evaluation else 'train'})"
        episode = self._episodes[command.trajectory] = Episode(command.trajectory, command.op, task)
        self._spawn(f"OpenEpisode {command.op}", self._open(command, episode))

    def step(self, command: commands.StepEpisode) -> None:
        episode = self._episodes.get(command.trajectory)
        if episode is None:
            episode = self._episodes[command.trajectory] = Episode(command.trajectory, command.op, "")
        episode.op = command.op
        action = self._store.view(command.trajectory).actions[command.turn]
        self._spawn(f"StepEpisode {command.op}", self._step(command, episode, action))

    def close(self, trajectory: TrajectoryId) -> None:
        """End the episode, if there is one, and take back what is being asked of it."""
        episode = self._episodes.pop(trajectory, None)
        if episode is not None and episode.peer in self._load:
            self._load[episode.peer] -= 1
            self._tell_closed(episode)

    def is_awaited(self, trajectory: TrajectoryId, op: OpId) -> bool:
        """Whether the trajectory still waits for this answer."""
        episode = self._episodes.get(trajectory)
        return episode is not None and episode.op == op

    def _tell_closed(self, episode: Episode) -> None:
        if episode.peer not in self._load:
            return
        try:
            self._server.notify(episode.peer, messages.CloseEpisode(episode.trajectory))
        except (PeerGoneError, QueueFullError) as error:
            log.warning("episode %d was not closed on %s: %s", episode.trajectory, episode.peer, error)

    def _is_current(self, episode: Episode) -> bool:
        return self._episodes.get(episode.trajectory) is episode

    async def _open(self, command: commands.OpenEpisode, episode: Episode) -> None:
        limits = self._config.environment
        outcome: messages.OpenEpisodeReply | messages.EpisodeFailed
        if await self._bind(episode):
            if not self._is_current(episode):
                self._load[episode.peer] -= 1
                return
            actions, observations = self._history(command)
            request = messages.OpenEpisode(
                command.trajectory,
                "evaluation" if command.evaluation else "train",
                command.task,
                actions,
                observations,
            )
            limit_s = limits.reset_timeout_s + command.turns * limits.step_timeout_s
            limit_s = min(limit_s, self._config.rollout.trajectory_deadline_s)
            outcome, charged = await self._ask(
                episode, command.op, request, messages.OpenEpisodeReply, limit_s
            )
        else:
            outcome, charged = messages.EpisodeFailed("gone", "there is no environment worker"), True
        if not self._is_current(episode):
            self._tell_closed(episode)  # again: the first may have overtaken the opening
        elif isinstance(outcome, messages.EpisodeFailed):
            await self._failed(episode, command.op, outcome, charged)
        else:
            event = events.EpisodeOpened(
                command.op, command.trajectory, len(outcome.ids) // 4, outcome.seconds
            )
            await self._inbox.put(EnvironmentResult(event, 0, outcome.ids))

    async def _step(self, command: commands.StepEpisode, episode: Episode, action: bytes) -> None:
        request = messages.StepEpisode(command.trajectory, command.turn, action, command.truncated)
        limit_s = min(self._config.environment.step_timeout_s, self._config.rollout.trajectory_deadline_s)
        outcome, charged = await self._ask(episode, command.op, request, messages.StepEpisodeReply, limit_s)
        if isinstance(outcome, messages.EpisodeFailed):
            await self._failed(episode, command.op, outcome, charged)
            return
        event = events.EpisodeStepped(
            command.op,
            command.trajectory,
            len(outcome.observation) // 4,
            outcome.reward,
            outcome.done,
            outcome.seconds,
        )
        await self._inbox.put(EnvironmentResult(event, command.turn, outcome.observation))

    async def _bind(self, episode: Episode) -> bool:
        """Bind the episode to the worker with the fewest; waits for one to come up. False when none does."""
        try:
            async with asyncio.timeout(self._config.runtime.start_timeout_s):
                episode.peer = await self._least_loaded()
        except TimeoutError:
            return False
        self._load[episode.peer] += 1
        return True

    async def _least_loaded(self) -> str:
        """Waits for a worker to come up; whoever calls it sets the limit."""
        while not self._load:
            self._up.clear()
            await self._up.wait()
        return min(self._load, key=self._load.__getitem__)

    def _history(self, command: commands.OpenEpisode) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        if command.turns == 0:
            return (), ()
        view = self._store.view(command.trajectory)
        return view.actions[: command.turns], view.observations[: command.turns]

    async def _ask(
        self, episode: Episode, op: OpId, request: Any, reply_type: type[Any], limit_s: float
    ) -> tuple[Any, bool]:
        """The reply, or the failure that stands for it; and whether a failure is held against the trajectory."""
        if refusal := self._suspicion.refusal(episode.task):
            return messages.EpisodeFailed("error", refusal), True
        if not self._suspicion.must_be_alone(episode.task):
            return await self._ask_now(episode, op, request, reply_type, limit_s)
        async with self._suspects.setdefault(episode.peer, asyncio.Lock()):
            if not self._is_current(episode):
                return messages.EpisodeFailed("gone", "it was closed meanwhile"), False
            return await self._ask_now(episode, op, request, reply_type, limit_s)

    async def _ask_now(
        self, episode: Episode, op: OpId, request: Any, reply_type: type[Any], limit_s: float
    ) -> tuple[Any, bool]:
        peer = episode.peer
        if peer not in self._load:  # it died while this episode was asked nothing
            return messages.EpisodeFailed("gone", "its environment worker is gone"), not peer
        kind = type(request).__name__
        self._suspicion.begin(peer, op, episode.task, kind)
        try:
            reply = await self._server.call(peer, request, deadline_s=limit_s + ANSWER_MARGIN_S)
        except PeerGoneError as error:
            charged = self._suspicion.is_blamed(peer, op)
            reason = f"{error}, under task {episode.task}" if charged else str(error)
            return messages.EpisodeFailed("gone", reason), charged
        except TimeoutError:
            text = f"no answer within {limit_s + ANSWER_MARGIN_S:g} s"
            return messages.EpisodeFailed("timeout", text), True
        except (QueueFullError, RemoteError) as error:
            return messages.EpisodeFailed("error", str(error)), True
        finally:
            self._suspicion.end(peer, op)
        self._suspicion.answered(episode.task, kind)
        if isinstance(reply, reply_type | messages.EpisodeFailed):
            return reply, True
        return messages.EpisodeFailed("error", f"answered {type(reply).__name__}"), True

    async def _failed(
        self, episode: Episode, op: OpId, failure: messages.EpisodeFailed, charged: bool
    ) -> None:
        log.warning("episode %d: %s: %s", episode.trajectory, failure.kind, failure.reason)
        self._say_where(episode, failure)
        if self._is_current(episode):
            self.close(episode.trajectory)  # the core takes a failed episode for closed
        event = events.EpisodeFailed(op, episode.trajectory, failure.kind, failure.reason, charged)
        await self._inbox.put(event)

    def _say_where(self, episode: Episode, failure: messages.EpisodeFailed) -> None:
        """Once a worker: its log has the traceback of each different failure, the core says how often there are any."""
        logs = self._logs.pop(episode.peer, None) if failure.kind == "error" else None
        if logs is not None:
            self._say(f"environment: an episode's code failed; the whole traceback is in {logs}/rank0.log")
