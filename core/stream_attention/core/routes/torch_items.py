"""Work items of the torch route: which query rows meet which KV tokens, computed on the host.

An item is a run of query rows of one unit (a request, or a request and KV head where page lists
differ between heads) with the KV range `[lo, hi)` that any of its rows can see. Everything here is
integer arithmetic on numpy arrays, so 65,536 requests cost milliseconds and no tensor is touched.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stream_attention.core.problem import MAX_WINDOW


@dataclass(frozen=True, slots=True)
class Visibility:
    """The mask of the contract as two inclusive offsets from a row's position `p`.

    A row sees tokens `max(0, p - left) … min(kv_len - 1, p + right)`; `None` = no bound.
    """

    left: int | None
    right: int | None

    @classmethod
    def of(cls, causal: bool, window_left: int | None, window_right: int | None) -> Visibility:
        """Causal bounds the right side at the row itself, whatever `window_right` says."""
        left, right = (
            None if w is None else min(w, MAX_WINDOW) for w in (window_left, window_right)
        )
        return cls(left, 0 if causal else right)

    @property
    def bounded(self) -> bool:
        return self.left is not None or self.right is not None


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Parallel int64 arrays, one entry an item.

    unit: request `b`, or `b * num_kv_heads + h` with per-head lists. row: first query row in the
    packed `q`. rows: query rows. position: position of the first row in its request (may be
    negative). lo, hi: KV tokens that some row sees; `hi > lo`.
    """

    unit: np.ndarray
    row: np.ndarray
    rows: np.ndarray
    position: np.ndarray
    lo: np.ndarray
    hi: np.ndarray

    def __len__(self) -> int:
        return len(self.unit)

    def take(self, index: np.ndarray) -> Items:
        """The items at `index`, in that order."""
        return Items(*(getattr(self, name)[index] for name in self.__slots__))


def build_items(
    kv_lens: np.ndarray,
    qo_start: np.ndarray,
    qo_len: np.ndarray,
    rows_per_item: int,
    sight: Visibility,
) -> tuple[Items, bool]:
    """Items with something to see, in order of unit, and whether any query row sees nothing.

    kv_lens, qo_start, qo_len: `[units]` int64; lengths already clamped to the capacity.
    """
    tiles = (qo_len + rows_per_item - 1) // rows_per_item
    unit = np.repeat(np.arange(len(kv_lens), dtype=np.int64), tiles)
    first = np.cumsum(tiles) - tiles
    offset = (np.arange(len(unit), dtype=np.int64) - first[unit]) * rows_per_item
    rows = np.minimum(qo_len[unit] - offset, rows_per_item)
    lens = kv_lens[unit]
    position = lens - qo_len[unit] + offset
    lo, hi = np.zeros_like(lens), lens
    if sight.left is not None:
        lo = np.maximum(position - sight.left, 0)
    if sight.right is not None:
        hi = np.clip(position + rows + sight.right, 0, lens)
    live = hi > lo
    items = Items(unit, qo_start[unit] + offset, rows, position, lo, hi)
    if live.all():
        return items, False
    return items.take(np.flatnonzero(live)), True


def pad_tokens(span: np.ndarray) -> np.ndarray:
    """Group width of a span: the next power of two, at least 8 (at most twice the work)."""
    exponent = np.ceil(np.log2(np.maximum(span, 8))).astype(np.int64)
    return np.int64(1) << exponent


def split_items(
    items: Items, group_tokens: int, group_elements: int, row_elements: int, token_elements: int
) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
    """Items to run alone, and groups `(padded_tokens, index)` of short ones to run together.

    A group shares rows and padded span, so that its tensors are rectangular. group_tokens: longest
    span that is worth grouping. group_elements: most fp32 elements of K, V or scores in a group.
    row_elements: score elements a row and token take; token_elements: K/V elements a token takes.
    """
    span = items.hi - items.lo
    short = span <= group_tokens
    alone = np.flatnonzero(~short)
    index = np.flatnonzero(short)
    if not len(index):
        return alone, []
    width = pad_tokens(span[index])
    rows = items.rows[index]
    order = np.lexsort((width, rows))
    index, width, rows = index[order], width[order], rows[order]
    edges = np.flatnonzero((np.diff(width) != 0) | (np.diff(rows) != 0)) + 1
    bounds = [0, *edges.tolist(), len(index)]
    groups = []
    lonely = [alone]
    for begin, end in itertools.pairwise(bounds):
        tokens, height = int(width[begin]), int(rows[begin])
        each = tokens * max(token_elements, height * row_elements)
        most = max(1, group_elements // each)
        for at in range(begin, end, most):
            part = index[at : min(at + most, end)]
            if len(part) == 1:
                lonely.append(part)
            else:
                groups.append((tokens, part))
    return np.concatenate(lonely), groups


def chunks(lo: int, hi: int, page_size: int, chunk_tokens: int) -> Iterator[tuple[int, int]]:
    """Cut `[lo, hi)` into ascending runs that one gather serves.

    Runs end at multiples of a whole number of pages, or inside one page where pages are larger
    than `chunk_tokens`; no run is longer than `max(chunk_tokens, page_size)` tokens.
    """
    while lo < hi:
        if page_size >= chunk_tokens:
            inside = lo % page_size
            stop = min(page_size, (inside // chunk_tokens + 1) * chunk_tokens)
            end = lo - inside + stop
        else:
            step = chunk_tokens // page_size * page_size
            end = (lo // step + 1) * step
        end = min(end, hi)
        yield lo, end
        lo = end
