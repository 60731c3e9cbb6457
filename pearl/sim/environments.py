"""Environments on the virtual clock: they follow the trajectory's script, and fail at a given rate."""

from collections.abc import Callable

from pearl.sim.clock import VirtualClock
from pearl.sim.hardware import Hardware
from pearl.sim.random_streams import stream
from pearl.sim.workload import Script, Workload
from pearl.types import commands, events
from pearl.types.events import AnyEvent
from pearl.types.ids import TrajectoryId

REPLAY_SECONDS_PER_TURN = 0.05
"""Of a lost episode that is brought back: its commands run again without waiting for a model."""


class Episode:
    """What the environment knows of one trajectory: its script, and its tokens as far as the core has received
    them."""

    __slots__ = ("group", "is_open", "script", "tokens", "turn_began_tokens")

    def __init__(self, group: int, script: Script) -> None:
        self.group = group
        self.script = script
        self.tokens = 0
        self.turn_began_tokens = 0
        self.is_open = False


class Environments:
    def __init__(
        self,
        clock: VirtualClock,
        workload: Workload,
        seed: int,
        group_size: int,
        max_observation_tokens: int,
        hardware: Hardware,
        post: Callable[[AnyEvent], None],
    ) -> None:
        self._clock = clock
        self._workload = workload
        self._group_size = group_size
        self._max_observation = max_observation_tokens
        self._scale = hardware.environment.latency_scale
        self._turn_overhead_s = hardware.worker.turn_overhead_seconds
        self._failure_rate = hardware.failures.environment_rate
        self._failures = stream(seed, "environment failures")
        self._rewards = stream(seed, "rewards")
        self._post = post
        self.episodes: dict[TrajectoryId, Episode] = {}

    def open(self, command: commands.OpenEpisode) -> None:
        identity = command.trajectory
        episode = self.episodes.get(identity)
        if episode is None:
            script = self._workload.script(command.task, identity)
            episode = self.episodes[identity] = Episode(identity // self._group_size, script)
        seconds = episode.script.reset_seconds + REPLAY_SECONDS_PER_TURN * command.turns
        self._clock.after(seconds, lambda: self._opened(command, episode, seconds))

    def _opened(self, command: commands.OpenEpisode, episode: Episode, seconds: float) -> None:
        episode.is_open = True
        if episode.tokens == 0:
            episode.tokens = episode.turn_began_tokens = episode.script.prompt_tokens
        self._post(
            events.EpisodeOpened(command.op, command.trajectory, episode.script.prompt_tokens, seconds)
        )

    def step(self, command: commands.StepEpisode) -> None:
        episode = self.episodes[command.trajectory]
        turn = episode.script.turns[command.turn]
        seconds = turn.env_seconds * self._scale + self._turn_overhead_s
        if self._failure_rate and self._failures.random() < self._failure_rate:
            self._clock.after(seconds, lambda: self._failed(command, episode))
        else:
            self._clock.after(seconds, lambda: self._stepped(command, episode))

    def _stepped(self, command: commands.StepEpisode, episode: Episode) -> None:
        turn = episode.script.turns[command.turn]
        done = command.turn + 1 >= len(episode.script.turns)
        observed = 0 if done else min(turn.observation_tokens, self._max_observation)
        reward = float(self._rewards.random() < 0.5) if done else 0.0
        seconds = turn.env_seconds * self._scale
        episode.tokens += observed
        episode.turn_began_tokens = episode.tokens
        self._post(events.EpisodeStepped(command.op, command.trajectory, observed, reward, done, seconds))

    def _failed(self, command: commands.StepEpisode, episode: Episode) -> None:
        episode.is_open = False
        self._post(events.EpisodeFailed(command.op, command.trajectory, "error", "failed at random"))

    def close(self, trajectory: TrajectoryId) -> None:
        episode = self.episodes.get(trajectory)
        if episode is not None:
            episode.is_open = False

    def void(self, trajectory: TrajectoryId) -> None:
        """Start the trajectory again with the same script."""
        self.episodes[trajectory].tokens = 0

    def forget(self, trajectory: TrajectoryId) -> None:
        self.episodes.pop(trajectory, None)
