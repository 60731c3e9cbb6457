"""Links over NCCL, for hosts with GPUs. Two ranks of a link cannot share a GPU.

Several communicators on one device need one consistent order of launches, so one thread of the process issues
for all links; each link has its own stream and is watched through events, so that a stuck one blocks nobody.
A message goes through a scratch buffer on the device; the ends' staging memory is host memory, best pinned.
"""

import os
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from pearl.runtime.vital_thread import VitalThread
from pearl.workers.weight_transfer import threads
from pearl.workers.weight_transfer.errors import LinkError
from pearl.workers.weight_transfer.link import SOURCE, Transfer, first_line, release_in_background

CUDA: Any = torch.cuda  # its streams and events are untyped
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
NUM_SCRATCH = 2
"""Messages a link has under way: one moves while the one before is verified."""
MAX_PENDING = 1024
POLL_S = 0.0005
"""Between looks at an event: a bucket of 4 MiB takes about as long on a 100 Gb/s link."""


class Issuer:
    """The one thread that launches on NCCL. Launching does not wait for the peer, so its queue stays short."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Callable[[], Any], Future[Any]]] = queue.Queue(MAX_PENDING)
        VitalThread(target=self._run, name="nccl issuer", daemon=True).start()

    def call(self, launch: Callable[[], Any], timeout_s: float) -> Any:
        """Run ``launch`` in the issuing thread and return its result. Raises LinkError when it fails or is late."""
        answer: Future[Any] = Future()
        try:
            self._queue.put((launch, answer), timeout=timeout_s)
            return answer.result(timeout_s)
        except (queue.Full, TimeoutError) as error:
            raise LinkError(f"the issuing thread did not launch within {timeout_s} s") from error
        except RuntimeError as error:
            raise LinkError(first_line(error)) from error

    def _run(self) -> None:
        while True:
            launch, answer = self._queue.get()
            try:
                answer.set_result(launch())
            except Exception as error:  # noqa: BLE001  whatever a launch raises belongs to its link alone
                answer.set_exception(error)
            del launch, answer  # else this thread would keep a dead link's group until the next launch


@cache
def issuer() -> Issuer:
    return Issuer()


class NcclLink:
    """One end over NCCL on the current CUDA device. Messages are broadcasts from the source in the pair's group."""

    def __init__(self, store: Store, rank: int, limit: timedelta) -> None:
        require_survivable_errors()
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._limit_s = limit.total_seconds()
        self._is_source = rank == SOURCE
        self._group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
        # Meets the peer here, in the link's own thread: left to the first message, it would hold up the issuer.
        self._group.eager_connect_single_device(self._device)
        self._stream: Any = CUDA.Stream(self._device)
        self._scratch: list[torch.Tensor] = []
        self._count = 0

    def send(self, data: torch.Tensor) -> Transfer:
        return self._start(data)

    def receive(self, data: torch.Tensor) -> Transfer:
        return self._start(data)

    def _start(self, data: torch.Tensor) -> Transfer:
        if self._group is None:
            raise LinkError("the link was abandoned")
        scratch = self._scratch_for(data.numel())
        event = issuer().call(lambda: self._launch(data, scratch), self._limit_s)
        return NcclTransfer(event, (data, scratch))

    def _scratch_for(self, num_bytes: int) -> torch.Tensor:
        if not self._scratch or self._scratch[0].numel() < num_bytes:
            self._drain()
            self._scratch = [
                torch.empty(num_bytes, dtype=torch.uint8, device=self._device) for _ in range(NUM_SCRATCH)
            ]
        self._count += 1
        return self._scratch[self._count % NUM_SCRATCH][:num_bytes]

    def _drain(self) -> None:
        """Old scratch may still be in use on the stream; a stuck stream must not block the caller for ever."""
        event = CUDA.Event()
        event.record(self._stream)
        NcclTransfer(event, ()).wait(self._limit_s)

    def _launch(self, data: torch.Tensor, scratch: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = SOURCE
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if self._is_source:
                scratch.copy_(data, non_blocking=True)
            # Without a timeout, wait() orders the stream behind the broadcast and does not block this thread.
            self._group.broadcast([scratch], options).wait()
            if not self._is_source:
                data.copy_(scratch, non_blocking=True)
            event = CUDA.Event()
            event.record(self._stream)
        return event

    def abandon(self) -> None:
        if self._group is not None:
            remains = [self._group, self._scratch, self._stream]
            self._group, self._scratch = None, []
            # Only abort ends a kernel that waits for a dead peer; it may itself take long.
            threads.start("abandoned nccl link", abort, remains)


class NcclTransfer:
    def __init__(self, event: Any, buffers: tuple[torch.Tensor, ...]) -> None:
        self._event = event
        self._buffers = buffers  # kept alive while the device may touch them

    def wait(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not self._event.query():
            if time.monotonic() > end:
                raise LinkError(f"a message took longer than {timeout_s} s")
            time.sleep(POLL_S)


def abort(remains: list[Any]) -> None:
    remains[0].abort()
    release_in_background(remains)


def require_survivable_errors() -> None:
    """torchrun exports 1, with which a dead peer of any group ends this whole process."""
    if os.environ.get(ERROR_HANDLING) not in ("0", "2"):
        raise ValueError(
            f"{ERROR_HANDLING}={os.environ.get(ERROR_HANDLING, 'unset')} lets a dead rollout worker end this process: "
            "set it to 2 (clean up, go on) in the environment of every process that holds links"
        )
