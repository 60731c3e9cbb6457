"""The prefill side of one attempt: offers its KV, sends what is ready from where the decode side has pages on."""

from collections import deque

import xxhash

from pearl.workers.rollout.kv_transfer.address import parse
from pearl.workers.rollout.kv_transfer.budget import Budgets, ByteBudget
from pearl.workers.rollout.kv_transfer.connection import Connection
from pearl.workers.rollout.kv_transfer.conversation import Movement, answer_of, converse
from pearl.workers.rollout.kv_transfer.errors import KvTransferError
from pearl.workers.rollout.kv_transfer.frames import Chunk, Done, Failed, Grant, Hello, Offer, Ping
from pearl.workers.rollout.kv_transfer.limits import KvLimits
from pearl.workers.rollout.kv_transfer.pages import Begin, Block, Ended, Pages, Ready


class Outgoing:
    def __init__(self, begin: Begin, sender: str, pages: Pages, budgets: Budgets, limits: KvLimits) -> None:
        self.attempt = begin.attempt
        self._address = begin.address
        self._sender = sender
        self._pages = pages
        self._budgets = budgets
        self._limits = limits
        self._connection: Connection | None = None
        self._ready: Ready | None = None
        self._ended: str | None = None
        self._next: int | None = None  # token to be read; None until the decode side has pages
        self._is_offered = False
        self._is_done = False
        self._blocks: deque[tuple[Chunk, Block]] = deque()  # bounded by the budget
        self._held = 0  # bytes of the budget
        self._readable = Movement(limits.wait_s)
        self._sayable = Movement(limits.wait_s)

    def notify(self, notice: Ready | Ended) -> None:
        if isinstance(notice, Ready):
            self._ready = notice
            self._readable.happened()
        else:
            self._ended = notice.reason
        self._sayable.happened()

    async def run(self) -> None:
        """Run the transfer and report its outcome to the engine, unless the engine itself ended it."""
        error = ""
        try:
            try:
                address = parse(self._address)
                self._connection = await Connection.open(address.host, address.port, self._limits.connect_s)
                hello = Hello(address.token, self.attempt, self._sender)
                await self._talk(self._connection, hello)
            except KvTransferError as failure:
                error = str(failure)
            await self._report(error)
            if self._connection is not None:
                last = error or self._ended
                await self._connection.finish(Failed(last) if last else None, self._limits.farewell_s)
        finally:
            self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def _report(self, error: str) -> None:
        if self._ended is None:
            outcome = self._pages.failed(self.attempt, error) if error else self._pages.sent(self.attempt)
            await answer_of(outcome, self._limits.engine_s)

    async def _talk(self, connection: Connection, hello: Hello) -> None:
        with self._budgets.of(self._address) as budget:
            try:
                await converse(
                    self._send_frames(connection, hello, budget),
                    self._receive_frames(connection),
                    self._gather(budget),
                )
            finally:
                budget.release(self._held)

    async def _send_frames(self, connection: Connection, hello: Hello, budget: ByteBudget) -> None:
        limits = self._limits
        await connection.send(hello, limits.silence_s)
        while not self._is_done and self._ended is None:
            if self._ready is not None and not self._is_offered:
                self._is_offered = True
                offer = Offer(self._ready.version, self._ready.total, self._ready.layout)
                await connection.send(offer, limits.silence_s)
            elif self._blocks:
                chunk, block = self._blocks.popleft()
                await connection.send(chunk, limits.chunk_s, block)
                self._held -= chunk.num_bytes
                budget.release(chunk.num_bytes)
            elif not await self._sayable.wait(limits.ping_s):
                await connection.send(Ping(), limits.silence_s)

    async def _receive_frames(self, connection: Connection) -> None:
        limit_s = self._limits.contact_s + self._limits.silence_s  # until the other stage is met
        while not self._is_done:
            frame = await connection.recv(limit_s)
            limit_s = self._limits.silence_s
            match frame:
                case Grant(start):
                    self._take_grant(start)
                case Done():
                    self._take_done()
                case Failed(reason):
                    raise KvTransferError(f"the decode worker says: {reason}")
                case Ping():
                    pass
                case _:
                    raise KvTransferError(f"{type(frame).__name__} from the decode side")

    def _take_grant(self, start: int) -> None:
        if not self._is_offered or self._ready is None or self._next is not None:
            raise KvTransferError("pages were granted that were not asked for")
        if not 0 <= start <= self._ready.total:
            raise KvTransferError(f"pages were granted from token {start} of {self._ready.total}")
        self._next = start
        self._readable.happened()

    def _take_done(self) -> None:
        if self._ready is None or self._next != self._ready.total or self._blocks:
            raise KvTransferError("the decode side calls it done before all was sent")
        self._is_done = True
        self._sayable.happened()

    async def _gather(self, budget: ByteBudget) -> None:
        """Read ahead of what is being sent, as far as the budget goes."""
        while True:
            ready, start = self._ready, self._next
            if ready is None or start is None or start >= ready.sendable:
                await self._readable.wait(self._limits.wait_s)
                continue
            if not await self._read(ready, start, budget):
                return

    async def _read(self, ready: Ready, start: int, budget: ByteBudget) -> bool:
        width, page = ready.layout.bytes_per_token, ready.page_tokens
        most = max(1, self._limits.chunk_bytes // width)
        count = min(most // page * page or most, ready.sendable - start)
        await budget.acquire(count * width)
        self._held += count * width
        block = await answer_of(self._pages.read(self.attempt, start, count), self._limits.engine_s)
        if block is None:
            return False
        digest = xxhash.xxh3_128_digest(block.data)
        chunk = Chunk(self.attempt, ready.version, start, count, block.nbytes, digest)
        self._blocks.append((chunk, block))
        self._next = start + count
        self._sayable.happened()
        return True
