"""Errors that teach: parameter, value, rule, nearest valid choice, and every fault at once.

`ValueError` is for a bad argument, `UnsupportedProblem` for a legal problem that no route serves,
`StalePlanError` for a plan whose bound tensors changed under it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


SHOWN = 380
"""Characters of a value that a message shows at most."""


class UnsupportedProblem(NotImplementedError):
    """A legal problem that no route serves; the message lists every candidate with its reasons."""


class StalePlanError(RuntimeError):
    """A plan was run after a tensor bound to it changed shape, strides, dtype or storage."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One broken rule: `parameter=value: rule; use nearest`."""

    parameter: str
    value: Any
    rule: str
    nearest: Any = None

    def __str__(self) -> str:
        text = f"{self.parameter}={shown(self.value)}: {self.rule}"
        return text if self.nearest is None else f"{text}; use {self.nearest}"


class Faults:
    """Collects faults so that one `ValueError` reports all of them."""

    __slots__ = ("_faults",)

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    def add(self, parameter: str, value: Any, rule: str, nearest: Any = None) -> None:
        self._faults.append(Fault(parameter, value, rule, nearest))

    def require(
        self, holds: bool, parameter: str, value: Any, rule: str, nearest: Any = None
    ) -> bool:
        """Record a fault unless `holds`; returns `holds`, so that later checks can be skipped."""
        if not holds:
            self.add(parameter, value, rule, nearest)
        return bool(holds)

    def extend(self, others: Faults) -> None:
        """Take over the faults that `others` collected."""
        self._faults.extend(others._faults)

    def __bool__(self) -> bool:
        return bool(self._faults)

    def __iter__(self):
        return iter(self._faults)

    def raise_if_any(self, subject: str = "") -> None:
        """Raise one `ValueError` with a line a fault; does nothing when there is none."""
        if not self._faults:
            return
        lines = [str(fault) for fault in self._faults]
        if len(lines) == 1:
            raise ValueError(f"{subject}: {lines[0]}" if subject else lines[0])
        head = f"{subject}: {len(lines)} faults" if subject else f"{len(lines)} faults"
        raise ValueError("\n  ".join([head, *lines]))


def check_both(first: Callable[[], Any], second: Callable[[], T]) -> T:
    """What `second` returns; where both raise `ValueError`, one with the text of both, in order.

    `second` is called first: an error of `first` that is no `ValueError` may only come of arguments
    that `second` accepts.
    """
    try:
        found = second()
    except ValueError as error:
        try:
            first()
        except ValueError as other:
            raise ValueError(f"{other}\n{error}") from None
        raise
    first()
    return found


def shown(value: Any) -> str:
    """`repr(value)`, cut to `SHOWN` characters; of what has none, such as a huge int, its type."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"<{type(value).__name__} too large to show>"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Shape as a plain tuple, which prints shorter than `torch.Size` in messages."""
    return tuple(tensor.shape)
