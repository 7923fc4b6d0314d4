"""The fused executor's scores: as few launches as a flow's graph allows, planned once.

Everything is allocated when it is planned; a run launches, and neither allocates nor syncs, so it
can be captured in a CUDA graph while lengths and page tables change in place.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from stream_attention.flows import generated
from stream_attention.flows.dependent import is_dependent
from stream_attention.flows.graph import FlowGraph
from stream_attention.flows.pool_fields import check_fields
from stream_attention.flows.score_arguments import check_score_arguments, row_arguments
from stream_attention.flows.score_source import ScoreSource, score_source
from stream_attention.flows.window import Window

TRITON_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "u8",  # its bits: not every device has the type
}
PROGRAMS_PER_SM, NUM_WARPS = 4, 4
"""Measured on an H200 at 8 × 32K tokens: 4 programs a multiprocessor, which load ahead, are as fast
as 8 or faster, and a second wave costs more than it hides."""


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


class FusedScores:
    """Score launches of one flow, for a batch of a fixed size on one device.

    graph: at the pool's page size and head dim. group_size: query heads a KV head. fields:
    `[num_pages, num_kv_heads, rows, cols]` by name, with k and v `[num_pages, num_kv_heads,
    page_size, D]` views where the flow reads them; kept, and written by flows with state.
    batch, max_pages: of page tables. dtype: of q. num_sms: of the device; sets how many programs
    walk the chunks, and no bit of a result.

    Raises `ValueError` for fields that are not the flow's, `UnsupportedProblem` for a flow that
    cannot be fused.
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
        for name in {"k", "v"}.intersection(names):
            if fields[name].dtype == torch.float8_e4m3fn:
                what = f"{name}.dtype=torch.float8_e4m3fn: scores read {name}, which has a scale"
                raise ValueError(f"flow {graph.name}: {what}; use a pool of bfloat16")
        dtypes = {"q": self._spelled("q", dtype)}
        dtypes |= {name: self._spelled(name, each.dtype) for name, each in self._fields.items()}
        self.source: ScoreSource = score_source(graph, group_size, dtypes)
        self._module: ModuleType = generated.load(self.source.text, f"score_{graph.name}")
        rows = batch * self.num_kv_heads
        self._max_chunks = max(1, -(-max_pages // self.source.chunk))
        device = next(iter(self._fields.values())).device
        self._is_dependent = is_dependent(device)
        per = {"page": max_pages, "chunk": self._max_chunks}
        self._buffers = {
            each.name: torch.empty(
                rows * per[each.per] * each.elements, dtype=torch.float32, device=device
            )
            for each in self.source.buffers
        }
        programs = max(1, num_sms * PROGRAMS_PER_SM // max(rows, 1))
        self._grid = (min(self._max_chunks, programs), rows)

    def _spelled(self, name: str, dtype: torch.dtype) -> str:
        if dtype not in TRITON_DTYPES:
            known = ", ".join(str(each).removeprefix("torch.") for each in TRITON_DTYPES)
            what = f"{name}.dtype={dtype}: must be one of {known}; use bfloat16"
            raise ValueError(f"flow {self.graph.name}: {what}")
        return TRITON_DTYPES[dtype]

    @property
    def num_launches(self) -> int:
        return len(self.source.launches)

    @property
    def workspace_bytes(self) -> int:
        """Scratch that this owns."""
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
        for launch in self.bind(q, page_table, sequence_lengths, scores):
            launch()

    def bind(
        self,
        q: torch.Tensor,
        page_table: torch.Tensor,
        sequence_lengths: torch.Tensor,
        scores: torch.Tensor,
    ) -> tuple[Callable[[], Any], ...]:
        """The launches of `run` on these tensors, checked now: for tensors that change in place."""
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
        options = {"num_warps": NUM_WARPS, "launch_pdl": self._is_dependent}
        return tuple(
            functools.partial(kernel[self._grid], **arguments, **options)
            for kernel, arguments in self.launches(q, page_table, sequence_lengths, scores)
        )

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
            self.max_pages,
            self._max_chunks,
        )
        common |= {
            "scores": scores,
            "q": q,
            "q_request": q.stride(0),
            "q_head": q.stride(1),
            "DEPENDENT": self._is_dependent,
            "DOT_FP32": os.environ.get("TRITON_INTERPRET", "0") == "1",
        }
        found = []
        for launch in self.source.launches:
            given = {f"f_{name}": _bits(self._fields[name]) for name in launch.fields}
            given |= {name: self._buffers[name] for name in launch.buffers}
            for name in {"k", "v"}.intersection(launch.fields):
                strides = self._fields[name].stride()
                given |= {f"{name}_page": strides[0], f"{name}_head": strides[1]}
                given |= {f"{name}_token": strides[2]}
            found.append((getattr(self._module, launch.name), {**common, **given}))
        return found
