"""`AttentionTilePlan`: which KV tiles a problem may execute, and where they live.

Exact contiguous, exact paged, validated fixed subset, run-time selected subset and sliding window
are five tile plans of one problem, never five engines. A tile is a run of `tile_tokens` logical KV
tokens of one request; a schedule is an ascending list of tiles per request and KV head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stream_attention.core.cache import PagedKVCache
from stream_attention.core.ir import Rule, check_rules, evaluable_repr, is_int
from stream_attention.core.problem import AttentionProblem

KINDS = ("exact_contiguous", "exact_paged", "fixed_subset", "selected", "sliding_window")
MAPPINGS = ("identity", "page_table")
GUARANTEE_OF_KIND = {
    "exact_contiguous": "exact",
    "exact_paged": "exact",
    "sliding_window": "exact",
    "fixed_subset": "schedule_exact",
    "selected": "schedule_exact",
}


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class AttentionTilePlan:
    """The legal tiles of a problem.

    kind: one of `KINDS`.
    mapping: `"identity"` (a contiguous cache: tile t is tokens t·tile_tokens …) or `"page_table"`.
    tile_tokens: tokens a tile; a multiple of the page size or a divisor of it.
    per_head_lists: the schedule differs between KV heads.
    window_left: sliding window only; `None` elsewhere. window_right likewise.
    tiles: fixed subset only: ascending tile ids, one tuple a KV head, or one tuple for all heads.
        Ids at or beyond a request's length are skipped for that request.
    """

    kind: str
    mapping: str = "page_table"
    tile_tokens: int = 16
    per_head_lists: bool = False
    window_left: int | None = None
    window_right: int | None = None
    tiles: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        check_rules(self, TILE_PLAN_RULES)

    __repr__ = evaluable_repr

    @classmethod
    def for_problem(cls, problem: AttentionProblem) -> AttentionTilePlan:
        """The plan that executes every tile the problem's semantics can reach."""
        mapping = "page_table" if problem.cache_kind == "paged" else "identity"
        common: dict[str, Any] = {
            "mapping": mapping,
            "tile_tokens": problem.page_size,
            "per_head_lists": problem.per_head_lists,
        }
        if problem.per_head_lists and problem.cache_kind == "paged":
            return cls(kind="selected", **common)
        if problem.has_window:
            return cls(
                kind="sliding_window",
                window_left=problem.window_left,
                window_right=problem.window_right,
                **common,
            )
        return cls(kind=f"exact_{problem.cache_kind}", **common)

    @property
    def guarantee(self) -> str:
        """What a result of this schedule promises at best."""
        return GUARANTEE_OF_KIND[self.kind]

    def legal_tiles(self, kv_len: int, qo_len: int = 1, kv_head: int = 0) -> tuple[int, ...]:
        """Tiles, ascending, that any of the last `qo_len` queries of a request may read.

        `kv_len` counts the tokens of the request's own list: for `"selected"` the list is already
        compacted, so its tiles are 0 … ceil(kv_len / tile_tokens) - 1.
        """
        count = -(-kv_len // self.tile_tokens)
        if self.kind == "fixed_subset":
            assert self.tiles is not None
            chosen = self.tiles[kv_head if len(self.tiles) > 1 else 0]
            return tuple(tile for tile in chosen if tile < count)
        first = 0
        if self.kind == "sliding_window" and self.window_left is not None:
            first = max(0, kv_len - qo_len - self.window_left) // self.tile_tokens
        return tuple(range(first, count))

    def page_lists(self, cache: PagedKVCache) -> PagedKVCache:
        """A fixed subset as per-KV-head page lists over the same pool (no K/V is moved).

        Every list is ascending, so only its last page can be part-filled. Reads nothing on the
        host: tables and lengths are built on the cache's device. `ValueError` for another kind,
        for a table that is per-head already, or for a tile that is no whole number of pages.
        """
        if self.kind != "fixed_subset" or cache.per_head_lists:
            raise ValueError(
                f"kind={self.kind!r}: page_lists lowers a fixed_subset over a shared page table"
            )
        if self.tile_tokens % cache.page_size:
            raise ValueError(
                f"tile_tokens={self.tile_tokens}: must be a multiple of page_size="
                f"{cache.page_size}; use {cache.page_size}"
            )
        assert self.tiles is not None
        per_tile = self.tile_tokens // cache.page_size
        heads, size = cache.num_kv_heads, cache.page_size
        if len(self.tiles) not in (1, heads):
            raise ValueError(
                f"tiles={len(self.tiles)} lists: one list, or one for each of {heads} KV heads"
            )
        rows = [
            [tile * per_tile + page for tile in chosen for page in range(per_tile)]
            for chosen in (self.tiles if len(self.tiles) == heads else self.tiles * heads)
        ]
        width = max((len(row) for row in rows), default=0)
        beyond = cache.max_pages  # an id that no request reaches: marks the padding
        ids = torch.tensor(
            [row + [beyond] * (width - len(row)) for row in rows], dtype=torch.int64
        ).to(cache.key.device)
        ids = ids.reshape(heads, width)
        lens = cache.sequence_lengths.to(torch.int64)  # [batch]
        used = (lens + size - 1) // size
        live = ids.unsqueeze(0) < used.view(-1, 1, 1)  # a prefix of every row: lists ascend
        batch = lens.shape[0]
        if cache.max_pages and width:
            logical = ids.clamp(max=cache.max_pages - 1).expand(batch, -1, -1)
            table = cache.page_table.unsqueeze(1).expand(-1, heads, -1).gather(2, logical)
            table = torch.where(live, table, torch.full_like(table, -1))
        else:
            table = torch.empty(batch, heads, 0, dtype=torch.int32, device=lens.device)
        tokens = (lens.view(-1, 1, 1) - ids.unsqueeze(0) * size).clamp(0, size)
        kept = torch.where(live, tokens, torch.zeros_like(tokens)).sum(2).to(torch.int32)
        return PagedKVCache(
            key=cache.key,
            value=cache.value,
            page_table=table.to(torch.int32).contiguous(),
            sequence_lengths=kept,
            layout=cache.layout,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
        )


def _ascending(plan: AttentionTilePlan) -> bool:
    if plan.tiles is None:
        return True
    return all(
        all(is_int(t) and t >= 0 for t in row) and list(row) == sorted(set(row))
        for row in plan.tiles
    )


def _window_ok(value: int | None) -> bool:
    return value is None or (is_int(value) and value >= 0)


TILE_PLAN_RULES: tuple[Rule, ...] = (
    Rule(
        "kind",
        f"must be one of {', '.join(KINDS)}",
        lambda t: t.kind in KINDS,
        lambda t: "'exact_paged'",
    ),
    Rule(
        "mapping",
        f"must be one of {', '.join(MAPPINGS)}",
        lambda t: t.mapping in MAPPINGS,
        lambda t: "'page_table'",
    ),
    Rule(
        "mapping",
        "exact_contiguous maps by identity; exact_paged and selected map by page_table",
        lambda t: (
            {
                "exact_contiguous": "identity",
                "exact_paged": "page_table",
                "selected": "page_table",
            }.get(t.kind, t.mapping)
            == t.mapping
        ),
        lambda t: "'identity'" if t.kind == "exact_contiguous" else "'page_table'",
    ),
    Rule(
        "tile_tokens",
        "must be an int >= 1",
        lambda t: is_int(t.tile_tokens) and t.tile_tokens >= 1,
        lambda t: 16,
    ),
    Rule(
        "tiles",
        "a fixed_subset needs at least one list of tiles; no other kind takes any",
        lambda t: (bool(t.tiles)) == (t.kind == "fixed_subset"),
        lambda t: "((0,),)" if t.kind == "fixed_subset" else "None",
    ),
    Rule(
        "tiles",
        "every list must hold ints >= 0 in strictly ascending order",
        _ascending,
        lambda t: tuple(tuple(sorted({x for x in row if is_int(x) and x >= 0})) for row in t.tiles),
    ),
    Rule(
        "window_left",
        "must be None or an int >= 0, and only a sliding_window carries one",
        lambda t: (
            _window_ok(t.window_left) and (t.kind == "sliding_window" or t.window_left is None)
        ),
        lambda t: "None",
    ),
    Rule(
        "window_right",
        "must be None or an int >= 0, and only a sliding_window carries one",
        lambda t: (
            _window_ok(t.window_right) and (t.kind == "sliding_window" or t.window_right is None)
        ),
        lambda t: "None",
    ),
    Rule(
        "kind",
        "a sliding_window needs window_left or window_right",
        lambda t: t.kind != "sliding_window" or (t.window_left, t.window_right) != (None, None),
        lambda t: "'exact_paged'",
    ),
    Rule(
        "per_head_lists",
        "a selected schedule is a list per KV head",
        lambda t: t.kind != "selected" or t.per_head_lists,
        lambda t: True,
    ),
)
