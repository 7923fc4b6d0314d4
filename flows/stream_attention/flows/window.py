"""Which pages of a row are candidates, and how many of them are read.

A row is one KV head of one request. Of its n pages, the first `bos` and the last `eos` are always
read, and the candidates are `[bos, n − eos)`: softmax, normalisation, reductions across pages,
states and top-k see these only.

    for row, n in enumerate(num_pages):
        candidates = range(min(bos, n), max(min(bos, n), n - eos))
        budget = max(topk, floor(ratio * n))           # candidates that top-k takes
        read = everything if n <= budget + bos + eos else first + chosen + last
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from stream_attention.core.errors import Faults
from stream_attention.core.ir import evaluable_repr, is_int

_LARGEST_DENOMINATOR = 1 << 20  # n · numerator stays below 2**52 for every n that int32 holds


@dataclass(frozen=True, slots=True)
class Window:
    """Pages that are always read. bos: the first ones. eos: the last ones. Both >= 0."""

    bos: int = 1
    eos: int = 1

    __repr__ = evaluable_repr

    def __post_init__(self) -> None:
        faults = Faults()
        for name in ("bos", "eos"):
            value = getattr(self, name)
            faults.require(is_int(value) and value >= 0, name, value, "must be an int >= 0", 1)
        faults.raise_if_any("Window")

    def bounds(self, num_pages: Any) -> tuple[Any, Any]:
        """(first, last) of the candidates of rows with `num_pages`, an integer tensor of any shape.

        An empty window has first = last.
        """
        first = num_pages.clamp(max=self.bos)
        return first, torch.maximum(first, num_pages - self.eos)


def pages_of(sequence_lengths: Any, page_size: int) -> Any:
    """`ceil(length / page_size)`, int64; lengths are integers >= 0, a tensor of any shape."""
    return (sequence_lengths.long() + page_size - 1) // page_size


@dataclass(frozen=True, slots=True)
class Budget:
    """How many candidates a row reads beside the reserved pages: `max(topk, floor(ratio · n))`.

    topk: pages, >= 0. ratio: of the row's pages, 0 to 1, taken as the decimal that it prints as, so
    that every device finds the same integer. per_row: [batch] or [batch, num_kv_heads] integers on
    the device, in place of both.
    """

    topk: int = 32
    ratio: float = 0.0
    per_row: Any = None

    def __post_init__(self) -> None:
        faults = Faults()
        faults.require(
            is_int(self.topk) and self.topk >= 0, "topk", self.topk, "must be an int >= 0", 32
        )
        number = isinstance(self.ratio, float | int) and not isinstance(self.ratio, bool)
        faults.require(
            number and 0 <= self.ratio <= 1, "ratio", self.ratio, "must be in [0, 1]", 0.0
        )
        if self.per_row is not None:
            faults.require(
                isinstance(self.per_row, torch.Tensor)
                and self.per_row.dtype in (torch.int32, torch.int64)
                and self.per_row.ndim in (1, 2),
                "per_row",
                self.per_row,
                "must be an int32 or int64 tensor [batch] or [batch, num_kv_heads]",
            )
        faults.raise_if_any("Budget")

    @property
    def fraction(self) -> Fraction:
        """`ratio` as two integers, for a kernel to multiply and divide by."""
        return Fraction(str(self.ratio)).limit_denominator(_LARGEST_DENOMINATOR)

    def pages(self, num_pages: Any) -> Any:
        """Budgets of rows [batch, num_kv_heads] with `num_pages`; int64, not below 0."""
        if self.per_row is not None:
            per_row = self.per_row if self.per_row.ndim == 2 else self.per_row[:, None]
            return per_row.to(num_pages.device).long().clamp(min=0).expand_as(num_pages)
        share = num_pages * self.fraction.numerator // self.fraction.denominator
        return share.clamp(min=self.topk)
