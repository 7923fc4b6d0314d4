"""The op-by-op executor's scores: a launch for each node of a flow's graph, through memory.

What a library of ops does, and so what the fused executor is compared with: every field is gathered
to the candidate pages, and every op reads its operands from memory and writes its value there, in
float32. Kernels are as wide as their op allows and process the window's pages alone. All memory is
allocated when it is planned; a run launches, and neither allocates nor syncs, so it can be captured
in a CUDA graph while lengths and page tables change in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stream_attention.core.errors import Faults
from stream_attention.flows.formats import RAGGED
from stream_attention.flows.fused import TRITON_DTYPES
from stream_attention.flows.graph import FlowGraph
from stream_attention.flows.op_by_op_plan import Place, Plan, Source, Step
from stream_attention.flows.pool_fields import check_fields
from stream_attention.flows.score_arguments import check_score_arguments, row_arguments
from stream_attention.flows.window import Window

NUM_WARPS = 4


class OpByOpScores:
    """Score launches of one flow, one for each op, for a batch of a fixed size on one device.

    graph: at the pool's page size and head dim. group_size: query heads a KV head. fields:
    `[num_pages, num_kv_heads, rows, cols]` by name, with k and v `[num_pages, num_kv_heads,
    page_size, D]` views where the flow reads them; kept, and written by flows with state.
    batch, max_pages: of page tables. dtype: of q. num_sms: not used, for it is `FusedScores`'s.

    Softmax, Normalize and reductions with dim=0 take two launches each, any other op one; a query,
    a reshape and topK none. Every sum is added in an order that only the flow sets.

    Raises `ValueError` for fields that are not the flow's.
    """

    def __init__(
        self,
        graph: FlowGraph,
        group_size: int,
        fields: Mapping[str, torch.Tensor],
        batch: int,
        max_pages: int,
        dtype: torch.dtype,
        window: Window | None = None,
        num_sms: int = 132,
    ) -> None:
        needs = graph.requirements
        names = tuple(dict.fromkeys((*needs.reads, *needs.writes)))
        self.num_kv_heads = next(iter(fields.values())).shape[1]
        check_fields(graph, fields, names, self.num_kv_heads)
        self.graph, self.group_size = graph, group_size
        self.batch, self.max_pages = batch, max_pages
        self.dtype, self.window = dtype, window or Window()
        self._fields = {name: fields[name] for name in names}
        self._check_storage()
        self._plan = Plan(graph, group_size, batch * self.num_kv_heads, max_pages)
        device = next(iter(self._fields.values())).device
        self._buffers: dict[Source, Any] = {
            piece: torch.empty(size, dtype=torch.float32, device=device)
            for piece, size in enumerate(self._plan.workspace.sizes)
        }

    def _check_storage(self) -> None:
        faults = Faults()
        known = ", ".join(str(each).removeprefix("torch.") for each in TRITON_DTYPES)
        dtypes = {"q": self.dtype, **{name: each.dtype for name, each in self._fields.items()}}
        for name, dtype in dtypes.items():
            rule = f"must be one of {known}"
            faults.require(dtype in TRITON_DTYPES, f"{name}.dtype", dtype, rule, "bfloat16")
        for name, tensor in self._fields.items():
            dense = tensor.shape[-1] == 1 or tensor.stride(-1) == 1
            faults.require(dense, f"{name}.stride()", tensor.stride(), "rows must be contiguous")
        faults.raise_if_any(f"flow {self.graph.name}")

    @property
    def num_launches(self) -> int:
        return len(self._plan.steps)

    @property
    def workspace_bytes(self) -> int:
        """Intermediate values that this owns."""
        return sum(each.numel() * 4 for each in self._buffers.values())

    def run(
        self,
        q: torch.Tensor,
        page_table: torch.Tensor,
        sequence_lengths: torch.Tensor,
        scores: torch.Tensor,
    ) -> None:
        """Score the candidates of every row, and update the states once.

        q: [batch, num_qo_heads, D], rows contiguous. page_table: [batch, max_pages] int32, or
        [batch, num_kv_heads, max_pages]. sequence_lengths: [batch] int32, or [batch, num_kv_heads].
        scores: [batch, num_kv_heads, max_pages] float32, contiguous; written in the window alone.
        """
        check_score_arguments(
            self.graph,
            self.group_size,
            self.num_kv_heads,
            self.batch,
            self.max_pages,
            self.dtype,
            q=q,
            page_table=page_table,
            sequence_lengths=sequence_lengths,
            scores=scores,
        )
        launches = self.launches(q, page_table, sequence_lengths, scores)
        for (kernel, arguments), step in zip(launches, self._plan.steps, strict=True):
            kernel[step.grid](**arguments, num_warps=NUM_WARPS)

    def launches(
        self,
        q: torch.Tensor,
        page_table: torch.Tensor,
        sequence_lengths: torch.Tensor,
        scores: torch.Tensor,
    ) -> list[tuple[Any, dict[str, Any]]]:
        """(kernel, arguments by name) of every launch of `run`, unchecked."""
        common = row_arguments(
            page_table,
            sequence_lengths,
            self.num_kv_heads,
            self.window,
            self._plan.max_pages,
            self._plan.max_chunks,
        )
        common["PAGE_SIZE"] = self.graph.page_size
        memory: dict[Source, Any] = {"q": q, "scores": scores, **self._buffers}
        found = []
        for step in self._plan.steps:
            given = {**common, **step.constants}
            given |= {name: memory[source] for name, source in step.tensors.items()}
            given |= self._strides(step, q)
            found.append((step.kernel, {name: given[name] for name in step.kernel.arg_names}))
        return found

    def _strides(self, step: Step, q: torch.Tensor) -> dict[str, Any]:
        """Strides in elements of what a launch does not read flat, and its field."""
        found: dict[str, Any] = {}
        if step.pool_field is not None:
            tensor = self._fields[step.pool_field]
            page, head, row = tensor.stride()[:3]
            found |= {"field": tensor, "field_page": page, "field_head": head, "field_row": row}
        for prefix, place in step.operands.items():
            request, head, page, row, col = self._value_strides(place, q)
            if prefix == "x" and step.constants.get("OP") == "transpose":
                row, col = col, row
            found |= {f"{prefix}_request": request, f"{prefix}_head": head}
            found |= {f"{prefix}_page": page, f"{prefix}_row": row, f"{prefix}_col": col}
        return found

    def _value_strides(self, place: Place, q: torch.Tensor) -> tuple[int, int, int, int, int]:
        """Of (request, head, page, row, column)."""
        if place.source == "q":
            return q.stride(0), self.group_size * q.stride(1), 0, q.stride(1), 1
        is_ragged = place.format is RAGGED
        head = place.elements * (self._plan.max_pages if is_ragged else 1)
        page = place.elements if is_ragged else 0
        return self.num_kv_heads * head, head, page, place.cols, 1
