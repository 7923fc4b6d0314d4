"""What finding faults in evidence is made of: the context, the form of a rule, and what it sees.

The rules themselves are in `evidence_provenance` and `evidence_numbers`, the tables of them and
what judges by these in `evidence_rules`.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

from stream_attention.core.errors import Fault
from stream_attention.core.ir import Rule, check_rules, is_int, is_name, is_tuple_of
from stream_attention.planner.evidence import (
    Correctness,
    EvidenceRow,
    Fingerprint,
    PairRow,
    Row,
    Samples,
)

Find = Callable[[Row, "Context"], Iterable[Fault]]

COMMIT_FORM = "must be 40 hexadecimal digits: of git, or behind files- of the installed files"
# A commit of git, or the digest of an installed package's files.
_COMMIT = re.compile(r"(files-)?[0-9a-f]{40}")
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(Z|\+00:00)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What rows are judged against. `None` = that is not asked.

    environment: where all rows must be from. commit: the source that all must be of.
    routes: names that may have run. min_samples: instead of `MIN_SAMPLES`. now: instead of the
    clock, with a time zone.
    """

    environment: Fingerprint | None = None
    commit: str | None = None
    routes: tuple[str, ...] | None = None
    min_samples: int | None = None
    now: datetime.datetime | None = None

    def __post_init__(self) -> None:
        check_rules(self, _CONTEXT_RULES)

    @property
    def time(self) -> datetime.datetime:
        """Now."""
        return self.now or datetime.datetime.now(datetime.timezone.utc)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a row does not count: the name of the rule, and what it found."""

    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


@dataclass(frozen=True, slots=True)
class RefusalRule:
    """A row of the table: `find(row, context)` gives what is wrong, nothing where nothing is."""

    name: str
    find: Find


def is_commit(name: Any) -> bool:
    """Whether it names a source, as rows do that count."""
    return isinstance(name, str) and _COMMIT.fullmatch(name) is not None


def device_type(arch: str) -> str:
    """`"cpu"` or `"cuda"`."""
    return "cpu" if arch == "cpu" else "cuda"


def time_of(row: Row) -> datetime.datetime | None:
    """`taken_at` as a time; `None` where it is none."""
    found = _TIME.fullmatch(row.taken_at)
    try:
        return datetime.datetime.fromisoformat(f"{found[1]}+00:00") if found else None
    except ValueError:  # the 30th of February
        return None


def is_time(value: float | None) -> TypeGuard[float]:
    """Whether a number of microseconds can be one."""
    return value is not None and math.isfinite(value) and value > 0


@dataclass(frozen=True, slots=True)
class Side:
    """One contender of a row. prefix: of its fields in the row."""

    prefix: str
    contender: str
    timing: Samples | None
    correctness: Correctness | None


def sides_of(row: Row) -> tuple[Side, ...]:
    """The two contenders of a pair, or the one of a single row: the route that ran."""
    if isinstance(row, PairRow):
        return (
            Side("first_", row.first, row.first_timing, row.first_correctness),
            Side("second_", row.second, row.second_timing, row.second_correctness),
        )
    return (Side("", row.resolved, row.timing, row.correctness),)


def of_any(find: Callable[[Any, Context], Fault | None]) -> Find:
    """A rule about every row, of any outcome."""

    def of_row(row: Row, context: Context) -> Iterator[Fault]:
        fault = find(row, context)
        if fault is not None:
            yield fault

    return of_row


def of_single(find: Callable[[EvidenceRow], Fault | None]) -> Find:
    """A rule about single rows of any outcome."""
    return of_any(lambda row, _: find(row) if isinstance(row, EvidenceRow) else None)


def of_ok(of: type, find: Callable[[Any, Context], Fault | None]) -> Find:
    """A rule about rows of class `of` that are ok."""

    def of_row(row: Row, context: Context) -> Iterator[Fault]:
        fault = find(row, context) if isinstance(row, of) and row.outcome == "ok" else None
        if fault is not None:
            yield fault

    return of_row


def of_sides(find: Callable[[Side, Any, Context], Fault | None]) -> Find:
    """A rule about each contender of a row that is ok."""

    def of_row(row: Row, context: Context) -> Iterator[Fault]:
        if row.outcome == "ok":
            found = (find(side, row, context) for side in sides_of(row))
            yield from (fault for fault in found if fault is not None)

    return of_row


def of_timings(find: Callable[[Samples, Any, Context], Fault | None]) -> Find:
    """A rule about each timing of a row that is ok; the fault's parameter is a field of it."""

    def of_side(side: Side, row: Row, context: Context) -> Fault | None:
        fault = None if side.timing is None else find(side.timing, row, context)
        return fault and _inside(f"{side.prefix}timing", fault)

    return of_sides(of_side)


def of_checks(find: Callable[[Correctness], Iterable[Fault]]) -> Find:
    """A rule about each comparison with the oracle of a row that is ok."""

    def of_row(row: Row, context: Context) -> Iterator[Fault]:
        for side in sides_of(row) if row.outcome == "ok" else ():
            for fault in () if side.correctness is None else find(side.correctness):
                yield _inside(f"{side.prefix}correctness", fault)

    return of_row


def _inside(field: str, fault: Fault) -> Fault:
    return Fault(f"{field}.{fault.parameter}", fault.value, fault.rule, fault.nearest)


def unless(holds: bool, parameter: str, value: Any, rule: str, nearest: Any = None) -> Fault | None:
    """`None` where the rule holds, else the fault."""
    return None if holds else Fault(parameter, value, rule, nearest)


_CONTEXT_RULES = (
    Rule(
        "environment",
        "must be a Fingerprint, or None",
        lambda c: c.environment is None or isinstance(c.environment, Fingerprint),
    ),
    Rule(
        "commit",
        "must be a commit's name, or None",
        lambda c: c.commit is None or is_name(c.commit),
    ),
    Rule(
        "routes",
        "must be a tuple of names, or None",
        lambda c: c.routes is None or is_tuple_of(c.routes, str),
    ),
    Rule(
        "min_samples",
        "must be an int >= 1, or None",
        lambda c: c.min_samples is None or (is_int(c.min_samples) and c.min_samples >= 1),
    ),
    Rule(
        "now",
        "must be a time with its zone, or None",
        lambda c: c.now is None or c.now.utcoffset() is not None,
    ),
)
