"""Whether records that were read hold values of the types that their fields are declared with."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

# Numbers of files that no bench writes; beyond them, floats and text of numbers come to limits.
MAX_NUMBER = 1 << 100

_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)
_NAMES = {
    int: "an int",
    float: "a finite number",
    str: "a str",
    bool: "a bool",
    type(None): "None",
    tuple: "a tuple",
    dict: "an object",
}


def wrong_fields(value: Any, hint: Any, where: str = "") -> Iterator[str]:
    """`where=value: must be …` for each value in a record, its tuples and objects that is of
    another type than its field. where: how messages call `value`.
    """
    options = _options(hint)
    if Any in options:
        return
    fitting = next((option for option in options if _fits(value, option)), None)
    if fitting is None:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:60]}…"
        yield f"{where}={shown}: must be {' or '.join(map(_name, options))}"
    elif dataclasses.is_dataclass(fitting):
        hints = _hints(fitting)
        for field in dataclasses.fields(fitting):
            name = f"{where}.{field.name}" if where else field.name
            yield from wrong_fields(getattr(value, field.name), hints[field.name], name)
    elif isinstance(value, tuple):
        of = typing.get_args(fitting)
        kinds = of if of[-1] is not Ellipsis else of[:1] * len(value)
        for index, (entry, kind) in enumerate(zip(value, kinds, strict=True)):
            yield from wrong_fields(entry, kind, f"{where}[{index}]")
    elif isinstance(value, dict):
        _, kind = typing.get_args(fitting)
        for key, entry in value.items():
            yield from wrong_fields(entry, kind, f"{where}.{key}")


def _options(hint: Any) -> tuple[Any, ...]:
    """The types that a value of type `hint` may have."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _fits(value: Any, option: Any) -> bool:
    """Whether a value is of a type, apart from what it holds."""
    plain = typing.get_origin(option) or option
    if isinstance(value, bool):
        return plain is bool
    if plain is tuple:
        of = typing.get_args(option)
        counted = of[-1] is not Ellipsis
        return isinstance(value, tuple) and (not counted or len(value) == len(of))
    if plain is float:
        return isinstance(value, (int, float)) and _is_bounded(value)
    return isinstance(value, plain) and (plain is not int or _is_bounded(value))


def _is_bounded(number: float) -> bool:
    return -MAX_NUMBER <= number <= MAX_NUMBER and not math.isnan(number)


def _name(option: Any) -> str:
    plain = typing.get_origin(option) or option
    return _NAMES.get(plain, f"a {plain.__name__}")
