"""The interpreter: runs a flow's graph with torch, in float64 or float32, on any device.

It is the oracle of the other executors and the way to write a flow without a GPU. It keeps what the
graph and the pool say of storage: a summary is rounded to its field's dtype when it is written, a
state when it is saved, and read back as that. Arguments are checked, so it syncs.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from stream_attention.core.errors import Faults, shape_of
from stream_attention.core.ir import evaluable_repr
from stream_attention.flows.formats import BATCHED, PAGED, RAGGED
from stream_attention.flows.graph import FlowGraph, Node
from stream_attention.flows.interpreter_ops import Operand, Run, compute
from stream_attention.flows.pool_fields import check_fields
from stream_attention.flows.selection import Selection, budgets_of, select
from stream_attention.flows.window import Budget, Window, pages_of

DTYPES = (torch.float64, torch.float32)


@dataclass(frozen=True, slots=True)
class IndexerResult:
    """What a decode step decided, for rows `[batch, num_kv_heads]`.

    selection: positions in the row's page table. pages: [batch, num_kv_heads, width] int32, page
    ids in the same order, −1 beyond. scores: [batch, num_kv_heads, max_pages] of the run's dtype,
    -inf outside the window. num_pages: [batch, num_kv_heads] int64.
    """

    selection: Selection
    pages: Any
    scores: Any
    num_pages: Any

    __repr__ = evaluable_repr


def interpret_cache(
    graph: FlowGraph,
    pool_fields: MutableMapping[str, Any],
    k: Any,
    v: Any,
    pages: Any,
    counts: Any,
    first_slots: Any = None,
    dtype: Any = torch.float64,
) -> None:
    """Fill the summaries of pages that K and V were written to; start the states of new ones.

    pool_fields: `[num_pages, num_kv_heads, rows, cols]` by name, written in place. k, v:
    `[num_pages, page_size, num_kv_heads, D]`, as they are after the write. pages: [n] integers, the
    pages written, each once. counts: [n], tokens that each holds now, 0 to page_size; those at and
    beyond are not read. first_slots: [n], the first slot that this write filled; a page written
    from slot 0 is new, so its states start at init. `None`: all are new. A page with no token
    keeps what it has.
    """
    num_kv_heads = k.shape[2] if k.ndim == 4 else 0
    fields = {**pool_fields, "k": k.transpose(1, 2), "v": v.transpose(1, 2)}
    names = ("k", "v", *(field.name for field in graph.declared))
    num_pages = check_fields(graph, fields, names, num_kv_heads)
    pages, counts = pages.long().to(k.device), counts.long().to(k.device)
    if first_slots is None:
        first_slots = torch.zeros_like(pages)
    _check_writes(graph, num_pages, pages, counts, first_slots, dtype)
    held = counts > 0
    pages, counts, first_slots = pages[held], counts[held], first_slots.to(k.device)[held]
    for field in graph.states:
        pool_fields[field.name][pages[first_slots == 0]] = field.init
    run = Run(graph.sizes, 0, dtype, counts.repeat_interleave(num_kv_heads))
    values: list[Operand] = []
    for _, node in graph.cache:
        values.append(_cache_node(run, node, values, fields, pages, num_kv_heads))


def _check_writes(
    graph: FlowGraph, num_pages: int, pages: Any, counts: Any, first_slots: Any, dtype: Any
) -> None:
    faults = Faults()
    ids, shapes = pages.tolist(), {shape_of(each) for each in (pages, counts, first_slots)}
    faults.require(
        shapes == {(len(ids),)}, "pages, counts, first_slots", shapes, "must have one shape [n]"
    )
    faults.require(len(set(ids)) == len(ids), "pages", ids, "each page is written once")
    faults.require(
        all(0 <= i < num_pages for i in ids), "pages", ids, f"must be in [0, {num_pages})"
    )
    faults.require(
        all(0 <= n <= graph.page_size for n in counts.tolist()),
        "counts",
        counts.tolist(),
        f"must be in [0, {graph.page_size}]",
    )
    faults.require(dtype in DTYPES, "dtype", dtype, "must be float64 or float32", torch.float64)
    faults.raise_if_any(f"flow {graph.name}")


def _cache_node(
    run: Run,
    node: Node,
    values: list[Operand],
    fields: Mapping[str, Any],
    pages: Any,
    num_kv_heads: int,
) -> Operand:
    leading, shape = len(pages) * num_kv_heads, run.sizes.numbers(node.shape)
    if node.op == "load":
        found = fields[node.attribute("field")][pages].to(run.dtype)
        return Operand(found.reshape(leading, *shape), node.shape, PAGED)
    if node.op == "fill":
        filled = torch.full((leading, *shape), node.attribute("alpha"), dtype=run.dtype)
        return Operand(filled.to(pages.device), node.shape, PAGED)
    if node.op == "store":
        (stored,) = (values[i] for i in node.operands)
        field = fields[node.attribute("field")]
        tensor = run.padded(Operand(stored.tensor, node.shape, PAGED), 0.0)
        field[pages] = tensor.to(field.dtype).reshape(len(pages), num_kv_heads, *shape)
        return stored
    return compute(run, node, [values[i] for i in node.operands])


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The packed candidate pages of all rows: [S] int64 each."""

    row: Any
    position: Any
    page: Any
    head: Any


