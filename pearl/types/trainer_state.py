"""Where the training world stands, as all parts of the core see it."""

from typing import Literal

import msgspec

from pearl.types.ids import Incarnation, OpId, PromptId
from pearl.types.weights import Version

TrainerStatus = Literal["gone", "starting", "idle", "training"]


class TrainerState(msgspec.Struct):
    status: TrainerStatus = "gone"
    incarnation: Incarnation = Incarnation(0)
    lineage: int = -1  # of the newest start
    op: OpId = OpId(0)
    version: Version | None = None  # newest trained; kept while the world restarts
    checksum: str = ""  # of the newest version
    checkpoint_step: int | None = None
    losses: list[float] = msgspec.field(default_factory=list)  # times, within the restart window
    step_began_s: float = 0.0  # when the previous step ended
    step_seconds: float | None = None  # of the newest step that is over
    tokens_at_step: int = 0  # tokens_generated then
    train_began_s: float = 0.0
    checkpoint_s: float = 0.0  # when the last one was known to be whole
    trained_members: dict[PromptId, int] = msgspec.field(default_factory=dict)  # of steps no checkpoint holds
    prompts_trained_twice: int = 0  # of steps that a checkpoint holds
    prompts_lost: int = 0

    @property
    def step(self) -> int:
        return 0 if self.version is None else self.version.step
