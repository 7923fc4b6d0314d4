"""Execution of the torch route's items: a long one at a time, or many short ones as a batch.

Rows are kept as `[heads, rows * group, …]`: the query heads that share a KV head are rows of one
matrix product, so every K and V element is read once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stream_attention.core.launch import BoundTensors
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.routes.torch_items import Items, Visibility, chunks
from stream_attention.core.routes.torch_kv import PoolReader
from stream_attention.core.routes.torch_softmax import (
    add_weighted,
    cap_,
    exponentiate_,
    finish,
    finite_or_zero,
    hidden,
)

_NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What all items of a run share.

    q, out: `[total_q, num_kv_heads, group, head_dim]` views of the bound tensors; lse: without the
    last axis, or `None`.
    shared: a unit is a request with all its KV heads; else a request and one KV head.
    chunk_tokens: most tokens of one gather, one product and one softmax step.
    """

    problem: AttentionProblem
    bound: BoundTensors
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    key: PoolReader
    value: PoolReader
    sight: Visibility
    shared: bool
    chunk_tokens: int


@dataclass(slots=True, eq=False)
class State:
    """Running softmax of `[heads, rows]`; `acc` is `[heads, rows, head_dim]`; all fp32.

    Fields are `None` until the first chunk, whose values they take without a rescale.
    """

    largest: torch.Tensor | None = None
    total: torch.Tensor | None = None
    acc: torch.Tensor | None = None

    def advance(self, scores: torch.Tensor) -> None:
        """Turn masked scores `[heads, rows, tokens]` into weights in place, and rescale `acc`."""
        above = scores.amax(-1)
        if self.largest is None or self.total is None or self.acc is None:
            self.largest = above
            self.total = exponentiate_(scores, above).sum(-1)
            return
        above = torch.maximum(self.largest, above)
        weight = torch.exp(self.largest - finite_or_zero(above))
        self.largest = above
        self.total.mul_(weight).add_(exponentiate_(scores, above).sum(-1))
        self.acc.mul_(weight.unsqueeze(-1))

    def accumulate(
        self, weights: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> None:
        """`acc += weights · value`; see `add_weighted`."""
        self.acc = add_weighted(self.acc, weights, value, mask)


def run_alone(call: Call, items: Items, index: int) -> None:
    """One item, chunk by chunk. Every shape depends on the item's own request only."""
    kv, p, q = call.bound.kv, call.problem, call.q
    unit, row, rows = int(items.unit[index]), int(items.row[index]), int(items.rows[index])
    position, lo, hi = int(items.position[index]), int(items.lo[index]), int(items.hi[index])
    head = None if call.shared else unit % kv.num_kv_heads
    request = unit if call.shared else unit // kv.num_kv_heads
    heads, group = (kv.num_kv_heads if call.shared else 1), p.gqa_group_size
    if kv.page_table is None:
        pages = torch.tensor([request], device=q.device)
    else:
        used = -(-hi // kv.page_size)
        pages = kv.page_table[request, head or 0, :used].to(torch.int64)
    pick = slice(None) if head is None else slice(head, head + 1)
    query = call.q[row : row + rows, pick]
    query = _scaled_query(call, query.transpose(0, 1), pick).view(heads, rows * group, -1)
    factor = _score_factor(call, pick)
    state = State()
    for begin, end in chunks(lo, hi, kv.page_size, call.chunk_tokens):
        ids = pages
        if kv.page_table is not None:
            ids = pages[begin // kv.page_size : (end - 1) // kv.page_size + 1]
        _chunk_step(call, state, (query, factor), (begin, end), ids, head, (position, rows))
    empty = None
    if call.sight.right is not None and position + call.sight.right < 0:
        first = position + call.sight.right
        empty = (torch.arange(first, first + rows, device=q.device) < 0).view(1, rows, 1)
    out, lse = _finish(call, state, (heads, rows, group), pick, empty)
    call.out[row : row + rows, pick].copy_(out.transpose(0, 1))
    if call.lse is not None:
        call.lse[row : row + rows, pick].copy_(lse.transpose(0, 1))


def _chunk_step(
    call: Call,
    state: State,
    scaled: tuple[torch.Tensor, torch.Tensor | float | None],
    span: tuple[int, int],
    pages: torch.Tensor,
    head: int | None,
    place: tuple[int, int],
) -> None:
    """Scores of one chunk of tokens, one softmax step, then `acc += P V`.

    scaled: the query rows, and what their scores are yet to be multiplied by.
    span: `[begin, end)` tokens, all in `pages` (which start with the page of `begin`).
    place: position of the first query row, and the number of them.
    """
    (query, factor), (begin, end), (position, count) = scaled, span, place
    heads, rows, _ = query.shape
    offset, tokens = begin % call.bound.kv.page_size, end - begin
    key = call.key.tile(pages, offset, tokens, head)
    scores = torch.bmm(query, key.transpose(1, 2))
    if factor is not None:
        scores.mul_(factor)
    cap_(scores, call.problem.logits_soft_cap)
    mask = None
    if _cuts(call.sight, position, count, begin, end):
        token = torch.arange(begin, end, device=query.device)
        positions = torch.arange(position, position + count, device=query.device)
        mask = hidden(positions.view(-1, 1, 1), token, call.sight)
        assert mask is not None  # a tile is cut by a window or by the causal edge
        scores.view(heads, count, -1, tokens).masked_fill_(mask, _NEG_INF)
        mask = mask.expand(-1, rows // count, -1).reshape(1, rows, tokens)
    state.advance(scores)
    state.accumulate(scores, call.value.tile(pages, offset, tokens, head), mask)


def _cuts(sight: Visibility, position: int, rows: int, begin: int, end: int) -> bool:
    """True when some row of `position … position + rows - 1` does not see all of `[begin, end)`."""
    right = sight.right is not None and end - 1 > position + sight.right
    return right or (sight.left is not None and begin < position + rows - 1 - sight.left)


def run_group(call: Call, items: Items, tokens: int) -> None:
    """Items of equal row count and spans of at most `tokens`, as one rectangular batch."""
    kv, p = call.bound.kv, call.problem
    device, count, rows = call.q.device, len(items), int(items.rows[0])
    unit, row, position, lo, hi = (
        torch.from_numpy(x).to(device)
        for x in (items.unit, items.row, items.position, items.lo, items.hi)
    )
    heads, group = (kv.num_kv_heads if call.shared else 1), p.gqa_group_size
    head = None if call.shared else unit % kv.num_kv_heads
    request = unit if call.shared else unit // kv.num_kv_heads
    token = lo.unsqueeze(1) + torch.arange(tokens, device=device)  # [count, tokens]
    valid = token < hi.unsqueeze(1)
    token = torch.where(valid, token, lo.unsqueeze(1))  # padding reads a slot the unit owns
    page, slot = request.unsqueeze(1), token
    if kv.page_table is not None:
        lane = torch.zeros_like(unit) if head is None else head
        page = kv.page_table[page, lane.unsqueeze(1), token // kv.page_size].to(torch.int64)
        slot = token % kv.page_size
    line = row.unsqueeze(1) + torch.arange(rows, device=device)  # [count, rows]
    pick = slice(None) if head is None else head
    where = (line,) if head is None else (line, head.unsqueeze(1))
    query = call.q[where]
    query = query.view(count, rows, heads, group, -1).transpose(1, 2)
    query = _scaled_query(call, query, pick).view(count * heads, rows * group, -1)
    key = call.key.tiles(page, slot, head)
    scores = torch.bmm(query, key.transpose(1, 2))
    factor = _score_factor(call, pick)
    if isinstance(factor, torch.Tensor) and head is None:
        factor = factor.expand(count, heads, 1, 1).reshape(count * heads, 1, 1)
    if factor is not None:
        scores.mul_(factor)
    cap_(scores, p.logits_soft_cap)
    place = (position.unsqueeze(1) + torch.arange(rows, device=device)).unsqueeze(2)
    mask = hidden(place, token.unsqueeze(1), call.sight)  # [count, rows, tokens]
    unseen = ~valid.unsqueeze(1)
    mask = unseen if mask is None else mask | unseen
    mask = mask[:, None, :, None].expand(count, heads, rows, group, tokens)
    scores.view(count, heads, rows, group, tokens).masked_fill_(mask, _NEG_INF)
    state = State()
    state.advance(scores)
    state.accumulate(scores, call.value.tiles(page, slot, head), mask.reshape(scores.shape))
    empty = None
    if call.sight.right is not None:
        empty = (place + call.sight.right < 0).view(count, 1, rows, 1)
    out, lse = _finish(call, state, (count, heads, rows, group), pick, empty)
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)  # [count, rows, heads, group, …]
    if head is not None:
        out, lse = out.squeeze(2), lse.squeeze(2)
    call.out[where] = out.to(call.out.dtype)
    if call.lse is not None:
        call.lse[where] = lse


def _scaled_query(call: Call, query: torch.Tensor, pick: slice | torch.Tensor) -> torch.Tensor:
    """q times what of `sm_scale` and the key scale is at most 1, fp32, contiguous.

    query: `[…, heads, rows, group, dim]`. Larger factors wait for the scores (`_score_factor`):
    a query times one of them may be no float32 where the score is.
    """
    query = query.to(torch.float32, memory_format=torch.contiguous_format)
    query = query * (call.problem.sm_scale if abs(call.problem.sm_scale) <= 1 else 1.0)
    scale = call.bound.kv.key_scale
    if scale is not None:
        query.mul_(_per_head(scale[pick], pick).clamp(max=1.0))
    return query.contiguous()


def _score_factor(call: Call, pick: slice | torch.Tensor) -> torch.Tensor | float | None:
    """What of the factors is above 1: one number, or `[heads | units, 1, 1]`; `None` = nothing."""
    own = call.problem.sm_scale if abs(call.problem.sm_scale) > 1 else None
    scale = call.bound.kv.key_scale
    if scale is None:
        return own
    above = _per_head(scale[pick], pick).clamp(min=1.0).flatten(1)
    above = above.unsqueeze(-1)
    return above if own is None else above * own


def _per_head(facts: torch.Tensor, pick: slice | torch.Tensor) -> torch.Tensor:
    """`[heads]` facts shaped to `[heads, 1, 1, 1]`, one a unit `[units, 1, 1, 1, 1]`."""
    if isinstance(pick, torch.Tensor):
        return facts.view(-1, 1, 1, 1, 1)
    return facts.view(-1, 1, 1, 1)


def _finish(
    call: Call,
    state: State,
    shape: tuple[int, ...],
    pick: slice | torch.Tensor,
    empty: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[*shape, head_dim_vo]` and lse `[*shape]`; shape is `[…, heads, rows, group]`."""
    bound, kv = call.bound, call.bound.kv
    sink = bound.attn_sink
    if sink is not None:
        sink = sink.to(torch.float32).view(kv.num_kv_heads, 1, -1)[pick]
        if isinstance(pick, torch.Tensor):
            sink = sink.unsqueeze(1)
    assert state.acc is not None
    assert state.total is not None
    assert state.largest is not None
    acc = state.acc.view(*shape, -1)
    out, lse = finish(acc, state.total.view(shape), state.largest.view(shape), sink, empty)
    if kv.value_scale is not None:  # last, as a sum of scaled values may be no float32
        out.mul_(_per_head(kv.value_scale[pick], pick))
    return out, lse
