"""Which nodes of a decode step each score launch computes, and what it hands to the next one.

A value that needs all pages of its row, as a softmax does, splits a step: one launch computes what
is reduced and leaves, a chunk of pages at a time, a partial result; the next one combines these and
goes on. A step with n such reductions one after another has n + 1 launches. What a later launch
needs again of an earlier one it reads back where it is small, such as a logit a head, and computes
anew where it is not: nothing of the size of a page's keys is ever written.
"""

from __future__ import annotations

from dataclasses import dataclass

from stream_attention.flows.formats import RAGGED
from stream_attention.flows.graph import FlowGraph, Node
from stream_attention.flows.op_table import OPS

KEPT_ELEMENTS = 64
"""A reduced operand of at most as many elements a page is written for the next launch."""


def crosses(node: Node) -> bool:
    """Whether the node needs all candidate pages of its row."""
    return OPS[node.op].crosses_pages(dict(node.attributes))


@dataclass(frozen=True, slots=True)
class Phase:
    """One launch. outputs: ids of the values it is for. kept: ids that it writes for later ones.

    nodes: ids that it computes, in order; kept values of earlier phases are among them, as loads.
    partial: ids of the reductions whose partial results it leaves. combined: ids of those that it
    finishes.
    """

    number: int
    nodes: tuple[int, ...]
    loaded: tuple[int, ...]
    kept: tuple[int, ...]
    partial: tuple[int, ...]
    combined: tuple[int, ...]
    is_last: bool


def is_kept(graph: FlowGraph, node_id: int, group_size: int) -> bool:
    """Whether a reduction's operand is small enough to be written."""
    node = graph.indexer.nodes[node_id]
    rows, cols = graph.sizes.numbers(node.shape, group_size)
    return node.format is RAGGED and rows * cols <= KEPT_ELEMENTS


def phases_of(graph: FlowGraph, group_size: int) -> tuple[Phase, ...]:
    """The launches of a decode step, in order."""
    nodes = graph.indexer.nodes
    reductions = [i for i, node in enumerate(nodes) if crosses(node)]
    count = graph.requirements.phases
    found: list[Phase] = []
    kept: set[int] = set()
    for number in range(count):
        is_last = number == count - 1
        partial = tuple(i for i in reductions if nodes[i].level == number + 1)
        wanted = {operand for i in partial for operand in nodes[i].operands}
        if is_last:
            wanted |= {i for i, node in enumerate(nodes) if node.op in ("save", "topk")}
        needed, loaded = _needed(graph, wanted, kept)
        written = {
            i for i in wanted if not is_last and i not in kept and is_kept(graph, i, group_size)
        }
        kept |= written
        found.append(
            Phase(
                number,
                tuple(sorted(needed)),
                tuple(sorted(loaded)),
                tuple(sorted(written)),
                partial,
                tuple(i for i in sorted(needed) if crosses(nodes[i])),
                is_last,
            )
        )
    return tuple(found)


def _needed(graph: FlowGraph, wanted: set[int], kept: set[int]) -> tuple[set[int], set[int]]:
    """(all that has to be known for `wanted`, what of it is read back)."""
    needed: set[int] = set()
    loaded: set[int] = set()
    left = list(wanted)
    while left:
        node_id = left.pop()
        if node_id in needed:
            continue
        needed.add(node_id)
        if node_id in kept:
            loaded.add(node_id)
            continue
        node = graph.indexer.nodes[node_id]
        if node.op == "load":
            left += _saved_before(graph, node_id)
        elif not (crosses(node) and OPS[node.op].format_rule(dict(node.attributes)) == "row"):
            left += node.operands
    return needed, loaded


def _saved_before(graph: FlowGraph, node_id: int) -> tuple[int, ...]:
    """What a load of a state that this step has saved before reads: the value saved."""
    field = graph.indexer.nodes[node_id].attribute("field")
    for node in reversed(graph.indexer.nodes[:node_id]):
        if node.op == "save" and node.attribute("field") == field:
            return node.operands
    return ()


def saved_before(graph: FlowGraph, node_id: int) -> int | None:
    """The id of the value that a load reads where this step has saved it before, or `None`."""
    found = _saved_before(graph, node_id)
    return found[0] if found else None
