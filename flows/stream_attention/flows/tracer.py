"""`Trace`: runs a hook of a flow on symbols and writes down what it does, as nodes of a graph.

Every rule of the language that needs more than an op's own row of `OPS` is here: which hook takes
which op, who may write which field, that a decode step ends in one topK.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stream_attention.core.dtypes import dtype_name
from stream_attention.flows.fields import RESERVED, STATE_DTYPES, Field
from stream_attention.flows.formats import BATCHED, PAGED, RAGGED, Format, join
from stream_attention.flows.graph import Node, SideGraph, level_of, without_unused
from stream_attention.flows.op_table import CACHE, INDEXER, OPS
from stream_attention.flows.shapes import Shape, ShapeError, Sizes
from stream_attention.flows.values import (
    Cache,
    Context,
    FieldHandle,
    Location,
    Output,
    Symbol,
    TraceError,
    Value,
    caller,
    describe,
)

if TYPE_CHECKING:
    from stream_attention.flows.operators import Operator

HOOKS = {INDEXER: "forward_indexer", CACHE: "forward_cache"}


@dataclass(slots=True)
class FieldRecord:
    """What traces learn of a field: `saved` and `stored` are the lines that write it."""

    name: str
    field: Field
    shape: Shape
    saved: str | None = None
    stored: str | None = None
    init: float | None = None


class Trace:
    """One hook's trace. `finish()` gives its graph."""

    def __init__(
        self, flow_name: str, side: str, sizes: Sizes, records: dict[str, FieldRecord]
    ) -> None:
        self.flow_name, self.side, self.sizes, self.records = flow_name, side, sizes, records
        self.nodes: list[Node] = []
        self.ended: str | None = None
        self._loaded: dict[str, Value] = {}
        self._stored: set[str] = set()
        handles = {name: FieldHandle(self, name, ("P", "D")) for name in RESERVED}
        if sizes.page_size == 1:
            handles = {name: FieldHandle(self, name, (1, "D")) for name in RESERVED}
        handles |= {name: FieldHandle(self, name, r.shape) for name, r in records.items()}
        self.cache = Cache(self, handles)
        self.context, self.output, self.location = Context(self), Output(self), Location(self)

    def error(self, text: str, source: str | None = None) -> TraceError:
        """The error to raise: it names the flow and the line."""
        return TraceError(f"flow {self.flow_name}, {source or caller()}: {text}")

    def query(self, source: str) -> Value:
        """`q`: [B, G, D], batched."""
        return self._append("query", {}, (), BATCHED, ("G", "D"), source)

    def call(self, operator: Operator, operands: tuple[Any, ...]) -> Value | None:
        """What `operator(*operands)` is in this trace: its value, or `None` for a mere write."""
        text = f"{operator.title}({', '.join(describe(each) for each in operands)})"
        for each in operands:
            if isinstance(each, Symbol) and each.trace is not self:
                raise self.error(
                    f"{text}: {describe(each)} is of another trace"
                    f"{' (' + HOOKS[each.trace.side] + ')' if each.trace.side != self.side else ''}"
                    ", a value lives in one call of a hook; use a field to carry it"
                )
        if operator.side != self.side:
            raise self.error(
                f"{text}: is an op of {HOOKS[operator.side]}, not of {HOOKS[self.side]}; "
                f"use {operator.counterpart}"
            )
        if self.ended is not None:
            raise self.error(
                f"{text}: comes after topK of {self.ended}, which ends forward_indexer; "
                "use it before topK"
            )
        attributes = operator.attributes(self)
        special = {"load": self._load, "save": self._save, "topk": self._topk, "fill": self._fill}
        if operator.op in special:
            return special[operator.op](text, attributes, operands)
        return self._compute(operator.op, text, attributes, operands)

    def finish(self) -> SideGraph:
        """The graph, without values that nothing uses. Raises where a decode step has no end."""
        if self.side == INDEXER and self.ended is None:
            raise self.error(
                "forward_indexer has no topK, which must end it; use topK()(score, o, ctx=ctx)",
                self.nodes[0].source,
            )
        return SideGraph(self.side, without_unused(self.nodes))

    def _append(
        self,
        op: str,
        attributes: Mapping[str, Any],
        operands: tuple[int, ...],
        format: Format,
        shape: Shape,
        source: str | None = None,
    ) -> Value:
        source = source or caller()
        level = level_of(op, dict(attributes), [self.nodes[i] for i in operands])
        if op == "load" and self.side == INDEXER:  # a state that was saved waits as its save did
            saves = [n for n in self.nodes if n.op == "save"]
            same = [n.level for n in saves if n.attribute("field") == attributes["field"]]
            level = max([level, *same])
        self.nodes.append(
            Node(op, operands, tuple(sorted(attributes.items())), format, shape, level, source)
        )
        return Value(self, len(self.nodes) - 1, shape, format, source)

    def _expect(self, text: str, operands: tuple[Any, ...], *kinds: type) -> None:
        """Raise unless there is one operand for each of `kinds`, of that kind."""
        names = {Value: "a value", FieldHandle: "a field", Output: "o", Symbol: "a value"}
        wanted = ", ".join(names[kind] for kind in kinds)
        if len(operands) != len(kinds):
            raise self.error(f"{text}: takes {wanted}, not {len(operands)} operands; use {wanted}")
        for each, kind in zip(operands, kinds, strict=True):
            if not isinstance(each, kind):
                raise self.error(f"{text}: {describe(each)} must be {names[kind]}; use {wanted}")

    def _as_value(self, text: str, operand: Any) -> Value:
        """An operand to compute with; a field is loaded, once until it is written."""
        if isinstance(operand, Value):
            return operand
        if isinstance(operand, FieldHandle):
            return self._read(text, operand)
        raise self.error(
            f"{text}: {describe(operand)} is nothing to compute with; use a value or cache[...]"
        )

    def _read(self, text: str, handle: FieldHandle) -> Value:
        name = handle.name
        if self.side == CACHE and name not in RESERVED and name not in self._stored:
            raise self.error(
                f"{text}: {describe(handle)} is read before this step writes it, but forward_cache "
                "may not accumulate across steps; use Load and Save in forward_indexer"
            )
        if name not in self._loaded:
            where = PAGED if self.side == CACHE else RAGGED
            self._loaded[name] = self._append("load", {"field": name}, (), where, handle.shape)
        return self._loaded[name]

    def _write(self, op: str, value: Value, handle: FieldHandle) -> None:
        self._loaded.pop(handle.name, None)
        self._append(op, {"field": handle.name}, (value.node_id,), value.format, handle.shape)

    def _shape(
        self, op: str, text: str, attributes: Mapping[str, Any], values: list[Value]
    ) -> Shape:
        try:
            return OPS[op].shape(self.sizes, tuple(v.shape for v in values), attributes)
        except ShapeError as error:
            raise self.error(f"{text}: {error}") from None

    def _compute(
        self, op: str, text: str, attributes: dict[str, Any], operands: tuple[Any, ...]
    ) -> Value:
        rule, out = OPS[op], None
        if self.side == CACHE and len(operands) == rule.arity + 1:
            *operands_list, out = operands
            operands = tuple(operands_list)
            self._expect(text, (out,), FieldHandle)
        if len(operands) != rule.arity:
            raise self.error(
                f"{text}: takes {rule.arity} operands, not {len(operands)}; use {rule.arity}"
            )
        values = [self._as_value(text, each) for each in operands]
        format_rule = rule.format_rule(attributes)
        found = join(tuple(value.format for value in values))
        if format_rule in ("window", "row"):
            if self.side == CACHE:
                raise self.error(
                    f"{text}: dim=0 runs over candidate pages, which forward_cache does not know; "
                    "use dim=1 or dim=2, or do it in forward_indexer"
                )
            if found != RAGGED:
                raise self.error(
                    f"{text}: dim=0 runs over candidate pages, so the operand must be {RAGGED}, "
                    f"not {found}; use a value computed with a field"
                )
            found = BATCHED if format_rule == "row" else RAGGED
        shape = self._shape(op, text, attributes, values)
        value = self._append(op, attributes, tuple(v.node_id for v in values), found, shape)
        if out is not None:
            self._store(text, value, out)
        return value

    def _load(self, text: str, attributes: dict[str, Any], operands: tuple[Any, ...]) -> Value:
        self._expect(text, operands, FieldHandle)
        return self._read(text, operands[0])

    def _record(self, text: str, handle: FieldHandle) -> FieldRecord:
        if handle.name in RESERVED:
            raise self.error(
                f"{text}: {describe(handle)} is K or V itself, which no flow writes; "
                "use a field of create_cache"
            )
        return self.records[handle.name]

    def _same_shape(self, text: str, value: Value, handle: FieldHandle) -> None:
        if any(
            self.sizes.unified(a, b) is None for a, b in zip(value.shape, handle.shape, strict=True)
        ):
            raise self.error(
                f"{text}: the value and the field must have one shape; "
                f"use {handle.name}={tuple(value.shape)} in create_cache, or reduce the value"
            )

    def _save(self, text: str, attributes: dict[str, Any], operands: tuple[Any, ...]) -> None:
        self._expect(text, operands, Symbol, FieldHandle)
        value, handle = self._as_value(text, operands[0]), operands[1]
        record = self._record(text, handle)
        if record.field.kind == "summary":
            raise self.error(
                f"{text}: {describe(handle)} is a summary, which only forward_cache writes; "
                'use Field(..., kind="state")'
            )
        if record.saved is not None:
            raise self.error(
                f"{text}: the field was saved at {record.saved}, a step saves once; use one Save"
            )
        if value.format != RAGGED:
            raise self.error(
                f"{text}: a state has a value a page, so the value must be {RAGGED}, not "
                f"{value.format}; use a value computed with a field"
            )
        dtype = record.field.dtype
        if dtype is not None and dtype not in STATE_DTYPES:
            raise self.error(
                f"{text}: a state accumulates, so its dtype={dtype_name(dtype)} must be one of "
                f"{', '.join(dtype_name(d) for d in STATE_DTYPES)}; use float32"
            )
        self._same_shape(text, value, handle)
        self._write("save", value, handle)
        record.saved = caller()

    def _topk(self, text: str, attributes: dict[str, Any], operands: tuple[Any, ...]) -> None:
        self._expect(text, operands, Symbol, Output)
        value = self._as_value(text, operands[0])
        if value.format != RAGGED:
            raise self.error(
                f"{text}: pages are selected by a score of each, so it must be {RAGGED}, not "
                f"{value.format}; use a value computed with a field"
            )
        shape = self._shape("topk", text, {}, [value])
        self._append("topk", {}, (value.node_id,), RAGGED, shape)
        self.ended = caller()

    def _store(self, text: str, value: Value, handle: FieldHandle) -> None:
        record = self._record(text, handle)
        if record.saved is not None or record.field.kind == "state":
            by = f", saved at {record.saved}" if record.saved else ""
            raise self.error(
                f"{text}: {describe(handle)} is a state{by}; forward_cache writes summaries, a "
                "state starts at its init; use Field(..., init=...), or another field"
            )
        self._same_shape(text, value, handle)
        self._write("store", value, handle)
        self._stored.add(handle.name)
        record.stored = caller()

    def _fill(self, text: str, attributes: dict[str, Any], operands: tuple[Any, ...]) -> None:
        self._expect(text, operands, FieldHandle)
        handle, alpha = operands[0], attributes["alpha"]
        record = self._record(text, handle)
        if record.saved is None and record.field.kind != "state":
            given = {"field": handle.name, "alpha": float(alpha)}
            self._store(text, self._append("fill", given, (), PAGED, handle.shape), handle)
            return
        # The reset of a state is what its declaration says, so this only says it once more.
        known = record.init if record.init is not None else record.field.init
        if known not in (0.0, float(alpha)):
            raise self.error(
                f"{text}: alpha={alpha} must be the init={known} of {describe(handle)}; "
                f"use alpha={known}"
            )
        record.init = float(alpha)
