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

import math
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


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


def pages_of(sequence_lengths: Any, page_size: int) -> Any:
    """`ceil(length / page_size)`, int64; lengths are integers >= 0, a tensor of any shape."""
    return (sequence_lengths.long() + page_size - 1) // page_size


@dataclass(frozen=True, slots=True)
class Budget:
    """How many candidates a row reads beside the reserved pages: `max(topk, floor(ratio · n))`.

    topk: pages, >= 0. ratio: of the row's pages, 0 to 1, taken as the decimal that it prints as, so
    that every device finds the same integer. per_row: [batch] or [batch, num_kv_heads] integers on
    the device, in place of both.

    mass: in place of all three, the fewest candidates whose share of `softmax(mass_scale · score)`
    over the window reaches it, `0 < mass <= 1`, then at least `min_pages` and at most `max_pages`
    (`None`: no bound). It depends on scores: see `selection.budgets_of`.
    """

    topk: int = 32
    ratio: float = 0.0
    per_row: Any = None
    mass: float | None = None
    mass_scale: float = 1.0
    min_pages: int = 0
    max_pages: int | None = None

    def __post_init__(self) -> None:
        faults = Faults()
        faults.require(
            is_int(self.topk) and self.topk >= 0, "topk", self.topk, "must be an int >= 0", 32
        )
        faults.require(
            _is_number(self.ratio) and 0 <= self.ratio <= 1,
            "ratio",
            self.ratio,
            "must be in [0, 1]",
            0.0,
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
        self._check_mass(faults)
        faults.raise_if_any("Budget")

    def _check_mass(self, faults: Faults) -> None:
        mass, scale, least, most = self.mass, self.mass_scale, self.min_pages, self.max_pages
        faults.require(
            mass is None or (_is_number(mass) and 0 < mass <= 1),
            "mass",
            mass,
            "must be in (0, 1]",
            1.0,
        )
        faults.require(
            mass is None or self.per_row is None,
            "mass",
            mass,
            "must be None where per_row is given",
        )
        faults.require(
            _is_number(scale) and 0 < scale < math.inf, "mass_scale", scale, "must be > 0", 1.0
        )
        fits = faults.require(
            is_int(least) and least >= 0, "min_pages", least, "must be an int >= 0", 0
        )
        rule = f"must be an int >= min_pages={least}"
        faults.require(
            most is None or (is_int(most) and (not fits or most >= least)),
            "max_pages",
            most,
            rule,
            least if fits else None,
        )

    @property
    def fraction(self) -> Fraction:
        """`ratio` as two integers, for a kernel to multiply and divide by."""
        return Fraction(str(self.ratio)).limit_denominator(_LARGEST_DENOMINATOR)

    def pages(self, num_pages: Any) -> Any:
        """Budgets of rows [batch, num_kv_heads] with `num_pages`; int64, not below 0.

        A budget by mass raises ValueError: it depends on scores.
        """
        if self.mass is not None:
            raise ValueError(
                f"Budget: mass={self.mass}: depends on scores; use selection.budgets_of"
            )
        if self.per_row is not None:
            per_row = self.per_row if self.per_row.ndim == 2 else self.per_row[:, None]
            return per_row.to(num_pages.device).long().clamp(min=0).expand_as(num_pages)
        share = num_pages * self.fraction.numerator // self.fraction.denominator
        return share.clamp(min=self.topk)
