"""Finished KV, found again by token content: a tree whose edges are pages. Pure.

A node is one page and the tokens in it; only leaves may be partly filled. Reuse is exact to the token: whole pages
are shared, the last, partly matching one is copied by its new user. Leaves that nobody uses are evicted, the
longest unused first. Everything in the tree was computed under one weight version; ``clear`` forgets it.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from pearl.workers.rollout.torch_engine.pages import PagePool

ID_BYTES = 4
MAX_COMPARED = 64
"""Newest children looked at for a partial match: bounds the time of an admission when many prompts differ early."""


@dataclass(eq=False, slots=True)
class Node:
    page: int
    tokens: bytes  # int32 ids, at most a page of them
    parent: "Node | None"
    children: dict[bytes, "Node"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Match:
    """``pages`` are shared whole; of page ``tail`` the first ``tail_tokens`` tokens fit (0 = no such page)."""

    pages: list[int]
    tail: int
    tail_tokens: int


class PrefixCache:
    def __init__(self, pool: PagePool, page_tokens: int) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._root = Node(0, b"", None)
        self._leaves: OrderedDict[Node, None] = OrderedDict()  # the longest unused first
        self._by_page: dict[int, Node] = {}

    @property
    def num_pages(self) -> int:
        return len(self._by_page)

    def match(self, ids: npt.NDArray[np.int32]) -> Match:
        """The longest cached prefix of ``ids``. The caller is no user of the pages yet."""
        data = ids.tobytes()
        width = self._page_tokens * ID_BYTES
        node, start, pages = self._root, 0, []
        while len(data) - start >= width:
            child = node.children.get(data[start : start + width])
            if child is None:
                break
            pages.append(child.page)
            node, start = child, start + width
        tail, tail_tokens = self._best_child(node, data[start : start + width])
        self._touch(tail or node)
        return Match(pages, tail.page if tail else 0, tail_tokens)

    def insert(self, ids: npt.NDArray[np.int32], pages: list[int]) -> list[int]:
        """Remember that ``pages`` hold the KV of ``ids``.

        Returns the tree's pages for the whole pages of ``ids``, in which others may have been first. The caller
        goes over to them: as long as every user of a page uses the whole path to it, all that nobody uses can be
        evicted.
        """
        data = ids.tobytes()
        width = self._page_tokens * ID_BYTES
        node, whole = self._root, []
        for index, start in enumerate(range(0, len(data), width)):
            tokens = data[start : start + width]
            child = node.children.get(tokens)
            if child is None:
                if len(tokens) < width and self._covers(node, tokens):
                    break
                child = self._add(node, tokens, pages[index])
            node = child
            if len(tokens) == width:
                whole.append(node.page)
        self._touch(node)
        return whole

    def evict(self) -> bool:
        """Give up the longest unused page that nobody uses; False when there is none."""
        for leaf in self._leaves:
            if not self._pool.is_used(leaf.page):
                self._remove(leaf)
                return True
        return False

    def clear(self) -> None:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            self._pool.uncache(node.page)
        self._root.children.clear()
        self._leaves.clear()
        self._by_page.clear()

    def _best_child(self, node: Node, wanted: bytes) -> tuple[Node | None, int]:
        best, best_tokens = None, 0
        first = wanted[:ID_BYTES]
        for tokens, child in islice(reversed(node.children.items()), MAX_COMPARED):
            if tokens.startswith(first) and first:
                common = _common_tokens(tokens, wanted)
                if common > best_tokens:
                    best, best_tokens = child, common
        return best, best_tokens

    def _add(self, parent: Node, tokens: bytes, page: int) -> Node:
        shorter = self._by_page.get(page)
        if shorter is not None:  # the page was offered before it held all this; a page has one node
            self._remove(shorter)
        if parent.children:
            self._drop_covered(parent, tokens)
        node = Node(page, tokens, parent)
        self._pool.cache(page)
        parent.children[tokens] = self._by_page[page] = node
        self._leaves.pop(parent, None)
        self._leaves[node] = None
        return node

    def _covers(self, parent: Node, tokens: bytes) -> bool:
        """A child begins with these tokens: a partly filled page of them would offer nothing new."""
        return any(other.startswith(tokens) for other in islice(reversed(parent.children), MAX_COMPARED))

    def _drop_covered(self, parent: Node, tokens: bytes) -> None:
        """A partly filled sibling that the new one begins with has nothing more to offer."""
        width = self._page_tokens * ID_BYTES
        newest = islice(reversed(parent.children.items()), MAX_COMPARED)
        covered = [child for other, child in newest if len(other) < width and tokens.startswith(other)]
        for node in covered:
            self._remove(node)

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children
        del self._leaves[leaf]
        del parent.children[leaf.tokens]
        del self._by_page[leaf.page]
        self._pool.uncache(leaf.page)
        if not parent.children and parent is not self._root:
            self._leaves[parent] = None
            self._leaves.move_to_end(parent, last=False)  # nothing used it later than the leaf just gone

    def _touch(self, node: Node) -> None:
        if node in self._leaves:
            self._leaves.move_to_end(node)


def _common_tokens(a: bytes, b: bytes) -> int:
    """Tokens that both begin with."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length // ID_BYTES
    left = np.frombuffer(a[:length], np.int32)
    right = np.frombuffer(b[:length], np.int32)
    return int((left != right).argmax())
