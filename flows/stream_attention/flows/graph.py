"""`FlowGraph`: a traced flow. Two SSA graphs, one filled with K/V writes and one of a decode step.

A node is one operation of `op_table.OPS`; its id is its place, so operands come before users and
executors run nodes in order. `print(graph)` shows it, `graph.dot()` is Graphviz text, and
`graph.content_hash` is equal for equal programs, whatever lines they were written on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stream_attention.core.ir import evaluable_repr
from stream_attention.flows.formats import Format
from stream_attention.flows.op_table import OPS
from stream_attention.flows.shapes import Shape, Sizes

EFFECTS = ("store", "save", "topk")
"""Nodes that are there for what they do; every other one only for those that use it."""


@dataclass(frozen=True, slots=True)
class GraphField:
    """A field as traced. dtype: `None` is the pool's own."""

    name: str
    shape: Shape
    dtype: str | None
    kind: str
    init: float = 0.0

    __repr__ = evaluable_repr


@dataclass(frozen=True, slots=True)
class Node:
    """One operation.

    op: a name in `OPS`. operands: ids of earlier nodes. attributes: by name, sorted; `field` of
    loads, fills, stores and saves. shape: (rows, cols), ints or symbols. level: how many
    reductions across pages come before its value is known. source: `path:line` of the call.
    """

    op: str
    operands: tuple[int, ...]
    attributes: tuple[tuple[str, Any], ...]
    format: Format
    shape: Shape
    level: int = 0
    source: str = ""

    __repr__ = evaluable_repr

    def attribute(self, name: str) -> Any:
        """The value of an attribute. Raises `KeyError` for one that the op does not have."""
        return dict(self.attributes)[name]


@dataclass(frozen=True, slots=True)
class SideGraph:
    """Nodes of one side, "cache" or "indexer", in an order in which they can run."""

    side: str
    nodes: tuple[Node, ...]

    __repr__ = evaluable_repr

    def __iter__(self) -> Iterator[tuple[int, Node]]:
        return iter(enumerate(self.nodes))

    def fields(self, *ops: str) -> tuple[str, ...]:
        """Names of the fields that nodes of these ops touch, each once, in order."""
        return tuple(dict.fromkeys(n.attribute("field") for n in self.nodes if n.op in ops))

    def users(self, node_id: int) -> tuple[int, ...]:
        return tuple(i for i, node in self if node_id in node.operands)


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a flow asks of its pool and of its executor, derived from the graph.

    page_sizes: tokens a page that the flow takes; `None` is any.
    prefix_sharing: whether requests may share pages; no where a state would be shared too.
    phases: 1 where a page's score and state need that page alone; one more for each reduction over
      the window that another one, a state or a combination waits for.
    reads: fields that a decode step reads; writes: states that it writes; summaries: fields that
      K/V writes fill; cache_reads: which of k and v those need.
    """

    page_sizes: tuple[int, ...] | None
    prefix_sharing: bool
    phases: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    summaries: tuple[str, ...]
    cache_reads: tuple[str, ...]

    __repr__ = evaluable_repr


@dataclass(frozen=True, slots=True)
class FlowGraph:
    """A flow at one page size and head dim, for every group size, batch and length."""

    name: str
    page_size: int
    head_dim: int
    declared: tuple[GraphField, ...]
    cache: SideGraph
    indexer: SideGraph
    page_sizes: tuple[int, ...] | None = None

    __repr__ = evaluable_repr

    def __str__(self) -> str:
        from stream_attention.flows.graph_text import graph_text

        return graph_text(self)

    def dot(self) -> str:
        """The graph as Graphviz DOT text."""
        from stream_attention.flows.graph_text import dot_text

        return dot_text(self)

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.page_size, self.head_dim)

    @property
    def fields(self) -> dict[str, GraphField]:
        return {field.name: field for field in self.declared}

    @property
    def states(self) -> tuple[GraphField, ...]:
        return tuple(field for field in self.declared if field.kind == "state")

    @property
    def requirements(self) -> Requirements:
        writes = self.indexer.fields("save")
        return Requirements(
            page_sizes=self.page_sizes,
            prefix_sharing=not self.states,
            phases=1 + max(node.level for node in self.indexer.nodes),
            reads=self.indexer.fields("load"),
            writes=writes,
            summaries=self.cache.fields("store"),
            cache_reads=tuple(n for n in self.cache.fields("load") if n in ("k", "v")),
        )

    @property
    def content_hash(self) -> str:
        """sha256 of the program: sizes, fields and nodes; neither its name nor its lines."""
        canonical = {
            "sizes": [self.page_size, self.head_dim],
            "fields": [[f.name, f.shape, f.dtype, f.kind, repr(f.init)] for f in self.declared],
            "sides": [
                [
                    [n.op, n.operands, [[k, repr(v)] for k, v in n.attributes], n.format, n.shape]
                    for n in side.nodes
                ]
                for side in (self.cache, self.indexer)
            ],
        }
        return hashlib.sha256(json.dumps(canonical).encode()).hexdigest()


def without_unused(nodes: list[Node]) -> tuple[Node, ...]:
    """The nodes that something with an effect needs, renumbered; the order stays."""
    needed: set[int] = set()
    for node_id in range(len(nodes) - 1, -1, -1):
        if nodes[node_id].op in EFFECTS or node_id in needed:
            needed.add(node_id)
            needed.update(nodes[node_id].operands)
    kept = sorted(needed)
    place = {old: new for new, old in enumerate(kept)}
    return tuple(
        Node(
            node.op,
            tuple(place[i] for i in node.operands),
            node.attributes,
            node.format,
            node.shape,
            node.level,
            node.source,
        )
        for node in (nodes[old] for old in kept)
    )


def level_of(op: str, attributes: dict[str, Any], operands: list[Node]) -> int:
    """Reductions over the window before a node's value: the operands' most, and its own."""
    before = max((node.level for node in operands), default=0)
    return before + OPS[op].crosses_pages(attributes)
