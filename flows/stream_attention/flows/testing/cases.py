"""Pools, page tables and queries to run flows on, with all that an executor may not look at.

Unused slots and unused pages hold NaN, page tables hold ids that are nowhere past their last page,
page ids are shuffled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stream_attention.flows.graph import FlowGraph
from stream_attention.flows.interpreter import interpret_cache
from stream_attention.flows.pool_fields import allocate_fields
from stream_attention.flows.window import pages_of


@dataclass(slots=True)
class FlowCase:
    """A pool with requests in it, and the queries of one step.

    q: [batch, num_kv_heads · G, D]. keys, values: [num_pages, page_size, num_kv_heads, D]. fields:
    the flow's and k, v as `[num_pages, num_kv_heads, page_size, D]` views. page_table: [batch,
    max_pages] int32. lengths: [batch] int32.
    """

    graph: FlowGraph
    q: Any
    keys: Any
    values: Any
    fields: dict[str, Any]
    page_table: Any
    lengths: Any

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[2]

    def page_counts(self, request: int) -> tuple[Any, Any]:
        """(page ids, valid tokens of each) of a request, int64 [n]."""
        page_size, length = self.graph.page_size, self.lengths[request]
        n = int(pages_of(length, page_size))
        counts = (length.long() - torch.arange(n) * page_size).clamp(max=page_size)
        return self.page_table[request, :n].long(), counts

    def page_rows(self, request: int, head: int) -> list[tuple[Any, Any]]:
        """(keys, values) [tokens, D] float64 of each page of a row."""
        pages, counts = self.page_counts(request)
        return [
            tuple(x[page, :count, head].double() for x in (self.keys, self.values))
            for page, count in zip(pages.tolist(), counts.tolist(), strict=True)
        ]

    def queries(self, request: int, head: int) -> Any:
        """[G, D] float64, the queries of a row."""
        group = self.q.shape[1] // self.num_kv_heads
        return self.q[request, head * group : (head + 1) * group].double()

    def write_all(self, dtype: Any = torch.float64) -> None:
        """Fill the summaries of every request's pages, and start their states."""
        written = [self.page_counts(request) for request in range(len(self.lengths))]
        pages, counts = (torch.cat(each) for each in zip(*written, strict=True))
        interpret_cache(self.graph, self.fields, self.keys, self.values, pages, counts, dtype=dtype)


def hostile_lengths(page_size: int) -> tuple[int, ...]:
    """Empty rows, one token, a page and its neighbours, an unfinished last page, many pages."""
    near = (page_size - 1, page_size, page_size + 1)
    return (0, 1, *near, 4 * page_size + (page_size + 1) // 2, 0, 9 * page_size)


def flow_case(
    graph: FlowGraph,
    group_size: int = 4,
    lengths: tuple[int, ...] | None = None,
    num_kv_heads: int = 2,
    dtype: Any = torch.float32,
    field_dtype: Any = torch.float64,
    state_dtype: Any = None,
    seed: int = 0,
    num_spare_pages: int = 3,
) -> FlowCase:
    """A case with random requests of these lengths, everything written.

    dtype: of q, K and V. field_dtype: of summaries that declare none. state_dtype: of states, in
    place of what they declare.
    """
    rng = torch.Generator().manual_seed(seed)
    lengths = hostile_lengths(graph.page_size) if lengths is None else lengths
    lens = torch.tensor(lengths, dtype=torch.int32)
    needed = pages_of(lens, graph.page_size).tolist()
    num_pages, max_pages = sum(needed) + num_spare_pages, max(needed, default=0) + 2
    order = torch.randperm(num_pages, generator=rng).to(torch.int32)
    page_table = torch.full((len(lengths), max_pages), 2**30, dtype=torch.int32)
    page_table[::2] = -1
    shape = (num_pages, graph.page_size, num_kv_heads, graph.head_dim)
    keys, values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    start = 0
    for request, (length, n) in enumerate(zip(lengths, needed, strict=True)):
        page_table[request, :n] = order[start : start + n]
        start += n
        for position in range(n):
            page = int(page_table[request, position])
            count = min(graph.page_size, length - position * graph.page_size)
            for pool in (keys, values):
                pool[page, :count].normal_(generator=rng)
    keys, values = keys.to(dtype), values.to(dtype)
    q_shape = (len(lengths), num_kv_heads * group_size, graph.head_dim)
    fields = allocate_fields(graph, num_pages, num_kv_heads, field_dtype)
    if state_dtype is not None:
        for state in graph.states:
            fields[state.name] = fields[state.name].to(state_dtype)
    fields |= {"k": keys.transpose(1, 2), "v": values.transpose(1, 2)}
    q = torch.randn(q_shape, generator=rng).to(dtype)
    case = FlowCase(graph, q, keys, values, fields, page_table, lens)
    case.write_all()
    return case
