"""Pools as calls of torch's scaled dot product attention: what its peers are made of.

Pages are gathered, which is a part of what is timed; a contiguous cache is read where it lies. fp8
K and V are widened to q's dtype with their scales, which is timed too. Requests that follow each
other with equally many queries are one call, padded under a mask, while padding adds less than half
to the tokens; else each is a call of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.contenders import Work
from stream_attention.bench.pools import Pool
from stream_attention.core.cache import ContiguousKVCache

_MOST_PADDING = 1.5


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Some requests of a pool as one call: rows `[first, last)` of q, `queries` a request.

    key, value: give `[requests, num_kv_heads, tokens, head_dim]`.
    seen: `"all"` (every query sees all tokens), `"square"` (causal, as many queries as tokens),
    `"lower_right"` (causal, the queries are the last tokens), or `"mask"`.
    mask: `[requests, 1, queries, tokens]` bool, there where `seen` is `"mask"`, and where it is
    `"lower_right"` if it was asked for.
    """

    first: int
    last: int
    queries: int
    key: Callable[[], torch.Tensor]
    value: Callable[[], torch.Tensor]
    seen: str
    mask: torch.Tensor | None


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Piece], torch.Tensor]
"""q `[b, queries, Hq, D]`, key and value `[b, Hkv, tokens, D]` → `[b, queries, Hq, D]`."""


def work(
    case: AttentionCase,
    pool: Pool,
    attend: Attend,
    *,
    masks: bool = True,
    lower_right: bool = False,
) -> Work:
    """`attend` on all pieces of a pool, into one output.

    masks: `attend` takes a mask; else lengths that differ are never padded. lower_right: it takes
    causal queries at the end of their tokens without a mask.
    """
    out = torch.empty_like(pool.q)
    spans = list(_spans(case, masks))
    pieces = [_piece(case, pool, span, lower_right) for span in spans]

    def run() -> None:
        for piece in pieces:
            rows = pool.q[piece.first : piece.last]
            q = rows.view(-1, piece.queries, case.num_qo_heads, case.head_dim)
            result = out[piece.first : piece.last].view_as(q)
            result.copy_(attend(q, piece.key(), piece.value(), piece))

    ragged = len(set(case.kv_lens)) > 1 or case.uniform_q_len is None
    padded = any(len({case.kv_lens[b] for b in range(*span)}) > 1 for span in spans)
    per_request = all(stop - start == 1 for start, stop in spans)
    note = "" if not ragged else "per request" if per_request else "padded" if padded else "runs"
    return Work(run=run, out=out, note=note)


def _spans(case: AttentionCase, masks: bool) -> Iterator[tuple[int, int]]:
    """First and last + 1 of requests that are one call; those without queries are in none."""
    for queries, group in groupby(range(case.batch), key=case.q_lens.__getitem__):
        requests = list(group)
        start, stop = requests[0], requests[-1] + 1
        lens = case.kv_lens[start:stop]
        same = len(set(lens)) == 1
        if not queries:
            continue
        if same or (masks and max(lens) * len(lens) <= _MOST_PADDING * sum(lens)):
            yield start, stop
        else:
            yield from ((request, request + 1) for request in requests)


def _piece(case: AttentionCase, pool: Pool, span: tuple[int, int], lower_right: bool) -> Piece:
    start, stop = span
    lens = torch.tensor(case.kv_lens[start:stop])
    queries, tokens = case.q_lens[start], int(lens.max())
    same = bool((lens == tokens).all())
    if same and (queries == 1 or not case.causal):
        seen = "all"
    elif same and queries == tokens:
        seen = "square"
    else:
        seen = "lower_right" if same else "mask"
    mask = None
    if seen == "mask" or (seen == "lower_right" and not lower_right):
        last_seen = lens.view(-1, 1).expand(-1, queries) - 1  # [requests, queries]
        if case.causal:
            last_seen = last_seen - queries + 1 + torch.arange(queries)
        visible = torch.arange(tokens) <= last_seen.unsqueeze(-1)
        mask = visible.unsqueeze(1).to(pool.q.device)
    requests = slice(start, stop)
    pages = None
    if not isinstance(pool.cache, ContiguousKVCache):
        pages = _pages(case, pool, requests, lens)

    def reader(store: torch.Tensor, scale: torch.Tensor | None) -> Callable[[], torch.Tensor]:
        factor = None if scale is None else scale.to(pool.q.dtype)

        def read() -> torch.Tensor:
            if pages is None:
                found = store[requests]
                found = found.transpose(1, 2) if case.layout == "NHD" else found
                found = found[:, :, :tokens]
            else:
                found = _gather(store, pages, tokens, case)
            return found if factor is None else found.to(factor.dtype) * factor

        return read

    cache = pool.cache
    return Piece(
        case.q_offsets[start],
        case.q_offsets[stop],
        queries,
        reader(cache.key, cache.key_scale),
        reader(cache.value, cache.value_scale),
        seen,
        mask,
    )


def _pages(case: AttentionCase, pool: Pool, span: slice, lens: torch.Tensor) -> torch.Tensor:
    """Page ids `[requests, pages]` int64, page 0 in place of those past a request's own."""
    used = -(-lens // case.page_size)
    width = max(1, int(used.max()))
    table = pool.page_table[span, :width].cpu().to(torch.int64)
    live = torch.arange(width) < used.unsqueeze(1)
    return torch.where(live, table, torch.zeros_like(table)).to(pool.q.device)


def _gather(
    store: torch.Tensor, pages: torch.Tensor, tokens: int, case: AttentionCase
) -> torch.Tensor:
    """`[requests, num_kv_heads, tokens, head_dim]`: a copy for NHD and HND alike."""
    stored = store.view(torch.uint8) if store.element_size() == 1 else store  # torch indexes no fp8
    found = stored[pages].view(store.dtype)  # [requests, pages, *page]
    requests = pages.shape[0]
    if case.layout == "NHD":
        rows = found.view(requests, -1, case.num_kv_heads, case.head_dim)
        return rows[:, :tokens].transpose(1, 2)
    heads = found.transpose(1, 2).reshape(requests, case.num_kv_heads, -1, case.head_dim)
    return heads[:, :, :tokens]
