"""The immutable 2-rank link: source is rank 0, receiver is rank 1, in a process group of their own.

Built from a store straight into the backend class, so that it lives beside any other group (FSDP's) and nobody
else takes part when one is made or dropped. Limits are on every message, because a backend does not wake an
operation whose peer died in the middle of it.
"""

import re
from datetime import timedelta
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from pearl.workers.weight_transfer import threads
from pearl.workers.weight_transfer.channel import Backend
from pearl.workers.weight_transfer.errors import LinkError

SOURCE, RECEIVER = 0, 1
WINDOW = 2
"""Buckets under way on a link: one moves while the receiver verifies the one before."""


class Transfer(Protocol):
    """A message under way."""

    def wait(self, timeout_s: float) -> None:
        """Returns when the buffer may be used again. Raises LinkError when it failed or is late."""


class Link(Protocol):
    """One end. Messages arrive in the order sent; the peer must have posted as many of the same sizes."""

    def send(self, data: torch.Tensor) -> Transfer: ...

    def receive(self, data: torch.Tensor) -> Transfer: ...

    def abandon(self) -> None:
        """Drop the link, stuck or not, without waiting for it. Harmless when repeated."""


def build_link(
    backend: Backend, rank: int, host: str, port: int, prefix: str, local_address: str, timeout_s: float
) -> Link:
    """Meet the other end under ``prefix`` in the store. Blocks for at most about ``timeout_s``, then LinkError."""
    limit = timedelta(seconds=timeout_s)
    try:
        # A client of its own: one that waits for a peer in a shared client would hold up every other link.
        client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        store = PrefixStore(prefix, client)
        if backend == "gloo":
            return GlooLink(store, rank, local_address, limit)
        from pearl.workers.weight_transfer.nccl_link import NcclLink  # needs a CUDA build

        return NcclLink(store, rank, limit)
    except (RuntimeError, dist.DistError) as error:
        raise LinkError(f"no link {prefix} within {timeout_s} s: {first_line(error)}") from error


class GlooLink:
    """Over gloo; used by one thread at each end."""

    def __init__(self, store: Store, rank: int, address: str, limit: timedelta) -> None:
        gloo: Any = dist.ProcessGroupGloo  # its options are missing in torch's type stubs
        options = gloo._Options()
        options._devices = [gloo_device(address)]
        options._threads = 1  # the default is two a group
        options._timeout = limit
        self._group: Any = gloo(store, rank, 2, options)
        self._peer = 1 - rank
        self._pending: list[GlooTransfer] = []

    def send(self, data: torch.Tensor) -> Transfer:
        return self._start("send", data)

    def receive(self, data: torch.Tensor) -> Transfer:
        return self._start("recv", data)

    def _start(self, operation: str, data: torch.Tensor) -> Transfer:
        if self._group is None:
            raise LinkError("the link was abandoned")
        try:
            # No local name for the group: a traceback would keep it alive into its reader's thread.
            transfer = GlooTransfer(getattr(self._group, operation)([data], self._peer, 0))
        except RuntimeError as error:
            raise LinkError(first_line(error)) from error
        self._pending = [*(other for other in self._pending if not other.done), transfer]
        return transfer

    def abandon(self) -> None:
        remains = [self._group, *(transfer.take() for transfer in self._pending)]
        self._group, self._pending = None, []
        if remains != [None]:
            release_in_background(remains)


class GlooTransfer:
    def __init__(self, work: Any) -> None:
        self._work = work  # holds the buffer: memory stays mapped while the backend may touch it
        self.done = False

    def wait(self, timeout_s: float) -> None:
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise LinkError(first_line(error)) from error
        self.done = True

    def take(self) -> Any:
        work, self._work = self._work, None
        return work


@cache
def gloo_device(address: str) -> Any:
    """One device (a loop thread and its sockets) for all links over this address."""
    return dist.ProcessGroupGloo.create_device(hostname=address)


def release_in_background(remains: list[Any]) -> None:
    """Let go of backend objects in a thread of their own: their destructors may wait for a stuck operation."""
    threads.start("abandoned link", remains.clear)


def first_line(error: Exception) -> str:
    """The backend's own words without its source path and its advice."""
    line = (str(error).splitlines() or [""])[0]
    return re.sub(r"^\[\S*\] ?", "", line).split(". This is typically")[0] or type(error).__name__
