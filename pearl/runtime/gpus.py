"""The GPUs of a host as NVML sees them, restricted to those that ``CUDA_VISIBLE_DEVICES`` leaves.

A GPU's name is what selects it in ``CUDA_VISIBLE_DEVICES`` under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, the order that
groups are started with: the physical index, or the UUID of a MIG device. Never a position in the visible list.
"""

from collections.abc import Sequence

import msgspec
import pynvml

from pearl.types.messages.control import Gpu

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_HIDES_ALL = ("", "-1", "NoDevFiles")  # the last is Slurm's, for a step without GPUs


class Device(msgspec.Struct, frozen=True):
    """A GPU, or one MIG device of a GPU in MIG mode (which is then not itself usable)."""

    name: str
    uuid: str
    memory_bytes: int


def virtual_gpus(host: str, count: int, memory_bytes: int) -> tuple[Gpu, ...]:
    """Stand-ins on a CPU host: what is scheduled on them runs on CPU cores."""
    return tuple(Gpu(f"{host}/{index}", memory_bytes, True) for index in range(count))


def physical_gpus(host: str, visible: str | None) -> tuple[Gpu, ...]:
    """The host's GPUs that ``visible``, the value of CUDA_VISIBLE_DEVICES or None when unset, selects.

    Raises:
        ValueError: ``visible`` names an unknown GPU, an ambiguous one, or one twice.
    """
    if visible is not None and visible.strip() in _HIDES_ALL:
        return ()
    chosen = select_visible(visible, nvml_devices())
    return tuple(Gpu(f"{host}/{device.name}", device.memory_bytes, False) for device in chosen)


def select_visible(visible: str | None, devices: Sequence[Device]) -> tuple[Device, ...]:
    """``devices`` in the order in which ``visible`` names them, by index, UUID or the beginning of a UUID."""
    if visible is None:
        return tuple(devices)
    if visible.strip() in _HIDES_ALL:
        return ()
    chosen: list[Device] = []
    for entry in visible.split(","):
        device = _find(entry.strip(), visible, devices)
        if device in chosen:
            raise ValueError(f"{VISIBLE_VARIABLE}={visible!r} names GPU {device.name} twice: name each once")
        chosen.append(device)
    return tuple(chosen)


def nvml_devices() -> list[Device]:
    """All GPUs in PCI order; none when there is no driver."""
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return []
    try:
        return [device for index in range(pynvml.nvmlDeviceGetCount()) for device in _devices_of(index)]
    finally:
        pynvml.nvmlShutdown()


def driver_version() -> str:
    """Return the version of the NVIDIA driver, "" when there is none."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ""
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _find(entry: str, visible: str, devices: Sequence[Device]) -> Device:
    by_uuid = entry.startswith(("GPU-", "MIG-"))
    found = [
        device for device in devices if device.name == entry or (by_uuid and device.uuid.startswith(entry))
    ]
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"{device.name} ({device.uuid})" for device in devices) or "none"
    problem = "could be several GPUs" if found else "is no usable GPU of this host"
    raise ValueError(f"{VISIBLE_VARIABLE}={visible!r}: {entry!r} {problem}; there are: {there}")


def _devices_of(index: int) -> list[Device]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    if not _in_mig_mode(handle):
        return [
            Device(str(index), pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        ]
    devices = []
    for position in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, position)
        except pynvml.NVMLError_NotFound:
            continue  # positions may be empty
        uuid = pynvml.nvmlDeviceGetUUID(part)
        devices.append(Device(uuid, uuid, pynvml.nvmlDeviceGetMemoryInfo(part).total))
    return devices


def _in_mig_mode(handle: object) -> bool:
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError_NotSupported:
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)
