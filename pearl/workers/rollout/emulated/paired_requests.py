"""Stages of pairs on emulated workers. The words between them are the real ones; of the KV itself only a token of four
bytes travels."""

import numpy as np

from pearl.types.weights import Version
from pearl.workers.rollout.emulated.request import Request
from pearl.workers.rollout.kv_transfer.frames import KvLayout, Layer
from pearl.workers.rollout.kv_transfer.pages import Block, Ready
from pearl.workers.rollout.paired_requests import BasePairedRequests

LAYOUT = KvLayout("float16", (Layer(0, 1, 1, 1),))


class PairedRequests(BasePairedRequests[Request]):
    def _ready(self, request: Request, version: Version) -> Ready:
        return Ready(request.attempt, request.computed, request.target, version, LAYOUT)

    def land(self, request: Request, num_tokens: int, version: Version) -> None:
        """Note that the first ``num_tokens`` tokens of its KV have arrived."""
        request.computed = num_tokens
        self._check_landed(request, version)


def block_of(num_tokens: int) -> Block:
    return np.zeros(num_tokens * LAYOUT.bytes_per_token, np.uint8)
