"""Sizes of a value's rows and columns: ints, or the symbols of what a trace does not fix.

| symbol | is | at trace time |
|---|---|---|
| `"G"` | query heads a KV head | unknown: one graph serves every group size |
| `"D"` | head dimension | known |
| `"P"` | page size, of an axis whose entries are tokens | known; an unfinished page has fewer |

An axis `"P"` carries padded lanes wherever a page is unfinished, so reductions along it know to use
the true count. Pages of one token are never unfinished: there the axis is a plain 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from stream_attention.flows.fields import Extent

Size = int | str
Shape = tuple[Size, Size]


class ShapeError(ValueError):
    """Shapes that an operation does not take; the text is the rule and the nearest choice."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the symbols stand for in one trace. Page size and head dim in tokens and elements."""

    page_size: int
    head_dim: int

    def value(self, size: Size, group_size: int | None = None) -> int | str:
        """The number of a size; `"G"` stays itself unless `group_size` is given."""
        if size == "D":
            return self.head_dim
        if size == "P":
            return self.page_size
        if size == "G" and group_size is not None:
            return group_size
        return size

    def numbers(self, shape: Shape, group_size: int | None = None) -> tuple[int, int]:
        """A shape as two numbers. `group_size` is needed where the shape has a `"G"`."""
        rows, cols = (self.value(size, group_size) for size in shape)
        assert isinstance(rows, int) and isinstance(cols, int), "a shape with G needs a group size"
        return rows, cols

    def size(self, number: int) -> Size:
        """The symbol of a size that a hook gave, or the plain number."""
        if isinstance(number, Extent) and not (number.symbol == "P" and number == 1):
            return number.symbol
        return int(number)

    def shape(self, numbers: tuple[int, int]) -> Shape:
        return self.size(numbers[0]), self.size(numbers[1])

    def same(self, a: Size, b: Size) -> bool:
        return self.value(a) == self.value(b)

    def is_one(self, a: Size) -> bool:
        return self.value(a) == 1

    def unified(self, a: Size, b: Size) -> Size | None:
        """The size that two equal ones have together, or `None`. Tokens stay tokens."""
        if not self.same(a, b):
            return None
        return min((s for s in (a, b) if isinstance(s, str)), key="PDG".index, default=a)

    def broadcast(self, a: Size, b: Size) -> Size | None:
        """The size of an elementwise result, where a 1 repeats; `None` where sizes do not fit."""
        both = self.unified(a, b)
        if both is not None:
            return both
        if self.is_one(a):
            return b
        return a if self.is_one(b) else None


def shape_text(shape: Shape) -> str:
    """`("G", 1)` → `[G, 1]`."""
    return f"[{shape[0]}, {shape[1]}]"
