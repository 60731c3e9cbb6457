"""One trajectory as the scheduler sees it: where it stands, what it has, what it waits for. Counts only."""

from typing import Literal

import msgspec

from pearl.types.ids import AttemptId, Incarnation, OpId, PromptId, Slot, TrajectoryId
from pearl.types.trajectory import Outcome, TokenDelta, TrajectoryRecord, Turn
from pearl.types.version_runs import append_run
from pearl.types.weights import Version

Phase = Literal["opening", "ready", "generating", "stepping", "finished", "trained"]
"""opening: waits for its environment; ready: waits for a worker; generating; stepping: waits for the observation;
finished: waits for its cohort; trained: kept until a checkpoint holds it."""
_NEXT: dict[Phase, tuple[Phase, ...]] = {
    # opening -> opening: begun; opening -> stepping: its environment was lost before it had answered the last turn
    "opening": ("opening", "ready", "stepping", "finished"),
    "ready": ("generating", "opening", "finished"),
    # generating -> ready: interrupted, its tokens kept
    "generating": ("ready", "stepping", "opening", "finished"),
    "stepping": ("ready", "opening", "finished"),
    # finished -> opening: the weights that made it died with their lineage
    "finished": ("trained", "opening"),
    # trained -> finished: the step was undone by a restore
    "trained": ("finished",),
}
TRANSITIONS: frozenset[tuple[Phase, Phase]] = frozenset(
    (before, after) for before, others in _NEXT.items() for after in others
)


class Trajectory(msgspec.Struct, gc=False):
    """The mutable row of one episode. ``attempt`` and ``op`` are what it waits for (0 = nothing)."""

    id: TrajectoryId
    prompt: PromptId
    cohort: int  # -1 for evaluations
    task: int
    evaluation: int | None = None
    phase: Phase = "opening"
    tokens: int = 0  # all of them: prompt, generated, observations
    turns: list[Turn] = msgspec.field(default_factory=list)
    attempt: AttemptId = AttemptId(0)
    op: OpId = OpId(0)
    slot: Slot = Slot(-1)  # of the running attempt; of a pair, the one that decodes
    prefill_slot: Slot | None = None  # of a pair, until its half is done
    reserved_tokens: int = 0  # of KV, counted at ``slot``
    env_open: bool = False
    step_pending: bool = False  # a finished turn's action has not been answered by the environment
    truncated: bool = False  # that turn ended by its length limit
    home: Slot | None = None
    prefix_incarnation: Incarnation = Incarnation(0)
    prefix_version: Version | None = None
    cached_tokens: int = 0  # at home
    start_version: Version | None = None
    end_version: Version | None = None
    reward: float = 0.0
    outcome: Outcome | None = None
    trained_step: int | None = None
    failures: int = 0  # infrastructure failures that cost it its tokens
    losses: int = 0  # environments that died under it
    errors: int = 0  # failed attempts in a row
    spent_s: float = 0.0  # generating and stepping, not queueing
    generate_s: float = 0.0  # of that, on workers
    queue_s: float = 0.0  # waiting for a worker
    reset_s: float = 0.0  # until its environment gave the prompt
    since_s: float = 0.0  # when its phase began, where that counts
    restart: str = ""  # start again once what it waits for has answered; the reason
    expired: bool = False  # end as expired once what it waits for has answered

    @property
    def turn(self) -> int:
        """The turn being made, from 0; so also how many the environment has answered. -1 before the first prompt."""
        return len(self.turns) - 1

    @property
    def generated_tokens(self) -> int:
        return sum(turn.generated_tokens for turn in self.turns)

    def enter(self, phase: Phase) -> None:
        """Go on to another phase: one that the table above allows."""
        assert (self.phase, phase) in TRANSITIONS, f"trajectory {self.id}: {self.phase} -> {phase} is no move"
        self.phase = phase

    def add_delta(self, delta: TokenDelta, slot: Slot) -> None:
        turn = self.turns[-1]
        turn.prefilled_tokens += delta.prefilled_tokens
        if delta.count:
            self.tokens += delta.count
            turn.generated_tokens += delta.count
            turn.worker = slot
            for run in delta.runs:
                append_run(turn.versions, run)
            if self.start_version is None:
                self.start_version = delta.runs[0].version
            self.end_version = delta.runs[-1].version

    def versions(self) -> set[Version]:
        return {run.version for turn in self.turns for run in turn.versions}

    def reset_tokens(self) -> None:
        """Forget all tokens; counters of failures stay, and so does the phase until it is opened again."""
        fresh = Trajectory(
            self.id,
            self.prompt,
            self.cohort,
            self.task,
            self.evaluation,
            self.phase,
            failures=self.failures,
            losses=self.losses,
        )
        for name in self.__struct_fields__:
            setattr(self, name, getattr(fresh, name))

    def record(self, lineage: int, discarded: str = "") -> TrajectoryRecord:
        return TrajectoryRecord(
            prompt=self.prompt,
            group=self.prompt,
            trajectory=self.id,
            cohort=self.cohort,
            lineage=lineage,
            trained_step=None if discarded else self.trained_step,
            start_version=self.start_version,
            end_version=self.end_version,
            reward=self.reward,
            outcome="discarded" if self.outcome is None else self.outcome.value,
            turns=self.turns,
            discarded=discarded,
            evaluation=self.evaluation,
            reset_seconds=self.reset_s,
        )
