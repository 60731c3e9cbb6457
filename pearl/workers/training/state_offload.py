"""One rank's training state off its device and back, bit-identical; the processes and their groups stay.

Parameters, optimizer state, gradients and the reference weights leave. The published snapshot is host memory of its
own and goes on being served.
"""

import torch

from pearl.types.error_text import error_text
from pearl.workers.memory_offload.errors import ResidencyError
from pearl.workers.memory_offload.saver import Saver
from pearl.workers.memory_offload.saver_for import saver_for
from pearl.workers.training.control import ControlChannel, Report
from pearl.workers.training.trainer import Trainer

TAG = "training state"


class TrainingResidency:
    """Both methods are collectives: every rank hears how all of them got on."""

    def __init__(
        self,
        trainer: Trainer,
        channel: ControlChannel,
        device: torch.device,
        verify: bool,
        saver: Saver | None = None,
    ) -> None:
        """``verify``: digests before and after are compared. ``saver`` None = that of the device, made at first use."""
        self._trainer = trainer
        self._channel = channel
        self._device = device
        self._verify = verify
        self._saver = saver

    def offload(self) -> list[Report]:
        """Offload the training state, between steps only. A rank that fails reports it; the others are offloaded
        nevertheless."""
        try:
            if self._saver is None:
                self._saver = saver_for(self._device)
            released = self._saver.release(TAG, self._trainer.state(), keep=True, verify=self._verify)
        except ResidencyError as error:
            report = Report(error=error_text(error))
        else:
            parts = {
                "backup": released.backup_s,
                "release": released.release_s,
                "verify": released.verify_s,
            }
            report = Report(released.num_bytes, parts)
        return self._channel.gather(report)

    def restore(self) -> list[Report]:
        """A rank without room stays offloaded and may try again; the others then have nothing to do."""
        report = Report(parts={"restore": 0.0, "verify": 0.0})
        try:
            if self._saver is not None:
                restored = self._saver.restore(TAG)
                report = Report(parts={"restore": restored.restore_s, "verify": restored.verify_s})
        except ResidencyError as error:
            report = Report(error=error_text(error))
        return self._channel.gather(report)


def check(reports: list[Report], what: str) -> None:
    """Raises ValueError when a rank failed."""
    failures = [f"rank {rank}: {report.error}" for rank, report in enumerate(reports) if report.error]
    if failures:
        raise ValueError(f"the training state {what}: {'; '.join(failures)}")


def slowest(reports: list[Report]) -> dict[str, float]:
    """Each part's longest time over the ranks."""
    names = {name: None for report in reports for name in report.parts}
    return {name: max(report.parts.get(name, 0.0) for report in reports) for name in names}
