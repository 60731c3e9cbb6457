"""What a simulated run reports, summed up as it goes."""

import msgspec

from pearl.types.profile import Profile
from pearl.types.reports import AnyReport, DecisionReport, ProfileReport, StepReport


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
        self.decisions: list[DecisionReport] = []
        self.profile: Profile | None = None  # the newest measured one, without its classes

    def add(self, report: AnyReport) -> None:
        match report:
            case StepReport():
                self.steps.append(
                    StepResult(
                        step=report.step,
                        end_s=report.time_s,
                        seconds=report.seconds,
                        train_seconds=report.train_seconds,
                        tokens_generated=report.tokens_generated,
                        tokens_trained=report.tokens_trained,
                    )
                )
            case DecisionReport():
                self.decisions.append(report)
            case ProfileReport():
                self.profile = report.profile

    @property
    def throughput(self) -> float:
        """Tokens a second over all whole steps together."""
        seconds = sum(step.seconds for step in self.steps)
        tokens = sum(step.tokens_generated + step.tokens_trained for step in self.steps)
        return tokens / seconds if seconds else 0.0
