"""The source of a flow's write launch: `write_source(graph, dtypes)`, one Triton kernel.

    for request, head, place in every page that new tokens go to:       # one program each
        k[page, head, begin:count] = k_new; v likewise                  # in the pool's dtype
        if begin == 0: states[page, head] = init
        fields[page, head] = forward_cache(k[page, head, :count], v[page, head, :count])

Summaries are computed from the page's tokens as stored, so they are those of the interpreter.
"""

from __future__ import annotations

from collections.abc import Mapping

from stream_attention.flows.graph import FlowGraph, GraphField, Node
from stream_attention.flows.graph_text import field_text, node_text
from stream_attention.flows.write_ops import EMIT, Tile, Writer, lanes_of, literal

LARGEST_TILE = 1 << 20
"""Elements that a tile of Triton may have."""

TRITON_DTYPES = {
    "float32": "tl.float32",
    "bfloat16": "tl.bfloat16",
    "float16": "tl.float16",
    "float8_e4m3fn": "tl.uint8",
}

_HEAD = '''"""The write launch of flow {name}: page size {page_size}, head dim {head_dim}.

{declared}

Made by stream_attention.flows.write_kernel; edit the flow instead.
"""

import triton
import triton.language as tl

from stream_attention.flows.kernel_parts import (
    as_float,
    as_stored,
    await_previous,
    column_max,
    column_min,
    column_sum,
    larger,
    repeat_last,
    smaller,
    store_tokens,
)
'''

_WRITE = '''
@triton.jit(do_not_specialize=["n_new", "touched", "max_pages", "num_pages"])
def write(
    k_new, k_batch_stride, k_token_stride, k_head_stride,
    v_new, v_batch_stride, v_token_stride, v_head_stride,
    k_pool, v_pool, page_stride, slot_stride, head_stride, k_scale, v_scale,
    page_table, table_stride, lengths, indptr, active, lengths_after,
    n_new, touched, max_pages, num_pages,{pointers}
    NUM_KV_HEADS: tl.constexpr, LENGTHS_INCLUDE_NEW: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One program a page that is written, a KV head and a request. Grid: batch · heads · touched.

    A request with a negative length, or 0 in `active`, writes nothing; nor does what would go
    beyond the page table or the pool.
    """
    await_previous(DEPENDENT)
    program = tl.program_id(0)
    row = program // touched
    head = (row % NUM_KV_HEADS).to(tl.int64)
    request = (row // NUM_KV_HEADS).to(tl.int64)
    length = tl.load(lengths + request)
    k_new += head * k_head_stride
    v_new += head * v_head_stride
    if indptr is None:
        n = n_new
        k_new += request * k_batch_stride
        v_new += request * v_batch_stride
    else:
        packed = tl.load(indptr + request)
        n = tl.minimum(tl.load(indptr + request + 1) - packed, n_new)
        k_new += packed.to(tl.int64) * k_token_stride
        v_new += packed.to(tl.int64) * v_token_stride
    first = length - n if LENGTHS_INCLUDE_NEW else length
    is_live = (first >= 0) & (length >= 0) & (n > 0)
    if active is not None:
        is_live = is_live & (tl.load(active + request) != 0)
    if lengths_after is not None:
        if program % (touched * NUM_KV_HEADS) == 0:
            end = tl.minimum(first.to(tl.int64) + n, max_pages.to(tl.int64) * {page_size})
            tl.store(lengths_after + request, tl.where(is_live, end, length).to(tl.int32))
    position = first // {page_size} + program % touched  # of the page, in the request
    begin = tl.maximum(first - position * {page_size}, 0)  # the first slot that is written
    count = tl.minimum(first + n - position * {page_size}, {page_size})  # tokens it then holds
    if is_live & (begin < count) & (position < max_pages):
        page = tl.load(page_table + request * table_stride + position).to(tl.int64)
        if (page >= 0) & (page < num_pages):
            at = page * page_stride + head * head_stride
            token = begin + position * {page_size} - first
            key_scale = 1.0 if k_scale is None else tl.load(k_scale + head)
            value_scale = 1.0 if v_scale is None else tl.load(v_scale + head)
            k = store_tokens(
                k_new, k_token_stride, token, k_pool + at, slot_stride, begin, count, key_scale,
                {page_lanes}, {head_dim}, {dim_lanes}, READ={reads_k},
            )
            v = store_tokens(
                v_new, v_token_stride, token, v_pool + at, slot_stride, begin, count,
                value_scale, {page_lanes}, {head_dim}, {dim_lanes}, READ={reads_v},
            )
'''

_INDENT = " " * 12


def pointer_of(field: str) -> str:
    """The parameter of `write` that takes a field."""
    return f"field_{field}"


def written_fields(graph: FlowGraph) -> tuple[GraphField, ...]:
    """The fields that `write` takes, in its order: summaries that are filled, and states."""
    stored = graph.requirements.summaries
    return tuple(f for f in graph.declared if f.kind == "state" or f.name in stored)


