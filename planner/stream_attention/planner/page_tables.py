"""How the pages of a batch's requests lie in the pool, as data, and the page table that follows.

The whole pages of a shared prefix are held once: every request of the group has the same ids in its
first columns.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stream_attention.core.ir import Rule, check_rules, evaluable_repr, is_int

if TYPE_CHECKING:
    from stream_attention.planner.workloads import WorkloadRequest

ORDERS = ("shuffled", "sequential", "interleaved")
NO_PAGE = -1
"""What table entries past a request's pages hold; a correct kernel never follows it."""


@dataclass(frozen=True, slots=True, repr=False)
class PageLayout:
    """Where pages lie.

    order: `"sequential"` = the pages of a request are neighbours, request after request;
        `"interleaved"` = requests take their pages in turns, as they do where all grow at once;
        `"shuffled"` = any order, as in a pool that has been in use for long.
    spare_pages: pages of the pool that no request uses. They come last, or anywhere when shuffled.
    Raises `ValueError` with every broken rule.
    """

    order: str = "shuffled"
    spare_pages: int = 0

    def __post_init__(self) -> None:
        check_rules(self, _LAYOUT_RULES)

    __repr__ = evaluable_repr


_LAYOUT_RULES = (
    Rule(
        "order",
        f"must be one of {', '.join(ORDERS)}",
        lambda p: p.order in ORDERS,
        lambda p: repr(ORDERS[0]),
    ),
    Rule(
        "spare_pages",
        "must be an int >= 0",
        lambda p: is_int(p.spare_pages) and p.spare_pages >= 0,
        lambda p: 0,
    ),
)


def num_pages_of(tokens: int, page_size: int) -> int:
    """`ceil(tokens / page_size)`: pages that hold so many tokens."""
    return -(-tokens // page_size)


def page_table(
    requests: Sequence[WorkloadRequest],
    page_size: int,
    max_pages: int,
    layout: PageLayout,
    seed: int,
) -> tuple[torch.Tensor, int]:
    """`([batch, max_pages] int32 on the CPU, pages of the pool)`, the same for the same arguments.

    Entries at and beyond a request's pages hold `NO_PAGE`. Requests of one prefix group share the
    ids of the prefix, and no other two entries are equal.
    """
    columns = _columns(requests, page_size)
    slots = list(_slots(columns, layout))
    total = len(slots) + layout.spare_pages
    ids = list(range(total))
    if layout.order == "shuffled":
        random.Random(seed).shuffle(ids)
    place = dict(zip(slots, ids, strict=False))
    table = torch.full((len(columns), max_pages), NO_PAGE, dtype=torch.int32)
    for row, keys in enumerate(columns):
        if keys:
            table[row, : len(keys)] = torch.tensor([place[key] for key in keys], dtype=torch.int32)
    return table, total


# Who holds a page, and which one of theirs it is: a prefix group (True) or a request (False).
_Slot = tuple[bool, int, int]


def _columns(requests: Sequence[WorkloadRequest], page_size: int) -> list[list[_Slot]]:
    """The page of every column of every request, by its holder."""
    columns = []
    for index, request in enumerate(requests):
        shared = request.prefix_len // page_size
        keys: list[_Slot] = []
        for page in range(num_pages_of(request.kv_len, page_size)):
            if page < shared and request.prefix_group is not None:
                keys.append((True, request.prefix_group, page))
            else:
                keys.append((False, index, page))
        columns.append(keys)
    return columns


def _slots(columns: Sequence[Sequence[_Slot]], layout: PageLayout) -> Iterator[_Slot]:
    """Every page once, in the order in which the pool hands out ids."""
    seen: set[_Slot] = set()
    if layout.order == "interleaved":
        longest = max(map(len, columns), default=0)
        turns = (keys[page] for page in range(longest) for keys in columns if page < len(keys))
    else:
        turns = (key for keys in columns for key in keys)
    for key in turns:
        if key not in seen:
            seen.add(key)
            yield key
