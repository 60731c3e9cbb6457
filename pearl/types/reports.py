"""What the core reports of a run, a struct a kind: the lines of metrics.jsonl, which docs/metrics.md describes.

``line_of`` gives the flat JSON object of a report. Three of them carry what they cannot name beforehand (a trainer's
own metrics, the parts of a duration, a measured profile): it lies beside the other keys in the line.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pearl.types.comparison import ComparedPart
from pearl.types.profile import Platform, Profile, Workload

Value = int | float | str | bool | None
Gpus = Annotated[str, Meta(description="GPUs by their ids, with commas between them")]
Step = Annotated[int, Meta(description="training step, from 0")]
Seconds = Annotated[float, Meta(description="how long it took, in seconds")]
Reason = Annotated[str, Meta(description="why, in words for people")]
Lineage = Annotated[int, Meta(description="how often the training world was restored from a checkpoint")]
Incarnation = Annotated[int, Meta(description="which of the process groups started under that number")]
Parts = dict[str, float]
PART_PREFIX = "part_"
CLASH_PREFIX = "trainer_"


class RunReport(msgspec.Struct, frozen=True, tag_field="kind"):
    """Base of all reports."""

    time_s: Annotated[float, Meta(description="seconds since the run began, in whole microseconds")]

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "time_s", round(self.time_s, 6))


class StepReport(RunReport, frozen=True, tag="step", kw_only=True):
    """A training step is over: its batch was trained and the new version is published."""

    step: Step
    lineage: Lineage
    seconds: Annotated[float, Meta(description="since the step before was over")]
    train_seconds: Annotated[float, Meta(description="of which the training world computed")]
    reward_mean: Annotated[float | None, Meta(description="over the trajectories that are not masked")]
    outcome_done: Annotated[int, Meta(description="trajectories that their environment ended")]
    masked: Annotated[int, Meta(description="trajectories left out of loss and baseline")]
    turns_mean: Annotated[float, Meta(description="turns of a trajectory")]
    tokens_generated: Annotated[int, Meta(description="by rollout since the step before was over")]
    tokens_trained: Annotated[int, Meta(description="generated tokens in the batch, masked ones left out")]
    throughput_tokens_per_s: Annotated[float, Meta(description="generated and trained tokens a second")]
    max_staleness: Annotated[int, Meta(description="versions between a trajectory's start and its training")]
    mean_staleness: Annotated[float, Meta(description="the same, on average")]
    mean_token_age: Annotated[float, Meta(description="versions between a token's making and its training")]
    max_logprob_gap: Annotated[
        float, Meta(description="largest difference of log-probs, rollout to training")
    ]
    logprob_gap_tokens: Annotated[int, Meta(description="tokens over which that was taken")]
    checkpoint_step: Annotated[int | None, Meta(description="of the checkpoint that was written, if one was")]
    weights_changed: Annotated[bool, Meta(description="whether the new version has another checksum")]
    metrics: dict[str, float]
    """The trainer's own (loss, gradient norm, ...); a name that is taken gets the prefix ``trainer_``."""


class EvaluationReport(RunReport, frozen=True, tag="evaluation", kw_only=True):
    """A round of greedy evaluation on unseen tasks is over."""

    round: Annotated[int, Meta(description="number of the round, from 0")]
    step: Annotated[int, Meta(description="of the version that was evaluated")]
    reward_mean: Annotated[float, Meta(description="over the tasks that are not masked")]
    tasks: Annotated[int, Meta(description="tasks of the round")]
    masked: Annotated[int, Meta(description="tasks whose infrastructure failed")]
    tokens: Annotated[int, Meta(description="generated tokens")]


class WorkerReport(RunReport, frozen=True, tag="worker", kw_only=True):
    """A rollout worker has changed its status."""

    slot: Annotated[int, Meta(description="the worker's stable number")]
    incarnation: Incarnation
    role: Annotated[str, Meta(description="colocated, prefill or decode")]
    zone: Annotated[str, Meta(description="dedicated, or overlap: on the GPUs of training")]
    activity: Annotated[str, Meta(description="active (routable), transitioning or inactive")]
    event: Annotated[str, Meta(description="the status it is in from now on")]
    version: Annotated[int | None, Meta(description="step of its weights")]
    lineage: Annotated[int | None, Meta(description="lineage of its weights")]
    gpus: Gpus
    reason: Reason


class TrainingReport(RunReport, frozen=True, tag="training", kw_only=True):
    """The training world does something else from now on."""

    activity: Annotated[
        str, Meta(description="starting, idle, training, offloading, lent, restoring or lost")
    ]
    incarnation: Incarnation
    step: Step
    lineage: Lineage
    gpus: Gpus
    reason: Reason
    parts: Parts = {}
    """Seconds of each stage of what led here, for example of an offload."""


