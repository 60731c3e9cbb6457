"""Page accounting of the KV store: who holds which page. Pure; the tensors are in ``attention``.

A page holds ``page_tokens`` tokens of all layers. It has users (requests) and may be cached; it is free when it has
neither. Page 0 is never given out: it stays all zero and fills the unused places of page tables.
"""


class PagePool:
    """``num_pages`` usable pages, numbered from 1."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_used = 0
        """Pages with at least one user."""
        self._users = [0] * (num_pages + 1)
        self._cached = bytearray(num_pages + 1)
        self._free = list(range(num_pages, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_only_cached(self) -> int:
        return self.num_pages - self.num_used - len(self._free)

    def take(self) -> int:
        """A free page with one user; the caller has made sure that there is one."""
        page = self._free.pop()
        self._users[page] = 1
        self.num_used += 1
        return page

    def use(self, page: int) -> None:
        """One more user of a page that is in use or cached."""
        users = self._users[page]
        assert users or self._cached[page], f"page {page} is free"
        self._users[page] = users + 1
        if users == 0:
            self.num_used += 1

    def drop(self, page: int) -> None:
        """One user less."""
        users = self._users[page] - 1
        assert users >= 0, f"page {page} was dropped too often"
        self._users[page] = users
        if users == 0:
            self.num_used -= 1
            if not self._cached[page]:
                self._free.append(page)

    def cache(self, page: int) -> None:
        assert self._users[page], f"page {page} is nobody's"
        self._cached[page] = 1

    def uncache(self, page: int) -> None:
        self._cached[page] = 0
        if not self._users[page]:
            self._free.append(page)

    def is_used(self, page: int) -> bool:
        return self._users[page] > 0
