"""KV that finished attempts left behind, one prefix a trajectory; the least recently left goes first.

What siblings of a group have in common is not shared: only the trajectory's own next turn finds it.
"""

from collections import OrderedDict

import numpy as np

from pearl.workers.rollout.emulated.tokens import Ids


class PrefixCache:
    def __init__(self) -> None:
        self.num_tokens = 0
        self._prefixes: OrderedDict[int, Ids] = OrderedDict()

    def put(self, key: int, ids: Ids) -> None:
        self._remove(key)
        if len(ids):
            self._prefixes[key] = ids
            self.num_tokens += len(ids)

    def match(self, key: int, ids: Ids) -> int:
        """Tokens at the front of ``ids`` whose KV is here."""
        kept = self._prefixes.get(key)
        if kept is None:
            return 0
        count = min(len(kept), len(ids))
        different = np.flatnonzero(kept[:count] != ids[:count])
        return int(different[0]) if len(different) else count

    def take(self, key: int) -> None:
        """Its KV belongs to a running request from now on."""
        self._remove(key)

    def shrink(self, num_tokens: int) -> None:
        """Evict whole prefixes, oldest first, until at most so many tokens are left."""
        while self.num_tokens > max(0, num_tokens):
            _, ids = self._prefixes.popitem(last=False)
            self.num_tokens -= len(ids)

    def clear(self) -> None:
        self._prefixes.clear()
        self.num_tokens = 0

    def _remove(self, key: int) -> None:
        ids = self._prefixes.pop(key, None)
        if ids is not None:
            self.num_tokens -= len(ids)
