"""What a run leaves behind: frozen records, and their JSON form, which reads back equal."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.check import Check
from stream_attention.bench.contenders import Facts
from stream_attention.bench.floor import ReadCurve, ReadPoint
from stream_attention.bench.lengths import Lengths
from stream_attention.bench.machine import Environment
from stream_attention.bench.output import write_fault, write_text
from stream_attention.bench.paired_timing import PairedTiming
from stream_attention.bench.record_types import wrong_fields
from stream_attention.bench.timing import Timing

SCHEMA = "stream_attention.bench.paged_decode/2"
KINDS = ("route", "peer")
OUTCOMES = ("ok", "unsupported", "failed", "wrong", "not_run")


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one case.

    kind: one of `KINDS`.
    outcome: one of `OUTCOMES`; `not_run` is in the file of a run that was cut short.
    reasons: why not ok. timing and check: there when they were made; a time counts when ok.
    extra_bytes: peak memory of one plan and run beyond its output. note: what it chose.
    resolved: the route that ran, which the engine chooses; else the contender itself. "" = none.
    workspace_bytes: what one plan still holds beyond its output after a run; timed_allocations:
    calls of the allocator in one eager run after the first; both torch's on CUDA, else `None`.
    seconds: wall time spent on the row, in a worker of its own with its inputs.
    versions: distributions of the contender. supports: its range, in its own words. kernel: facts
    of the kernel that ran. clocks: of the device, read after the samples.
    """

    contender: str
    kind: str
    outcome: str
    reasons: tuple[str, ...] = ()
    timing: Timing | None = None
    check: Check | None = None
    extra_bytes: int | None = None
    note: str = ""
    resolved: str = ""
    workspace_bytes: int | None = None
    timed_allocations: int | None = None
    seconds: float = 0.0
    versions: Facts = ()
    supports: tuple[str, ...] = ()
    kernel: Facts = ()
    clocks: Facts = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: must be one of {', '.join(KINDS)}; use 'peer'")
        _check_outcome(self.outcome, self.reasons)


@dataclass(frozen=True, slots=True)
class PairRow:
    """Two contenders on one case, timed in turns. first is ours by custom, second its peer.

    outcome, reasons: as of a `Row`. timing: there when it was made; a ratio counts when ok.
    checks, resolved: of the first and the second. seconds: wall time spent on the pair. versions:
    distributions of both.
    """

    case: AttentionCase
    first: str
    second: str
    outcome: str
    reasons: tuple[str, ...] = ()
    timing: PairedTiming | None = None
    checks: tuple[Check | None, Check | None] = (None, None)
    resolved: tuple[str, str] = ("", "")
    seconds: float = 0.0
    versions: Facts = ()

    def __post_init__(self) -> None:
        _check_outcome(self.outcome, self.reasons)


def _check_outcome(outcome: str, reasons: tuple[str, ...]) -> None:
    if outcome not in OUTCOMES:
        raise ValueError(f"outcome={outcome!r}: must be one of {', '.join(OUTCOMES)}; use 'failed'")
    if (outcome == "ok") == bool(reasons):
        raise ValueError(f"reasons={reasons!r}: every outcome but ok gives a reason")


@dataclass(frozen=True, slots=True)
class CaseResult:
    """All contenders on one case. skipped: why none ran, "" when they did.

    moved_bytes, flops, kv_bytes: by the formulas. floor_us: the read curve at `moved_bytes`.
    rotation_bytes: KV bytes that a round over all pools reads; cold: that exceeds the cache as the
    method asks.
    """

    case: AttentionCase
    kv_bytes: int
    moved_bytes: int
    flops: int
    floor_us: float
    rotation_bytes: int
    cold: bool
    rows: tuple[Row, ...] = ()
    skipped: str = ""

    def best_peer(self, *, allocation_free: bool = False) -> Row | None:
        """The fastest correct peer, or the fastest of those whose timed run allocated nothing."""
        peers = [row for row in self.rows if row.kind == "peer" and row.outcome == "ok"]
        if allocation_free:
            peers = [row for row in peers if row.timed_allocations == 0]
        timed = [row for row in peers if row.timing is not None]
        return min(timed, key=lambda row: _p50(row), default=None)

    def over_floor(self, row: Row) -> float:
        """`time / floor(bytes)`."""
        return _p50(row) / self.floor_us

    def gb_per_s(self, row: Row) -> float:
        """Useful bytes a second, in 1e9."""
        return self.moved_bytes / _p50(row) / 1e3

    def speed_up(self, row: Row) -> float | None:
        """Best peer's time over this row's; `None` without a peer, and for a row that is not ok."""
        best = self.best_peer()
        return None if best is None or row.outcome != "ok" else _p50(best) / _p50(row)


