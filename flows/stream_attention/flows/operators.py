"""The ops that flows are written with: built in `__init__`, called in a hook.

| hook | call | gives |
|---|---|---|
| `forward_indexer` | `op(x, ctx=ctx)`, `op(x, y, ctx=ctx)` | a value |
| | `Load()(cache["r"], ctx=ctx)`, `Save()(x, cache["r"], ctx=ctx)` | a value; nothing |
| | `topK()(score, o, ctx=ctx)` | the end |
| `forward_cache` | `op(x, loc=loc, ctx=ctx)`, `op(x, y, loc=loc, ctx=ctx)` | a value |
| | the same with a field last | the value, written to the field |
| | `Fill(alpha)(cache["c"], loc=loc, ctx=ctx)` | the field, filled |

An op object holds its attributes only, readable and settable by name until the flow is traced, and
may be called any number of times. What an op computes stands in `op_table.OPS`; names with a `C`
are those of the cache side. Wrong attributes raise `ValueError`, wrong calls `TraceError`.
"""

from __future__ import annotations

import inspect
from typing import Any

from stream_attention.flows.op_table import CACHE, INDEXER, OPS
from stream_attention.flows.values import Context, Symbol, TraceError, Value, caller, describe

_OF_A_CALL = ("field",)  # attributes that the operands of a call give


class Operator:
    """An op of `forward_indexer`; `op` is its row of `OPS`."""

    op: str
    side = INDEXER

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        rules = OPS[self.op].attributes
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature(
            [
                inspect.Parameter(name, kind, default=rule.default)
                for name, rule in rules.items()
                if name not in _OF_A_CALL
            ]
        )
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ValueError(f"{self.title}: {error}; use {self.title}{signature}") from None
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if value is not None and not rules[name].holds(value):
                raise ValueError(f"{self.title}: {self._broken(name, value)}")
            setattr(self, name, value)

    @property
    def title(self) -> str:
        """The name that flows call the op by."""
        return type(self).__name__

    @property
    def counterpart(self) -> str:
        """What the other hook has in its place, for messages."""
        other = "C" + self.title if self.side == INDEXER else self.title.removeprefix("C")
        if other != self.title and other in globals():
            return other
        return {
            "save": "op(x, cache[...], loc=loc, ctx=ctx), which writes a summary",
            "load": "cache['k'] or cache['v'] as an operand",
            "fill": "Field(..., init=...) for where a state starts",
        }.get(self.op, f"it in {'forward_indexer' if self.side == INDEXER else 'forward_cache'}")

    def _broken(self, name: str, value: Any) -> str:
        rule = OPS[self.op].attributes[name]
        return f"{name}={value!r}: {rule.rule}; use {rule.nearest}"

    def attributes(self, trace: Any) -> dict[str, Any]:
        """The attributes as they are now. Raises `TraceError` for one that is not set or legal."""
        found = {}
        for name, rule in OPS[self.op].attributes.items():
            if name in _OF_A_CALL:
                continue
            found[name] = value = getattr(self, name)
            if not rule.holds(value):
                raise trace.error(f"{self.title}: {self._broken(name, value)}, by create_cache")
            if isinstance(rule.default, float):
                found[name] = float(value)
        return found

    def __call__(self, *operands: Any, loc: Any = None, ctx: Any = None) -> Value | None:
        """Note the op down in the trace of its context, or of its operands."""
        symbols = [each for each in (ctx, *operands) if isinstance(each, Symbol)]
        if not symbols or not (ctx is None or isinstance(ctx, Context)):
            given = ", ".join(describe(each) for each in (*operands, ctx))
            raise TraceError(
                f"{caller()}: {self.title}({given}): is called with the symbols of a hook, while "
                "the flow is traced; use flow.trace(page_size, head_dim), and the interpreter"
            )
        return symbols[0].trace.call(self, operands)

    def __repr__(self) -> str:
        names = [name for name in OPS[self.op].attributes if name not in _OF_A_CALL]
        return f"{self.title}({', '.join(f'{n}={getattr(self, n)!r}' for n in names)})"


class CacheOperator(Operator):
    """An op of `forward_cache`."""

    side = CACHE


def _op(title: str, op: str, base: type[Operator] = Operator) -> Any:
    rule = OPS[op]
    names = ", ".join(f"{name}={a.default!r}" for name, a in rule.attributes.items())
    doc = f"{rule.formula}.\n\nAttributes: {names or 'none'}."
    return type(title, (base,), {"op": op, "__doc__": doc, "__module__": __name__})


GeMM, GeMV = _op("GeMM", "gemm"), _op("GeMV", "gemv")
Add, Multiply = _op("Add", "add"), _op("Multiply", "multiply")
Maximum, Minimum = _op("Maximum", "maximum"), _op("Minimum", "minimum")
Relu, Sigmoid, Silu = _op("Relu", "relu"), _op("Sigmoid", "sigmoid"), _op("Silu", "silu")
Abs, Exp, Log = _op("Abs", "abs"), _op("Exp", "exp"), _op("Log", "log")
Mean, Max, Min = _op("Mean", "mean"), _op("Max", "max"), _op("Min", "min")
Sum, L2Norm = _op("Sum", "sum"), _op("L2Norm", "l2norm")
Softmax, Normalize = _op("Softmax", "softmax"), _op("Normalize", "normalize")
Transpose = _op("Transpose", "transpose")
Load, Save = _op("Load", "load"), _op("Save", "save")
topK = _op("topK", "topk")  # noqa: N816, the programming model's name

CGeMM, CAdd = _op("CGeMM", "gemm", CacheOperator), _op("CAdd", "add", CacheOperator)
CMultiply = _op("CMultiply", "multiply", CacheOperator)
CMaximum = _op("CMaximum", "maximum", CacheOperator)
CMinimum = _op("CMinimum", "minimum", CacheOperator)
CRelu, CSigmoid = _op("CRelu", "relu", CacheOperator), _op("CSigmoid", "sigmoid", CacheOperator)
CSilu, CAbs = _op("CSilu", "silu", CacheOperator), _op("CAbs", "abs", CacheOperator)
CExp, CLog = _op("CExp", "exp", CacheOperator), _op("CLog", "log", CacheOperator)
CMean, CMax = _op("CMean", "mean", CacheOperator), _op("CMax", "max", CacheOperator)
CMin, CSum = _op("CMin", "min", CacheOperator), _op("CSum", "sum", CacheOperator)
CL2Norm = _op("CL2Norm", "l2norm", CacheOperator)
CTranspose = _op("CTranspose", "transpose", CacheOperator)
Fill = CFill = _op("Fill", "fill", CacheOperator)


class _Reshaped(Operator):
    """`Reshape(rows, cols)`; `Reshape(-1, rows, cols)` says the same."""

    op = "reshape"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if len(args) == 3 and args[0] == -1:
            args = args[1:]
        super().__init__(*args, **kwargs)


class Reshape(_Reshaped):
    """The same elements, row-major, as `[., rows, cols]`."""


class CReshape(_Reshaped):
    """The same elements, row-major, as `[., rows, cols]`; on the cache side."""

    side = CACHE
