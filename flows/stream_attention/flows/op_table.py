"""Every operation of the flow language: `OPS[name]`, the one place that says what an op is.

Tracer, interpreter and generators of kernels read arity, shapes, formats, attributes and the
identities of reductions from here; op classes only name their row. Formulas in `formula` use
x, y: operands `[., rows, cols]`; reductions keep rank, the reduced axis becomes 1. All arithmetic
is float32 or wider.

Format rules (`PAGED` operands of an indexer are loaded before, on the cache side all is `PAGED`):
`join`: BATCHED with RAGGED broadcasts the row to its candidate pages;
`window`: needs RAGGED, works across the candidate pages of a row, stays RAGGED;
`row`: as `window`, and leaves one value a row, BATCHED;
`read`: a field, gathered; `write`: a value of the format of pages into a field; `end`: topK.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stream_attention.flows.shapes import Shape, ShapeError, Sizes, shape_text

INDEXER, CACHE = "indexer", "cache"
BOTH = frozenset((INDEXER, CACHE))
ShapeRule = Callable[[Sizes, tuple[Shape, ...], Mapping[str, Any]], Shape]


@dataclass(frozen=True, slots=True)
class Attribute:
    """A parameter of an op: its default, and what values it takes, as a rule and its text."""

    default: Any
    holds: Callable[[Any], bool]
    rule: str
    nearest: Any = None


@dataclass(frozen=True, slots=True)
class OpRule:
    """One operation. `identity` is what a padded lane contributes; `None` where nothing reduces."""

    arity: int
    formula: str
    shape: ShapeRule
    format: str = "join"
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    identity: float | None = None
    sides: frozenset[str] = BOTH

    def format_rule(self, attributes: Mapping[str, Any]) -> str:
        """`format`, where `dim=0` makes a reduction one over the window."""
        return "row" if self.format == "join" and attributes.get("dim") == 0 else self.format

    def crosses_pages(self, attributes: Mapping[str, Any]) -> bool:
        """Whether a value of a page needs all candidate pages of its row."""
        return self.format_rule(attributes) in ("window", "row")


def is_number(value: Any) -> bool:
    """A finite int or float; a flag is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _number(default: float) -> Attribute:
    return Attribute(default, is_number, "must be a finite number", default)


def _same(sizes: Sizes, shapes: tuple[Shape, ...], attributes: Mapping[str, Any]) -> Shape:
    return shapes[0]


def _broadcast(sizes: Sizes, shapes: tuple[Shape, ...], attributes: Mapping[str, Any]) -> Shape:
    found = []
    for axis, (a, b) in enumerate(zip(*shapes, strict=True)):
        both = sizes.broadcast(a, b)
        if both is None:
            where = ("rows", "cols")[axis]
            raise ShapeError(f"{where} {a} and {b} must be equal, or one of them 1")
        found.append(both)
    return found[0], found[1]


def _product(sizes: Sizes, shapes: tuple[Shape, ...], attributes: Mapping[str, Any]) -> Shape:
    x, y = shapes
    if sizes.unified(x[1], y[1]) is None:
        raise ShapeError(f"cols {x[1]} and {y[1]} must be equal, for y xᵀ sums over them")
    return y[0], x[0]


def _vector(sizes: Sizes, shapes: tuple[Shape, ...], attributes: Mapping[str, Any]) -> Shape:
    if not sizes.is_one(shapes[0][0]):
        raise ShapeError(f"x has {shapes[0][0]} rows, must have 1; use GeMM, or Mean(dim=1) of x")
    return _product(sizes, shapes, attributes)


