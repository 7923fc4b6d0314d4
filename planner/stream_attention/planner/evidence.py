"""Evidence: immutable rows of what was measured, where, and how it was judged.

A row says what one contender did on one cell; every outcome is a row, also that it was refused,
failed or wrong. A pair row says how two contenders compared when they ran in turns. The rows of
`evidence_rules` say which of them count.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stream_attention.core.errors import shown
from stream_attention.core.ir import (
    Rule,
    check_rules,
    evaluable_repr,
    is_int,
    is_name,
    is_tuple_of,
)
from stream_attention.planner.cells import Cell
from stream_attention.planner.plain import digest_of, from_plain, to_plain

SCHEMA = "stream_attention.evidence/1"
ROLES = ("native", "portable", "external")
OUTCOMES = ("ok", "unsupported", "failed", "wrong")

Facts = tuple[tuple[str, str], ...]
"""Names with values, ascending by name."""


def _is_facts(value: Any) -> bool:
    pairs = is_tuple_of(value, tuple) and all(
        len(pair) == 2 and all(map(is_name, pair)) for pair in value
    )
    return pairs and [name for name, _ in value] == sorted({name for name, _ in value})


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Fingerprint:
    """The environment that rows of one set share. `None` = could not be found out.

    device: name as the driver gives it. arch: `"sm_90"`. num_sms, l2_bytes: of the device.
    sm_clock_mhz, memory_clock_mhz: highest clocks. cpu: its name.
    """

    device: str
    arch: str
    num_sms: int
    l2_bytes: int
    driver: str | None
    cuda: str | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    cpu: str
    python: str
    torch: str
    triton: str | None

    def __post_init__(self) -> None:
        check_rules(self, _FINGERPRINT_RULES)

    __repr__ = evaluable_repr

    @property
    def digest(self) -> str:
        """SHA-256 of all facts."""
        return digest_of(to_plain(self))

    def differences(self, other: Fingerprint) -> tuple[str, ...]:
        """`field: ours, not theirs` of every fact that differs; empty where the two are equal."""
        names = [field.name for field in dataclasses.fields(self)]
        facts = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return tuple(f"{name}: {ours!r}, not {its!r}" for name, ours, its in facts if ours != its)


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Correctness:
    """The comparison with the fp64 oracle, worst pool, with the tolerance that it was held to.

    max_error, rms_error: against the oracle. max_bound, rms_bound: what the tolerance allows.
    `None` where a fault was found before they were computed; what was computed stays, NaN too.
    rows_checked of rows. tolerance: name of the rule that made the bounds.
    """

    max_error: float | None
    max_bound: float | None
    rms_error: float | None
    rms_bound: float | None
    rows_checked: int
    rows: int
    tolerance: str

    def __post_init__(self) -> None:
        check_rules(self, _CORRECTNESS_RULES)

    __repr__ = evaluable_repr


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Samples:
    """Raw samples of a measurement, microseconds a call, in the order taken.

    method: of `bench.timing`, such as `"cuda_graph_cold"`. calls_per_sample: calls that each sample
    averages over. num_pools: distinct sets of inputs in the rotation.
    """

    samples_us: tuple[float, ...]
    method: str
    calls_per_sample: int = 1
    num_pools: int = 1

    def __post_init__(self) -> None:
        check_rules(self, _SAMPLES_RULES)

    __repr__ = evaluable_repr

    @property
    def p50_us(self) -> float:
        """The median, which every comparison is made of. Raises `ValueError` without samples."""
        if not self.samples_us:
            raise ValueError("samples_us=(): has no median")
        return statistics.median(self.samples_us)


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class EvidenceRow:
    """What one contender did on one cell.

    requested: the contender that was asked for. resolved: the route that ran, "" when none did.
    role: one of `ROLES`. outcome: one of `OUTCOMES`; reasons: why not ok.
    versions: distributions of the contender. correctness, timing: there when they were made.
    floor_us: time to read the cell's bytes, measured in the same run.
    timed_allocations: allocator calls of one run; `None` = not counted, as on a CPU.
    workspace_bytes: scratch of one plan. supports: the contender's own words on its range.
    kernel: resource facts of the kernel that ran. clocks: clocks read beside the samples.
    commit: of the source, without local changes. taken_at: UTC, ISO 8601 with seconds.
    """

    cell: Cell
    requested: str
    resolved: str
    role: str
    outcome: str
    reasons: tuple[str, ...] = ()
    environment: Fingerprint
    versions: Facts = ()
    correctness: Correctness | None = None
    timing: Samples | None = None
    floor_us: float | None = None
    timed_allocations: int | None = None
    workspace_bytes: int | None = None
    supports: tuple[str, ...] = ()
    kernel: Facts = ()
    clocks: Facts = ()
    commit: str
    command: str
    taken_at: str

    def __post_init__(self) -> None:
        check_rules(self, _ROW_RULES)

    __repr__ = evaluable_repr

    @property
    def id(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the row's plain form."""
        return digest_of(plain_of(self))[:16]


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class PairRow:
    """Two contenders in one process on one cell, run in turns: sample i of both is one pair.

    first: ours. second: the peer. A pair's ratio is first over second: below 1, ours is faster.
    outcome and reasons: of the pair; only an ok pair, where both were right, has samples.
    """

    cell: Cell
    first: str
    second: str
    outcome: str
    reasons: tuple[str, ...] = ()
    environment: Fingerprint
    versions: Facts = ()
    first_correctness: Correctness | None = None
    second_correctness: Correctness | None = None
    first_timing: Samples | None = None
    second_timing: Samples | None = None
    commit: str
    command: str
    taken_at: str

    def __post_init__(self) -> None:
        check_rules(self, _PAIR_RULES)

    __repr__ = evaluable_repr

    @property
    def id(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the row's plain form."""
        return digest_of(plain_of(self))[:16]

    @property
    def ratios(self) -> tuple[float, ...]:
        """`first / second`, pair by pair; `()` unless ok."""
        if self.first_timing is None or self.second_timing is None:
            return ()
        times = zip(self.first_timing.samples_us, self.second_timing.samples_us, strict=True)
        return tuple(ours / peers for ours, peers in times)


Row = EvidenceRow | PairRow
_KINDS: dict[str, type] = {"single": EvidenceRow, "pair": PairRow}


def plain_of(row: Row) -> dict[str, Any]:
    """Plain data of a row, with its schema and kind."""
    kind = "pair" if isinstance(row, PairRow) else "single"
    return {**to_plain(row), "kind": kind, "schema": SCHEMA}


def row_from_plain(plain: Any) -> Row:
    """The inverse of `plain_of`.

    Raises `ValueError` for another schema or kind, and for a key that is missing or unknown.
    """
    schema = plain.get("schema") if isinstance(plain, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"schema={shown(schema)}: must be {SCHEMA!r}; measure again")
    kind = plain.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"kind={shown(kind)}: must be one of {', '.join(_KINDS)}")
    fields = {key: value for key, value in plain.items() if key not in ("schema", "kind")}
    return from_plain(_KINDS[kind], fields)


