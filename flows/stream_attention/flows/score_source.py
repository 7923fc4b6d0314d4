"""Triton source of a decode step's score launches, from a flow's graph.

A program takes one row (a KV head of a request) and walks its candidate pages a chunk at a time.
Chunks have a size that only the flow sets, so sums are added in one order on every device, in every
batch. The source is for people too: every line of it names the line of the flow that it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stream_attention.flows.formats import RAGGED
from stream_attention.flows.graph import FlowGraph, Node
from stream_attention.flows.score_kernel import Buffer, ScoreKernel
from stream_attention.flows.score_ops import Writer, padded_size
from stream_attention.flows.score_phases import phases_of

TILE_ELEMENTS = 8192
"""Of the largest tile of a chunk: 64 registers of each of 128 threads."""
MOST_PAGES = 256
_HEADER = '''"""Scores of {name}: page_size {page_size}, head_dim {head_dim}, group {group}."""

import triton
import triton.language as tl

from stream_attention.flows.kernel_parts import as_float, as_stored, await_previous, larger, smaller
from stream_attention.flows.score_runtime import (
    combined_mass,
    combined_max,
    combined_min,
    combined_sum,
)
'''


@dataclass(frozen=True, slots=True)
class ScoreLaunch:
    """A kernel: its name, the fields that it takes, in order, and its scratch."""

    name: str
    fields: tuple[str, ...]
    buffers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScoreSource:
    """The text of a module, and how its kernels are called.

    chunk: pages a program takes at a time. buffers: all scratch, each once.
    """

    text: str
    chunk: int
    launches: tuple[ScoreLaunch, ...]
    buffers: tuple[Buffer, ...]


def score_source(graph: FlowGraph, group_size: int, dtypes: Mapping[str, str]) -> ScoreSource:
    """The source for a group size and the storage dtypes of q ("q"), k, v and the fields, as Triton
    spells them: "bf16", "fp16", "fp32", and "u8" for the bits of fp8.

    Raises `UnsupportedProblem` for a flow that cannot be fused, with the line.
    """
    phases = phases_of(graph, group_size)
    lanes = _group_lanes(graph, group_size, dtypes)
    chunk = _chunk(graph, group_size, lanes)
    text = _HEADER.format(
        name=graph.name, page_size=graph.page_size, head_dim=graph.head_dim, group=group_size
    )
    launches, buffers = [], {}
    for phase in phases:
        kernel = ScoreKernel(Writer(graph, group_size, lanes, chunk), phase, dtypes)
        lines = kernel.build()
        text += "\n\n" + "\n".join(lines) + "\n"
        launches.append(ScoreLaunch(kernel.name, kernel.fields, tuple(kernel.buffers)))
        buffers.update(kernel.buffers)
    return ScoreSource(text, chunk, tuple(launches), tuple(buffers.values()))


def _sixteen_bit_products(graph: FlowGraph, dtypes: Mapping[str, str]) -> list[Node]:
    """Products of the queries as they are with a field as it is, both of one 16-bit dtype."""
    nodes, found = graph.indexer.nodes, []
    for node in nodes:
        if node.op != "gemm":
            continue
        x, y = (nodes[i] for i in node.operands)
        if x.op == "query" and y.op == "load" and dtypes["q"] in ("bf16", "fp16"):
            if dtypes[y.attribute("field")] == dtypes["q"]:
                found.append(node)
    return found


def _group_lanes(graph: FlowGraph, group_size: int, dtypes: Mapping[str, str]) -> int:
    """Lanes of the axis of a group's heads: 16 at least where tensor cores multiply by them, and no
    tile of heads and dimensions a page would grow with it.
    """
    lanes = padded_size(group_size)
    wide = any(
        node.format is RAGGED and "G" in node.shape and max(graph.sizes.numbers(node.shape, 1)) > 1
        for node in graph.indexer.nodes
    )
    return max(lanes, 16) if _sixteen_bit_products(graph, dtypes) and not wide else lanes


def _chunk(graph: FlowGraph, group_size: int, lanes: int) -> int:
    writer = Writer(graph, group_size, lanes, 1)
    most = max(
        writer.lanes(node.shape[0]) * writer.lanes(node.shape[1])
        for node in graph.indexer.nodes
        if node.format is RAGGED
    )
    return min(max(TILE_ELEMENTS // most, 1), MOST_PAGES)