class GpusReport(RunReport, frozen=True, tag="gpus", kw_only=True):
    """Preemptible GPUs came, are wanted back, were given back or are lost."""

    event: Literal["arrived", "reclaimed", "returned", "lost"]
    gpus: Gpus
    grace_s: Annotated[float, Meta(description="reclaimed: within how many seconds")] | UnsetType = UNSET
    reason: Annotated[str, Meta(description="reclaimed, lost: why")] | UnsetType = UNSET
    seconds: Annotated[float, Meta(description="returned: since the reclaim")] | UnsetType = UNSET
    on_time: Annotated[bool, Meta(description="returned: within the grace")] | UnsetType = UNSET


class HandoffReport(RunReport, frozen=True, tag="handoff", kw_only=True):
    """GPUs have changed hands: lent by training and serving, returned to it, or a group of joiners serves."""

    event: Literal["borrow", "return", "expansion"]
    workers: Annotated[int, Meta(description="borrow, expansion: that serve now")] | UnsetType = UNSET
    seconds: Seconds
    step: Annotated[int, Meta(description="borrow, return: training step, from 0")] | UnsetType = UNSET
    parts: Parts = {}
    """Seconds of each stage."""


class PlanReport(RunReport, frozen=True, tag="plan", kw_only=True):
    """The elastic scheduler begins to change the allocation."""

    urgency: Literal["mandatory", "optional"]
    add: Annotated[str, Meta(description="slot:role of each worker that is started or woken")]
    remove: Annotated[str, Meta(description="slot of each worker that goes")]
    rebind: Annotated[str, Meta(description="slot:role of each worker that changes its role")]
    reason: Reason


class DecisionReport(RunReport, frozen=True, tag="decision", kw_only=True):
    """The decision engine has compared allocations of the workers that are there."""

    workers: Annotated[int, Meta(description="how many there are")]
    current: Annotated[str, Meta(description="allocation, for example 4P9D or 13C")]
    target: Annotated[str, Meta(description="allocation that is chosen")]
    predicted_s: Annotated[float | None, Meta(description="makespan of the target; null without a profile")]
    switch: Annotated[str, Meta(description="none, or what kind of change leads to the target")]
    forced: Annotated[bool, Meta(description="the current allocation could not be kept")]
    reason: Reason
    candidates: Annotated[str, Meta(description="allocation=seconds of the best; ! marks what cannot be")]


class GateReport(RunReport, frozen=True, tag="gate", kw_only=True):
    """A gate has compared gain and cost of a loan or an expansion."""

    gate: Literal["lend", "expand"]
    yes: Annotated[bool, Meta(description="whether it pays")]
    gain_s: Annotated[float | None, Meta(description="seconds gained, as predicted")]
    cost_s: Annotated[float | None, Meta(description="seconds that it costs")]
    reason: Reason


class ProfileReport(RunReport, frozen=True, tag="profile", kw_only=True):
    """What the runtime tracker has measured by the end of a step: the profile, without its trajectory classes."""

    predicted_s: Annotated[float | None, Meta(description="makespan by the profile of the step before")]
    measured_s: Annotated[float, Meta(description="what the step took")]
    workload: Workload
    platform: Platform

    @property
    def profile(self) -> Profile:
        return Profile(self.workload, self.platform)


class ComparisonReport(RunReport, frozen=True, tag="comparison", kw_only=True):
    """A part of the run was compared with plain transformers: log-probs of the same tokens, in nats."""

    part: ComparedPart
    slot: Annotated[int | None, Meta(description="of the worker; null for training")]
    num_tokens: Annotated[int, Meta(description="tokens that were compared")]
    mean_gap: float
    max_gap: float
    generated_tokens: Annotated[int, Meta(description="tokens that the engine made for this alone")]
    seconds: Seconds
    skipped: Annotated[str, Meta(description="why nothing was compared")] | UnsetType = UNSET
    error: Annotated[str, Meta(description="what is wrong")] | UnsetType = UNSET


class NoteReport(RunReport, frozen=True, tag="note", kw_only=True):
    """A remark for people."""

    text: str


AnyReport = (
    StepReport
    | EvaluationReport
    | WorkerReport
    | TrainingReport
    | GpusReport
    | HandoffReport
    | PlanReport
    | DecisionReport
    | GateReport
    | ProfileReport
    | ComparisonReport
    | NoteReport
)
RESERVED = frozenset({"kind", *StepReport.__struct_fields__}) - {"metrics"}
"""Keys of a step's line that a trainer's metric cannot have."""


def line_of(report: AnyReport) -> dict[str, Value]:
    """Return the report's JSON object: flat, ``kind`` first, the keys always in the same order."""
    line: dict[str, Value] = msgspec.to_builtins(report)
    match report:
        case StepReport():
            del line["metrics"]
            line |= {f"{CLASH_PREFIX}{k}" if k in RESERVED else k: v for k, v in report.metrics.items()}
        case TrainingReport() | HandoffReport():
            del line["parts"]
            line |= {f"{PART_PREFIX}{name}": value for name, value in report.parts.items()}
        case ProfileReport():
            del line["workload"], line["platform"]
            line |= msgspec.to_builtins(report.workload) | msgspec.to_builtins(report.platform)
            del line["classes"]  # a line holds numbers only
    return line
