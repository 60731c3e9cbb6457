"""Source side of the links: serves the latest snapshot to every slot that asks, each in a thread of its own.

One receiver's trouble is its own: a bucket that is late or fails ends that link, nobody else's, and the next
request of that slot builds a new one. The publisher never waits for any of them. A newer version supersedes the
one being sent at a bucket's edge.
"""

import atexit
import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from datetime import timedelta

import msgspec
import torch
from torch._C._distributed_c10d import Store, TCPStore

from pearl.types import tcp_address
from pearl.types.weights import BucketSpec, Version
from pearl.workers.weight_transfer import threads
from pearl.workers.weight_transfer.channel import (
    Backend,
    BucketReady,
    Channel,
    LinkKey,
    Open,
    Opened,
    PushResult,
    Refused,
    Request,
    Superseded,
)
from pearl.workers.weight_transfer.errors import LinkError
from pearl.workers.weight_transfer.link import SOURCE, WINDOW, Link, Transfer, build_link
from pearl.workers.weight_transfer.snapshot_image import SnapshotStore

log = logging.getLogger(__name__)

MAX_LINKS = 256
MAX_DEADLINE_S = 600.0
NUM_OUTCOMES = 1024
LAST_WORDS_S = 0.1
"""A receiver that drops a link says why first, so its words are here or nearly so."""
OPEN_TIMEOUT_S = 5.0
"""For a new connection to say who it is."""


class PushOutcome(msgspec.Struct, frozen=True):
    """How one push to one slot ended. ``error`` is empty when the receiver verified the whole version."""

    key: LinkKey
    version: Version
    seconds: float
    error: str


class LinkServer:
    """Listens on ports the system chose and already bound for us; both go with this object or its process."""

    def __init__(
        self,
        store: SnapshotStore,
        *,
        bind_address: str = "0.0.0.0",
        address: str,
        deadline_s: float = 10.0,
        backend: Backend = "gloo",
    ) -> None:
        """``address`` is what receivers connect to (``advertised_address``); ``deadline_s`` bounds building a link."""
        self._store = store
        self._deadline_s = deadline_s
        self._backend: Backend = backend
        self._lock = threading.Lock()
        self._sessions: dict[tuple[int, int], PushSession] = {}  # (source, slot) -> the one live session
        self._outcomes: deque[PushOutcome] = deque(maxlen=NUM_OUTCOMES)
        self._count = 0
        self._closed = False
        self._listener = listen(bind_address)
        self._store_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind_address, bind_address)
        self._rendezvous, self._store_port = host_store(
            bind_address, self._store_host, timedelta(seconds=deadline_s)
        )
        self.address = tcp_address.join(address, self._listener.getsockname()[1])
        store.link_address = self.address
        threads.start("link server", self._accept)
        _live.add(self)

    def outcomes(self) -> list[PushOutcome]:
        """The last pushes that ended, oldest first."""
        with self._lock:
            return list(self._outcomes)

    def links(self) -> dict[LinkKey, Link]:
        """Links that are up now."""
        with self._lock:
            return {
                s.key: s.link for s in self._sessions.values() if s.key is not None and s.link is not None
            }

    def store_keys(self) -> list[str]:
        """Keys of links being made; those of finished ones are gone."""
        return list(self._rendezvous.list_keys())

    def close(self) -> None:
        """Stop serving; nothing is waited for. Harmless when repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            sessions = list(self._sessions.values())
        shut(self._listener)
        for session in sessions:
            session.end()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            session = PushSession(self, self._store, Channel(connection))
            threads.start("link", session.run)

    def admit(self, session: "PushSession", key: LinkKey) -> Opened | Refused:
        """Give the session its link's name, in the place of an older session of the same slot."""
        if (key.source, key.source_incarnation) != (self._store.rank, self._store.incarnation):
            return Refused(
                f"this is source {self._store.rank}.{self._store.incarnation}, not that of link {key}"
            )
        with self._lock:
            older = self._sessions.get((key.source, key.slot))
            if older is not None and older.key is not None and older.key.incarnation > key.incarnation:
                return Refused(f"slot {key.slot} has incarnation {older.key.incarnation} by now")
            if self._closed or (older is None and len(self._sessions) >= MAX_LINKS):
                return Refused("closed" if self._closed else f"{MAX_LINKS} links are up")
            session.key = key
            self._sessions[(key.source, key.slot)] = session
            self._count += 1
            prefix = f"{key}/{self._count}/"
        if older is not None:
            older.end()
        return Opened(self._backend, self._store_port, prefix)

    def build(self, opened: Opened, local_address: str) -> Link:
        port, limit = opened.store_port, self._deadline_s
        return build_link(opened.backend, SOURCE, self._store_host, port, opened.prefix, local_address, limit)

    def forget(self, prefix: str) -> None:
        """Remove what a link left in the store while it was made: links come and go for days."""
        for key in self._rendezvous.list_keys() if prefix else ():
            if key.startswith(prefix):
                self._rendezvous.delete_key(key)

    def ended(self, session: "PushSession") -> None:
        self.forget(session.prefix)
        with self._lock:
            place = None if session.key is None else (session.key.source, session.key.slot)
            if place is not None and self._sessions.get(place) is session:
                del self._sessions[place]

    def record(self, outcome: PushOutcome) -> None:
        with self._lock:
            self._outcomes.append(outcome)
        level = logging.WARNING if outcome.error else logging.INFO
        log.log(
            level,
            "push of version %s over link %s: %s in %.3f s",
            outcome.version,
            outcome.key,
            outcome.error or "whole",
            outcome.seconds,
        )