def _text(name: str, optional: bool = False) -> Rule:
    return Rule(
        name,
        "must be a non-empty string" + (", or None" if optional else ""),
        lambda node: (optional and getattr(node, name) is None) or is_name(getattr(node, name)),
    )


def _string(name: str) -> Rule:
    return Rule(name, "must be a string", lambda node: isinstance(getattr(node, name), str))


def _facts(name: str) -> Rule:
    return Rule(
        name,
        "must be a tuple of (name, value) strings, ascending by name",
        lambda node: _is_facts(getattr(node, name)),
    )


def _is_number(value: Any) -> bool:
    """A float, also one that is not finite, or an int that is no larger than those."""
    return isinstance(value, float) or (is_int(value) and abs(value) <= sys.float_info.max)


def _each(
    names: tuple[str, ...], text: str, holds: Callable[[Any], bool], optional: bool = False
) -> tuple[Rule, ...]:
    """`holds(value)` for each of the fields; `None` too where it is optional."""

    def of_field(name: str) -> Callable[[Any], bool]:
        return lambda node: (optional and getattr(node, name) is None) or holds(getattr(node, name))

    return tuple(
        Rule(name, f"must be {text}" + (", or None" if optional else ""), of_field(name))
        for name in names
    )


def _counts(*names: str, low: int, optional: bool = False) -> tuple[Rule, ...]:
    text = f"an int >= {low} of 64 bits"
    return _each(names, text, lambda value: is_int(value) and low <= value < 2**63, optional)


def _records(cls: type, *names: str) -> tuple[Rule, ...]:
    return _each(names, f"a {cls.__name__}", lambda value: isinstance(value, cls), optional=True)


_FINGERPRINT_RULES = (
    *(_text(name) for name in ("device", "arch", "cpu", "python", "torch")),
    *(_text(name, optional=True) for name in ("driver", "cuda", "triton")),
    *_counts("num_sms", low=1),
    *_counts("l2_bytes", low=0),
    *_counts("sm_clock_mhz", "memory_clock_mhz", low=1, optional=True),
)
_CORRECTNESS_RULES = (
    *_each(
        ("max_error", "max_bound", "rms_error", "rms_bound"), "a number", _is_number, optional=True
    ),
    *_counts("rows_checked", "rows", low=0),
    _string("tolerance"),
)
_SAMPLES_RULES = (
    Rule(
        "samples_us",
        "must be a tuple of numbers",
        lambda s: isinstance(s.samples_us, tuple) and all(map(_is_number, s.samples_us)),
    ),
    _text("method"),
    *_counts("calls_per_sample", "num_pools", low=1),
)
_COMMON_RULES = (
    Rule("cell", "must be a Cell", lambda r: isinstance(r.cell, Cell)),
    Rule("environment", "must be a Fingerprint", lambda r: isinstance(r.environment, Fingerprint)),
    Rule("outcome", f"must be one of {', '.join(OUTCOMES)}", lambda r: r.outcome in OUTCOMES),
    Rule(
        "reasons",
        "must be a tuple of non-empty strings: none where the outcome is ok, else one at least",
        lambda r: (
            is_tuple_of(r.reasons, str)
            and all(r.reasons)
            and (r.outcome == "ok") == (not r.reasons)
        ),
    ),
    _facts("versions"),
    *(_string(name) for name in ("commit", "command", "taken_at")),
)
_ROW_RULES = (
    *_COMMON_RULES,
    _text("requested"),
    _string("resolved"),
    Rule("role", f"must be one of {', '.join(ROLES)}", lambda r: r.role in ROLES),
    _facts("kernel"),
    _facts("clocks"),
    Rule("supports", "must be a tuple of strings", lambda r: is_tuple_of(r.supports, str)),
    *_records(Correctness, "correctness"),
    *_records(Samples, "timing"),
    *_each(("floor_us",), "a number", _is_number, optional=True),
    *_counts("timed_allocations", "workspace_bytes", low=0, optional=True),
)
_PAIR_RULES = (
    *_COMMON_RULES,
    _text("first"),
    Rule(
        "second", "must be another contender", lambda r: is_name(r.second) and r.second != r.first
    ),
    *_records(Correctness, "first_correctness", "second_correctness"),
    *_records(Samples, "first_timing", "second_timing"),
)