def interpret_indexer(
    graph: FlowGraph,
    q: Any,
    fields: Mapping[str, Any],
    page_table: Any,
    sequence_lengths: Any,
    window: Window | None = None,
    budget: Budget | None = None,
    dtype: Any = torch.float64,
    update_state: bool = True,
) -> IndexerResult:
    """One decode step: scores of the candidates, selected pages, states updated once, in place.

    q: [batch, num_q_heads, D]; heads h·G to (h + 1)·G − 1 are those of KV head h. fields:
    `[num_pages, num_kv_heads, rows, cols]` by name, with k and v `[num_pages, num_kv_heads,
    page_size, D]` where the flow reads them. page_table: [batch, max_pages] int32, or
    [batch, num_kv_heads, max_pages]; entries past the last page are never looked at.
    sequence_lengths: [batch] or [batch, num_kv_heads] tokens, 0 to capacity. window and budget:
    their defaults. update_state=False leaves the states as they are.
    """
    window, budget = window or Window(), budget or Budget()
    names = tuple(dict.fromkeys((*graph.requirements.reads, *graph.requirements.writes)))
    num_kv_heads = fields[names[0]].shape[1] if names and names[0] in fields else 0
    num_pages_of_pool = check_fields(graph, fields, names, num_kv_heads)
    table, lengths = _checked(
        graph, q, num_kv_heads, page_table, sequence_lengths, num_pages_of_pool, dtype
    )
    num_pages = pages_of(lengths, graph.page_size)
    pages = _candidates(graph, table, num_pages, window, num_pages_of_pool)
    first, last = window.bounds(num_pages)
    if not update_state:
        states = {name: fields[name].clone() for name in graph.requirements.writes}
        fields = {**fields, **states}
    tokens = lengths.reshape(-1)[pages.row] - pages.position * graph.page_size
    run = Run(
        sizes=graph.sizes,
        group_size=q.shape[1] // num_kv_heads,
        dtype=dtype,
        counts=tokens.clamp(max=graph.page_size),
        row_of_page=pages.row,
        window_sizes=(last - first).reshape(-1),
    )
    scores = torch.full(table.shape, -torch.inf, dtype=dtype, device=q.device)
    packed = _run_indexer(graph, run, q, fields, pages)
    scores.reshape(-1, table.shape[-1])[pages.row, pages.position] = packed
    budgets = budgets_of(scores, num_pages, budget, window)
    selection = select(scores, num_pages, budgets, window)
    return IndexerResult(selection, selection.pages(table), scores, num_pages)


