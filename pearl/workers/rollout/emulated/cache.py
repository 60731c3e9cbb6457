"""KV that finished attempts left behind, one prefix a trajectory; the least recently left goes first.

A trajectory's next turn takes its prefix over. Its siblings, which begin alike, are spared what they have in common,
and each is counted with tokens of its own.
"""

from collections import OrderedDict

import numpy as np

from pearl.workers.rollout.emulated.tokens import Ids

HEAD_TOKENS = 32
"""Contexts that begin with the same ones are siblings; what others have in common is not worth looking for."""


def head_of(ids: Ids) -> bytes:
    return ids[:HEAD_TOKENS].tobytes()


def common(one: Ids, other: Ids) -> int:
    """Tokens at the front that are the same."""
    count = min(len(one), len(other))
    different = np.flatnonzero(one[:count] != other[:count])
    return int(different[0]) if len(different) else count


class PrefixCache:
    def __init__(self) -> None:
        self.num_tokens = 0
        self._prefixes: OrderedDict[int, Ids] = OrderedDict()
        self._heads: dict[int, bytes] = {}

    def put(self, key: int, ids: Ids) -> None:
        self._remove(key)
        if len(ids):
            self._prefixes[key] = ids
            self._heads[key] = head_of(ids)
            self.num_tokens += len(ids)

    def match(self, key: int, ids: Ids) -> int:
        """Tokens at the front of ``ids`` whose KV the trajectory left here."""
        kept = self._prefixes.get(key)
        return 0 if kept is None else common(kept, ids)

    def match_siblings(self, head: bytes, ids: Ids) -> int:
        """The same of any trajectory that begins alike."""
        alike = [self._prefixes[key] for key, kept in self._heads.items() if kept == head]
        return max((common(kept, ids) for kept in alike), default=0)

    def take(self, key: int) -> None:
        """Remove an entry whose KV belongs to a running request from now on."""
        self._remove(key)

    def shrink(self, num_tokens: int) -> None:
        """Evict whole prefixes, oldest first, until at most so many tokens are left."""
        while self.num_tokens > max(0, num_tokens):
            self._remove(next(iter(self._prefixes)))

    def clear(self) -> None:
        self._prefixes.clear()
        self._heads.clear()
        self.num_tokens = 0

    def _remove(self, key: int) -> None:
        ids = self._prefixes.pop(key, None)
        if ids is not None:
            del self._heads[key]
            self.num_tokens -= len(ids)
