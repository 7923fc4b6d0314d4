"""Frozen records as plain data and back: one canonical JSON text a value, for stable hashes.

A record's plain form leaves out fields that hold their defaults: a field that is added later, with
a default, changes neither the text nor the hash of what was written before. Equal records have
equal texts: a whole number where a float is meant is written as the float, and -0.0 as 0.0. JSON
has no NaN and no infinity; a float field holds `"nan"`, `"inf"` or `"-inf"` instead.

A class whose plain form is its own has a method `plain()` and a class method `from_plain(plain)`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from stream_attention.core.errors import SHOWN, Faults, shown

T = TypeVar("T")

MAX_UNKNOWN = 8
"""Keys of a record that an error names one by one where they are unknown."""
_NOT_FINITE = ("nan", "inf", "-inf")


def canonical_json(plain: Any) -> str:
    """The one text of plain data: sorted keys, no spaces, no NaN or infinity.

    Raises `ValueError` for a number that is not finite, `TypeError` for what is no plain data.
    """
    return json.dumps(
        plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def digest_of(plain: Any) -> str:
    """SHA-256 of `canonical_json(plain)`, 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(plain).encode()).hexdigest()


def to_plain(value: Any) -> Any:
    """Dicts, lists, strings, numbers, `None`: records become dicts without their defaults.

    Raises `TypeError` for a value that has no plain form, such as a tensor, and `ValueError` for a
    number that a field of floats cannot hold.
    """
    return _plain(type(value), value)


def _hints(cls: Any) -> dict[str, Any]:
    return _hints_of(cls)


_hints_of = functools.lru_cache(maxsize=256)(typing.get_type_hints)


def _plain(hint: Any, value: Any) -> Any:
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, (int, float)):
        return _plain_number(hint, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain_record(value)
    if isinstance(value, (tuple, list)):
        return [
            _plain(of, each)
            for of, each in zip(_hints_of_entries(hint, len(value)), value, strict=True)
        ]
    if isinstance(value, Mapping):
        return {key: _plain(Any, each) for key, each in value.items()}
    raise TypeError(f"{shown(value)} of {type(value).__name__} has no plain form")


def _plain_number(hint: Any, value: float) -> Any:
    if isinstance(value, float) or _means_float(hint):
        try:
            value = float(value) + 0.0  # + 0.0 takes the sign off -0.0
        except OverflowError:
            raise ValueError(f"number={shown(value)}: must be one that a float can hold") from None
        return value if math.isfinite(value) else str(value)
    return int(value)


def _plain_record(record: Any) -> Any:
    if callable(getattr(record, "plain", None)):
        return record.plain()
    hints, plain = _hints(type(record)), {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if not _is_default(field, value):
            plain[field.name] = _plain(hints[field.name], value)
    return plain


def _is_default(field: dataclasses.Field, value: Any) -> bool:
    if field.default is not dataclasses.MISSING:
        default = field.default
    elif field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    else:
        return False
    same_kind = isinstance(value, bool) == isinstance(default, bool)
    return same_kind and bool(value == default)


def _means_float(hint: Any) -> bool:
    """Whether a whole number in a field of this type is a float."""
    options = _options(hint)
    return float in options and int not in options


def _options(hint: Any) -> tuple[Any, ...]:
    """The types that a value of type `hint` may have."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _hints_of_entries(hint: Any, count: int) -> tuple[Any, ...]:
    """The types of the `count` entries of a tuple of type `hint`; `Any` where it does not say."""
    for option in _options(hint):
        arguments = typing.get_args(option)
        if typing.get_origin(option) is tuple:
            if len(arguments) == 2 and arguments[1] is Ellipsis:
                return arguments[:1] * count
            if len(arguments) == count:
                return arguments
    return (Any,) * count


def from_plain(cls: type[T], plain: Any) -> T:
    """The record of class `cls` whose `to_plain` is `plain`.

    Raises `ValueError` that names every key which is missing or unknown, what is of another type,
    and what the record itself refuses.
    """
    own = getattr(cls, "from_plain", None)
    if callable(own):
        return typing.cast(T, own(plain))
    faults = Faults()
    if not isinstance(plain, dict):
        faults.add(cls.__name__, plain, "must be a JSON object", "{...}")
        faults.raise_if_any()
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = [name for name in plain if name not in fields]
    for name in unknown[:MAX_UNKNOWN]:
        key = name if len(name) <= SHOWN else f"{name[: SHOWN - 3]}..."
        faults.add(key, plain[name], "is no key of it", f"one of {', '.join(fields)}")
    if unknown[MAX_UNKNOWN:]:
        count = len(unknown)
        faults.add("keys", f"{count - MAX_UNKNOWN} more", f"{count} are no keys of it")
    hints = _hints(cls)
    values = {}
    for name, field in fields.items():
        if name in plain:
            try:
                values[name] = _restored(hints[name], plain[name])
            except (TypeError, ValueError, OverflowError) as error:
                faults.add(name, plain[name], f"must be {_spelled(hints[name])} ({error})")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            faults.add(name, None, "is missing")
    faults.raise_if_any(cls.__name__)
    return cls(**values)


def _spelled(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint)) if isinstance(hint, type) else str(hint)


def _restored(hint: Any, plain: Any) -> Any:
    """`plain` as a value of type `hint`."""
    options = _options(hint)
    if len(options) > 1:
        return _restored_option(options, plain)
    if hint is Any:
        return plain
    if hint is type(None) or hint is None:
        if plain is not None:
            raise TypeError(f"got {type(plain).__name__}")
        return None
    if typing.get_origin(hint) is tuple:
        return _restored_tuple(typing.get_args(hint), plain)
    if dataclasses.is_dataclass(hint):
        return from_plain(typing.cast(type, hint), plain)
    if not isinstance(hint, type):
        raise NotImplementedError(f"fields of type {hint} have no plain form yet")
    if hint is float and plain in _NOT_FINITE:
        return float(plain)
    if hint is float and isinstance(plain, int) and not isinstance(plain, bool):
        return float(plain)
    flag_as_number = isinstance(plain, bool) and hint is not bool
    if isinstance(plain, hint) and not flag_as_number:
        return plain
    raise TypeError(f"got {type(plain).__name__}")


def _restored_option(options: tuple[Any, ...], plain: Any) -> Any:
    """`plain` as the first of several types that takes it; what the only other than `None` says."""
    if plain is None and type(None) in options:
        return None
    errors: list[Exception] = []
    for option in options:
        if option is not type(None):
            try:
                return _restored(option, plain)
            except (TypeError, ValueError, OverflowError) as error:
                errors.append(error)
    raise TypeError("; ".join(dict.fromkeys(map(str, errors))))


def _restored_tuple(arguments: tuple[Any, ...], plain: Any) -> tuple[Any, ...]:
    if not isinstance(plain, list):
        raise TypeError(f"got {type(plain).__name__}, not a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_entry(arguments[0], index, each) for index, each in enumerate(plain))
    if len(plain) != len(arguments):
        raise ValueError(f"has {len(plain)} entries, not {len(arguments)}")
    return tuple(
        _entry(of, index, each)
        for index, (of, each) in enumerate(zip(arguments, plain, strict=True))
    )


def _entry(hint: Any, index: int, plain: Any) -> Any:
    """An entry of a tuple; an error says which."""
    try:
        return _restored(hint, plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"[{index}]: {error}") from None