def _checked(
    graph: FlowGraph,
    q: Any,
    num_kv_heads: int,
    page_table: Any,
    sequence_lengths: Any,
    num_pages_of_pool: int,
    dtype: Any,
) -> tuple[Any, Any]:
    """(page_table, lengths) with a KV head axis: [batch, num_kv_heads, max_pages] and one less."""
    faults = Faults()
    batch = q.shape[0]
    faults.require(
        q.ndim == 3 and q.shape[2] == graph.head_dim and q.shape[1] % max(1, num_kv_heads) == 0,
        "q.shape",
        shape_of(q),
        f"must be [batch, a multiple of {num_kv_heads} heads, {graph.head_dim}]",
    )
    faults.require(dtype in DTYPES, "dtype", dtype, "must be float64 or float32", torch.float64)
    table = page_table[:, None] if page_table.ndim == 2 else page_table
    lengths = sequence_lengths[:, None] if sequence_lengths.ndim == 1 else sequence_lengths
    max_pages = table.shape[-1]
    for name, given, fits in (
        ("page_table", page_table, shape_of(table) in _shapes(batch, num_kv_heads, max_pages)),
        ("sequence_lengths", sequence_lengths, shape_of(lengths) in _shapes(batch, num_kv_heads)),
    ):
        rule = f"must start with [{batch}] or [{batch}, {num_kv_heads}]"
        faults.require(fits, f"{name}.shape", shape_of(given), rule)
    capacity = max_pages * graph.page_size
    for row, length in enumerate(lengths.reshape(-1).tolist()):
        faults.require(
            0 <= length <= capacity, f"sequence_lengths[{row}]", length, f"must be 0 to {capacity}"
        )
    faults.raise_if_any(f"flow {graph.name}")
    wide = (batch, num_kv_heads)
    return table.expand(*wide, max_pages).contiguous(), lengths.expand(wide).contiguous().long()


def _shapes(batch: int, num_kv_heads: int, *rest: int) -> tuple[tuple[int, ...], ...]:
    return (batch, 1, *rest), (batch, num_kv_heads, *rest)


def _candidates(
    graph: FlowGraph, table: Any, num_pages: Any, window: Window, num_pages_of_pool: int
) -> _Candidates:
    batch, num_kv_heads, max_pages = table.shape
    first, last = (bound.reshape(-1) for bound in window.bounds(num_pages))
    sizes = last - first
    rows = torch.arange(batch * num_kv_heads, device=table.device)
    row = rows.repeat_interleave(sizes)
    starts = (sizes.cumsum(0) - sizes)[row]
    position = torch.arange(len(row), device=table.device) - starts + first[row]
    page = table.reshape(-1, max_pages)[row, position].long() if len(row) else row
    wrong = (page < 0) | (page >= num_pages_of_pool)
    if wrong.any():
        at = int(wrong.nonzero()[0, 0])
        request, head = divmod(int(row[at]), num_kv_heads)
        raise ValueError(
            f"page_table[{request}, {head}, {int(position[at])}]={int(page[at])}: must be in "
            f"[0, {num_pages_of_pool})"
        )
    head = row % max(1, num_kv_heads)
    if graph.states and len(torch.unique(page * num_kv_heads + head)) != len(page):
        raise ValueError(
            f"flow {graph.name}: page_table: requests share pages, but the flow has state, which "
            "would be shared too; use a pool without prefix sharing"
        )
    return _Candidates(row, position, page, head)


def _run_indexer(
    graph: FlowGraph, run: Run, q: Any, fields: Mapping[str, Any], pages: _Candidates
) -> Any:
    """[S] scores of the packed candidates; saves on the way."""
    values: list[Operand] = []
    for _, node in graph.indexer:
        if node.op == "query":
            rows = len(run.window_sizes)
            grouped = q.to(run.dtype).reshape(rows, run.group_size, graph.head_dim)
            values.append(Operand(grouped, node.shape, BATCHED))
        elif node.op == "load":
            loaded = fields[node.attribute("field")][pages.page, pages.head].to(run.dtype)
            values.append(Operand(loaded, node.shape, RAGGED))
        elif node.op == "save":
            (saved,) = (values[i] for i in node.operands)
            field = fields[node.attribute("field")]
            tensor = run.padded(Operand(saved.tensor, node.shape, RAGGED), 0.0)
            tensor = tensor.expand(len(pages.page), *field.shape[2:])
            field[pages.page, pages.head] = tensor.to(field.dtype)
            values.append(saved)
        else:
            values.append(compute(run, node, [values[i] for i in node.operands]))
    return values[-1].tensor.reshape(-1)
