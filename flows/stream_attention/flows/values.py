"""What hooks handle while they are traced: symbols for values, fields, outputs and slots.

A symbol has a shape and a format and no numbers. Whatever would need numbers (`if`, `float()`,
arithmetic, torch functions) is refused with the flow, the line and the op to use.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from stream_attention.flows.formats import PAGED, Format
from stream_attention.flows.shapes import Shape, shape_text

if TYPE_CHECKING:
    from stream_attention.flows.tracer import Trace

_HERE = os.path.dirname(os.path.abspath(__file__))


class TraceError(ValueError):
    """A flow that is not legal: `flow NAME, path:line: what, rule; use nearest`."""


def caller() -> str:
    """`path:line` of the innermost frame that is not this package's own machinery."""
    frame = sys._getframe(1)
    while frame.f_back and os.path.dirname(os.path.abspath(frame.f_code.co_filename)) == _HERE:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def nearest(name: Any, known: Any) -> str:
    """The known name that is closest to `name`, else all of them."""
    known = [str(each) for each in known]
    found = difflib.get_close_matches(str(name), known, 1, 0.4)
    return repr(found[0]) if found else ", ".join(map(repr, known)) or "none"


def _refusing(what: str, instead: str) -> Any:
    def method(self: Symbol, *others: Any) -> NoReturn:
        operands = " and ".join(describe(each) for each in (self, *others))
        self._refuse(f"{what} of {operands}: has no numbers while it is traced; use {instead}")

    return method


class Symbol:
    """Something that belongs to one trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def describe(self) -> str:
        raise NotImplementedError

    def _refuse(self, text: str) -> NoReturn:
        raise self.trace.error(text)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that Python or a tool asks for
            raise AttributeError(name)
        return self._refuse(f"{describe(self)} has no .{name}; use an op, called as op(x, ctx=ctx)")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = next(each for each in _flat((args, kwargs or {})) if isinstance(each, Symbol))
        name = getattr(function, "__name__", str(function))
        found._refuse(f"torch's {name} of {describe(found)}: is no op of a flow; use an op")

    __bool__ = _refusing("truth", "Maximum, Minimum or Relu: a flow has no branches on values")
    __len__ = _refusing("len()", "a size of create_cache")
    __iter__ = _refusing("iteration", "an op on the whole value")
    __getitem__ = _refusing("[]", "Reshape, or Max, Mean or Sum")
    __float__ = __int__ = __index__ = _refusing("a number", "an op on the value")
    __eq__ = __ne__ = _refusing("comparison", "Maximum, Minimum or Relu")
    __lt__ = __le__ = __gt__ = __ge__ = _refusing("comparison", "Maximum, Minimum or Relu")
    __add__ = __radd__ = _refusing("+", "Add()")
    __sub__ = __rsub__ = _refusing("-", "Add(alpha=1, beta=-1)")
    __mul__ = __rmul__ = _refusing("*", "Multiply(), or Add's alpha and beta for a constant")
    __truediv__ = __rtruediv__ = _refusing("/", "Multiply(), or Normalize(dim=0)")
    __matmul__ = __rmatmul__ = _refusing("@", "GeMM()")
    __neg__ = _refusing("-", "Add(alpha=-1, beta=0)")
    __abs__ = _refusing("abs()", "Abs()")
    __pow__ = _refusing("**", "Multiply() of the value with itself")
    __hash__ = object.__hash__


def _flat(nested: Any) -> Iterator[Any]:
    if isinstance(nested, dict):
        nested = tuple(nested.values())
    if isinstance(nested, tuple | list):
        for each in nested:
            yield from _flat(each)
    else:
        yield nested


class Value(Symbol):
    """The result of a node: `[., rows, cols]` in one of the three formats."""

    def __init__(self, trace: Trace, node_id: int, shape: Shape, format: Format, source: str):
        super().__init__(trace)
        self.node_id, self.shape, self.format, self.source = node_id, shape, format, source

    def describe(self) -> str:
        where = f" of line {self.source.rpartition(':')[2]}" if self.source else ""
        return f"%{self.node_id} {self.format} {shape_text(self.shape)}{where}"


class FieldHandle(Symbol):
    """`cache[name]`: a field of the pool, read by ops that take it and written by Save or `out`."""

    def __init__(self, trace: Trace, name: str, shape: Shape) -> None:
        super().__init__(trace)
        self.name, self.shape, self.format = name, shape, PAGED

    def describe(self) -> str:
        return f"cache[{self.name!r}] {PAGED} {shape_text(self.shape)}"


class Output(Symbol):
    """`o`: where topK puts the pages."""

    def describe(self) -> str:
        return "o, where topK puts the selection"


class Location(Symbol):
    """`loc`: the slots written in this step."""

    def describe(self) -> str:
        return "loc, the slots written"


class Context(Symbol):
    """`ctx`: what a hook may know of its call: `page_size` in tokens and `head_dim`."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.page_size, self.head_dim = trace.sizes.page_size, trace.sizes.head_dim

    def describe(self) -> str:
        return "ctx"


class Cache:
    """`cache`: the fields by name, with k and v."""

    def __init__(self, trace: Trace, handles: dict[str, FieldHandle]) -> None:
        self._trace, self._handles = trace, handles

    def __getitem__(self, name: str) -> FieldHandle:
        if name not in self._handles:
            raise self._trace.error(
                f"cache[{name!r}]: create_cache declares no such field; "
                f"use {nearest(name, self._handles)}"
            )
        return self._handles[name]

    def __setitem__(self, name: str, value: Any) -> None:
        raise self._trace.error(
            f"cache[{name!r}] = {describe(value)}: fields are written by ops; "
            "use op(x, cache[...], loc=loc, ctx=ctx) or Save"
        )

    def __contains__(self, name: object) -> bool:
        return name in self._handles

    def __iter__(self) -> Iterator[str]:
        return iter(self._handles)

    def __len__(self) -> int:
        return len(self._handles)

    def keys(self) -> Any:
        return self._handles.keys()


def describe(what: Any) -> str:
    """An operand in an error: a symbol's id, format and shape, else its type and value."""
    if isinstance(what, Symbol):
        return what.describe()
    text = repr(what)
    return f"{type(what).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
