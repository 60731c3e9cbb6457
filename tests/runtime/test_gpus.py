"""Each name in CUDA_VISIBLE_DEVICES means one physical GPU, or is refused."""

from types import SimpleNamespace

import pynvml
import pytest

from pearl.runtime.gpus import Device, physical_gpus, select_visible, virtual_gpus
from pearl.types.messages.control import Gpu

DEVICES = [
    Device(str(index), uuid, 80 << 30)
    for index, uuid in enumerate(["GPU-ab12", "GPU-ab34", "GPU-cd34", "GPU-ef"])
]
DEVICES += [Device(uuid, uuid, 10 << 30) for uuid in ("MIG-11", "MIG-22")]


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("3,1", ["3", "1"]),
        (" 3 , 1 ", ["3", "1"]),
        ("GPU-ab12,GPU-cd34", ["0", "2"]),
        ("GPU-c", ["2"]),
        ("MIG-22,0", ["MIG-22", "0"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        (None, ["0", "1", "2", "3", "MIG-11", "MIG-22"]),
    ],
)
@pytest.mark.scenario("LA-05")
def test_the_gpus_meant_are_chosen_in_that_order(visible: str | None, names: list[str]) -> None:
    assert [device.name for device in select_visible(visible, DEVICES)] == names


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        ("1,1", "names GPU 1 twice"),
        ("0,GPU-ab12", "names GPU 0 twice"),
        ("9", r"'9' is no usable GPU of this host; there are: 0 \(GPU-ab12\), 1"),
        ("GPU-zz", "'GPU-zz' is no usable GPU"),
        ("GPU-ab", "'GPU-ab' could be several GPUs"),
        ("0,,1", "'' is no usable GPU"),
        ("ab12", "'ab12' is no usable GPU"),
        ("0;1", "'0;1' is no usable GPU"),
    ],
)
@pytest.mark.scenario("LA-05")
def test_doubled_unknown_and_ambiguous_entries_are_refused(visible: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_visible(visible, DEVICES)


def test_virtual_gpus_are_named_by_host_and_index() -> None:
    assert virtual_gpus("node", 2, 7) == (Gpu("node/0", 7, True), Gpu("node/1", 7, True))


def fake_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs: the first plain, the second in MIG mode with its position 1 in use."""

    def mig_handle(handle: str, position: int) -> str:
        if position != 1:
            raise pynvml.NVMLError_NotFound
        return f"{handle}.1"

    def mig_mode(handle: str) -> tuple[int, int]:
        if handle == "gpu0":
            raise pynvml.NVMLError_NotSupported
        return 1, 1

    uuids = {"gpu0": "GPU-aa", "gpu1": "GPU-bb", "gpu1.1": "MIG-cc"}
    sizes = {"gpu0": 80, "gpu1": 80, "gpu1.1": 10}
    fakes = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: f"gpu{index}",
        "nvmlDeviceGetUUID": uuids.__getitem__,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=sizes[handle]),
        "nvmlDeviceGetMigMode": mig_mode,
        "nvmlDeviceGetMaxMigDeviceCount": lambda _: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": mig_handle,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(pynvml, name, fake)


@pytest.mark.scenario("LA-05")
def test_nvml_gpus_keep_their_physical_names(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch)
    assert physical_gpus("h", None) == (Gpu("h/0", 80, False), Gpu("h/MIG-cc", 10, False))
    assert physical_gpus("h", "MIG-cc") == (Gpu("h/MIG-cc", 10, False),)
    assert physical_gpus("h", "") == ()
    with pytest.raises(ValueError, match="'1' is no usable GPU"):
        physical_gpus("h", "1")


def test_a_host_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", no_library)
    assert physical_gpus("h", None) == ()
