"""What a run leaves behind: frozen records, and their JSON form, which reads back equal."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stream_attention.bench.cases import DecodeCase
from stream_attention.bench.check import Check
from stream_attention.bench.floor import ReadCurve, ReadPoint
from stream_attention.bench.lengths import Lengths
from stream_attention.bench.machine import Environment
from stream_attention.bench.output import write_fault, write_text
from stream_attention.bench.timing import Timing

SCHEMA = "stream_attention.bench.paged_decode/1"
OUTCOMES = ("ok", "unsupported", "failed", "wrong", "not_run")


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one case.

    outcome: one of `OUTCOMES`; `not_run` is in the file of an isolated run that was cut short.
    reasons: why not ok. timing and check: there when they were made; a time counts when ok.
    extra_bytes: peak memory of one plan and run beyond its output. note: what it chose.
    """

    contender: str
    kind: str
    outcome: str
    reasons: tuple[str, ...] = ()
    timing: Timing | None = None
    check: Check | None = None
    extra_bytes: int | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(
                f"outcome={self.outcome!r}: must be one of {', '.join(OUTCOMES)}; use 'failed'"
            )
        if (self.outcome == "ok") == bool(self.reasons):
            raise ValueError(f"reasons={self.reasons!r}: every outcome but ok gives a reason")


@dataclass(frozen=True, slots=True)
class CaseResult:
    """All contenders on one case. skipped: why none ran, "" when they did.

    moved_bytes, flops, kv_bytes: by the formulas. floor_us: the read curve at `moved_bytes`.
    rotation_bytes: KV bytes that a round over all pools reads; cold: that exceeds the cache as the
    method asks.
    """

    case: DecodeCase
    kv_bytes: int
    moved_bytes: int
    flops: int
    floor_us: float
    rotation_bytes: int
    cold: bool
    rows: tuple[Row, ...] = ()
    skipped: str = ""

    def best_peer(self) -> Row | None:
        """The fastest correct peer."""
        peers = [row for row in self.rows if row.kind == "peer" and row.outcome == "ok"]
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
    """A whole run. settings: the flags that shaped it. missing: packages that brought nothing."""

    environment: Environment
    settings: dict[str, Any]
    curve: ReadCurve
    cases: tuple[CaseResult, ...]
    missing: dict[str, str] = field(default_factory=dict)
    schema: str = SCHEMA


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
    return data


def from_json(data: dict[str, Any]) -> Run:
    """The inverse of `to_json`; derived numbers are dropped.

    Raises `ValueError` for another schema, and for a key that is missing or unknown.
    """
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"schema={schema!r}: must be {SCHEMA!r}; use a file of that schema")
    try:
        return _run(data)
    except KeyError as error:
        fault = f"has no key {error.args[0]!r}"
    except (TypeError, AttributeError) as error:  # a key too many or too few of a record
        fault = str(error)
    raise ValueError(f"data: must be what to_json gives, but {fault}; use a file of this bench")


def _run(data: dict[str, Any]) -> Run:
    curve = data["curve"]
    return Run(
        environment=Environment(**data["environment"]),
        settings=data["settings"],
        curve=ReadCurve(tuple(ReadPoint(**p) for p in curve["points"]), curve["method"]),
        cases=tuple(_case_result(case) for case in data["cases"]),
        missing=data["missing"],
    )


def _case_result(data: dict[str, Any]) -> CaseResult:
    fields = {key: value for key, value in data.items() if key not in ("case", "rows", "name")}
    case = dict(data["case"])
    lengths = case.pop("lengths")
    return CaseResult(
        case=DecodeCase(lengths=Lengths(lengths["kind"], tuple(lengths["numbers"])), **case),
        rows=tuple(_row(row) for row in data["rows"]),
        **fields,
    )


def _row(data: dict[str, Any]) -> Row:
    fields = {key: value for key, value in data.items() if key != "derived"}
    fields["reasons"] = tuple(fields["reasons"])
    if fields["timing"] is not None:
        timing = fields["timing"]
        fields["timing"] = Timing(**{**timing, "samples_us": tuple(timing["samples_us"])})
    if fields["check"] is not None:
        fields["check"] = Check(**fields["check"])
    return Row(**fields)


def write_json(run: Run, path: Path) -> None:
    """Write `to_json(run)` to `path`."""
    write_text(path, json.dumps(to_json(run), indent=1, allow_nan=False) + "\n")


@dataclass(slots=True)
class Sink:
    """The file of a run, written whole as results come in. path: `None` = nowhere.

    num_cases: cases of this run in the file. error: why the last write failed, "" where it did not.
    """

    path: Path | None = None
    num_cases: int = 0
    error: str = ""

    def write(self, run: Run) -> None:
        """Write; a failure is kept in `error`, because the run is worth more than its file."""
        if self.path is None:
            return
        try:
            write_json(run, self.path)
        except OSError as error:
            self.error = write_fault(self.path, error)
            return
        self.num_cases, self.error = len(run.cases), ""

    @property
    def kept(self) -> str:
        """`; what had finished is in PATH`, or "" where this run wrote no case."""
        return f"; what had finished is in {self.path}" if self.num_cases else ""
