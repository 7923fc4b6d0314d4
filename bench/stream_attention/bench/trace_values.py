"""The cells of a trace, text or JSON, as lengths and microseconds."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from decimal import Decimal, InvalidOperation
from typing import Any

from stream_attention.core.ir import is_int

MAX_TOKENS = 2**31 - 1
MAX_BLOCK = 2**63 - 1  # of the ids of blocks
_PER_US = {"s": 6, "ms": 3, "us": 0}  # powers of ten
_LARGEST_EXPONENT = 15  # of a number of seconds: an epoch in nanoseconds has 18 digits
_DATETIME = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?\s*(Z|[+-]\d\d:?\d\d)?"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class BadCell(Exception):
    """A cell that breaks a rule; `args` are the rule and the nearest choice, or `None`."""


def is_number(value: Any) -> bool:
    """A JSON number, or text that reads as one."""
    return _decimal(value) is not None


def _decimal(value: Any) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, (int, Decimal, str)):
        return None
    try:
        return Decimal(value)
    except InvalidOperation:
        return None


def tokens(value: Any, low: int) -> int:
    """A count of tokens in low .. 2^31 - 1. Raises `BadCell`."""
    rule = f"must be an int in {low}..{MAX_TOKENS}"
    number = _decimal(value)
    if number is None or not number.is_finite():
        raise BadCell(rule, None)
    # Before `int`, which would write out what 1e999999 stands for.
    kept = min(max(number, Decimal(low)), Decimal(MAX_TOKENS))
    if kept != number or kept != kept.to_integral_value():
        raise BadCell(rule, int(kept.to_integral_value()))
    if not (is_int(value) or (isinstance(value, str) and value.strip().isdecimal())):
        raise BadCell(rule, int(kept))  # 12.0 may be what is left of a column with gaps
    return int(kept)


def microseconds(value: Any, unit: str) -> int:
    """An arrival in microseconds, rounded to even; a datetime counts from 1970. Raises `BadCell`.

    Text without a time zone is taken as UTC.
    """
    if unit == "datetime":
        return _of_datetime(value)
    rule = f"must be a finite number of {unit} >= 0"
    number = _decimal(value)
    if number is None or not number.is_finite():
        raise BadCell(rule, None)
    if number < 0:
        raise BadCell(rule, 0)
    if number and number.adjusted() > _LARGEST_EXPONENT + 6 - _PER_US[unit]:
        raise BadCell(rule, "a time within 30 million years")
    return int(number.scaleb(_PER_US[unit]).to_integral_value())


def has_zone(value: Any) -> bool:
    """A datetime's text says its time zone."""
    match = _DATETIME.fullmatch(value.strip()) if isinstance(value, str) else None
    return bool(match and match[4])


def _of_datetime(value: Any) -> int:
    rule, nearest = "must be a date and time", "2023-11-16 18:17:03.9799600"
    match = _DATETIME.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise BadCell(rule, nearest)
    day, clock, fraction, zone = match.groups()
    zone = "+00:00" if zone in (None, "Z") else zone
    zone = zone if ":" in zone else f"{zone[:3]}:{zone[3:]}"
    try:
        moment = datetime.fromisoformat(f"{day}T{clock}{zone}")
    except ValueError:  # 2023-13-45
        raise BadCell(rule, nearest) from None
    whole = (moment - _EPOCH) // timedelta(microseconds=1)
    parts = Decimal(f"0.{fraction or 0}").scaleb(6).to_integral_value()
    return whole + int(parts)
