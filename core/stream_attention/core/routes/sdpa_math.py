"""Attention in plain differentiable torch operations: cap, lse and everything SDPA has no word for.

`out = softmax(cap(sm_scale · QKᵀ) masked) · V` over blocks of queries in fp32 (fp64 inputs stay
fp64). Without gradients one block of scores is alive at a time; with gradients autograd keeps the
weights of all blocks, as any plain implementation does.
"""

from __future__ import annotations

import torch

from stream_attention.core.dtypes import torch_dtype
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.routes.sdpa_masks import (
    both,
    empty_like_output,
    empty_prefix,
    full_rank,
    key_range,
    rows_of_mask,
    seen,
    split_mask,
)

# Scores of one block: 4 M of them are 16 MB in fp32; with their weights and masks under 64 MB.
BLOCK_SCORES = 1 << 22
_NEG_INF = float("-inf")


def apply_math(
    problem: AttentionProblem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_sink: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)` of whole sequences, differentiable in q, k, v, the sink and an additive mask.

    q: `[batch, qo_len, num_qo_heads, head_dim_qk]`. k, v: `[batch, kv_len, num_kv_heads, dim]`.
    attn_sink: `[num_qo_heads]`. attn_mask: `[B|1, Hq|1, Sq, Sk]` bool (True = seen) or additive.
    out: `[batch, qo_len, num_qo_heads, head_dim_vo]` (fp64 of fp64 inputs, else
    `problem.out_dtype`); lse: `[batch, qo_len, num_qo_heads]` fp32 natural log. A row that sees
    nothing gives 0 and -inf and no gradient. `generator` feeds the dropout. Never syncs.
    """
    batch = q.shape[0]
    if problem.batch_invariant and batch:
        # Shapes, strides and addresses of every product then depend on one request alone.
        parts = []
        for b in range(batch):
            own = attn_mask
            if own is not None:
                own = rows_of_mask(full_rank(own), b, b + 1, 0)
            one_q, one_k, one_v = (
                x[b : b + 1].clone(memory_format=torch.contiguous_format) for x in (q, k, v)
            )
            parts.append(_apply(problem, one_q, one_k, one_v, attn_sink, own, generator))
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    return _apply(problem, q, k, v, attn_sink, attn_mask, generator)


def _apply(
    problem: AttentionProblem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_sink: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
    generator: torch.Generator | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, qo_len, heads, _ = q.shape
    kv_len, dim = k.shape[1], v.shape[3]
    out_dtype = torch.float64 if q.dtype == torch.float64 else torch_dtype(problem.out_dtype)
    begin = empty_prefix(problem, qo_len, kv_len)
    step = max(1, BLOCK_SCORES // max(1, batch * heads * kv_len))
    mask = None if attn_mask is None else full_rank(attn_mask)
    outs, lses = [], []
    begin = qo_len if batch == 0 else begin
    if begin or qo_len == 0:
        nothing = empty_like_output(q[:, :begin], dim, k, v, attn_sink, attn_mask)
        outs.append(nothing.to(out_dtype))
        lses.append(nothing[..., 0].to(torch.float32) + _NEG_INF)
    for first in range(begin, qo_len, step):
        rows = (first, min(first + step, qo_len))
        out, lse = _block(problem, (q, k, v), rows, attn_sink, mask, generator)
        outs.append(out.to(out_dtype))
        lses.append(lse.to(torch.float32))
    if len(outs) == 1:
        return outs[0], lses[0]
    return torch.cat(outs, 1), torch.cat(lses, 1)


def _block(
    problem: AttentionProblem,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rows: tuple[int, int],
    attn_sink: torch.Tensor | None,
    mask: torch.Tensor | None,
    generator: torch.Generator | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `rows[0] … rows[1] - 1`: out `[B, n, Hq, head_dim_vo]` and lse `[B, n, Hq]`."""
    q, k, v = qkv
    batch, qo_len, heads, _ = q.shape
    kv_len, kv_heads, count = k.shape[1], k.shape[2], rows[1] - rows[0]
    group = heads // kv_heads
    dtype = torch.promote_types(q.dtype, torch.float32)
    lo, hi = key_range(problem, rows[0], rows[1] - 1, qo_len, kv_len)
    queries = q[:, rows[0] : rows[1]].to(dtype)
    if abs(problem.sm_scale) <= 1:  # whichever way a product is no float32 where the score is
        queries = queries * problem.sm_scale
    # Not `unflatten`: the compiler cannot trace it under a default device.
    queries = queries.reshape(batch, count, kv_heads, group, q.shape[3])
    queries = queries.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, Hkv, G * n, D]
    keys, values = (x[:, lo:hi].to(dtype).transpose(1, 2) for x in (k, v))
    scores = queries @ keys.transpose(2, 3)
    if abs(problem.sm_scale) > 1:
        scores = scores * problem.sm_scale
    scores = scores.view(batch, heads, count, hi - lo)
    if problem.logits_soft_cap is not None:
        scores = problem.logits_soft_cap * torch.tanh(scores / problem.logits_soft_cap)
    visible = seen(problem, rows, (lo, hi), kv_len - qo_len, q.device)
    if mask is not None:
        own = rows_of_mask(rows_of_mask(mask, rows[0], rows[1], 2), lo, hi, 3)
        allowed, bias = split_mask(own)
        visible = both(visible, allowed)
        if bias is not None:
            scores = scores + bias.to(dtype)
    if visible is not None:
        scores = scores.masked_fill(~visible, _NEG_INF)
    weights, total, largest, empty = _softmax(scores, attn_sink)
    if problem.dropout_p > 0:
        keep = 1.0 - problem.dropout_p
        weights = weights * torch.empty_like(weights).bernoulli_(keep, generator=generator) / keep
    lse = (largest + torch.log(total)).masked_fill(empty, _NEG_INF)
    weights = weights / total.unsqueeze(-1)
    out = weights.view(batch, kv_heads, group * count, hi - lo) @ values
    out = out.view(batch, heads, count, v.shape[3]).transpose(1, 2)
    return out, lse.transpose(1, 2)


def _softmax(
    scores: torch.Tensor, attn_sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`exp(s - m)`, its sum with the sink, `m`, and which rows are empty (their sum is 1).

    `m` carries no gradient: the result does not depend on it.
    """
    largest = scores.detach().amax(-1)
    empty = largest == _NEG_INF
    if attn_sink is not None:
        sink = attn_sink.to(scores.dtype).view(-1, 1)  # [Hq, 1] over [B, Hq, n]
        largest = torch.maximum(largest, sink.detach())
    largest = largest.masked_fill(empty, 0.0)
    weights = torch.exp(scores - largest.unsqueeze(-1))
    total = weights.sum(-1)
    if attn_sink is not None:
        total = total + torch.exp(torch.where(empty, _NEG_INF, sink - largest))
    return weights, total.masked_fill(empty, 1.0), largest, empty
