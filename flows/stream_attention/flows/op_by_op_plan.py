"""The op-by-op executor's plan: which kernel runs each node of a graph, and where its values lie.

Memory of a value that nothing reads any more is given to a later one, as a caching allocator would.
The query is read where it is, a reshape is the same memory with other sizes, and the value that
`topk` takes is computed into `scores`: these take no launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stream_attention.flows.formats import BATCHED, RAGGED, Format
from stream_attention.flows.graph import FlowGraph, Node
from stream_attention.flows.op_by_op_kernels import (
    elementwise_kernel,
    gather_kernel,
    gemm_kernel,
    reduce_kernel,
    save_kernel,
)
from stream_attention.flows.op_by_op_window_kernels import (
    window_combine_kernel,
    window_finish_kernel,
    window_partial_kernel,
)
from stream_attention.flows.op_table import OPS, REPEATED_BLOCKS
from stream_attention.flows.score_ops import padded_size
from stream_attention.flows.shapes import Shape

BLOCK_ELEMENTS = 1024
"""Of an elementwise op at a time: 8 a thread."""
TILE_ELEMENTS = 4096
"""Of a gather, a product or a reduction at a time: 32 registers of each of 128 threads."""
MOST_PAGES = 1024
CHUNK_PAGES, CHUNK_ELEMENTS = 1024, 8
"""A share of what runs over a window: the pages, and the elements of a page, 32 bytes of it."""
COMBINED_CHUNKS = 64

Source = str | int
"""What holds a value: "q", "scores", or the number of a piece of the workspace."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value lies, row-major but for q; rows and cols are its shape as numbers."""

    source: Source
    shape: Shape
    rows: int
    cols: int
    format: Format

    @property
    def elements(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True, slots=True)
class Step:
    """One launch. tensors: by argument. operands: those that are given with strides, by the prefix
    of these. pool_field: what of the pool it reads or writes.
    """

    kernel: Any
    grid: tuple[int, int, int]
    constants: dict[str, Any]
    tensors: dict[str, Source] = field(default_factory=dict)
    operands: dict[str, Place] = field(default_factory=dict)
    pool_field: str | None = None


@dataclass(slots=True)
class Workspace:
    """Pieces of float32 memory, in elements, and which of them nothing holds."""

    sizes: list[int] = field(default_factory=list)
    free: set[int] = field(default_factory=set)

    def take(self, elements: int) -> int:
        """The smallest free piece that is large enough, else a new one."""
        fitting = [piece for piece in self.free if self.sizes[piece] >= elements]
        if not fitting:
            self.sizes.append(elements)
            return len(self.sizes) - 1
        piece = min(fitting, key=lambda each: (self.sizes[each], each))
        self.free.remove(piece)
        return piece

    def give(self, piece: Source) -> None:
        if isinstance(piece, int):
            self.free.add(piece)