class PushSession:
    """One receiver's connection and its link; runs in its own daemon thread."""

    def __init__(self, server: LinkServer, store: SnapshotStore, channel: Channel) -> None:
        self.key: LinkKey | None = None
        self.link: Link | None = None
        self.prefix = ""  # of the keys it may still have in the store
        self._server = server
        self._store = store
        self._channel = channel

    def run(self) -> None:
        try:
            if self._open():
                while True:
                    self._serve(self._request())
        except LinkError as error:
            log.info("link %s ended: %s", self.key, error)
        finally:
            self._server.ended(self)
            self._channel.close()
            if self.link is not None:
                self.link.abandon()

    def end(self) -> None:
        """End the session from another thread: the next thing it does fails."""
        self._channel.close()

    def _open(self) -> bool:
        frame = self._channel.recv(OPEN_TIMEOUT_S)
        if not isinstance(frame, Open):
            raise LinkError(f"{type(frame).__name__} before Open")
        answer = self._server.admit(self, frame.key)
        self._channel.send(answer)
        if isinstance(answer, Refused):
            return False
        self.prefix = answer.prefix
        self.link = self._server.build(answer, self._channel.local_address)
        return True

    def _request(self) -> Request:
        frame = self._channel.recv(None)  # idle between versions; ends when either side closes the connection
        if not isinstance(frame, Request) or not 0 < frame.deadline_s <= MAX_DEADLINE_S:
            raise LinkError(f"not a request: {frame}")
        self._server.forget(self.prefix)  # whoever asks has built its end
        self.prefix = ""
        return frame

    def _serve(self, request: Request) -> None:
        assert self.key is not None
        start = time.monotonic()
        error = "the source failed"
        try:
            error = self._push(request)
        except LinkError as failure:
            error = self._last_words() or str(failure)
            raise
        finally:
            seconds = time.monotonic() - start
            self._server.record(PushOutcome(self.key, request.version, seconds, error))

    def _last_words(self) -> str:
        """The reason the receiver gave before it dropped the link; "" when it just went."""
        try:
            frame = self._channel.recv(LAST_WORDS_S)
        except LinkError:
            return ""
        return frame.error if isinstance(frame, PushResult) else ""

    def _push(self, request: Request) -> str:
        snapshot = self._store.latest
        if snapshot is None or snapshot.version != request.version:
            return self._supersede()
        with self._store.pinned(request.version) as image:
            if image is None or not self._send(image, snapshot.buckets, request):
                return self._supersede()
        frame = self._channel.recv(request.deadline_s)
        if not isinstance(frame, PushResult) or frame.version != request.version:
            raise LinkError(f"not a verdict on {request.version}: {frame}")
        return frame.error

    def _supersede(self) -> str:
        latest = None if self._store.latest is None else self._store.latest.version
        self._channel.send(Superseded(latest))
        return f"superseded by {latest}"

    def _send(self, image: torch.Tensor, buckets: tuple[BucketSpec, ...], request: Request) -> bool:
        """All buckets, each within the limit; False when a newer version came out in between."""
        assert self.link is not None
        under_way: deque[Transfer] = deque()
        is_latest = True
        for index, bucket in enumerate(buckets):
            latest = self._store.latest
            is_latest = latest is not None and latest.version == request.version
            if not is_latest:
                break
            self._channel.send(BucketReady(index))
            under_way.append(self.link.send(image[bucket.offset : bucket.offset + bucket.num_bytes]))
            if len(under_way) == WINDOW:
                under_way.popleft().wait(request.deadline_s)
        while under_way:
            under_way.popleft().wait(request.deadline_s)
        return is_latest


def listen(address: str) -> socket.socket:
    """A listening socket on a port that the system chose: never probed, so nobody can take it in between."""
    is_ipv6 = ":" in address
    return socket.create_server(
        (address, 0),
        family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
        backlog=MAX_LINKS,
        dualstack_ipv6=is_ipv6,
    )


def host_store(bind_address: str, address: str, timeout: timedelta) -> tuple[Store, int]:
    """The store in which the two ends of a new link find each other, on a socket bound here."""
    listener = listen(bind_address)
    port = int(listener.getsockname()[1])
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=os.dup(listener.fileno()),
    )
    listener.close()
    return store, port


def shut(listener: socket.socket) -> None:
    """Close a listener so that a thread inside ``accept`` wakes."""
    try:
        listener.shutdown(socket.SHUT_RDWR)
    finally:
        listener.close()


_live: "weakref.WeakSet[LinkServer]" = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """Runs before the threads are joined: idle sessions end at once, busy ones at their limit."""
    for server in list(_live):
        server.close()
