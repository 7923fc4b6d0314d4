"""Triton expressions of the ops: what `OPS` says, on tiles `[pages or 1, rows, cols]` of float32.

A tile's axes are padded to powers of two. Padded lanes hold anything; where an op reduces over
them, they get the reduction's identity first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from stream_attention.core.errors import UnsupportedProblem
from stream_attention.flows.formats import BATCHED, RAGGED, Format
from stream_attention.flows.graph import FlowGraph, Node
from stream_attention.flows.op_table import OPS, REPEATED_BLOCKS
from stream_attention.flows.shapes import Shape, Size


def padded_size(size: int) -> int:
    """The power of two at or above."""
    return 1 << max(size - 1, 0).bit_length()


def number(value: float) -> str:
    """A literal; infinities spelled as Triton takes them."""
    return f'float("{value}")' if value in (float("inf"), float("-inf")) else repr(float(value))


@dataclass(frozen=True, slots=True)
class Tile:
    """A value in the source: its variable, and what the graph says of it.

    zeros: padded lanes hold 0. raw: the variable before it was made float32, and its dtype.
    """

    name: str
    shape: Shape
    format: Format
    zeros: bool = False
    raw: tuple[str, str] | None = None


@dataclass(slots=True)
class Writer:
    """Lines of a kernel's body, and the sizes that its tiles have."""

    graph: FlowGraph
    group_size: int
    group_lanes: int
    chunk: int
    indent: str = "    "
    lines: list[str] = field(default_factory=list)

    def write(self, line: str) -> None:
        self.lines.append(self.indent + line if line else "")

    def size(self, size: Size) -> int:
        """Elements of an axis."""
        found = self.graph.sizes.value(size, self.group_size)
        assert isinstance(found, int)
        return found

    def lanes(self, size: Size) -> int:
        """Lanes of an axis."""
        return self.group_lanes if size == "G" else padded_size(self.size(size))

    def tile_shape(self, shape: Shape, format: Format) -> tuple[int, int, int]:
        leading = 1 if format is BATCHED else self.chunk
        return leading, self.lanes(shape[0]), self.lanes(shape[1])

    def axis_mask(self, size: Size, axis: int, format: Format) -> str | None:
        """A boolean that broadcasts to a tile: the lanes of an axis that hold something."""
        where = "[None, :, None]" if axis == 1 else "[None, None, :]"
        lanes = f"tl.arange(0, {self.lanes(size)})"
        if size == "P":
            held = "held[:, None, None]" if format is RAGGED else "most_held"
            return f"({lanes}{where} < {held})"
        if self.lanes(size) == self.size(size):
            return None
        return f"({lanes} < {self.size(size)}){where}"

    def mask(self, shape: Shape, format: Format) -> str | None:
        masks = [self.axis_mask(size, axis + 1, format) for axis, size in enumerate(shape)]
        kept = [mask for mask in masks if mask is not None]
        return " & ".join(kept) if kept else None

    def padded(self, tile: Tile, identity: float) -> str:
        """The tile with `identity` in every padded lane."""
        mask = self.mask(tile.shape, tile.format)
        if mask is None or (tile.zeros and identity == 0.0):
            return tile.name
        return f"tl.where({mask}, {tile.name}, {number(identity)})"


def _gemm(writer: Writer, node: Node, name: str, tiles: list[Tile]) -> bool:
    """`y xᵀ`; on tensor cores where both are stored in 16 bits, which multiply exactly."""
    x, y = tiles
    chunk, rows_y, depth = writer.tile_shape(y.shape, y.format)
    _, rows_x, _ = writer.tile_shape(x.shape, x.format)
    if is_dot(writer, x, y):
        assert x.raw and y.raw
        writer.write(f"{name}_x = tl.reshape({x.raw[0]}, [{rows_x}, {depth}])")
        writer.write(f"{name}_y = tl.reshape({y.raw[0]}, [{chunk * rows_y}, {depth}])")
        writer.write("if DOT_FP32:  # where bf16 products are not available, as in an interpreter")
        writer.write(f"    {name}_x, {name}_y = {name}_x.to(tl.float32), {name}_y.to(tl.float32)")
        products = f"{name}_y, tl.trans({name}_x)"
        writer.write(f'{name} = tl.dot({products}, input_precision="ieee")')
        writer.write(f"{name} = tl.reshape({name}, [{chunk}, {rows_y}, {rows_x}])")
        return False
    left, right = writer.padded(y, 0.0), writer.padded(x, 0.0)
    if writer.size(y.shape[0]) == 1:
        writer.write(f"{name} = tl.sum(({left}) * ({right}), 2)[:, None, :]")
    elif writer.size(x.shape[0]) == 1:
        writer.write(f"{name} = tl.sum(({left}) * ({right}), 2)[:, :, None]")
    else:
        product = f"({left})[:, :, None, :] * ({right})[:, None, :, :]"
        writer.write(f"{name} = tl.sum({product}, 3)")
    return False


