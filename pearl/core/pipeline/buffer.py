"""The schedule of training batches: step k trains exactly cohort k, a fixed list of trajectories; it holds no
trajectory data.

Invariants: a cohort's members are opened in prompt order; each is finished exactly once; batch k is cohort k, whole.
Cohort k may be opened once the trainer's version >= k - bound, so staleness is bounded by construction.
"""

from typing import Literal

import msgspec

from pearl.types.config import Config
from pearl.types.ids import PromptId, TrajectoryId

CohortStatus = Literal["rollout", "training", "trained"]


class Cohort(msgspec.Struct):
    index: int
    first_prompt: int
    num_members: int
    opened: int = 0
    finished: int = 0
    status: CohortStatus = "rollout"

    @property
    def is_complete(self) -> bool:
        return self.finished == self.num_members


class CohortBuffer(msgspec.Struct):
    """``total_prompts`` 0 = no end of data. A last short cohort is trained as it is."""

    group_size: int
    prompts_per_step: int
    bound: int
    strict: bool
    num_steps: int
    total_prompts: int = 0
    cohorts: dict[int, Cohort] = msgspec.field(default_factory=dict)

    @classmethod
    def build(cls, config: Config, total_prompts: int) -> "CohortBuffer":
        per_step = config.data.batch_size // config.data.group_size
        steps = config.run.num_steps
        if total_prompts:
            steps = min(steps, -(-total_prompts // per_step))
        return cls(
            group_size=config.data.group_size,
            prompts_per_step=per_step,
            bound=config.rollout.staleness_bound,
            strict=config.rollout.start == "strict",
            num_steps=steps,
            total_prompts=total_prompts,
        )

    def get(self, index: int) -> Cohort:
        """Return cohort ``index``, created on first use."""
        cohort = self.cohorts.get(index)
        if cohort is None:
            first = index * self.prompts_per_step
            prompts = self.prompts_per_step
            if self.total_prompts:
                prompts = min(prompts, self.total_prompts - first)
            cohort = self.cohorts[index] = Cohort(index, first, prompts * self.group_size)
        return cohort

    def next_to_open(self, step: int) -> Cohort | None:
        """Return the oldest cohort within the bound that has trajectories left to start; in strict mode None while
        an older one is unfinished."""
        last = min(step + self.bound, self.num_steps - 1)
        for index in range(step, last + 1):
            cohort = self.get(index)
            if cohort.opened < cohort.num_members:
                return cohort
            if self.strict and not cohort.is_complete:
                return None
        return None

    def open_next(self, cohort: Cohort) -> tuple[TrajectoryId, PromptId]:
        """Allocate the cohort's next trajectory; returns its id and prompt."""
        prompt = cohort.first_prompt + cohort.opened // self.group_size
        member = cohort.opened % self.group_size
        cohort.opened += 1
        return TrajectoryId(prompt * self.group_size + member), PromptId(prompt)

    def members(self, cohort: Cohort) -> list[TrajectoryId]:
        first = cohort.first_prompt * self.group_size
        return [TrajectoryId(first + i) for i in range(cohort.num_members)]

    def prompts(self, cohort: Cohort) -> list[PromptId]:
        return [PromptId(cohort.first_prompt + i) for i in range(cohort.num_members // self.group_size)]

    def drop_from(self, step: int) -> None:
        """Forget cohorts >= ``step``: training ends before them."""
        for index in [index for index in self.cohorts if index >= step]:
            del self.cohorts[index]

    def drop_before(self, step: int) -> None:
        """Forget cohorts < ``step``: they are in a checkpoint."""
        for index in [index for index in self.cohorts if index < step]:
            del self.cohorts[index]
