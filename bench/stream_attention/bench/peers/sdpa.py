"""Gather the pages, then torch's scaled dot product attention: decode without a paged kernel.

`sdpa_gather` passes GQA to SDPA (`enable_gqa`). `sdpa_gather_packed` lays the query heads of a
group along the query axis instead, which is the same sum and lets SDPA read each K and V once a
group. Ragged batches are padded under a mask while padding adds less than half to the tokens, else
run request by request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from stream_attention.bench.cases import DecodeCase
from stream_attention.bench.contenders import Work, peer
from stream_attention.bench.pools import Pool

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
    return [_work(case, pool, device, _attend_gqa) for pool in pools]


@peer(
    "sdpa_gather_packed",
    supports=lambda case, device: (
        *_supports(case, device),
        *(("q_len: packing groups along the query axis needs q_len=1; use 1",) * (case.q_len > 1)),
    ),
)
def build_packed(case: DecodeCase, pools: Sequence[Pool], device: torch.device) -> list[Work]:
    """SDPA over gathered pages with the group along the query axis."""
    return [_work(case, pool, device, _attend_packed) for pool in pools]


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


def _work(case: DecodeCase, pool: Pool, device: torch.device, attend: Attend) -> Work:
    longest = max(case.kv_lens)
    padded = longest * case.batch <= _MOST_PADDING * sum(case.kv_lens)
    out = torch.empty_like(pool.q)
    q = pool.q.view(case.batch, case.q_len, case.num_qo_heads, case.head_dim)
    result = out.view_as(q)
    spans = [(0, case.batch, longest)]
    if not padded:
        spans = [(row, row + 1, tokens) for row, tokens in enumerate(case.kv_lens)]
    pieces = [_piece(case, pool, device, *span) for span in spans]

    def run() -> None:
        for (first, last, tokens), (pages, mask) in zip(spans, pieces, strict=True):
            key = _gather(pool.cache.key, pages, tokens, case)
            value = _gather(pool.cache.value, pages, tokens, case)
            result[first:last] = attend(q[first:last], key, value, mask)

    note = "" if len(set(case.kv_lens)) == 1 else ("padded" if padded else "per request")
    return Work(run=run, out=out, note=note)


def _piece(
    case: DecodeCase, pool: Pool, device: torch.device, first: int, last: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Page ids `[requests, pages]` int64 and the mask of requests `first` … `last` (exclusive)."""
    lens = torch.tensor(case.kv_lens[first:last])
    used = -(-lens // case.page_size)
    width = max(1, -(-tokens // case.page_size))
    table = pool.cache.page_table[first:last, :width].cpu().to(torch.int64)
    live = torch.arange(width) < used.unsqueeze(1)
    pages = torch.where(live, table, torch.zeros_like(table)).to(device)
    if case.q_len == 1 and bool((lens == tokens).all()):
        return pages, None
    last_seen = lens.view(-1, 1) - case.q_len + torch.arange(case.q_len)  # [requests, q_len]
    mask = torch.arange(tokens) <= last_seen.unsqueeze(-1)
    return pages, mask.unsqueeze(1).to(device)


def _gather(
    store: torch.Tensor, pages: torch.Tensor, tokens: int, case: DecodeCase
) -> torch.Tensor:
    """`[requests, num_kv_heads, tokens, head_dim]`: a copy for NHD and HND alike."""
    found = store[pages]  # [requests, pages, *page]
    requests = pages.shape[0]
    if case.layout == "NHD":
        rows = found.view(requests, -1, case.num_kv_heads, case.head_dim)
        return rows[:, :tokens].transpose(1, 2)
    heads = found.transpose(1, 2).reshape(requests, case.num_kv_heads, -1, case.head_dim)
    return heads[:, :, :tokens]
