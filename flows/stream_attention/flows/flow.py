"""`Flow`: the base class. A flow declares fields, fills them from K and V, and scores pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stream_attention.core.dtypes import dtype_name
from stream_attention.core.errors import Faults
from stream_attention.core.ir import is_int
from stream_attention.flows.fields import Extent, Field, declared
from stream_attention.flows.graph import FlowGraph, GraphField
from stream_attention.flows.op_table import CACHE, INDEXER
from stream_attention.flows.shapes import Sizes
from stream_attention.flows.tracer import FieldRecord, Trace
from stream_attention.flows.values import TraceError

DEFAULT_PAGE_SIZE, DEFAULT_HEAD_DIM = 16, 128
"""Sizes that `flow.graph` is traced for where no other was asked for yet."""


class Flow:
    """Decides each decode step which pages the queries of a KV head read.

    A subclass writes three hooks and builds its ops in `__init__`; the hooks run on symbols, once
    for a page size and head dim, and leave a `FlowGraph` that executors read.

    page_sizes: tokens a page that the flow takes; `None` is any.
    """

    page_sizes: tuple[int, ...] | None = None
    registered_name: str | None = None

    def __init__(self) -> None:
        """Ports call `super().__init__()`; nothing has to."""

    def create_cache(self, page_size: int, head_dim: int) -> Mapping[str, Any]:
        """`{field: (rows, cols)}` or `{field: Field(...)}`, beside k and v."""
        raise NotImplementedError(f"{type(self).__name__} has no create_cache")

    def forward_cache(self, cache: Any, loc: Any, ctx: Any) -> None:
        """Fill summaries of the pages that K and V were written to."""
        raise NotImplementedError(f"{type(self).__name__} has no forward_cache")

    def forward_indexer(self, q: Any, o: Any, cache: Any, ctx: Any) -> None:
        """Score pages for `q` [B, G, D] and end in `topK()(score, o, ctx=ctx)`."""
        raise NotImplementedError(f"{type(self).__name__} has no forward_indexer")

    @property
    def name(self) -> str:
        """The registered name, or the class's."""
        return self.registered_name or type(self).__name__

    def require_page_size(self, page_size: int) -> None:
        """Raise `ValueError` for a page size that is not in `page_sizes`."""
        if self.page_sizes is not None and page_size not in self.page_sizes:
            allowed = ", ".join(map(str, self.page_sizes))
            nearest = min(self.page_sizes, key=lambda size: abs(size - page_size))
            raise ValueError(
                f"flow {self.name}: page_size={page_size}: must be one of {allowed}; use {nearest}"
            )

    def get_cache_meta_info(self, page_size: int, head_dim: int) -> dict[str, tuple[int, int]]:
        """(rows, cols) of each field as numbers, by name, without k and v."""
        graph = self.trace(page_size, head_dim)
        return {field.name: graph.sizes.numbers(field.shape) for field in graph.declared}

    def run_indexer_virtual(self, group_size: int, page_size: int, head_dim: int) -> FlowGraph:
        """Trace the flow and check it for a group size, without data; returns the graph."""
        if not (is_int(group_size) and group_size >= 1):
            raise ValueError(f"group_size={group_size!r}: must be an int >= 1; use 1")
        graph = self.trace(page_size, head_dim)
        for _, node in graph.indexer:
            graph.sizes.numbers(node.shape, group_size)
        return graph

    @property
    def graph(self) -> FlowGraph:
        """The graph traced last; without one, that of usual sizes."""
        last: FlowGraph | None = getattr(self, "_last_graph", None)
        if last is None:
            page_size = self.page_sizes[0] if self.page_sizes else DEFAULT_PAGE_SIZE
            last = self.trace(page_size, DEFAULT_HEAD_DIM)
        return last

    def trace(self, page_size: int, head_dim: int) -> FlowGraph:
        """The graph for a page size in tokens and a head dim, traced when first asked for.

        Raises `TraceError` (a `ValueError`) for a program that is not legal.
        """
        faults = Faults()
        for parameter, value, near in (("page_size", page_size, 16), ("head_dim", head_dim, 128)):
            faults.require(is_int(value) and value >= 1, parameter, value, "must be >= 1", near)
        faults.raise_if_any(f"flow {self.name}")
        self.require_page_size(page_size)
        graphs: dict[tuple[int, int], FlowGraph] = self.__dict__.setdefault("_graphs", {})
        if (page_size, head_dim) not in graphs:
            graphs[page_size, head_dim] = self._traced(Sizes(page_size, head_dim))
        self._last_graph = graphs[page_size, head_dim]
        return self._last_graph

    def _traced(self, sizes: Sizes) -> FlowGraph:
        # The hook may give its ops what follows from these, such as a scale.
        made = self.create_cache(Extent(sizes.page_size, "P"), Extent(sizes.head_dim, "D"))
        try:
            fields = declared(made)
        except ValueError as error:
            where = line_of(type(self).create_cache)
            raise TraceError(f"flow {self.name}, {where}: {error}") from None
        records = {n: FieldRecord(n, f, sizes.shape(f.shape)) for n, f in fields.items()}
        # First, for what it saves is a state to the other one.
        indexer = Trace(self.name, INDEXER, sizes, records)
        q = indexer.query(line_of(type(self).forward_indexer))
        self.forward_indexer(q, indexer.output, indexer.cache, indexer.context)
        cache = Trace(self.name, CACHE, sizes, records)
        self.forward_cache(cache.cache, cache.location, cache.context)
        graph = FlowGraph(
            name=self.name,
            page_size=sizes.page_size,
            head_dim=sizes.head_dim,
            declared=tuple(graph_field(record) for record in records.values()),
            cache=cache.finish(),
            indexer=indexer.finish(),
            page_sizes=self.page_sizes,
        )
        self._check_written(graph, records)
        return graph

    def _check_written(self, graph: FlowGraph, records: dict[str, FieldRecord]) -> None:
        faults = Faults()
        for name, record in records.items():
            if record.saved is None and record.field.kind == "state":
                faults.add(f"field {name}", record.field, "no Save writes this state", "Save()")
            elif record.saved is None and record.stored is None:
                if name in graph.indexer.fields("load"):
                    faults.add(f"field {name}", record.field, "is read, and nothing writes it")
        try:
            faults.raise_if_any(f"flow {self.name}, {line_of(type(self).create_cache)}")
        except ValueError as error:
            raise TraceError(str(error)) from None


def graph_field(record: FieldRecord) -> GraphField:
    """A field with what both traces found out about it."""
    field: Field = record.field
    kind = field.kind or ("state" if record.saved else "summary")
    dtype = dtype_name(field.dtype) if field.dtype is not None else None
    if kind == "state" and dtype is None:
        dtype = "float32"
    init = field.init if record.init is None else record.init
    return GraphField(record.name, record.shape, dtype, kind, float(init))


def line_of(function: Any) -> str:
    """`path:line` of a function's definition, or its name where it has none."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)
