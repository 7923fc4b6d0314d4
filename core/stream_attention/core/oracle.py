"""The one fp64 oracle: every option of the contract, token by token, for tests and benches.

It is written to be obviously right, not fast: the tokens of a request are listed one by one from
its page list, a boolean matrix says which query sees which token, and the sums are plain fp64
sums. It shares no code with any route. `blocks` is also read by `testing.golden`, which repeats
the same sums with the roundings that a kernel of a given dtype makes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stream_attention.core.cache import PagedKVCache
from stream_attention.core.device import without_autocast
from stream_attention.core.oracle_args import OracleCall, prepare, token_counts

# fp64 scores held at once; 2^22 of them are 32 MB, and fewer would not make small problems faster.
_SCORES_AT_ONCE = 1 << 22
# K/V tokens converted to fp64 at once: 16K tokens of head_dim 512 are 64 MB.
_TOKENS_AT_ONCE = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """All queries of one request that share one KV head, and the tokens of that head.

    rows: the request's rows of `q`. heads: the query heads of the group.
    q: `[qo_len, group, head_dim_qk]`; key, value: `[kv_len, head_dim]`, as stored.
    mask: `[qo_len, group, kv_len]` bool or additive (broadcast), or `None`.
    """

    rows: slice
    heads: slice
    q: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_scale: float
    value_scale: float
    mask: torch.Tensor | None


def attention(
    q: torch.Tensor,
    cache_or_kv: Any,
    qo_indptr: torch.Tensor | None = None,
    *,
    v: torch.Tensor | None = None,
    sm_scale: float | None = None,
    causal: bool = True,
    window_left: int | None = None,
    window_right: int | None = None,
    logits_soft_cap: float | None = None,
    attn_sink: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """`out = softmax(cap(sm_scale · QKᵀ) masked) · V` in fp64.

    q: `[total_q, num_qo_heads, head_dim_qk]` with `qo_indptr` `[batch + 1]` int32; or
        `[batch, num_qo_heads, head_dim_qk]`, one query a request; or
        `[batch, qo_len, num_qo_heads, head_dim_qk]`. Any floating dtype, any strides.
    cache_or_kv: `PagedKVCache`, `ContiguousKVCache`, a pair `(k, v)` of
        `[batch, kv_len, num_kv_heads, head_dim]`, any floating dtypes, or `k` alone with `v=`.
    causal: query i of a request sits at position `p = kv_len - qo_len + i` and sees tokens up to p.
        Without causal it sees tokens up to `p + window_right`, or all.
    window_left: tokens from `p - window_left` on. Inclusive; `None` = off.
    attn_sink: `[num_qo_heads]` logits; `exp(sink)` joins the denominator of a row that sees any
        token.
    attn_mask: broadcastable to `[batch, num_qo_heads, qo_len, capacity]`, bool (True = seen) or
        additive (after the cap; `-inf` = not seen), for requests of equal `qo_len`. NaN or +inf
        where a token is seen makes the row NaN.

    Returns `out`, fp64, of q's shape with `head_dim_vo`; with `return_lse` also `lse` fp64, natural
    log of the whole denominator, without the last axis. A row that sees no token: 0 and `-inf`,
    also with a sink. A token that a row does not see takes no part, whatever it holds. Token
    positions of per-KV-head lists are positions in the list. Differentiable; syncs; raises
    `ValueError` with every fault.
    """
    call = prepare(
        q,
        cache_or_kv,
        qo_indptr,
        v=v,
        sm_scale=sm_scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        logits_soft_cap=logits_soft_cap,
        attn_sink=attn_sink,
        attn_mask=attn_mask,
        return_lse=return_lse,
    )
    with without_autocast(q.device):
        out, lse = _attention(call)
    return (out, lse) if return_lse else out


def _attention(call: OracleCall) -> tuple[torch.Tensor, torch.Tensor]:
    (total, heads), device = call.q.shape[:2], call.q.device
    out = torch.zeros(total, heads, call.out_shape[-1], dtype=torch.float64, device=device)
    lse = torch.full((total, heads), -math.inf, dtype=torch.float64, device=device)
    for block in blocks(call):
        for chunk in query_chunks(block):
            live, scores, visible = masked_scores(call, block, chunk)
            if not live.numel():
                continue
            weights, norm = softmax(scores, sink_of_rows(call, block, live))
            row, head = rows_of(block, chunk, live)
            out[row, head] = weighted_values(block, weights, visible)
            lse[row, head] = norm
    return out.reshape(call.out_shape), lse.reshape(call.out_shape[:-1])


def blocks(call: OracleCall) -> Iterator[Block]:
    """One `Block` a (request, KV head); K and V are gathered token by token in list order."""
    heads, group = call.num_kv_heads, call.group
    lens = token_counts(call.cache)
    for request, (start, stop) in enumerate(itertools.pairwise(call.indptr)):
        for head in range(heads):
            if start == stop:
                continue
            kv_len = lens[request][head]
            key, value = _tokens(call.cache, request, head, kv_len)
            chosen = slice(head * group, (head + 1) * group)
            mask = call.attn_mask
            if mask is not None:
                mask = mask[request, chosen, :, :kv_len].transpose(0, 1)
            yield Block(
                rows=slice(start, stop),
                heads=chosen,
                q=call.q[start:stop, chosen],
                key=key,
                value=value,
                key_scale=_scale(call.cache, "key_scale", head),
                value_scale=_scale(call.cache, "value_scale", head),
                mask=mask,
            )


def visibility(call: OracleCall, qo_len: int, kv_len: int, device: Any = "cpu") -> torch.Tensor:
    """`[qo_len, kv_len]` bool: which query of a request sees which token, from the contract."""
    position = torch.arange(qo_len, device=device).unsqueeze(1) + (kv_len - qo_len)
    token = torch.arange(kv_len, device=device).unsqueeze(0)
    seen = torch.ones(qo_len, kv_len, dtype=torch.bool, device=device)
    if call.causal:
        seen &= token <= position
    elif call.window_right is not None:
        seen &= token <= position + call.window_right
    if call.window_left is not None:
        seen &= token >= position - call.window_left
    return seen


def query_chunks(block: Block) -> Iterator[slice]:
    """Slices of the block's queries whose scores fit in `_SCORES_AT_ONCE`."""
    qo_len, group = block.q.shape[:2]
    kv_len = block.key.shape[0]
    step = max(1, _SCORES_AT_ONCE // max(1, group * kv_len))
    for start in range(0, qo_len, step):
        yield slice(start, min(start + step, qo_len))


def masked_scores(
    call: OracleCall, block: Block, chunk: slice, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of `chunk` that see a token: `(live, scores, visible)`.

    live: `[n]` indices into the chunk's `(query, head)` rows. scores: `[n, kv_len]` in `dtype`,
    capped and masked, `-inf` where not seen. visible: `[n, kv_len]` bool.
    """
    qo_len, group, dim = block.q.shape
    kv_len = block.key.shape[0]
    visible = visibility(call, qo_len, kv_len, block.q.device)[chunk].unsqueeze(1)
    visible = visible.expand(-1, group, -1)
    bias = None
    if block.mask is not None:
        mask = block.mask[chunk]
        if mask.dtype != torch.bool:
            bias = mask.to(dtype).reshape(mask.shape[0] * group, kv_len)
            mask = mask != -math.inf  # NaN is no mask: its row is NaN
        visible = visible & mask
    visible = visible.reshape(visible.shape[0] * group, kv_len)
    live = visible.any(-1).nonzero().flatten()
    visible = visible[live]
    if not live.numel():
        return live, torch.zeros(0, kv_len, dtype=dtype, device=block.q.device), visible
    rows = block.q[chunk].to(dtype).reshape(-1, dim)[live]
    scores = torch.cat(
        [rows @ (part.to(dtype) * block.key_scale).T for part in block.key.split(_TOKENS_AT_ONCE)],
        dim=1,
    )
    scores = scores * call.sm_scale
    if call.logits_soft_cap is not None:
        scores = call.logits_soft_cap * torch.tanh(scores / call.logits_soft_cap)
    if bias is not None:
        scores = scores + bias[live]
    return live, scores.masked_fill(~visible, -math.inf), visible


def softmax(scores: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`weights = exp(scores - m) / sum`, `lse = m + log(sum)`, m the row's largest logit.

    scores: `[n, kv_len]`. sink: `[n]` logits that join m and the sum, or `None`. The shorter
    `exp(scores - lse)` is wrong for large scores: beside -1e20 an lse has no room for `log(n)`.
    """
    largest = scores.detach().amax(-1)  # it cancels, in the gradients too
    if sink is not None:
        largest = torch.maximum(largest, sink.detach())
    largest = torch.where(largest == -math.inf, 0.0, largest)
    weights = torch.exp(scores - largest.unsqueeze(-1))
    total = weights.sum(-1)
    if sink is not None:
        total = total + torch.exp(sink - largest)
    return weights / total.unsqueeze(-1), largest + torch.log(total)


def weighted_values(block: Block, weights: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """`weights · V` over the seen tokens: `[n, head_dim_vo]` in the dtype of `weights`."""
    dtype = weights.dtype
    total = torch.zeros(weights.shape[0], block.value.shape[1], dtype=dtype, device=weights.device)
    parts = zip(
        weights.split(_TOKENS_AT_ONCE, 1),
        visible.split(_TOKENS_AT_ONCE, 1),
        block.value.split(_TOKENS_AT_ONCE),
        strict=True,
    )
    for weight, seen, value in parts:
        value = value.to(dtype) * block.value_scale
        if not value.isfinite().all():  # 0 · NaN is NaN: sum the seen tokens only
            per_row = [w[s] @ value[s] for w, s in zip(weight, seen, strict=True)]
            total = total + torch.stack(per_row)
        else:
            total = total + weight @ value
    return total


def sink_of_rows(call: OracleCall, block: Block, live: torch.Tensor) -> torch.Tensor | None:
    """`[n]` sink logits of the live rows, fp64, or `None` without a sink."""
    if call.attn_sink is None:
        return None
    return call.attn_sink[block.heads].double()[live % block.q.shape[1]]


def rows_of(block: Block, chunk: slice, live: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and head in the packed output of each live `(query, head)` row of the chunk."""
    group = block.q.shape[1]
    return block.rows.start + chunk.start + live // group, block.heads.start + live % group


def _tokens(cache: Any, request: int, head: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one head's `kv_len` tokens, `[kv_len, head_dim]` each, as stored."""
    if isinstance(cache, tuple):
        return cache[0][request, :, head], cache[1][request, :, head]
    paged = isinstance(cache, PagedKVCache)
    if paged:
        table = cache.page_table[request]
        table = table[head] if table.dim() == 2 else table
        pages = table[: -(-kv_len // cache.page_size)].long()  # no entry beyond is looked at
    found = []
    for pool in (cache.key, cache.value):
        plane = pool[:, :, head] if cache.layout == "NHD" else pool[:, head]
        if paged:
            raw = plane.view(torch.uint8) if plane.element_size() == 1 else plane
            plane = raw[pages].flatten(0, 1).view(plane.dtype)
        else:
            plane = plane[request]
        found.append(plane[:kv_len])
    return found[0], found[1]


def _scale(cache: Any, name: str, head: int) -> float:
    scale = None if isinstance(cache, tuple) else getattr(cache, name)
    if scale is None:
        return 1.0
    if isinstance(scale, torch.Tensor):
        flat = scale.reshape(-1)
        return float(flat[head if flat.numel() > 1 else 0])
    return float(scale)
