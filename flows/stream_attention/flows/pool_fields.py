"""A flow's fields as tensors: `[num_pages, num_kv_heads, rows, cols]` each, beside k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stream_attention.core.dtypes import dtype_name, torch_dtype
from stream_attention.core.errors import Faults, shape_of
from stream_attention.flows.graph import FlowGraph


def allocate_fields(
    graph: FlowGraph,
    num_pages: int,
    num_kv_heads: int,
    dtype: Any = torch.bfloat16,
    device: Any = "cpu",
) -> dict[str, Any]:
    """New fields of a pool, by name: summaries 0 in `dtype` or their own, states at their init."""
    made = {}
    for field in graph.declared:
        rows, cols = graph.sizes.numbers(field.shape)
        made[field.name] = torch.full(
            (num_pages, num_kv_heads, rows, cols),
            field.init if field.kind == "state" else 0.0,
            dtype=dtype if field.dtype is None else torch_dtype(field.dtype),
            device=device,
        )
    return made


def check_fields(
    graph: FlowGraph, fields: Mapping[str, Any], names: tuple[str, ...], num_kv_heads: int
) -> int:
    """The pool's number of pages; raises `ValueError` for every field that is not as declared.

    names: the fields that a call touches; k and v are `[num_pages, num_kv_heads, page_size, D]`.
    A state may be of another dtype than its declaration says, for what that does can be measured.
    """
    faults, num_pages = Faults(), None
    pool = {"k": ("P", "D"), "v": ("P", "D")}
    for name in names:
        if not faults.require(
            name in fields, name, None, f"flow {graph.name} needs this field", "allocate_fields"
        ):
            continue
        declared = graph.fields.get(name)
        shape = graph.sizes.numbers(declared.shape if declared else pool[name])
        have = shape_of(fields[name])
        if num_pages is None and have:
            num_pages = have[0]
        wanted = (num_pages, num_kv_heads, *shape)
        faults.require(have == wanted, f"{name}.shape", have, f"must be {wanted}")
        if declared and declared.kind == "summary" and declared.dtype is not None:
            dtype = dtype_name(fields[name].dtype)
            faults.require(
                dtype == declared.dtype, f"{name}.dtype", dtype, f"must be {declared.dtype}"
            )
    faults.raise_if_any(f"flow {graph.name}")
    return num_pages or 0
