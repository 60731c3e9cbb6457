"""SGLang plugin for hosts without a GPU: its CPU engine then also hands KV over and lets go of memory.

It does nothing where torch finds a GPU; a worker does not even put it on SGLang's path there.
"""

import ctypes
import gc
import mmap
import multiprocessing
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Held(NamedTuple):
    """Memory that was allocated in a region."""

    storage: Any  # weak
    num_bytes: int
    keep: bool


class _Pages(NamedTuple):
    pointer: int
    num_bytes: int
    first: int  # address of the whole pages inside
    length: int
    keep: bool


_held: dict[str, dict[int, _Held]] = defaultdict(dict)  # by tag and address
_kept: dict[tuple[str, int], bytes] = {}
_paused: set[str] = set()


class NoEvent:
    """Prefill marks "KV written" with a CUDA event; work on a CPU is done when the mark is made."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


def activate() -> None:
    if torch.cuda.is_available():
        return
    torch.cuda.Event = NoEvent  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda device=None: None  # type: ignore[assignment, misc, return-value]
    _fork()
    _relabel_nixl()
    _install_saver()
    try:
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender
    except ImportError:
        return
    # It would stage page indices through pinned memory and a CUDA event.
    MooncakeKVSender.supports_host_tensor_indices = False


def _fork() -> None:
    """SGLang spawns its processes, for CUDA's sake, and each then imports everything again. Forked ones have it all,
    and share its memory. SGLang says how it starts processes right before it does; there are no threads yet."""
    set_start_method = multiprocessing.set_start_method

    def choose(method: str, force: bool = False) -> None:
        set_start_method("fork", force)
        gc.freeze()  # else the first collection of a child copies what it shares

    multiprocessing.set_start_method = choose


def _relabel_nixl() -> None:
    """SGLang calls its KV pool VRAM; here it is host memory."""
    try:
        import nixl._api as api
    except ImportError:
        return

    def host(kind: str | None) -> str | None:
        return "DRAM" if kind == "VRAM" else kind

    class Agent(api.nixl_agent):  # type: ignore[misc]
        def register_memory(self, reg: Any, mem_type: str | None = None, *rest: Any, **options: Any) -> Any:
            return super().register_memory(reg, host(mem_type), *rest, **options)

        def get_xfer_descs(self, descs: Any, mem_type: str | None = None, *rest: Any, **options: Any) -> Any:
            return super().get_xfer_descs(descs, host(mem_type), *rest, **options)

        def prep_xfer_dlist(
            self, agent: Any, descs: Any, mem_type: str | None = None, *rest: Any, **options: Any
        ) -> Any:
            return super().prep_xfer_dlist(agent, descs, host(mem_type), *rest, **options)

    api.nixl_agent = Agent


def _install_saver() -> None:
    """Instead of torch_memory_saver, which needs CUDA: pages go back to the system, addresses stay."""
    from sglang.srt.utils import torch_memory_saver_adapter as adapters
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __init__(self, tag: str, keep: bool) -> None:
            super().__init__()
            self.tag, self.keep = tag, keep

        def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.device.type == "cpu":
                storage = out.untyped_storage()
                known = _held[self.tag].get(storage.data_ptr())
                if storage.nbytes() >= 2 * PAGE and (known is None or known.storage.expired()):
                    held = _Held(StorageWeakRef(storage), storage.nbytes(), self.keep)
                    _held[self.tag][storage.data_ptr()] = held
            return out

    class CpuSaver(adapters.TorchMemorySaverAdapter):  # type: ignore[misc]
        enabled = True

        def configure_subprocess(self) -> AbstractContextManager[None]:
            return nullcontext()

        @contextmanager
        def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
            with Record(tag, enable_cpu_backup):
                yield

        def cuda_graph(self, **_: object) -> AbstractContextManager[None]:
            return nullcontext()

        def disable(self) -> AbstractContextManager[None]:
            return nullcontext()

        def pause(self, tag: str) -> None:
            _pause(tag)

        def resume(self, tag: str) -> None:
            _resume(tag)

    nothing = adapters._TorchMemorySaverAdapterNoop
    adapters.TorchMemorySaverAdapter.create = staticmethod(lambda enable: CpuSaver() if enable else nothing())


def _pause(tag: str) -> None:
    if tag in _paused:
        return
    _paused.add(tag)
    for pages in _pages(tag):
        if pages.keep:
            _kept[tag, pages.pointer] = ctypes.string_at(pages.pointer, pages.num_bytes)
        if _libc.madvise(pages.first, pages.length, mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED)")


def _resume(tag: str) -> None:
    _paused.discard(tag)
    for pages in _pages(tag):
        kept = _kept.pop((tag, pages.pointer), None)
        if kept is not None:
            ctypes.memmove(pages.pointer, kept, pages.num_bytes)


def _pages(tag: str) -> Iterator[_Pages]:
    """Whole pages inside the living storages of a tag."""
    for pointer, held in _held[tag].items():
        first = -(-pointer // PAGE) * PAGE
        length = (pointer + held.num_bytes) // PAGE * PAGE - first
        if length > 0 and not held.storage.expired():
            yield _Pages(pointer, held.num_bytes, first, length, held.keep)
