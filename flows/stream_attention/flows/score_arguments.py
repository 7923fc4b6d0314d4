"""Checks of what every executor's `run` takes."""

from __future__ import annotations

from typing import Any

import torch

from stream_attention.core.errors import Faults, shape_of
from stream_attention.flows.graph import FlowGraph
from stream_attention.flows.window import Window


def check_score_arguments(
    graph: FlowGraph,
    group_size: int,
    num_kv_heads: int,
    batch: int,
    max_pages: int,
    dtype: torch.dtype,
    *,
    q: Any,
    page_table: Any,
    sequence_lengths: Any,
    scores: Any,
) -> None:
    """Raise `ValueError` for every argument that is not what was planned for.

    q: [batch, num_kv_heads · group_size, D] of dtype, rows contiguous. page_table: [batch,
    max_pages] or [batch, num_kv_heads, max_pages] int32. sequence_lengths: [batch] or [batch,
    num_kv_heads] int32. scores: [batch, num_kv_heads, max_pages] float32, contiguous.
    """
    faults = Faults()
    shape = (batch, num_kv_heads * group_size, graph.head_dim)
    tables = ((batch, max_pages), (batch, num_kv_heads, max_pages))
    lengths = ((batch,), (batch, num_kv_heads))
    faults.require(shape_of(q) == shape, "q.shape", shape_of(q), f"must be {shape}")
    faults.require(q.dtype == dtype, "q.dtype", q.dtype, f"must be {dtype}")
    faults.require(q.stride(-1) == 1, "q.stride()", q.stride(), "rows must be contiguous")
    for name, tensor, shapes in (
        ("page_table", page_table, tables),
        ("sequence_lengths", sequence_lengths, lengths),
    ):
        found, rule = shape_of(tensor), f"must be {shapes[0]} or {shapes[1]}"
        faults.require(found in shapes, f"{name}.shape", found, rule)
        rule = "must be torch.int32"
        faults.require(tensor.dtype == torch.int32, f"{name}.dtype", tensor.dtype, rule)
    faults.require(
        page_table.stride(-1) == 1, "page_table.stride()", page_table.stride(), "ends in 1"
    )
    faults.require(
        shape_of(scores) == tables[1] and scores.is_contiguous(),
        "scores.shape",
        shape_of(scores),
        f"must be {tables[1]}, contiguous",
    )
    faults.require(
        scores.dtype == torch.float32, "scores.dtype", scores.dtype, "must be torch.float32"
    )
    faults.raise_if_any(f"flow {graph.name}")


def row_arguments(
    page_table: Any,
    sequence_lengths: Any,
    num_kv_heads: int,
    window: Window,
    max_pages: int,
    max_chunks: int,
) -> dict[str, Any]:
    """What every score kernel takes to find the candidates of its row, by name."""
    table, lengths = page_table.stride(), sequence_lengths.stride()
    return {
        "page_table": page_table,
        "sequence_lengths": sequence_lengths,
        "max_pages": max_pages,
        "max_chunks": max_chunks,
        "table_request": table[0],
        "table_head": table[1] if page_table.ndim == 3 else 0,
        "length_request": lengths[0],
        "length_head": lengths[1] if sequence_lengths.ndim == 2 else 0,
        "HEADS": num_kv_heads,
        "BOS": window.bos,
        "EOS": window.eos,
    }