class Plan:
    """The launches of a decode step, in order, for a batch of `rows` (request, KV head) rows."""

    def __init__(self, graph: FlowGraph, group_size: int, rows: int, max_pages: int) -> None:
        self.graph, self.group_size = graph, group_size
        self.rows, self.max_pages = rows, max(max_pages, 1)
        self.max_chunks = -(-self.max_pages // CHUNK_PAGES)
        self.workspace = Workspace()
        self.steps: list[Step] = []
        self._places: dict[int, Place] = {}
        nodes = graph.indexer.nodes
        (end,) = (node for node in nodes if node.op == "topk")
        self._scored = self._root(end.operands[0])
        last_use = {self._root(i): at for at, node in enumerate(nodes) for i in node.operands}
        for node_id, node in graph.indexer:
            if node.op != "topk":
                self._add(node_id, node)
            for root, at in last_use.items():
                if at == node_id:
                    self.workspace.give(self._places[root].source)

    def _root(self, node_id: int) -> int:
        """The node whose memory a value is in."""
        node = self.graph.indexer.nodes[node_id]
        return self._root(node.operands[0]) if node.op == "reshape" else node_id

    def _add(self, node_id: int, node: Node) -> None:
        operands = [self._places[i] for i in node.operands]
        if node.op == "query":
            self._places[node_id] = self._place("q", node)
        elif node.op == "reshape":
            self._places[node_id] = self._place(operands[0].source, node)
        elif node.op == "save":
            self._move(save_kernel, node, "x", operands[0])
        else:
            out = self._place(self._source_of(node_id, node), node)
            self._places[node_id] = out
            STEPS[node.op](self, node, out, operands)

    def _place(self, source: Source, node: Node) -> Place:
        rows, cols = self.graph.sizes.numbers(node.shape, self.group_size)
        return Place(source, node.shape, rows, cols, node.format)

    def _source_of(self, node_id: int, node: Node) -> Source:
        if node_id == self._scored:
            return "scores"
        rows, cols = self.graph.sizes.numbers(node.shape, self.group_size)
        pages = self.max_pages if node.format is RAGGED else 1
        return self.workspace.take(self.rows * pages * rows * cols)

    def _grid(self, out: Place, pages: int, blocks: int = 1) -> tuple[int, int, int]:
        return (-(-self.max_pages // pages) if out.format is RAGGED else 1), self.rows, blocks

    def _move(self, kernel: Any, node: Node, name: str, place: Place) -> None:
        """A load or a save: between a field and a RAGGED value of its shape."""
        block = min(padded_size(place.elements), BLOCK_ELEMENTS)
        pages = min(max(TILE_ELEMENTS // block, 1), MOST_PAGES)
        constants = {**tokens_of(node.shape), "COLS": place.cols, "ELEMENTS": place.elements}
        constants |= {"PAGES": pages, "BLOCK": block}
        grid = self._grid(place, pages, -(-place.elements // block))
        tensors = {name: place.source}
        self.steps.append(
            Step(kernel, grid, constants, tensors, pool_field=node.attribute("field"))
        )

    def load(self, node: Node, out: Place, operands: list[Place]) -> None:
        self._move(gather_kernel, node, "out", out)

    def elementwise(self, node: Node, out: Place, operands: list[Place]) -> None:
        attributes, x, y = dict(node.attributes), operands[0], operands[-1]
        pages = max(BLOCK_ELEMENTS // out.elements, 1) if out.format is RAGGED else 1
        constants = {
            "OP": node.op,
            "ALPHA": attributes.get("alpha", 0.0),
            "BETA": attributes.get("beta", 0.0),
            "BINARY": len(operands) == 2,
            **axes_of("X", x, out, node.op == "transpose"),
            **axes_of("Y", y, out),
            "RAGGED": out.format is RAGGED,
            "COLS": out.cols,
            "ELEMENTS": out.elements,
            "PAGES": pages,
            "BLOCK": BLOCK_ELEMENTS,
        }
        tensors = {"out": out.source, "x": x.source, "y": y.source}
        given = {"x": x, "y": y}
        grid = self._grid(out, pages)
        self.steps.append(Step(elementwise_kernel, grid, constants, tensors, given))

    def product(self, node: Node, out: Place, operands: list[Place]) -> None:
        x, y = operands
        depth = padded_size(max(y.cols, 2))
        block = min(max(TILE_ELEMENTS // depth, 1), 128)
        pages = max(block // y.rows, 1) if out.format is RAGGED else 1
        with_tokens = [each.format for each in operands if each.shape[1] == "P"]
        held = "page" if RAGGED in with_tokens else "row" if with_tokens else "all"
        constants = {
            "RAGGED": out.format is RAGGED,
            "X_PAGES": x.format is RAGGED,
            "ROWS_X": x.rows,
            "ROWS_Y": y.rows,
            "DEPTH": y.cols,
            "HELD": held,
            "PAGES": pages,
            "BLOCK": block,
            "BLOCK_DEPTH": depth,
        }
        tensors = {"out": out.source, "x": x.source, "y": y.source}
        given = {"x": x, "y": y}
        self.steps.append(Step(gemm_kernel, self._grid(out, pages), constants, tensors, given))

    def reduction(self, node: Node, out: Place, operands: list[Place]) -> None:
        (x,), dim, block_rows = operands, node.attribute("dim"), node.attribute("block")
        if dim == 0:
            self._over_window(node, out, x)
            return
        length = (x.rows, x.cols)[dim - 1]
        size = length if block_rows is None else block_rows
        lanes = padded_size(max(min(size, length), 2))
        block = min(max(TILE_ELEMENTS // lanes, 1), MOST_PAGES)
        if out.format is BATCHED:
            block = min(block, padded_size(out.elements))
        pages = max(block // out.elements, 1) if out.format is RAGGED else 1
        with_tokens = x.shape[dim - 1] == "P"
        by = "page" if x.format is RAGGED else "row"
        constants = {
            "OP": node.op,
            "IDENTITY": OPS[node.op].identity,
            "DIM": dim,
            "OUTER": out.rows,
            "INNER": out.cols,
            "SIZE": size,
            "LENGTH": length,
            "HELD": by if with_tokens else "all",
            "REPEATS": block_rows is not None and with_tokens and node.op in REPEATED_BLOCKS,
            "RAGGED": out.format is RAGGED,
            "PAGES": pages,
            "BLOCK": block,
            "BLOCK_SIZE": lanes,
        }
        tensors = {"out": out.source, "x": x.source}
        grid = self._grid(out, pages)
        self.steps.append(Step(reduce_kernel, grid, constants, tensors, {"x": x}))

    def _shares(self, node: Node, x: Place) -> tuple[dict[str, Any], dict[str, Source], int]:
        """Launch the shares of x's chunks: (constants, tensors, blocks) for what combines them."""
        block = min(padded_size(x.elements), CHUNK_ELEMENTS)
        blocks = -(-x.elements // block)
        size = self.rows * blocks * self.max_chunks * block
        partial = self.workspace.take(size)
        mass = self.workspace.take(size) if node.op == "softmax" else partial
        constants = {
            "OP": node.op,
            "IDENTITY": OPS[node.op].identity,
            "SCALE": dict(node.attributes).get("scale", 1.0),
            **tokens_of(x.shape),
            "COLS": x.cols,
            "ELEMENTS": x.elements,
            "CHUNK": CHUNK_PAGES,
            "BLOCK": block,
            "COMBINED": COMBINED_CHUNKS,
        }
        tensors: dict[str, Source] = {"x": x.source, "partial": partial, "mass": mass}
        grid = self._grid(x, CHUNK_PAGES, blocks)
        self.steps.append(Step(window_partial_kernel, grid, constants, tensors))
        for piece in {partial, mass}:  # only the next launch reads them
            self.workspace.give(piece)
        return constants, tensors, blocks

    def _over_window(self, node: Node, out: Place, x: Place) -> None:
        constants, tensors, blocks = self._shares(node, x)
        tensors = {"out": out.source, **tensors}
        grid = self._grid(out, 1, blocks)
        self.steps.append(Step(window_combine_kernel, grid, constants, tensors))

    def normalization(self, node: Node, out: Place, operands: list[Place]) -> None:
        constants, tensors, blocks = self._shares(node, operands[0])
        tensors = {"out": out.source, **tensors}
        grid = self._grid(out, CHUNK_PAGES, blocks)
        self.steps.append(Step(window_finish_kernel, grid, constants, tensors))


def tokens_of(shape: Shape) -> dict[str, bool]:
    """Which axes are tokens of a page."""
    return {"ROW_TOKENS": shape[0] == "P", "COL_TOKENS": shape[1] == "P"}


def axes_of(name: str, operand: Place, out: Place, is_transposed: bool = False) -> dict[str, bool]:
    """The axes of the output that an elementwise operand has, and whether it lies as it does."""
    rows, cols = operand.rows, operand.cols
    if is_transposed:
        rows, cols = cols, rows
    same = (rows, cols, operand.format) == (out.rows, out.cols, out.format)
    return {
        f"{name}_FLAT": same and not is_transposed and operand.source != "q",
        f"{name}_PAGES": operand.format is RAGGED,
        f"{name}_ROWS": rows > 1,
        f"{name}_COLS": cols > 1,
    }


STEPS: dict[str, Callable[[Plan, Node, Place, list[Place]], None]] = {
    "load": Plan.load,
    "gemm": Plan.product,
    "gemv": Plan.product,
    "softmax": Plan.normalization,
    "normalize": Plan.normalization,
    **dict.fromkeys(("mean", "max", "min", "sum", "l2norm"), Plan.reduction),
    **dict.fromkeys(("add", "multiply", "maximum", "minimum", "relu"), Plan.elementwise),
    **dict.fromkeys(("sigmoid", "silu", "abs", "exp", "log", "transpose"), Plan.elementwise),
}
"""Writes the launches of an op down. Query, reshape, save and topk are the plan's own."""
