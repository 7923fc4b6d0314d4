"""`PageAllocator`: which pages of a pool are in use, on the host. No tensor is touched.

free = set(range(num_pages))
page = min(free)            # the lowest free page is next, whatever was released when
references[page] = 1        # one holder; released by the last of them
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

from stream_attention.core.errors import Faults
from stream_attention.core.ir import is_int


class PoolExhausted(RuntimeError):
    """More pages were asked for than are free; nothing was allocated."""


class PageAllocator:
    """Pages 0 to `num_pages` − 1 with reference counts. Every method may be called by any thread.

    Each call holds or changes nothing where it raises. Pages are given as ints, an iterable of them
    or an integer tensor; a page that stands twice counts twice.
    """

    def __init__(self, num_pages: int) -> None:
        if not (is_int(num_pages) and num_pages >= 1):
            raise ValueError(f"num_pages={num_pages!r}: must be an int >= 1; use 1")
        self.num_pages = num_pages
        self._lock = threading.Lock()
        self._references: dict[int, int] = {}
        self._freed: list[int] = []  # a heap of pages below _fresh
        self._fresh = 0  # this page and those above were never in use

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give."""
        with self._lock:
            return self.num_pages - len(self._references)

    @property
    def num_used(self) -> int:
        """Pages that somebody holds."""
        with self._lock:
            return len(self._references)

    def references(self, page: int) -> int:
        """Holders of a page; 0 where it is free."""
        with self._lock:
            return self._references.get(page, 0)

    def allocate(self, n: int) -> list[int]:
        """The `n` lowest free pages, ascending, one reference each.

        Raises `PoolExhausted` where fewer are free, `ValueError` for an `n` that is no count.
        """
        if not (is_int(n) and n >= 0):
            raise ValueError(f"n={n!r}: must be an int >= 0; use 1")
        with self._lock:
            num_free = self.num_pages - len(self._references)
            if n > num_free:
                raise PoolExhausted(
                    f"n={n}: only {num_free} of {self.num_pages} pages are free; release pages, "
                    f"or use n <= {num_free}"
                )
            taken = [heapq.heappop(self._freed) for _ in range(min(n, len(self._freed)))]
            fresh = n - len(taken)
            taken += range(self._fresh, self._fresh + fresh)
            self._fresh += fresh
            self._references.update(dict.fromkeys(taken, 1))
            return taken

    def retain(self, pages: Any) -> list[int]:
        """One more reference to each page; returns them. Raises `ValueError` for a free page."""
        given = Counter(page_ids(pages))
        with self._lock:
            self._require(given, least=1, rule="is free, and what nobody holds cannot be retained")
            for page, times in given.items():
                self._references[page] += times
        return list(given.elements())

    def release(self, pages: Any) -> list[int]:
        """One reference less to each page; returns those that are free now, ascending.

        Raises `ValueError` for a page that is released more often than it is held.
        """
        given = Counter(page_ids(pages))
        with self._lock:
            self._require(given, least=None, rule="is released more often than it is held")
            freed = []
            for page, times in given.items():
                self._references[page] -= times
                if not self._references[page]:
                    del self._references[page]
                    heapq.heappush(self._freed, page)
                    freed.append(page)
        return sorted(freed)

    def _require(self, given: Counter[int], least: int | None, rule: str) -> None:
        """Raise for every page with fewer references than `least`, or than times given."""
        faults = Faults()
        for page, times in given.items():
            held = self._references.get(page, 0)
            if not 0 <= page < self.num_pages:
                faults.add("pages", page, f"must be in [0, {self.num_pages})")
            elif held < (times if least is None else least):
                faults.add("pages", page, f"{rule} ({held} references)")
        faults.raise_if_any("PageAllocator")


def page_ids(pages: Any) -> list[int]:
    """Page ids as ints, of an int, an iterable or a tensor. Raises `ValueError` for others."""
    if hasattr(pages, "tolist"):
        pages = pages.tolist()
    found = list(pages) if isinstance(pages, Iterable) else [pages]
    wrong = [page for page in found if not is_int(page)]
    if wrong:
        raise ValueError(f"pages={wrong[0]!r}: must be page ids, ints; use [0, 1]")
    return found