def _p50(row: Row) -> float:
    assert row.timing is not None
    return row.timing.p50_us


@dataclass(frozen=True, slots=True)
class Run:
    """A whole run. settings: the flags that shaped it. missing: packages that brought nothing.

    pairs: what was timed in turns, beside the cases.
    """

    environment: Environment
    settings: dict[str, Any]
    curve: ReadCurve
    cases: tuple[CaseResult, ...]
    missing: dict[str, str] = field(default_factory=dict)
    schema: str = SCHEMA
    pairs: tuple[PairRow, ...] = ()


def to_json(run: Run) -> dict[str, Any]:
    """Plain data: lists, dicts, numbers, strings. Medians and ratios are added for readers."""
    data = dataclasses.asdict(run)
    for case, plain in zip(run.cases, data["cases"], strict=True):
        plain["name"] = case.case.name
        for row, flat in zip(case.rows, plain["rows"], strict=True):
            if row.timing is None:
                continue
            flat["derived"] = {
                "n": row.timing.n,
                "p20_us": row.timing.p20_us,
                "p50_us": row.timing.p50_us,
                "p80_us": row.timing.p80_us,
                "over_floor": case.over_floor(row),
                "gb_per_s": case.gb_per_s(row),
                "speed_up_vs_best_peer": case.speed_up(row),
            }
    for pair, plain in zip(run.pairs, data["pairs"], strict=True):
        plain["name"] = pair.case.name
        if pair.timing is not None:
            low, high = pair.timing.confidence_interval()
            plain["derived"] = {
                "n": pair.timing.n,
                "ratio_p50": pair.timing.ratio_p50,
                "ratio_low_95": low if math.isfinite(high) else None,
                "ratio_high_95": high if math.isfinite(high) else None,
            }
    return data


def from_json(data: dict[str, Any]) -> Run:
    """The inverse of `to_json`; derived numbers are dropped.

    Raises `ValueError` for another schema, for a key that is missing or unknown, and for a value of
    another type than the records have.
    """
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"schema={schema!r}: must be {SCHEMA!r}; use a file of that schema")
    try:
        run = _run(data)
    except KeyError as error:
        fault = f"has no key {error.args[0]!r}"
    except (TypeError, AttributeError, IndexError, OverflowError) as error:
        fault = str(error)  # a key too many or too few of a record, or a value of another type
    else:
        wrong = next(wrong_fields(run, Run), None)
        if wrong is None:
            return run
        fault = wrong
    raise ValueError(f"data: must be what to_json gives, but {fault}; use a file of this bench")


def _run(data: dict[str, Any]) -> Run:
    return Run(
        environment=Environment(**data["environment"]),
        settings=data["settings"],
        curve=curve_from(data["curve"]),
        cases=tuple(_case_result(case) for case in data["cases"]),
        missing=data["missing"],
        pairs=tuple(pair_from(pair) for pair in data["pairs"]),
    )


def curve_from(data: dict[str, Any]) -> ReadCurve:
    """The curve that `dataclasses.asdict` made plain."""
    return ReadCurve(tuple(ReadPoint(**point) for point in data["points"]), data["method"])


def case_from(data: dict[str, Any]) -> AttentionCase:
    """The case that `dataclasses.asdict` made plain."""
    fields = dict(data)
    for name in ("lengths", "q_lengths"):
        if fields[name] is not None:
            fields[name] = Lengths(fields[name]["kind"], tuple(fields[name]["numbers"]))
    return AttentionCase(**fields)


