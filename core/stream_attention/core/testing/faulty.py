"""A plain route with a fault for every line of the contract: it shows that each check can fail.

Without a fault it is right: fp32, one request and one KV head at a time. `record(fault)` is a
registry record like any other. Never registered by default.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from stream_attention.core.backend_plan import AttentionBackendPlan
from stream_attention.core.launch import BoundTensors
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import AttentionRecord

# fault → line of the contract that it breaks
FAULTS = {
    "scores in the output dtype": 1,
    "values summed in the output dtype": 1,
    "base-2 lse": 1,
    "no cap": 1,
    "scale 0 means default": 1,
    "key scale forgotten": 1,
    "query heads dealt over KV heads": 1,
    "empty row is NaN": 2,
    "empty row has lse 0": 2,
    "empty row keeps the sink": 2,
    "causal from the top left": 3,
    "negative positions clamped": 3,
    "first list for every KV head": 3,
    "window without its own token": 4,
    "window of the block's first row": 4,
    "no right window": 4,
    "sink in every split": 5,
    "sink only in a full split": 5,
    "tail masked by score only": 6,
    "unused ids dereferenced": 7,
    "offsets of 32 bits": 8,
    "requests of 16 bits": 8,
    "layer axis ignored": 8,
    "q taken for dense": 9,
    "values rounded before their scale": 1,
    "scratch shared by launches": 10,
    "buffer shared by launches": 10,
    "lengths read at build": 11,
    "table read at build": 11,
    "queries read at build": 11,
    "different bits every run": 12,
    "split by batch": 12,
}
_SPLIT_TOKENS = 64
_SHARED: dict[str, Any] = {}


def record(fault: str | None = None) -> AttentionRecord:
    """The route with one fault of `FAULTS`, or with none."""
    assert fault is None or fault in FAULTS, fault

    def make(problem: AttentionProblem, plan: Any, device: Any, bound: BoundTensors) -> Any:
        return PlainLaunch(problem, bound, fault)

    return AttentionRecord(
        route=f"plain ({fault or 'right'})",
        backend="torch",
        package="stream-attention-core",
        rules=(),
        estimate_us=lambda problem, device: 1e9,
        build=make,
    )


class PlainLaunch:
    """One bound call of the plain route; implements `Launch`."""

    def __init__(self, problem: AttentionProblem, bound: BoundTensors, fault: str | None) -> None:
        self.backend_plan = AttentionBackendPlan(route="plain", backend="torch", arch="cpu")
        self._problem, self._fault, self._runs = problem, fault, 0
        self.rebind(bound)
        kv = bound.kv
        self._lens = None if kv.kv_lens is None else kv.kv_lens.clone()
        self._table = None if kv.page_table is None else kv.page_table.clone()
        self._q = bound.q.clone()
        if fault == "scratch shared by launches":
            _SHARED["bound"] = bound

    def rebind(self, bound: BoundTensors) -> None:
        self._bound = bound

    def reset(self) -> None:
        self._runs = 0

    def run(self) -> None:
        problem, bound = self._problem, self._bound
        if self._fault == "scratch shared by launches":
            bound = _SHARED["bound"]
        self._runs += 1
        bound.out.zero_()
        assert bound.lse is not None
        bound.lse.fill_(-math.inf)
        if bound.qo_indptr is None:
            rows = problem.total_qo_len // max(problem.batch, 1)
            offsets = [request * rows for request in range(problem.batch + 1)]
        else:
            offsets = bound.qo_indptr.tolist()
        lens = bound.kv.kv_lens
        if self._fault == "lengths read at build":
            lens = self._lens
        counts = None if lens is None else lens.tolist()
        batch = problem.batch
        if self._fault == "requests of 16 bits":
            batch = min(batch, 65_535)
        for request in range(batch):
            start, stop = offsets[request], offsets[request + 1]
            for head in range(problem.num_kv_heads if start < stop else 0):
                list_of = 0 if self._fault == "first list for every KV head" else head
                kv_len = bound.kv.capacity if counts is None else counts[request][list_of]
                self._head(bound, request, head, slice(start, stop), kv_len)

    def _head(self, bound: BoundTensors, request: int, head: int, rows: slice, kv_len: int) -> None:
        problem, fault = self._problem, self._fault
        group = problem.gqa_group_size
        heads = slice(head * group, (head + 1) * group)
        if fault == "query heads dealt over KV heads":
            heads = slice(head, None, problem.num_kv_heads)
        q = self._q if fault == "queries read at build" else bound.q
        if fault == "q taken for dense":
            q = q.as_strided(q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1))
        queries = q[rows, heads].float()  # [m, group, d]
        if fault == "buffer shared by launches":  # written before it is read, but not in one go
            queries = _SHARED.setdefault(queries.shape, torch.empty_like(queries)).copy_(queries)
        if fault == "different bits every run":
            queries = queries * (1 + 1e-3 * self._runs)
        key = self._tokens(bound, bound.kv.key, request, head, kv_len)
        value = self._tokens(bound, bound.kv.value, request, head, kv_len)
        if bound.kv.key_scale is not None and fault != "key scale forgotten":
            key = key * bound.kv.key_scale[head]
        if bound.kv.value_scale is not None and fault != "values rounded before their scale":
            value = value * bound.kv.value_scale[head]
        scores = self._scores(queries, key)
        seen = self._seen(queries.shape[0], kv_len, key.shape[0]).to(scores.device)
        scores = scores.masked_fill(~seen.unsqueeze(1), -math.inf)
        sink = None if bound.attn_sink is None else bound.attn_sink[heads]
        out, lse = self._softmax(scores, value, sink, bound.out.dtype)
        if fault == "values rounded before their scale" and bound.kv.value_scale is not None:
            out = out.to(bound.out.dtype).float() * bound.kv.value_scale[head]
        bound.out[rows, heads] = out.to(bound.out.dtype)
        assert bound.lse is not None
        bound.lse[rows, heads] = lse

    def _scores(self, queries: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """`[m, group, n]` fp32, scaled and capped."""
        problem, fault = self._problem, self._fault
        scale = problem.sm_scale
        if fault == "scale 0 means default":
            scale = scale or problem.head_dim_qk**-0.5
        scores = torch.einsum("mgd,nd->mgn", queries, key) * scale
        if problem.logits_soft_cap is not None and fault != "no cap":
            scores = problem.logits_soft_cap * torch.tanh(scores / problem.logits_soft_cap)
        if fault == "scores in the output dtype":
            scores = scores.to(getattr(torch, problem.out_dtype)).float()
        return scores

    def _seen(self, qo_len: int, kv_len: int, loaded: int) -> torch.Tensor:
        """`[m, n]` bool over the loaded tokens."""
        problem, fault = self._problem, self._fault
        position = torch.arange(qo_len).unsqueeze(1) + kv_len - qo_len
        if fault == "causal from the top left":
            position = torch.arange(qo_len).unsqueeze(1)
        if fault == "negative positions clamped":
            position = position.clamp(min=0)
        token = torch.arange(loaded).unsqueeze(0)
        seen = (token < kv_len).expand(qo_len, -1)
        if problem.causal:
            seen = seen & (token <= position)
        elif problem.window_right is not None and fault != "no right window":
            seen = seen & (token <= position + problem.window_right)
        if problem.window_left is not None:
            low = position - problem.window_left
            if fault == "window without its own token":
                low = low + 1
            if fault == "window of the block's first row":
                low = low[:1]
            seen = seen & (token >= low)
        return seen

    def _tokens(
        self, bound: BoundTensors, pool: torch.Tensor, request: int, head: int, kv_len: int
    ) -> torch.Tensor:
        """`[n, d]` fp32: the tokens of one head, by page and slot."""
        fault, kv = self._fault, bound.kv
        if fault == "layer axis ignored":
            dense = pool.shape[1] * pool.shape[2] * pool.shape[3]
            pool = pool.as_strided(pool.shape, (dense, *pool.stride()[1:]))
        loaded = kv_len
        if fault == "tail masked by score only":
            loaded = min(-(-kv_len // kv.page_size) * kv.page_size, kv.capacity)
        if fault == "unused ids dereferenced":
            loaded = min(kv_len + kv.page_size, kv.capacity)
        token = torch.arange(loaded, device=pool.device)
        if kv.page_table is None:
            return pool[request, :, head].float()[token]
        table = self._table if fault == "table read at build" else kv.page_table
        assert table is not None
        list_of = 0 if fault == "first list for every KV head" else head
        pages = table[request, list_of].long()[token // kv.page_size]
        if fault == "offsets of 32 bits":
            flat = pool.as_strided((_span(pool),), (1,))
            offset = (pages * pool.stride(0)).to(torch.int32).long() % flat.shape[0]
            offset = offset + token % kv.page_size * pool.stride(1) + head * pool.stride(2)
            column = torch.arange(pool.shape[3], device=pool.device)
            return flat[(offset.unsqueeze(1) + column) % flat.shape[0]].float()
        raw = pool.view(torch.uint8) if pool.element_size() == 1 else pool
        found = raw[pages, token % kv.page_size, head].view(pool.dtype).float()
        if fault == "unused ids dereferenced":
            found[kv_len:] = 0
        return found

    def _softmax(
        self,
        scores: torch.Tensor,
        value: torch.Tensor,
        sink: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted values and lse of `[m, group, n]` masked scores."""
        fault = self._fault
        shape = (*scores.shape[:2], value.shape[1])
        if not scores.shape[-1]:
            scores = torch.full((*scores.shape[:2], 1), -math.inf, device=scores.device)
            value = torch.zeros(1, value.shape[1], device=value.device)
        largest = scores.amax(-1, keepdim=True)
        empty = (largest == -math.inf).squeeze(-1)
        if fault != "empty row is NaN":
            largest = torch.where(largest == -math.inf, 0.0, largest)
        if sink is not None:
            largest = torch.maximum(largest, sink.unsqueeze(-1))  # keeps exp(sink) in range
        weights = torch.exp(scores - largest)
        total = weights.sum(-1)
        if sink is not None:
            times: Any = 1
            splits = -(-scores.shape[-1] // _SPLIT_TOKENS)
            if fault == "sink in every split":
                times = splits
            if fault == "sink only in a full split":
                times = min(1, scores.shape[-1] // _SPLIT_TOKENS)
            total = total + times * torch.exp(sink - largest.squeeze(-1))
        if fault == "values summed in the output dtype":
            out = torch.zeros(shape, dtype=dtype, device=scores.device)
            for step in range(0, value.shape[0], 16):
                part = weights[..., step : step + 16] @ value[step : step + 16]
                out = (out.float() + part).to(dtype)
            out = out.float()
        elif fault == "split by batch":
            step = 16 * self._problem.batch
            pieces = zip(weights.split(step, -1), value.split(step), strict=True)
            out = torch.stack([w @ v for w, v in pieces]).sum(0)
        else:
            out = weights @ value
        out = out / total.unsqueeze(-1)
        lse = largest.squeeze(-1) + torch.log(total)
        if fault == "base-2 lse":
            lse = lse / math.log(2)
        if fault == "empty row is NaN":
            return out, lse
        kept = fault == "empty row keeps the sink" and sink is not None
        blank: Any = 0.0 if fault == "empty row has lse 0" else -math.inf
        if kept:
            assert sink is not None
            blank = sink.expand(lse.shape)
        return torch.where(empty.unsqueeze(-1), 0.0, out), torch.where(empty, blank, lse)


def _span(pool: torch.Tensor) -> int:
    """Elements from the first to the last of a strided view, both counted."""
    return 1 + sum((n - 1) * s for n, s in zip(pool.shape, pool.stride(), strict=True))


__all__ = ["FAULTS", "record"]
