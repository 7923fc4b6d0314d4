"""What every IR object shares: a `repr` that omits defaults and evaluates back, and rule tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from stream_attention.core.errors import Faults


def evaluable_repr(node: Any) -> str:
    """`Name(field=value, …)` without the fields that hold their defaults; `eval` gives it back."""
    shown = []
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if field.default is not dataclasses.MISSING and value == field.default:
            continue
        if field.default_factory is not dataclasses.MISSING and value == field.default_factory():
            continue
        shown.append(f"{field.name}={value!r}")
    return f"{type(node).__name__}({', '.join(shown)})"


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a legality table.

    `holds(node)` says whether the rule is met; `value(node)` is what the message shows (by default
    the attribute `parameter`); `nearest(node)` names the nearest legal choice, or is `None`.
    """

    parameter: str
    text: str
    holds: Callable[[Any], bool]
    nearest: Callable[[Any], Any] | None = None
    value: Callable[[Any], Any] | None = None


NOT_OF_TYPE = (TypeError, ValueError, RuntimeError, AttributeError, OverflowError)
"""What a rule about a value meets where the value is of another type, arrays and tensors too, or
an int that no float holds."""


def broken_rules(node: Any, rules: Iterable[Rule]) -> Faults:
    """Every rule of the table which `node` breaks: what it has, and the nearest legal choice."""
    faults = Faults()
    for rule in rules:
        try:
            held = bool(rule.holds(node))
        except NOT_OF_TYPE:  # a field of the wrong type cannot meet a rule about its value
            held = False
        if not held:
            value = rule.value(node) if rule.value else getattr(node, rule.parameter)
            nearest = None
            if rule.nearest is not None:
                try:
                    nearest = rule.nearest(node)
                except (*NOT_OF_TYPE, ZeroDivisionError):
                    nearest = None
            faults.add(rule.parameter, value, rule.text, nearest)
    return faults


def check_rules(node: Any, rules: Iterable[Rule]) -> None:
    """Raise one `ValueError` that lists every rule of the table which `node` breaks."""
    broken_rules(node, rules).raise_if_any(type(node).__name__)


def is_name(value: Any) -> bool:
    """True for a string that is not empty."""
    return isinstance(value, str) and bool(value)


def is_tuple_of(value: Any, of: type) -> bool:
    """True for a tuple, also an empty one, of nothing but `of`."""
    return isinstance(value, tuple) and all(isinstance(each, of) for each in value)


def is_int(value: Any) -> bool:
    """True for a plain integer; `True` and `False` are flags, not counts."""
    return isinstance(value, int) and not isinstance(value, bool)
