"""One attempt inside the emulated engine: what it will say, how far it is, and what has been told of it."""

import numpy as np

from pearl.types.trajectory import FinishReason, VersionRun
from pearl.types.weights import Version
from pearl.workers.rollout.emulated.cache import head_of
from pearl.workers.rollout.emulated.tokens import LOGPROB, Ids
from pearl.workers.rollout.paired_requests import PairStage
from pearl.workers.rollout.protocol import Delta, GenerateRequest


class Request:
    __slots__ = (
        "answer_finish",
        "arrival",
        "attempt",
        "computed",
        "end",
        "head",
        "ids",
        "is_offered",
        "is_stale",
        "key",
        "kv_told",
        "kv_version",
        "num_tokens",
        "prefilled",
        "prompt_end",
        "reported",
        "stage",
    )

    def __init__(
        self,
        request: GenerateRequest,
        arrival: int,
        answer: Ids,
        finish: FinishReason,
        stage: PairStage | None = None,
    ) -> None:
        context = len(request.ids)
        self.attempt = request.attempt
        self.arrival = arrival
        """Order of admission, and of retraction from the other end."""
        self.key = request.seed
        """Of the trajectory, under which its KV is kept."""
        self.head = head_of(request.ids)
        self.ids: Ids = np.concatenate((request.ids, answer))
        """The context and all that is going to be said; ``num_tokens`` of them are there by now."""
        self.end = len(self.ids)
        self.answer_finish: FinishReason = finish
        self.num_tokens = self.reported = context
        self.computed = 0
        """Tokens from the front whose KV is there."""
        self.prefilled = 0
        """Context tokens computed and not yet told."""
        self.prompt_end = context
        """Computing a token before this is prefill: of the context, or again after a retraction."""
        self.kv_version: Version | None = None
        """The oldest version in its KV; None while there is none."""
        self.is_stale = False
        """Its KV began under an older version or was told to be forgotten: never kept for others."""
        self.stage = stage
        """Which stage of a pair it is; None = a whole request, as is a decode stage once its KV has landed."""
        self.is_offered = False
        """Decode stage: its prefill stage has room and computes."""
        self.kv_told = -1
        """Prefill stage: tokens whose KV was last said to be ready."""

    @property
    def target(self) -> int:
        """Tokens to be computed before the next one comes; a prefill stage leaves the last to the decode stage."""
        return self.num_tokens - (self.stage == "prefill")

    @property
    def is_prefilling(self) -> bool:
        return self.computed < self.num_tokens - 1

    def prefill(self, count: int, version: Version) -> bool:
        """Compute ``count`` tokens of the context; True when that gave the next one."""
        self.prefilled += max(0, min(self.prompt_end - self.computed, count))
        self.computed += count
        if self.kv_version is None:
            self.kv_version = version
        if self.computed < self.num_tokens or self.stage is not None:
            return False
        self.num_tokens += 1
        return True

    def decode(self, count: int, version: Version) -> None:
        """Compute the last token and so get the next, ``count`` times."""
        self.prefilled += max(0, min(self.prompt_end - self.computed, count))
        self.computed += count
        self.num_tokens += count
        if self.kv_version is None:
            self.kv_version = version

    def lose_kv(self) -> None:
        self.prompt_end = max(self.prompt_end, self.num_tokens - 1)
        self.computed = 0
        self.kv_version = None
        self.is_stale = False

    def delta(self, version: Version | None, finish: FinishReason | None = None, error: str = "") -> Delta:
        """All since the last one; the tokens in it were made under ``version``."""
        count, prefilled = self.num_tokens - self.reported, self.prefilled
        runs: list[VersionRun] = []
        if count:
            assert version is not None
            assert self.kv_version is not None
            runs = [VersionRun(version, count, self.kv_version)]
        ids: list[int] = self.ids[self.reported : self.num_tokens].tolist()
        self.reported, self.prefilled = self.num_tokens, 0
        return Delta(self.attempt, ids, [LOGPROB] * count, runs, prefilled, finish, error)
