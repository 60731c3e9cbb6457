"""The decode side of one attempt: waits for its prefill stage, then takes KV into pages that the engine has granted.

Nothing is written to a page before its bytes are verified and the engine itself has found the attempt alive.
"""

import asyncio
from collections import deque

from pearl.workers.rollout.kv_transfer.budget import Budgets, ByteBudget, SpareBlocks
from pearl.workers.rollout.kv_transfer.connection import Connection
from pearl.workers.rollout.kv_transfer.conversation import Movement, answer_of, converse
from pearl.workers.rollout.kv_transfer.errors import KvTransferError
from pearl.workers.rollout.kv_transfer.frames import AnyFrame, Chunk, Done, Failed, Grant, Offer, Ping
from pearl.workers.rollout.kv_transfer.limits import KvLimits
from pearl.workers.rollout.kv_transfer.pages import Block, Ended, Expect, Granted, Landed, Pages


class Incoming:
    def __init__(
        self, expect: Expect, pages: Pages, budgets: Budgets, spare: SpareBlocks, limits: KvLimits
    ) -> None:
        self.attempt = expect.attempt
        self._sender = expect.sender
        self._pages = pages
        self._budgets = budgets
        self._spare = spare
        self._limits = limits
        self._arrival: asyncio.Future[Connection | None] = asyncio.get_running_loop().create_future()
        self._offer: Offer | None = None
        self._next: int | None = None  # token that the next chunk begins with; None until there are pages
        self._is_landed = False
        self._ended: str | None = None
        self._words: deque[AnyFrame] = deque()  # at most two: a grant, and that it is done
        self._sayable = Movement(limits.wait_s)
        self._blocks: asyncio.Queue[tuple[Chunk, Block]] = asyncio.Queue()  # bounded by the budget
        self._held = 0  # bytes of the budget

    def meet(self, connection: Connection) -> bool:
        """Take the connection of the prefill stage; False when nobody waits for it any more."""
        if self._arrival.done():
            return False
        self._arrival.set_result(connection)
        return True

    def notify(self, notice: Granted | Landed | Ended) -> None:
        match notice:
            case Granted():
                self._next = notice.start
                self._words.append(Grant(notice.start))
            case Landed():
                self._is_landed = True
                self._words.append(Done())
            case Ended():
                self._ended = notice.reason
                if not self._arrival.done():
                    self._arrival.set_result(None)
        self._sayable.happened()

    async def run(self) -> None:
        """Run the transfer and report a failure to the engine, unless the engine itself ended it."""
        connection: Connection | None = None
        error = ""
        try:
            try:
                connection = await self._met()
                if connection is not None:
                    await self._talk(connection)
            except KvTransferError as failure:
                error = str(failure)
            if error and self._ended is None and not self._is_landed:
                await answer_of(self._pages.failed(self.attempt, error), self._limits.engine_s)
            if connection is not None:
                last = error or self._ended
                await connection.finish(Failed(last) if last else None, self._limits.farewell_s)
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the connection, also of one that came in the moment of a timeout."""
        if self._arrival.done() and not self._arrival.cancelled():
            connection = self._arrival.result()
            if connection is not None:
                connection.close()

    async def _met(self) -> Connection | None:
        limit_s = self._limits.contact_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._arrival
        except TimeoutError:
            raise KvTransferError(f"{self._sender} did not get in touch within {limit_s:g} s") from None

    async def _talk(self, connection: Connection) -> None:
        with self._budgets.of(self._sender) as budget:
            try:
                await converse(
                    self._send_frames(connection),
                    self._receive_frames(connection, budget),
                    self._land(budget),
                )
            finally:
                budget.release(self._held)

    async def _send_frames(self, connection: Connection) -> None:
        limits = self._limits
        word: AnyFrame = Ping()  # at once: the prefill stage has been waiting to be met
        while self._ended is None:
            await connection.send(word, limits.silence_s)
            if isinstance(word, Done):
                return
            if not self._words and self._ended is None:
                await self._sayable.wait(limits.ping_s)
            word = self._words.popleft() if self._words else Ping()

    async def _receive_frames(self, connection: Connection, budget: ByteBudget) -> None:
        while True:
            match await connection.recv(self._limits.silence_s):
                case Offer() as offer:
                    await self._take_offer(offer)
                case Chunk() as chunk:
                    await self._take_chunk(chunk, connection, budget)
                case Failed(reason):
                    raise KvTransferError(f"{self._sender} says: {reason}")
                case Ping():
                    pass
                case frame:
                    raise KvTransferError(f"{type(frame).__name__} from the prefill side")

    async def _take_offer(self, offer: Offer) -> None:
        if self._offer is not None:
            raise KvTransferError("KV was offered twice")
        try:
            _ = offer.layout.bytes_per_token
        except ValueError as error:
            raise KvTransferError(str(error)) from error
        self._offer = offer
        await answer_of(self._pages.offered(self.attempt, offer), self._limits.engine_s)

    async def _take_chunk(self, chunk: Chunk, connection: Connection, budget: ByteBudget) -> None:
        self._check(chunk)
        await budget.acquire(chunk.num_bytes)
        self._held += chunk.num_bytes
        block = self._spare.take(chunk.num_bytes)
        if await connection.fill(block, self._limits.chunk_s) != chunk.digest:
            raise KvTransferError(f"{chunk.count} tokens from {chunk.start} arrived corrupt, by their digest")
        self._next = chunk.start + chunk.count
        self._blocks.put_nowait((chunk, block))
        self._sayable.happened()

    def _check(self, chunk: Chunk) -> None:
        offer = self._offer
        if offer is None or self._next is None:
            raise KvTransferError("KV came before there were pages for it")
        if (chunk.attempt, chunk.version) != (self.attempt, offer.version):
            raise KvTransferError(f"KV of attempt {chunk.attempt} at version {chunk.version} came")
        if chunk.start != self._next or chunk.count < 1 or chunk.start + chunk.count > offer.num_tokens:
            raise KvTransferError(
                f"{chunk.count} tokens from {chunk.start} came, not those from {self._next}"
            )
        if chunk.num_bytes != chunk.count * offer.layout.bytes_per_token:
            raise KvTransferError(f"{chunk.count} tokens came as {chunk.num_bytes} bytes")

    async def _land(self, budget: ByteBudget) -> None:
        while True:
            chunk, block = await self._blocks.get()
            landing = self._pages.land(self.attempt, chunk.version, chunk.start, chunk.count, block)
            await answer_of(landing, self._limits.engine_s)
            self._spare.give(block)
            self._held -= chunk.num_bytes
            budget.release(chunk.num_bytes)
