"""Triton source of the cache side's ops: what `interpreter_ops` computes, on tiles of one page.

A value `[rows, cols]` is a float32 tile of powers of two; lanes beyond its sizes, and token lanes
beyond the page's count, hold anything. Each op that sums or compares lanes first puts its identity
of `OPS` into those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stream_attention.flows.graph import FlowGraph, Node
from stream_attention.flows.op_table import OPS, REPEATED_BLOCKS
from stream_attention.flows.shapes import Shape, Size, Sizes

_FEWEST_FOR_DOT = 16  # rows, columns and depth that tl.dot takes
_REDUCE = {"max": "column_max", "min": "column_min"}


def lanes_of(number: int) -> int:
    """The lanes of an axis: the power of two at or above."""
    return 1 << (number - 1).bit_length()


def literal(number: float) -> str:
    """A number as Triton reads it; infinities have no literal."""
    return f'float("{number}")' if number in (float("inf"), float("-inf")) else repr(number)


@dataclass(frozen=True, slots=True)
class Tile:
    """A value in the source: its variable, and what the graph says of its shape."""

    name: str
    shape: Shape


class Writer:
    """Collects the lines of one node after the other. `count` in the source: tokens of the page."""

    def __init__(self, graph: FlowGraph) -> None:
        self.sizes: Sizes = graph.sizes
        self.lines: list[str] = []

    def number(self, size: Size) -> int:
        return self.sizes.numbers((size, 1))[0]

    def lanes(self, shape: Shape) -> tuple[int, int]:
        rows, cols = self.sizes.numbers(shape)
        return lanes_of(rows), lanes_of(cols)

    def valid(self, size: Size, axis: int, tokens: bool = True) -> str | None:
        """A mask of lanes that hold something along an axis, or `None` where all do.

        tokens: whether slots beyond the page's count are padding, too.
        """
        number = self.number(size)
        lanes, at = lanes_of(number), ("[:, None]", "[None, :]")[axis]
        if size == "P" and tokens:
            return f"(tl.arange(0, {lanes}) < count){at}"
        return None if lanes == number else f"(tl.arange(0, {lanes}) < {number}){at}"

    def padded(self, tile: Tile, identity: float, axes: tuple[int, ...]) -> str:
        """The tile with `identity` in the padded lanes of these axes, as an expression."""
        masks = [self.valid(tile.shape[axis], axis) for axis in axes]
        mask = " & ".join(each for each in masks if each is not None)
        return f"tl.where({mask}, {tile.name}, {literal(identity)})" if mask else tile.name

    def held(self, size: Size) -> str:
        """How many lanes of an axis hold something, as an expression."""
        return "count" if size == "P" else str(self.number(size))

    def let(self, name: str, expression: str) -> None:
        self.lines.append(f"{name} = {expression}")


Emit = Callable[[Writer, str, Node, list[Tile]], None]


def _gemm(writer: Writer, name: str, node: Node, operands: list[Tile]) -> None:
    x, y = operands
    identity = OPS["gemm"].identity or 0.0
    left, right = (writer.padded(each, identity, (1,)) for each in (y, x))
    rows, depth = writer.lanes(y.shape)
    cols = writer.lanes(x.shape)[0]
    if cols == 1:
        writer.let(name, f"column_sum({left} * {right}, 1)")
    elif rows == 1:
        writer.let(name, f"tl.trans(column_sum({left} * {right}, 1))")
    elif min(rows, cols, depth) >= _FEWEST_FOR_DOT:
        writer.let(name, f'tl.dot({left}, tl.trans({right}), input_precision="ieee")')
    else:
        writer.let(f"{name}_left", left)
        writer.let(f"{name}_right", right)
        product = f"{name}_left[:, None, :] * {name}_right[None, :, :]"
        writer.let(name, f"tl.sum({product}, 2)")


def _binary(expression: str) -> Emit:
    def emit(writer: Writer, name: str, node: Node, operands: list[Tile]) -> None:
        x, y = (each.name for each in operands)
        numbers = {key: literal(value) for key, value in node.attributes}
        writer.let(name, expression.format(x=x, y=y, **numbers))

    return emit


def _unary(expression: str) -> Emit:
    def emit(writer: Writer, name: str, node: Node, operands: list[Tile]) -> None:
        numbers = {key: literal(value) for key, value in node.attributes}
        inner = "({beta} * {x} + {alpha})".format(x=operands[0].name, **numbers)
        writer.let(name, expression.format(x=operands[0].name, inner=inner, **numbers))

    return emit


def _reduced(op: str, tile: str, axis: int, held: str) -> str:
    """A reduction of a tile whose padded lanes hold the identity; `held` divides a mean."""
    if op in _REDUCE:
        return f"{_REDUCE[op]}({tile}, {axis})"
    if op == "l2norm":
        return f"tl.sqrt_rn(column_sum({tile} * {tile}, {axis}))"
    total = f"column_sum({tile}, {axis})"
    return f"tl.div_rn({total}, ({held}) * 1.0)" if op == "mean" else total


def _reduction(writer: Writer, name: str, node: Node, operands: list[Tile]) -> None:
    (tile,), axis = operands, node.attribute("dim") - 1
    identity, block = OPS[node.op].identity, node.attribute("block")
    assert identity is not None
    size = tile.shape[axis]
    if block is not None and block < writer.number(size):
        _blocks(writer, name, node, tile, block, identity)
        return
    writer.let(f"{name}_lanes", writer.padded(tile, identity, (axis,)))
    writer.let(name, _reduced(node.op, f"{name}_lanes", axis, writer.held(size)))


def _blocks(writer: Writer, name: str, node: Node, tile: Tile, block: int, identity: float) -> None:
    """[blocks, cols] of rows cut into blocks; those without rows repeat the last one with some."""
    held, (rows, cols) = writer.held(tile.shape[0]), writer.lanes(tile.shape)
    num_blocks = -(-writer.number(tile.shape[0]) // block)
    lanes = lanes_of(num_blocks)
    starts = f"tl.arange(0, {lanes})[:, None] * {block}"
    of_block = f"tl.minimum(tl.maximum({held} - {starts}, 1), {block})"
    writer.let(f"{name}_lanes", writer.padded(tile, identity, (0,)))
    if block == lanes_of(block):
        writer.let(f"{name}_cut", f"tl.reshape({name}_lanes, ({lanes}, {block}, {cols}))")
        # The mean's division comes after the middle axis is gone.
        op = "sum" if node.op == "mean" else node.op
        found = _reduced(op, f"{name}_cut", 1, "1")
        writer.let(name, f"tl.reshape({found}, ({lanes}, {cols}))")
    else:
        writer.let(name, f"tl.full(({lanes}, {cols}), 0.0, tl.float32)")
        writer.let(f"{name}_block", f"tl.arange(0, {rows})[:, None] // {block}")
        op = "sum" if node.op == "mean" else node.op
        for at in range(num_blocks):
            inside = f"tl.where({name}_block == {at}, {name}_lanes, {literal(identity)})"
            writer.let(f"{name}_inside", inside)
            found = _reduced(op, f"{name}_inside", 0, "1")
            row = f"tl.arange(0, {lanes})[:, None] == {at}"
            writer.let(name, f"tl.where({row}, {found}, {name})")
    if node.op == "mean":
        writer.let(name, f"tl.div_rn({name}, ({of_block}) * 1.0)")
    if node.op in REPEATED_BLOCKS:
        last = f"({held} + {block - 1}) // {block} - 1"
        writer.let(name, f"repeat_last({name}, {last}, {lanes})")


def _transpose(writer: Writer, name: str, node: Node, operands: list[Tile]) -> None:
    writer.let(name, f"tl.trans({operands[0].name})")


def _reshape(writer: Writer, name: str, node: Node, operands: list[Tile]) -> None:
    (tile,) = operands
    rows, cols = writer.lanes(node.shape)
    before, after = writer.sizes.numbers(tile.shape), writer.sizes.numbers(node.shape)
    if before == after:
        writer.let(name, tile.name)
    elif before == writer.lanes(tile.shape) and after == (rows, cols):
        writer.let(name, f"tl.reshape({tile.name}, ({rows}, {cols}))")
    else:  # lanes between the rows are in the way: element i of one order is i of the other
        flat = writer.lanes(tile.shape)
        writer.let(f"{name}_flat", f"tl.reshape({tile.name}, ({flat[0] * flat[1]},))")
        lanes = f"tl.arange(0, {rows})[:, None] * {after[1]} + tl.arange(0, {cols})[None, :]"
        last = before[0] * before[1] - 1
        writer.let(f"{name}_at", f"tl.reshape(tl.minimum({lanes}, {last}), ({rows * cols},))")
        source = f"{name}_at // {before[1]} * {flat[1]} + {name}_at % {before[1]}"
        writer.let(name, f"tl.reshape(tl.gather({name}_flat, {source}, 0), ({rows}, {cols}))")


EMIT: dict[str, Emit] = {
    "gemm": _gemm,
    "gemv": _gemm,
    "add": _binary("{alpha} * {x} + {beta} * {y}"),
    "multiply": _binary("{x} * {y}"),
    "maximum": _binary("larger({x}, {y})"),
    "minimum": _binary("smaller({x}, {y})"),
    "relu": _unary("tl.where(({x} >= {alpha}) | ({x} != {x}), {x}, {beta})"),
    "sigmoid": _unary("1.0 / (1.0 + tl.exp({inner}))"),
    "silu": _unary("{x} / (1.0 + tl.exp({inner}))"),
    "abs": _unary("tl.abs({inner})"),
    "exp": _unary("tl.exp({inner})"),
    "log": _unary("tl.log({inner})"),
    **dict.fromkeys(("mean", "max", "min", "sum", "l2norm"), _reduction),
    "transpose": _transpose,
    "reshape": _reshape,
}
"""Every op that the cache side may have, but those that touch memory."""