def _reduce(sizes: Sizes, shapes: tuple[Shape, ...], attributes: Mapping[str, Any]) -> Shape:
    (rows, cols), dim, block = shapes[0], attributes["dim"], attributes.get("block")
    if block is not None and dim != 1:
        raise ShapeError(f"block={block} cuts rows, so dim={dim} must be 1; use dim=1")
    if block is not None and rows == "G":
        raise ShapeError(f"block={block} cuts rows of a known number, not G; use block=None")
    if dim == 1:
        number = sizes.value(rows)
        return (1 if block is None else -(-int(number) // block)), cols
    return (rows, 1) if dim == 2 else (rows, cols)


def _transposed(sizes: Sizes, shapes: tuple[Shape, ...], attributes: Mapping[str, Any]) -> Shape:
    return shapes[0][1], shapes[0][0]


def _reshaped(sizes: Sizes, shapes: tuple[Shape, ...], attributes: Mapping[str, Any]) -> Shape:
    asked = sizes.shape((attributes["rows"], attributes["cols"]))
    rows, cols = (sizes.value(size) for size in shapes[0])
    if sizes.same(asked[0], rows) and sizes.same(asked[1], cols):
        return shapes[0]
    if "P" in shapes[0]:
        raise ShapeError(
            "tokens may not be mixed: an unfinished page has fewer; reduce them first, "
            "use dim=1 with block= for parts of a page"
        )
    if isinstance(rows, str) or isinstance(cols, str):
        raise ShapeError(f"{shape_text(shapes[0])} has G heads, a number only known later")
    wanted = sizes.numbers(asked)
    if rows * cols != wanted[0] * wanted[1]:
        raise ShapeError(f"{rows} x {cols} elements do not fill {wanted[0]} x {wanted[1]}")
    return asked


def _scalar(sizes: Sizes, shapes: tuple[Shape, ...], attributes: Mapping[str, Any]) -> Shape:
    if not all(sizes.is_one(size) for size in shapes[0]):
        raise ShapeError(
            f"a score is one number a page, [1, 1], not {shape_text(shapes[0])}; "
            "reduce rows and cols with Max, Mean or Sum"
        )
    return 1, 1


def _of_field(sizes: Sizes, shapes: tuple[Shape, ...], attributes: Mapping[str, Any]) -> Shape:
    raise AssertionError("the tracer knows the field's shape")


def _dims(*allowed: int, default: int) -> Attribute:
    text = ", ".join(map(str, allowed))
    return Attribute(
        default,
        lambda dim: isinstance(dim, int) and not isinstance(dim, bool) and dim in allowed,
        f"must be one of {text}",
        default,
    )


_BLOCK = Attribute(None, lambda n: n is None or _is_count(n), "must be None or an int >= 1", 16)
_FIELD = Attribute(None, lambda name: isinstance(name, str), "must be a field's name")


def _reduction(formula: str, identity: float) -> OpRule:
    attributes = {"dim": _dims(0, 1, 2, default=1), "block": _BLOCK}
    return OpRule(1, formula, _reduce, "join", attributes, identity)


def _elementwise(formula: str, **defaults: float) -> OpRule:
    attributes = {name: _number(default) for name, default in defaults.items()}
    return OpRule(1, formula, _same, "join", attributes)


def _binary(formula: str, **defaults: float) -> OpRule:
    attributes = {name: _number(default) for name, default in defaults.items()}
    return OpRule(2, formula, _broadcast, "join", attributes)


_ONLY_INDEXER, _ONLY_CACHE = frozenset((INDEXER,)), frozenset((CACHE,))

OPS: dict[str, OpRule] = {
    "gemm": OpRule(2, "y xᵀ: [., rows of y, rows of x]", _product, identity=0.0),
    "gemv": OpRule(2, "y xᵀ with one row in x: [., rows of y, 1]", _vector, identity=0.0),
    "add": _binary("alpha x + beta y", alpha=1.0, beta=1.0),
    "multiply": _binary("x y"),
    "maximum": _binary("max(x, y), NaN if one is"),
    "minimum": _binary("min(x, y), NaN if one is"),
    "relu": _elementwise("x if x >= alpha or NaN, else beta", alpha=0.0, beta=0.0),
    "sigmoid": _elementwise("1 / (1 + exp(beta x + alpha))", alpha=0.0, beta=-1.0),
    "silu": _elementwise("x / (1 + exp(beta x + alpha))", alpha=0.0, beta=-1.0),
    "abs": _elementwise("|beta x + alpha|", alpha=0.0, beta=1.0),
    "exp": _elementwise("exp(beta x + alpha)", alpha=0.0, beta=1.0),
    "log": _elementwise("log(beta x + alpha), natural", alpha=0.0, beta=1.0),
    "mean": _reduction("Σ x / true count; 0 over nothing", 0.0),
    "max": _reduction("max x; -inf over nothing", -math.inf),
    "min": _reduction("min x; +inf over nothing", math.inf),
    "sum": _reduction("Σ x", 0.0),
    "l2norm": _reduction("sqrt(Σ x²)", 0.0),
    "softmax": OpRule(
        1,
        "exp(scale x - m) / Σ exp(scale x - m) over the window, m its maximum; 0 where all is -inf",
        _same,
        "window",
        {"dim": _dims(0, default=0), "scale": _number(1.0)},
        -math.inf,
        _ONLY_INDEXER,
    ),
    "normalize": OpRule(
        1,
        "x / Σ x over the window; 0 where the sum is 0",
        _same,
        "window",
        {"dim": _dims(0, default=0)},
        0.0,
        _ONLY_INDEXER,
    ),
    "transpose": OpRule(1, "xᵀ", _transposed),
    "reshape": OpRule(
        1,
        "the same elements, row-major, as [., rows, cols]",
        _reshaped,
        attributes={
            name: Attribute(None, _is_count, "must be an int >= 1", 1) for name in ("rows", "cols")
        },
    ),
    "query": OpRule(0, "q: [., G, D]", lambda *_: ("G", "D"), sides=_ONLY_INDEXER),
    "load": OpRule(0, "the field's pages", _of_field, "read", {"field": _FIELD}),
    "fill": OpRule(
        0,
        "alpha everywhere in the pages written",
        _of_field,
        "read",
        {"field": _FIELD, "alpha": _number(0.0)},
        sides=_ONLY_CACHE,
    ),
    "store": OpRule(1, "field ← x", _of_field, "write", {"field": _FIELD}, sides=_ONLY_CACHE),
    "save": OpRule(1, "field ← x", _of_field, "write", {"field": _FIELD}, sides=_ONLY_INDEXER),
    "topk": OpRule(1, "the pages of the largest x, ascending", _scalar, "end", sides=_ONLY_INDEXER),
}

REPEATED_BLOCKS = ("mean", "max", "min")
"""A block of an unfinished page without tokens repeats the last one that has some, so that no
±inf and no page's tail can reach a score; sums and norms of nothing are 0."""
