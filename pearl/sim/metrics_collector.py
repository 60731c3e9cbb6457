"""What a simulated run reports, summed up as it goes."""

from typing import Any, TypeVar

import msgspec

from pearl.types.profile import Platform, Profile, Workload


class StepResult(msgspec.Struct, frozen=True):
    step: int
    end_s: float
    seconds: float
    train_seconds: float
    tokens_generated: int
    tokens_trained: int

    @property
    def throughput(self) -> float:
        """Tokens a second, generated and trained together (paper §6.1)."""
        return (self.tokens_generated + self.tokens_trained) / self.seconds if self.seconds > 0 else 0.0


class MetricsCollector:
    """Collects the core's reports."""

    def __init__(self) -> None:
        self.steps: list[StepResult] = []
        self.decisions: list[dict[str, Any]] = []
        self.profile: Profile | None = None  # the newest measured one, without its classes

    def add(self, kind: str, values: dict[str, Any]) -> None:
        if kind == "step":
            self.steps.append(
                StepResult(
                    step=values["step"],
                    end_s=values["time_s"],
                    seconds=values["seconds"],
                    train_seconds=values["train_seconds"],
                    tokens_generated=values["tokens_generated"],
                    tokens_trained=values["tokens_trained"],
                )
            )
        elif kind == "decision":
            self.decisions.append(values)
        elif kind == "profile":
            self.profile = Profile(_picked(Workload, values), _picked(Platform, values))

    @property
    def throughput(self) -> float:
        """Tokens a second over all whole steps together."""
        seconds = sum(step.seconds for step in self.steps)
        tokens = sum(step.tokens_generated + step.tokens_trained for step in self.steps)
        return tokens / seconds if seconds else 0.0


T = TypeVar("T", Workload, Platform)


def _picked(kind: type[T], values: dict[str, Any]) -> T:
    return kind(**{name: values[name] for name in kind.__struct_fields__ if name in values})
