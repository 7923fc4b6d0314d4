"""What each row of `OPS` computes, on torch tensors: `COMPUTE[op](run, node, operands)`.

Tensors are `[leading, rows, cols]` of the run's dtype. Padded lanes of an axis "P" hold anything;
each reduction replaces them by its identity first. Operands of mixed formats come expanded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stream_attention.flows.formats import BATCHED, Format
from stream_attention.flows.graph import Node
from stream_attention.flows.op_table import OPS, REPEATED_BLOCKS
from stream_attention.flows.shapes import Shape, Sizes


@dataclass(frozen=True, slots=True)
class Operand:
    """A value while it is computed: its tensor, and what the graph says of it."""

    tensor: Any
    shape: Shape
    format: Format


@dataclass(slots=True)
class Run:
    """What the operations of one execution share.

    counts: [leading] int64, valid tokens of each page. row_of_page: [S] int64 and window_sizes:
    [B] int64, for values RAGGED; `None` on the cache side.
    """

    sizes: Sizes
    group_size: int
    dtype: Any
    counts: Any
    row_of_page: Any = None
    window_sizes: Any = None

    def tokens(self, leading: Format) -> Any:
        """[leading, page_size] bool: which token lanes hold one."""
        lanes = torch.arange(self.sizes.page_size, device=self.counts.device)
        valid = lanes < self.counts[:, None]
        if leading is BATCHED:  # a lane of a row holds something where one of its pages has it
            valid = over_window(self, valid.to(self.dtype)[:, None], "sum")[:, 0] > 0
        return valid

    def lanes(self, operand: Operand) -> Any:
        """[leading, rows or 1, cols or 1] bool of valid lanes, or `None` where all are."""
        mask = None
        for axis, size in enumerate(operand.shape):
            if size == "P":
                valid = self.tokens(operand.format)
                valid = valid[:, :, None] if axis == 0 else valid[:, None, :]
                mask = valid if mask is None else mask & valid
        return mask

    def padded(self, operand: Operand, identity: float) -> Any:
        """The tensor with `identity` in every padded lane."""
        mask = self.lanes(operand)
        if mask is None:
            return operand.tensor
        return operand.tensor.masked_fill(~mask, identity)


def over_window(run: Run, tensor: Any, how: str) -> Any:
    """[B, rows, cols]: "sum", "max" or "min" over each row's candidates, in their order."""
    return torch.segment_reduce(
        tensor.contiguous(), how, lengths=run.window_sizes, axis=0, unsafe=True
    )


def _to_pages(run: Run, per_row: Any) -> Any:
    return per_row[run.row_of_page]


def _gemm(run: Run, node: Node, operands: list[Operand]) -> Any:
    x, y = (run.padded(each, OPS["gemm"].identity or 0.0) for each in operands)
    return y @ x.transpose(1, 2)


def _add(run: Run, node: Node, operands: list[Operand]) -> Any:
    x, y = operands
    return node.attribute("alpha") * x.tensor + node.attribute("beta") * y.tensor


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[Run, Node, list[Operand]], Any]:
    return lambda run, node, operands: function(operands[0].tensor, operands[1].tensor)


def _relu(run: Run, node: Node, operands: list[Operand]) -> Any:
    x, alpha, beta = operands[0].tensor, node.attribute("alpha"), node.attribute("beta")
    return torch.where((x >= alpha) | x.isnan(), x, beta)


def _affine(function: Callable[[Any, Any], Any]) -> Callable[[Run, Node, list[Operand]], Any]:
    def compute(run: Run, node: Node, operands: list[Operand]) -> Any:
        x = operands[0].tensor
        return function(x, node.attribute("beta") * x + node.attribute("alpha"))

    return compute


def _reduced(tensor: Any, op: str, dim: int, counts: Any) -> Any:
    """A reduction of lanes that hold the identity where they are padded; counts divide a mean."""
    if op == "max":
        return tensor.amax(dim, keepdim=True)
    if op == "min":
        return tensor.amin(dim, keepdim=True)
    if op == "l2norm":
        return (tensor * tensor).sum(dim, keepdim=True).sqrt()
    total = tensor.sum(dim, keepdim=True)
    return total / counts.clamp(min=1) if op == "mean" else total


def _reduction(run: Run, node: Node, operands: list[Operand]) -> Any:
    (operand,), dim = operands, node.attribute("dim")
    identity = OPS[node.op].identity
    assert identity is not None
    if dim == 0:
        return _window_reduction(run, node.op, operand, identity)
    tensor, mask = run.padded(operand, identity), run.lanes(operand)
    along = mask if operand.shape[dim - 1] == "P" else None
    if along is None:
        counts = torch.full((1, 1, 1), tensor.shape[dim], device=tensor.device)
    else:
        counts = along.sum(dim, keepdim=True)
    if node.attribute("block") is None:
        return _reduced(tensor, node.op, dim, counts)
    return _blocks(tensor, node.op, node.attribute("block"), counts, identity)


