"""`FlowRuntime`: a flow in a decode loop: append, score, select, attend, without a host in it.

    runtime = FlowRuntime(flow, pool, engine, q, page_table, sequence_lengths, budget=Budget(128))
    for k_new, v_new in layers:            # q, page_table and sequence_lengths change in place
        runtime.append(k_new, v_new)
        out, info = runtime.step()

Everything is planned once, for the batch and the width of the page table. A step reads lengths and
page tables on the device, so `append` and `step` can be captured in a CUDA graph and replayed while
requests come, grow and go.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from stream_attention.core.errors import Faults, shape_of
from stream_attention.core.info import AttentionInfo
from stream_attention.flows.fused import FusedScores
from stream_attention.flows.pool import FlowPool
from stream_attention.flows.top_k import TopK
from stream_attention.flows.window import Budget, Window
from stream_attention.flows.write_launch import WriteLaunch

SCHEDULE_EXACT = "schedule_exact"


class FlowRuntime:
    """One layer's flow for a batch whose tensors are bound.

    flow: of the pool. pool: K, V and fields; one a layer, so a layer has states of its own. engine:
    attends; `None` is a new one. q: [batch, num_qo_heads, head_dim], the queries of a step.
    page_table: [batch, max_pages] int32. sequence_lengths: [batch] int32 tokens, those of this step
    included; 0 is an empty row. All three are read at every step and may change in place.
    budget, window: pages that are read, see `Budget` and `Window`; their defaults. max_budget:
    bound of budgets `per_row`, pages. sm_scale: of the attention, `head_dim ** -0.5` by default.
    dense_below: a batch whose page table holds at most so many tokens a request is attended in
    full, exactly; scores are then computed only to keep states.

    out: [batch, num_qo_heads, head_dim], written by `step`. pages: [batch, num_kv_heads, width]
    int32, the pages that were read, ascending; page_lengths: [batch, num_kv_heads] int32 tokens in
    them. Scratch is allocated here; `append` and `step` allocate nothing that a graph cannot hold,
    and do not sync. Steps of one runtime share scratch, so they are ordered by their stream.

    Raises `ValueError` with every broken rule, `UnsupportedProblem` where no route attends.
    """

    def __init__(
        self,
        pool: FlowPool,
        q: torch.Tensor,
        page_table: torch.Tensor,
        sequence_lengths: torch.Tensor,
        engine: Any = None,
        *,
        budget: Budget | None = None,
        window: Window | None = None,
        max_budget: int | None = None,
        sm_scale: float | None = None,
        dense_below: int = 0,
    ) -> None:
        self.pool, self.graph = pool, pool.graph
        self.q, self.page_table, self.sequence_lengths = q, page_table, sequence_lengths
        self.budget, self.window = budget or Budget(), window or Window()
        _check(pool, q, page_table, sequence_lengths, dense_below)
        if engine is None:
            from stream_attention.planner.engine import StreamAttnEngine

            engine = StreamAttnEngine()
        batch, max_pages = page_table.shape
        heads = pool.num_kv_heads
        self.is_dense = max_pages * pool.page_size <= dense_below
        num_sms = 1
        if pool.device.type == "cuda":
            num_sms = torch.cuda.get_device_properties(pool.device).multi_processor_count
        self._scores: FusedScores | None = None
        if not self.is_dense or self.graph.states:
            self._scores = FusedScores(
                self.graph,
                q.shape[1] // heads,
                pool.fields,
                batch,
                max_pages,
                q.dtype,
                self.window,
                num_sms,
            )
        self.scores = torch.zeros(batch, heads, max_pages, device=pool.device)
        self._top_k: TopK | None = None
        self.pages, self.page_lengths = page_table, sequence_lengths
        if not self.is_dense:
            self._select(batch, heads, max_pages, max_budget)
        self._launches = self._bound()
        self.out = torch.zeros_like(q)
        self.plan = engine.plan(
            q,
            pool.cache(self.pages, self.page_lengths),
            sm_scale=sm_scale,
            out=self.out,
            validate=False,
        )
        self.info = self._info(self.plan.info, dense_below)

    def _select(self, batch: int, heads: int, max_pages: int, max_budget: int | None) -> None:
        self._top_k = TopK(
            max_pages,
            batch * heads,
            self.pool.page_size,
            self.window,
            self.budget,
            self.pool.device,
            max_budget=max_budget,
        )
        place: dict[str, Any] = {"dtype": torch.int32, "device": self.pool.device}
        self.pages = torch.zeros(batch, heads, self._top_k.width, **place)
        self.page_lengths = torch.zeros(batch, heads, **place)
        self.nan_counts = torch.zeros(batch, heads, **place)

    def _bound(self) -> tuple[Any, ...]:
        """Launches before attention, on the bound tensors: checked once."""
        found: tuple[Any, ...] = ()
        row = (self.page_table, self.sequence_lengths)
        if self._scores is not None:
            found += self._scores.bind(self.q, *row, self.scores)
        if self._top_k is not None:
            outputs = (self.pages, self.page_lengths, self.nan_counts)
            found += self._top_k.bind(self.scores, *row, *outputs)
        return found

    def _info(self, attended: AttentionInfo, dense_below: int) -> AttentionInfo:
        """What a step reports: exact attention over what the flow chose."""
        name = self.pool.flow.name
        if self.is_dense:
            capacity = self.page_table.shape[1] * self.pool.page_size
            reason = f"{capacity} tokens a request at most, dense_below={dense_below}: all are read"
            return dataclasses.replace(attended, reason=f"flow {name}: {reason}; {attended.reason}")
        return dataclasses.replace(
            attended,
            guarantee=SCHEDULE_EXACT,
            reason=f"flow {name} selects, {attended.route} attends exactly to the selection; "
            f"{attended.reason}",
        )

    @property
    def num_launches(self) -> int:
        """Launches of a step before attention, the write of K and V among them."""
        scores = self._scores.num_launches if self._scores is not None else 0
        return 1 + scores + (self._top_k.num_launches if self._top_k is not None else 0)

    @property
    def workspace_bytes(self) -> int:
        """Scratch that the runtime owns, the pool and the bound tensors not counted."""
        own = [self.scores, self.out]
        if self._top_k is not None:
            own += [self.pages, self.page_lengths, self.nan_counts]
        total = sum(each.numel() * each.element_size() for each in own)
        for part in (self._scores, self._top_k):
            total += 0 if part is None else part.workspace_bytes
        return total + self.plan.workspace_bytes

    def append(
        self, k_new: torch.Tensor, v_new: torch.Tensor, active: torch.Tensor | None = None
    ) -> None:
        """Write the newest tokens of every request, their pages' summaries, and start new states.

        k_new, v_new: [batch, n_new, num_kv_heads, head_dim]; they take the last n_new places of
        `sequence_lengths`, which counts them already. active: [batch] int32, 0 where a request
        appends nothing; needed for empty rows only where their length is not below n_new.
        """
        WriteLaunch(
            self.pool,
            k_new,
            v_new,
            self.page_table,
            self.sequence_lengths,
            active=active,
            lengths_include_new=True,
        ).run()

    def step(self) -> tuple[torch.Tensor, AttentionInfo]:
        """Score, select and attend for `q`: `(out, info)`; states are updated once."""
        for launch in self._launches:
            launch()
        self.plan.run()
        return self.out, self.info


def _check(
    pool: FlowPool, q: Any, page_table: Any, sequence_lengths: Any, dense_below: Any
) -> None:
    faults, heads = Faults(), pool.num_kv_heads
    fits = q.dim() == 3 and q.shape[2] == pool.head_dim and q.shape[1] % heads == 0 and q.shape[1]
    faults.require(
        bool(fits),
        "q.shape",
        shape_of(q),
        f"must be [batch, a multiple of {heads} heads, {pool.head_dim}]",
    )
    batch = q.shape[0]
    for name, tensor, good in (
        ("page_table", page_table, page_table.dim() == 2 and page_table.shape[0] == batch),
        ("sequence_lengths", sequence_lengths, shape_of(sequence_lengths) == (batch,)),
    ):
        rule = f"must be [{batch}, max_pages]" if name == "page_table" else f"must be [{batch}]"
        faults.require(good, f"{name}.shape", shape_of(tensor), rule)
        rule = "must be torch.int32"
        faults.require(tensor.dtype == torch.int32, f"{name}.dtype", tensor.dtype, rule)
    for name, tensor in (("q", q), ("page_table", page_table), ("lengths", sequence_lengths)):
        rule = f"must be the pool's, {pool.device}"
        faults.require(tensor.device == pool.device, f"{name}.device", str(tensor.device), rule)
    number = isinstance(dense_below, int) and dense_below >= 0
    faults.require(number, "dense_below", dense_below, "must be an int >= 0", 0)
    faults.raise_if_any("FlowRuntime")
