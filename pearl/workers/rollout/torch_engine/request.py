"""One attempt inside the engine: its tokens, how far their KV is computed, and the pages that hold it."""

import numpy as np
import numpy.typing as npt

from pearl.types.splitmix import splitmix64
from pearl.types.weights import Version
from pearl.workers.rollout.kv_transfer.frames import KvLayout
from pearl.workers.rollout.paired_requests import PairStage
from pearl.workers.rollout.protocol import GenerateRequest


class Request:
    __slots__ = (
        "arrival",
        "attempt",
        "computed",
        "copy_from",
        "copy_tokens",
        "ids",
        "is_offered",
        "is_stale",
        "key",
        "kv_told",
        "kv_version",
        "layout",
        "limit",
        "num_tokens",
        "page_tokens",
        "pages",
        "pending_key",
        "prefilled",
        "prompt_end",
        "stage",
        "stop_ids",
        "table",
        "temperature",
        "verified",
    )

    def __init__(
        self, request: GenerateRequest, arrival: int, page_tokens: int, stage: PairStage | None = None
    ) -> None:
        context = len(request.ids)
        self.attempt = request.attempt
        self.arrival = arrival
        """Order of admission, and of retraction from the other end."""
        self.stage = stage
        """Which stage of a pair it is; None = a whole request, as is a decode stage once its KV has landed."""
        self.limit = context + (1 if stage == "prefill" else request.params.max_new_tokens)
        self.ids: npt.NDArray[np.int32] = np.empty(self.limit, np.int32)
        self.ids[:context] = request.ids
        self.num_tokens = context
        self.computed = 0
        """Tokens from the front whose KV is in ``pages``."""
        self.verified = 0
        """Tokens from the front whose KV has led to finite logits: only these may be cached for others."""
        self.prefilled = 0
        """Context tokens computed and not yet reported."""
        self.prompt_end = context
        """Computing a token before this is prefill: of the context, or again after a retraction."""
        self.page_tokens = page_tokens
        self.pages: list[int] = []
        self.table: npt.NDArray[np.int64] = np.zeros(-(-self.limit // page_tokens), np.int64)
        """``pages`` again, padded with page 0, in the form that the page gather needs."""
        self.copy_from: int | None = None
        """A cached page whose beginning is to be copied into this request's last page before the next iteration."""
        self.copy_tokens = 0
        """How many tokens of ``copy_from`` fit."""
        self.pending_key: bytes | None = None
        """The prefix this request is about to offer to others that wait for the same one."""
        self.kv_version: Version | None = None
        """The oldest version in its KV; None while there is none."""
        self.is_stale = False
        """Its KV began under an older version or was told to be forgotten: never cached for others."""
        self.is_offered = False
        """Decode stage: its prefill stage has pages and computes."""
        self.layout: KvLayout | None = None
        """Decode stage: of the KV that comes."""
        self.kv_told = -1
        """Prefill stage: tokens whose KV was last said to be ready."""
        self.key = splitmix64(request.seed)
        self.temperature = request.params.temperature
        self.stop_ids = frozenset(request.params.stop_ids)

    @property
    def is_prefilling(self) -> bool:
        return self.computed < self.num_tokens - 1

    @property
    def end(self) -> int:
        """Tokens to be computed: the last one of a prefill stage is left to the decode stage, who needs its logits."""
        return self.num_tokens - (self.stage == "prefill")

    def slots(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Places of tokens [start, end) in the KV store."""
        positions = np.arange(start, end)
        return self.table[positions // self.page_tokens] * self.page_tokens + positions % self.page_tokens

    def add_page(self, page: int) -> None:
        self.table[len(self.pages)] = page
        self.pages.append(page)

    def replace_page(self, index: int, page: int) -> None:
        """Another page with the same KV."""
        self.table[index] = page
        self.pages[index] = page