def _case_result(data: dict[str, Any]) -> CaseResult:
    fields = {key: value for key, value in data.items() if key not in ("case", "rows", "name")}
    return CaseResult(
        case=case_from(data["case"]), rows=tuple(row_from(row) for row in data["rows"]), **fields
    )


def row_from(data: dict[str, Any]) -> Row:
    """The row that `dataclasses.asdict` made plain."""
    fields = {key: value for key, value in data.items() if key != "derived"}
    fields["reasons"] = tuple(fields["reasons"])
    fields["supports"] = tuple(fields["supports"])
    for name in ("versions", "kernel", "clocks"):
        fields[name] = _facts(fields[name])
    fields["timing"] = _timing(fields["timing"])
    fields["check"] = _check(fields["check"])
    return Row(**fields)


def pair_from(data: dict[str, Any]) -> PairRow:
    """The pair that `dataclasses.asdict` made plain."""
    fields = {key: value for key, value in data.items() if key not in ("derived", "name")}
    (first, second), sides = fields["checks"], fields["timing"]
    fields["case"] = case_from(fields["case"])
    fields["reasons"] = tuple(fields["reasons"])
    if sides is not None:
        fields["timing"] = PairedTiming(
            **{name: _timing_from(side) for name, side in sides.items()}
        )
    fields["checks"] = (_check(first), _check(second))
    fields["resolved"] = tuple(fields["resolved"])
    fields["versions"] = _facts(fields["versions"])
    return PairRow(**fields)


def _facts(data: Sequence[Sequence[str]]) -> Facts:
    return tuple((name, value) for name, value in data)


def _timing(data: dict[str, Any] | None) -> Timing | None:
    return None if data is None else _timing_from(data)


def _timing_from(data: dict[str, Any]) -> Timing:
    return Timing(**{**data, "samples_us": tuple(data["samples_us"])})


def _check(data: dict[str, Any] | None) -> Check | None:
    if data is None:
        return None
    check = Check(**data)
    numbers = ("max_error", "max_bound", "rms_error", "rms_bound")
    missing = [name for name in numbers if getattr(check, name) is None]
    if missing and len(missing) < len(numbers):
        raise ValueError(f"check.{missing[0]}=None: must be a number, as its other three are")
    return check


def write_json(run: Run, path: Path) -> None:
    """Write `to_json(run)` to `path`."""
    write_text(path, json.dumps(to_json(run), indent=1, allow_nan=False) + "\n")


# Of the wall time, which a run of many rows spends on its file: it is written whole every time.
_WRITING_SHARE = 0.05


@dataclass(slots=True)
class Sink:
    """The file of a run, written whole as results come in. path: `None` = nowhere.

    num_cases: cases of this run in the file that have a result. error: why the last write failed,
    "" where it did not. clock: seconds; replaced in tests.
    """

    path: Path | None = None
    num_cases: int = 0
    error: str = ""
    clock: Callable[[], float] = time.monotonic
    _next: float = -math.inf

    def write(self, run: Run) -> None:
        """Write; a failure is kept in `error`, because the run is worth more than its file."""
        if self.path is None:
            return
        begin = self.clock()
        try:
            write_json(run, self.path)
        except OSError as error:
            self.error = write_fault(self.path, error)
            return
        end = self.clock()
        self._next = end + (end - begin) / _WRITING_SHARE
        self.num_cases, self.error = sum(_has_result(case) for case in run.cases), ""

    def offer(self, run: Run) -> None:
        """Write where that keeps writing within its share of the time.

        The next `write` brings what an offer left out.
        """
        if self.clock() >= self._next:
            self.write(run)

    @property
    def kept(self) -> str:
        """`; what had finished is in PATH`, or "" where this run wrote no case."""
        return f"; what had finished is in {self.path}" if self.num_cases else ""


def _has_result(case: CaseResult) -> bool:
    return bool(case.skipped) or any(row.outcome != "not_run" for row in case.rows)