def _blocks(tensor: Any, op: str, block: int, counts: Any, identity: float) -> Any:
    """[leading, ceil(rows / block), cols]; counts: [leading or 1, 1, cols or 1], rows that hold."""
    leading, rows, cols = tensor.shape
    num_blocks = -(-rows // block)
    counts = counts[:, :, :1].expand(leading, 1, 1)
    short = num_blocks * block - rows
    tensor = torch.nn.functional.pad(tensor, (0, 0, 0, short), value=identity)
    tensor = tensor.reshape(leading, num_blocks, block, cols)
    starts = torch.arange(num_blocks, device=tensor.device)[None, :, None] * block
    held = (counts - starts).clamp(0, block)[..., None]  # [leading, num_blocks, 1, 1]
    found = _reduced(tensor, op, 2, held)[:, :, 0]
    if op not in REPEATED_BLOCKS:
        return found
    last = ((counts + block - 1) // block - 1).clamp(min=0)
    source = torch.minimum(torch.arange(num_blocks, device=tensor.device)[None, :, None], last)
    return found.gather(1, source.expand(leading, num_blocks, cols))


def _window_reduction(run: Run, op: str, operand: Operand, identity: float) -> Any:
    tensor = run.padded(operand, identity)
    if op in ("max", "min"):
        return over_window(run, tensor, op)
    if op == "l2norm":
        return over_window(run, tensor * tensor, "sum").sqrt()
    total = over_window(run, tensor, "sum")
    if op == "sum":
        return total
    mask = run.lanes(operand)
    if mask is None:
        return total / run.window_sizes[:, None, None].clamp(min=1)
    held = mask.to(run.dtype).expand_as(tensor)
    return total / over_window(run, held, "sum").clamp(min=1)


def _softmax(run: Run, node: Node, operands: list[Operand]) -> Any:
    (operand,) = operands
    scaled = Operand(node.attribute("scale") * operand.tensor, operand.shape, operand.format)
    tensor = run.padded(scaled, -torch.inf)
    largest = over_window(run, tensor, "max")
    largest = largest.masked_fill(largest.isneginf(), 0.0)  # all of them -inf: no mass at all
    weights = (tensor - _to_pages(run, largest)).exp()
    total = over_window(run, weights, "sum")
    return weights / _to_pages(run, total.masked_fill(total == 0, 1.0))


def _normalize(run: Run, node: Node, operands: list[Operand]) -> Any:
    tensor = run.padded(operands[0], 0.0)
    total = _to_pages(run, over_window(run, tensor, "sum"))
    return (tensor / total).masked_fill(total == 0, 0.0)


def _transpose(run: Run, node: Node, operands: list[Operand]) -> Any:
    return operands[0].tensor.transpose(1, 2)


def _reshape(run: Run, node: Node, operands: list[Operand]) -> Any:
    tensor = operands[0].tensor
    return tensor.reshape(tensor.shape[0], *run.sizes.numbers(node.shape, run.group_size))


def _topk(run: Run, node: Node, operands: list[Operand]) -> Any:
    return operands[0].tensor


COMPUTE: dict[str, Callable[[Run, Node, list[Operand]], Any]] = {
    "gemm": _gemm,
    "gemv": _gemm,
    "add": _add,
    "multiply": _binary(torch.mul),
    "maximum": _binary(torch.maximum),
    "minimum": _binary(torch.minimum),
    "relu": _relu,
    "sigmoid": _affine(lambda x, inner: torch.sigmoid(-inner)),
    "silu": _affine(lambda x, inner: x * torch.sigmoid(-inner)),
    "abs": _affine(lambda x, inner: inner.abs()),
    "exp": _affine(lambda x, inner: inner.exp()),
    "log": _affine(lambda x, inner: inner.log()),
    "mean": _reduction,
    "max": _reduction,
    "min": _reduction,
    "sum": _reduction,
    "l2norm": _reduction,
    "softmax": _softmax,
    "normalize": _normalize,
    "transpose": _transpose,
    "reshape": _reshape,
    "topk": _topk,
}
"""Every op but those that touch memory: query, load, fill, store and save are the interpreter's."""


def compute(run: Run, node: Node, operands: list[Operand]) -> Operand:
    """The value of a node; BATCHED operands of a RAGGED one are broadcast to their pages."""
    if any(each.format != operands[0].format for each in operands):
        operands = [
            Operand(_to_pages(run, each.tensor), each.shape, node.format)
            if each.format is BATCHED
            else each
            for each in operands
        ]
    return Operand(COMPUTE[node.op](run, node, operands), node.shape, node.format)
