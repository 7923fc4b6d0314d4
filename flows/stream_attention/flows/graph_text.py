"""A flow's graph for people: text, a line a node, and Graphviz DOT."""

from __future__ import annotations

import os

from stream_attention.flows.graph import FlowGraph, GraphField, Node, SideGraph
from stream_attention.flows.op_table import OPS
from stream_attention.flows.shapes import shape_text


def short_source(source: str) -> str:
    """`/a/b/flow.py:12` → `flow.py:12`."""
    return os.path.basename(source)


def _number(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def attributes_text(node: Node) -> str:
    """Attributes that are not the op's defaults: `dim=1, scale=0.125`."""
    rule = OPS[node.op]
    return ", ".join(
        f"{name}={_number(value)}"
        for name, value in node.attributes
        if value != rule.attributes[name].default or name == "dim"
    )


def _call(node: Node) -> str:
    ids = ", ".join(f"%{i}" for i in node.operands)
    inside = ", ".join(part for part in (ids, attributes_text(node)) if part)
    return f"{node.op}({inside})"


def node_text(node_id: int, node: Node) -> str:
    """`%3 = gemv(%1, %2)  ragged [1, 1]  block.py:21`."""
    left = f"%{node_id} = {_call(node)}"
    source = f"  {short_source(node.source)}" if node.source else ""
    return f"{left:<44} {node.format} {shape_text(node.shape)}{source}"


def field_text(field: GraphField) -> str:
    """`c  summary [1, D] of the pool's dtype`."""
    dtype = field.dtype or "the pool's dtype"
    init = f", starts at {_number(field.init)}" if field.kind == "state" else ""
    return f"{field.name}: {field.kind} {shape_text(field.shape)} {dtype}{init}"


def _side_lines(side: SideGraph) -> list[str]:
    return [f"  {node_text(node_id, node)}" for node_id, node in side] or ["  nothing"]


def graph_text(graph: FlowGraph) -> str:
    """Fields, both sides a line a node, and what follows from them."""
    needs = graph.requirements
    pages = "any" if needs.page_sizes is None else ", ".join(map(str, needs.page_sizes))
    lines = [f"flow {graph.name}: page_size {graph.page_size}, head_dim {graph.head_dim}"]
    lines += [f"  {field_text(field)}" for field in graph.declared]
    lines += ["with every write of K and V:", *_side_lines(graph.cache)]
    lines += ["every decode step:", *_side_lines(graph.indexer)]
    lines += [
        f"page sizes: {pages}; prefix sharing: {'allowed' if needs.prefix_sharing else 'refused'}"
        f"; phases: {needs.phases}",
        f"reads: {', '.join(needs.reads) or 'nothing'}; writes: "
        f"{', '.join(needs.writes) or 'nothing'}; hash: {graph.content_hash[:16]}",
    ]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def dot_text(graph: FlowGraph) -> str:
    """Graphviz DOT: a cluster a side; fields are cylinders that both touch."""
    lines = [f"digraph {_quoted(graph.name)} {{", "  rankdir=LR;", "  node [shape=box];"]
    names = [field.name for field in graph.declared]
    names += [
        n for n in ("k", "v") if n in {*graph.cache.fields("load"), *graph.indexer.fields("load")}
    ]
    lines += [
        f"  {_quoted('field ' + name)} [shape=cylinder, label={_quoted(name)}];" for name in names
    ]
    edges = []
    for side in (graph.cache, graph.indexer):
        lines += [
            f"  subgraph {_quoted('cluster_' + side.side)} {{",
            f"    label={_quoted(side.side)};",
        ]
        for node_id, node in side:
            own = _quoted(f"{side.side} {node_id}")
            label = f"%{node_id} {node.op}({attributes_text(node)})\n{node.format} "
            label += shape_text(node.shape)
            lines.append(f"    {own} [label={_quoted(label)}];".replace("\n", "\\n"))
            edges += [f"  {_quoted(f'{side.side} {i}')} -> {own};" for i in node.operands]
            if node.op == "load":
                edges.append(f"  {_quoted('field ' + node.attribute('field'))} -> {own};")
            if node.op in ("store", "save"):
                edges.append(f"  {own} -> {_quoted('field ' + node.attribute('field'))};")
        lines.append("  }")
    return "\n".join([*lines, *edges, "}"])