def is_dot(writer: Writer, x: Tile, y: Tile) -> bool:
    """Whether a product of a batched x and pages y goes to tensor cores."""
    if x.raw is None or y.raw is None or x.raw[1] != y.raw[1] or x.raw[1] not in ("bf16", "fp16"):
        return False
    chunk, rows_y, depth = writer.tile_shape(y.shape, y.format)
    _, rows_x, _ = writer.tile_shape(x.shape, x.format)
    formats = x.format is BATCHED and y.format is RAGGED
    return formats and chunk * rows_y >= 16 and rows_x >= 16 and depth >= 16


def _binary(template: str) -> Callable[[Writer, Node, str, list[Tile]], bool]:
    def emit(writer: Writer, node: Node, name: str, tiles: list[Tile]) -> bool:
        attributes = {key: number(value) for key, value in node.attributes}
        writer.write(f"{name} = " + template.format(x=tiles[0].name, y=tiles[1].name, **attributes))
        return node.op in ("maximum", "minimum") and all(tile.zeros for tile in tiles)

    return emit


def _affine(template: str) -> Callable[[Writer, Node, str, list[Tile]], bool]:
    def emit(writer: Writer, node: Node, name: str, tiles: list[Tile]) -> bool:
        alpha, beta = node.attribute("alpha"), node.attribute("beta")
        inner = tiles[0].name if beta == 1.0 else f"{number(beta)} * {tiles[0].name}"
        inner = inner if alpha == 0.0 else f"{inner} + {number(alpha)}"
        writer.write(f"{name} = " + template.format(x=tiles[0].name, inner=f"({inner})"))
        return False

    return emit


def _relu(writer: Writer, node: Node, name: str, tiles: list[Tile]) -> bool:
    x, alpha, beta = tiles[0].name, node.attribute("alpha"), node.attribute("beta")
    kept = f"({x} >= {number(alpha)}) | ({x} != {x})"
    writer.write(f"{name} = tl.where({kept}, {x}, {number(beta)})")
    return tiles[0].zeros and alpha <= 0.0


def _reduced(op: str, tile: str, axis: int) -> str:
    """A reduction of a tile whose padded lanes hold the identity; a mean is only its sum."""
    if op in ("max", "min"):
        return f"tl.reduce({tile}, {axis}, {'larger' if op == 'max' else 'smaller'})"
    if op == "l2norm":
        return f"tl.sqrt(tl.sum(({tile}) * ({tile}), {axis}))"
    return f"tl.sum({tile}, {axis})"


def _reduction(writer: Writer, node: Node, name: str, tiles: list[Tile]) -> bool:
    (tile,), dim, block = tiles, node.attribute("dim"), node.attribute("block")
    identity = OPS[node.op].identity
    assert identity is not None
    along = tile.shape[dim - 1]
    if block is not None:
        _blocks(writer, node, name, tile, identity)
        return False
    if writer.lanes(along) == 1:
        reduced = writer.padded(tile, identity)
        writer.write(
            f"{name} = tl.abs({reduced})" if node.op == "l2norm" else f"{name} = {reduced}"
        )
        return False
    back = "[:, None, :]" if dim == 1 else "[:, :, None]"
    writer.write(f"{name} = {_reduced(node.op, writer.padded(tile, identity), dim)}{back}")
    if node.op == "mean":
        writer.write(f"{name} = {name} / {_count(writer, along, tile.format)}")
    return False


