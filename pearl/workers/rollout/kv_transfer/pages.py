"""What the transport needs of an engine, and what an engine tells it. Pure.

The engine decides everything about pages; the transport moves bytes. Notices of one attempt are in order, and those
that a call brought about arrive before its answer.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pearl.types.weights import Version
from pearl.workers.rollout.kv_transfer.frames import KvLayout, Offer

Block = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Begin:
    """A prefill stage is here: reach the decode worker at ``address``."""

    attempt: int
    address: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The prefill stage's first ``tokens`` tokens, of ``total``, can be read; best in whole pages."""

    attempt: int
    tokens: int
    total: int
    version: Version
    layout: KvLayout
    page_tokens: int = 1

    @property
    def sendable(self) -> int:
        """Tokens from the front that are worth a chunk: whole pages, until all is ready."""
        return (
            self.tokens if self.tokens == self.total else self.tokens // self.page_tokens * self.page_tokens
        )


@dataclass(frozen=True, slots=True)
class Expect:
    """A decode stage is here; its KV will come from the worker ``sender``."""

    attempt: int
    sender: str


@dataclass(frozen=True, slots=True)
class Granted:
    """The decode stage has pages for all of its KV; the first ``start`` tokens were cached."""

    attempt: int
    start: int


@dataclass(frozen=True, slots=True)
class Landed:
    """All KV of the decode stage is in its pages."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The engine has no stage of this attempt any more, for a reason of its own."""

    attempt: int
    reason: str


Notice = Begin | Ready | Expect | Granted | Landed | Ended


class Pages(Protocol):
    """Called on the transport's loop. What no longer concerns a live stage does nothing."""

    async def read(self, attempt: int, start: int, count: int) -> Block | None:
        """A copy of these tokens' KV; None when the stage is over, of which an ``Ended`` has told."""
        ...

    async def sent(self, attempt: int) -> None:
        """The prefill stage has handed over everything."""
        ...

    async def offered(self, attempt: int, offer: Offer) -> None:
        """Answered by ``Granted`` when there is room, or by ``Ended``."""
        ...

    async def land(self, attempt: int, version: Version, start: int, count: int, data: Block) -> None:
        """Put it into the decode stage's pages; ``data`` may be reused afterwards."""
        ...

    async def failed(self, attempt: int, reason: str) -> None:
        """The handing over failed: the stage ends as "abort", unless all its KV had landed."""
        ...
