"""The saver for a device."""

import torch

from pearl.workers.memory_offload.host_saver import HostSaver
from pearl.workers.memory_offload.saver import Saver


def saver_for(device: torch.device) -> Saver:
    """Raises ResidencyError when the device needs a library that is not installed."""
    if device.type == "cuda":
        from pearl.workers.memory_offload.cuda_saver import (
            CudaSaver,  # what it needs is not there on CPU hosts
        )

        return CudaSaver(device)
    return HostSaver()