def write_source(graph: FlowGraph, dtypes: Mapping[str, str]) -> str:
    """The module that has `write`, for fields stored in `dtypes` (names, by field).

    Raises `ValueError` for a page of more than 2^20 lanes.
    """
    page_lanes, dim_lanes = lanes_of(graph.page_size), lanes_of(graph.head_dim)
    if page_lanes * dim_lanes > LARGEST_TILE:
        raise ValueError(
            f"flow {graph.name}: page_size={graph.page_size}: a page of head_dim={graph.head_dim} "
            f"has more than {LARGEST_TILE} elements; use {LARGEST_TILE // dim_lanes}"
        )
    fields = written_fields(graph)
    head = _HEAD.format(
        name=graph.name,
        page_size=graph.page_size,
        head_dim=graph.head_dim,
        declared="\n".join(field_text(field) for field in graph.declared) or "It has no fields.",
    )
    pointers = "".join(f" {pointer_of(field.name)}," for field in fields)
    write = _WRITE.format(
        pointers="\n   " + pointers if pointers else "",
        page_size=graph.page_size,
        head_dim=graph.head_dim,
        page_lanes=page_lanes,
        dim_lanes=dim_lanes,
        reads_k="k" in graph.requirements.cache_reads,
        reads_v="v" in graph.requirements.cache_reads,
    )
    lines = [*_state_lines(graph, dtypes), *_summary_lines(graph, dtypes)]
    if fields:
        lines = ["cell = page * NUM_KV_HEADS + head  # of every field", *lines]
    body = "".join(f"{_INDENT}{line}\n" if line else "\n" for line in lines)
    return f"{head}\n{write}{body}"


def _state_lines(graph: FlowGraph, dtypes: Mapping[str, str]) -> list[str]:
    """A page that is written from its first slot on is new: its states start at init."""
    if not graph.states:
        return []
    lines = ["if begin == 0:"]
    for state in graph.states:
        writer = Writer(graph)
        rows, cols = writer.lanes(state.shape)
        start = f"tl.full(({rows}, {cols}), {literal(state.init)}, tl.float32)"
        writer.let(f"start_{state.name}", start)
        _store(writer, state, f"start_{state.name}", dtypes[state.name], "start")
        lines += [f"    {line}" for line in (f"# {field_text(state)}", *writer.lines)]
    return lines


def _summary_lines(graph: FlowGraph, dtypes: Mapping[str, str]) -> list[str]:
    writer, tiles = Writer(graph), list[Tile]()
    held: dict[str, str] = {"k": "k", "v": "v"}  # variables with what fields hold, float32
    for node_id, node in graph.cache:
        writer.lines.append(f"# {node_text(node_id, node)}")
        tiles.append(_node(writer, graph, node_id, node, tiles, held, dtypes))
    return writer.lines


def _node(
    writer: Writer,
    graph: FlowGraph,
    node_id: int,
    node: Node,
    tiles: list[Tile],
    held: dict[str, str],
    dtypes: Mapping[str, str],
) -> Tile:
    """The variable of a node, after its lines."""
    name, operands = f"x{node_id}", [tiles[i] for i in node.operands]
    if node.op == "load":
        return Tile(held[node.attribute("field")], node.shape)
    if node.op == "fill":
        rows, cols = writer.lanes(node.shape)
        filled = f"tl.full(({rows}, {cols}), {literal(node.attribute('alpha'))}, tl.float32)"
        writer.let(name, filled)
    elif node.op == "store":
        field = graph.fields[node.attribute("field")]
        padded = writer.padded(Tile(operands[0].name, field.shape), 0.0, (0, 1))
        if "P" not in field.shape:
            padded = operands[0].name
        _store(writer, field, padded, dtypes[field.name], name)
        held[field.name] = f"as_float({name}_stored)"
        return operands[0]
    else:
        EMIT[node.op](writer, name, node, operands)
    return Tile(name, node.shape)


def _store(writer: Writer, field: GraphField, value: str, dtype: str, name: str) -> None:
    """Lines that round a tile to the field's dtype and store it."""
    rows, cols = writer.sizes.numbers(field.shape)
    row_lanes, col_lanes = writer.lanes(field.shape)
    at = f"{pointer_of(field.name)} + cell * {rows * cols}"
    at += f" + tl.arange(0, {row_lanes})[:, None] * {cols} + tl.arange(0, {col_lanes})[None, :]"
    masks = (writer.valid(size, axis, tokens=False) for axis, size in enumerate(field.shape))
    mask = " & ".join(each for each in masks if each is not None)
    writer.let(f"{name}_stored", f"as_stored({value}, {TRITON_DTYPES[dtype]})")
    writer.lines.append(f"tl.store({at}, {name}_stored{', mask=' + mask if mask else ''})")
