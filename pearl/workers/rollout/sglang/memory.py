"""What the processes of a server hold: of the slot's GPUs by their driver, on a CPU host by their resident pages."""

import os

import psutil
import pynvml

from pearl.runtime.process_markers import with_descendants


def held_bytes(pid: int, uses_gpu: bool) -> int:
    """Return the bytes held by the server and all its processes."""
    pids = set(with_descendants([pid]))
    return _on_gpus() if uses_gpu else sum(map(_resident, pids))


def _resident(pid: int) -> int:
    try:
        found: int = psutil.Process(pid).memory_info().rss
        return found
    except psutil.Error:
        return 0  # it has just ended


def _on_gpus() -> int:
    """Return the bytes in use on the GPUs that this process may see; while it serves or releases, a slot has its
    GPUs for itself."""
    pynvml.nvmlInit()
    try:
        return sum(_used(name) for name in _visible())
    finally:
        pynvml.nvmlShutdown()


def _visible() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return [name.strip() for name in named.split(",") if name.strip()]


def _used(name: str) -> int:
    handle = (
        pynvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.isdecimal()
        else pynvml.nvmlDeviceGetHandleByUUID(name)
    )
    used: int = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    return used