def _count(writer: Writer, along: Size, format: Format) -> str:
    if along != "P":
        return number(writer.size(along))
    held = "held[:, None, None]" if format is RAGGED else "most_held"
    return f"tl.maximum({held}, 1).to(tl.float32)"


def _blocks(writer: Writer, node: Node, name: str, tile: Tile, identity: float) -> None:
    """A reduction of each `block` rows, one after another; see `REPEATED_BLOCKS`."""
    rows, block = writer.size(tile.shape[0]), node.attribute("block")
    num_blocks = -(-rows // block)
    lanes = f"tl.arange(0, {writer.lanes(tile.shape[0])})[None, :, None]"
    places = f"tl.arange(0, {padded_size(num_blocks)})[None, :, None]"
    held = "held[:, None, None]" if tile.format is RAGGED else "most_held"
    full = writer.padded(tile, identity)
    for index in range(num_blocks):
        part = f"{name}_{index}"
        inside = f"({lanes} // {block}) == {index}"
        masked = f"tl.where({inside}, {full}, {number(identity)})"
        writer.write(f"{part} = {_reduced(node.op, masked, 1)}[:, None, :]")
        if node.op == "mean":
            count = number(min(block, rows - index * block))
            if tile.shape[0] == "P":
                left = f"tl.minimum({held} - {index * block}, {block})"
                count = f"tl.maximum({left}, 1).to(tl.float32)"
            writer.write(f"{part} = {part} / {count}")
        if index and tile.shape[0] == "P" and node.op in REPEATED_BLOCKS:
            writer.write(f"{part} = tl.where({held} > {index * block}, {part}, {name}_{index - 1})")
        if index == 0:
            writer.write(
                f"{name} = {part} + tl.zeros([1, {padded_size(num_blocks)}, 1], tl.float32)"
            )
        else:
            writer.write(f"{name} = tl.where({places} == {index}, {part}, {name})")


def _transpose(writer: Writer, node: Node, name: str, tiles: list[Tile]) -> bool:
    writer.write(f"{name} = tl.permute({tiles[0].name}, [0, 2, 1])")
    return tiles[0].zeros


def _reshape(writer: Writer, node: Node, name: str, tiles: list[Tile]) -> bool:
    tile = tiles[0]
    wanted = writer.tile_shape(node.shape, tile.format)
    if writer.mask(tile.shape, tile.format) or writer.mask(node.shape, tile.format):
        shapes = f"{tile.shape} to {node.shape}"
        raise UnsupportedProblem(
            f"flow {writer.graph.name}, {node.source}: Reshape from {shapes}: the fused executor "
            "reshapes sizes that are powers of two; use Transpose or a reduction, or the "
            "interpreter"
        )
    writer.write(f"{name} = tl.reshape({tile.name}, [{', '.join(map(str, wanted))}])")
    return False


EMIT: dict[str, Callable[[Writer, Node, str, list[Tile]], bool]] = {
    "gemm": _gemm,
    "gemv": _gemm,
    "add": _binary("{alpha} * {x} + {beta} * {y}"),
    "multiply": _binary("{x} * {y}"),
    "maximum": _binary("larger({x}, {y})"),
    "minimum": _binary("smaller({x}, {y})"),
    "relu": _relu,
    "sigmoid": _affine("1.0 / (1.0 + tl.exp({inner}))"),
    "silu": _affine("{x} / (1.0 + tl.exp({inner}))"),
    "abs": _affine("tl.abs({inner})"),
    "exp": _affine("tl.exp({inner})"),
    "log": _affine("tl.log({inner})"),
    "mean": _reduction,
    "max": _reduction,
    "min": _reduction,
    "sum": _reduction,
    "l2norm": _reduction,
    "transpose": _transpose,
    "reshape": _reshape,
}
"""Writes the lines of an op; gives whether padded lanes of the result hold 0. What touches memory,
and what runs across pages, is the kernel's."""


def emit(writer: Writer, node: Node, name: str, tiles: list[Tile]) -> Tile:
    """The lines of a node, and its tile."""
    zeros = EMIT[node.op](writer, node, name, tiles)
    return Tile(name, node.shape, node.format, zeros)
