"""Gather the pages, then torch's scaled dot product attention: decode without a paged kernel.

A contiguous cache is read where it lies. fp8 K and V are widened to q's dtype with their scales,
which is a part of what is timed.

`sdpa_gather` passes GQA to SDPA (`enable_gqa`). `sdpa_gather_packed` lays the query heads of a
group along the query axis instead, which is the same sum and lets SDPA read each K and V once a
group. Ragged batches are padded under a mask while padding adds less than half to the tokens, else
run request by request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from stream_attention.bench.cases import DecodeCase
from stream_attention.bench.contenders import Work, peer
from stream_attention.bench.pools import Pool
from stream_attention.core.cache import ContiguousKVCache

_MOST_PADDING = 1.5


def _supports(case: DecodeCase, device: torch.device) -> tuple[str, ...]:
    reasons = []
    if min(case.kv_lens) == 0:
        reasons.append("lengths: SDPA gives NaN for a request without tokens; use lengths >= 1")
    if case.q_len > 1 and min(case.kv_lens) < case.q_len:
        reasons.append(
            "q_len: SDPA gives NaN for rows before the first token; use q_len <= lengths"
        )
    return tuple(reasons)


@peer("sdpa_gather", supports=_supports)
def build_gather(case: DecodeCase, pools: Sequence[Pool], device: torch.device) -> list[Work]:
    """SDPA over gathered pages with `enable_gqa`."""
    return [_work(case, pool, _attend_gqa) for pool in pools]


@peer(
    "sdpa_gather_packed",
    supports=lambda case, device: (
        *_supports(case, device),
        *(("q_len: packing groups along the query axis needs q_len=1; use 1",) * (case.q_len > 1)),
    ),
)
def build_packed(case: DecodeCase, pools: Sequence[Pool], device: torch.device) -> list[Work]:
    """SDPA over gathered pages with the group along the query axis."""
    return [_work(case, pool, _attend_packed) for pool in pools]


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def _attend_gqa(
    q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """q `[b, q_len, Hq, D]`, key and value `[b, Hkv, n, D]` → `[b, q_len, Hq, D]`."""
    out = scaled_dot_product_attention(
        q.transpose(1, 2), key, value, attn_mask=mask, enable_gqa=q.shape[2] != key.shape[1]
    )
    return out.transpose(1, 2)


def _attend_packed(
    q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """As `_attend_gqa` with q_len = 1: the group is SDPA's query axis."""
    batch, _, heads, dim = q.shape
    packed = q.view(batch, key.shape[1], heads // key.shape[1], dim)
    out = scaled_dot_product_attention(packed, key, value, attn_mask=mask)
    return out.reshape(batch, 1, heads, dim)


def _work(case: DecodeCase, pool: Pool, attend: Attend) -> Work:
    longest = max(case.kv_lens)
    padded = longest * case.batch <= _MOST_PADDING * sum(case.kv_lens)
    out = torch.empty_like(pool.q)
    q = pool.q.view(case.batch, case.q_len, case.num_qo_heads, case.head_dim)
    result = out.view_as(q)
    spans = [slice(0, case.batch)]
    if not padded:
        spans = [slice(row, row + 1) for row in range(case.batch)]
    pieces = [_piece(case, pool, span) for span in spans]

    def run() -> None:
        for span, piece in zip(spans, pieces, strict=True):
            result[span] = attend(q[span], piece.key(), piece.value(), piece.mask)

    note = "" if len(set(case.kv_lens)) == 1 else ("padded" if padded else "per request")
    return Work(run=run, out=out, note=note)


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Some requests of a pool. key, value: give `[requests, num_kv_heads, tokens, head_dim]`.

    mask: `[requests, 1, q_len, tokens]` bool, or `None` where every query sees all tokens.
    """

    key: Callable[[], torch.Tensor]
    value: Callable[[], torch.Tensor]
    mask: torch.Tensor | None


def _piece(case: DecodeCase, pool: Pool, span: slice) -> _Piece:
    lens = torch.tensor(case.kv_lens[span])
    tokens = int(lens.max())
    mask = None
    if case.q_len > 1 or not bool((lens == tokens).all()):
        last_seen = lens.view(-1, 1) - case.q_len + torch.arange(case.q_len)  # [requests, q_len]
        seen = torch.arange(tokens) <= last_seen.unsqueeze(-1)
        mask = seen.unsqueeze(1).to(pool.q.device)
    pages = None if isinstance(pool.cache, ContiguousKVCache) else _pages(case, pool, span, lens)

    def reader(store: torch.Tensor, scale: torch.Tensor | None) -> Callable[[], torch.Tensor]:
        factor = None if scale is None else scale.to(pool.q.dtype)

        def read() -> torch.Tensor:
            if pages is None:
                found = store[span].transpose(1, 2) if case.layout == "NHD" else store[span]
                found = found[:, :, :tokens]
            else:
                found = _gather(store, pages, tokens, case)
            return found if factor is None else found.to(factor.dtype) * factor

        return read

    cache = pool.cache
    return _Piece(reader(cache.key, cache.key_scale), reader(cache.value, cache.value_scale), mask)


def _pages(case: DecodeCase, pool: Pool, span: slice, lens: torch.Tensor) -> torch.Tensor:
    """Page ids `[requests, pages]` int64, page 0 in place of those past a request's own."""
    used = -(-lens // case.page_size)
    width = max(1, int(used.max()))
    table = pool.page_table[span, :width].cpu().to(torch.int64)
    live = torch.arange(width) < used.unsqueeze(1)
    return torch.where(live, table, torch.zeros_like(table)).to(pool.q.device)


def _gather(
    store: torch.Tensor, pages: torch.Tensor, tokens: int, case: DecodeCase
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
