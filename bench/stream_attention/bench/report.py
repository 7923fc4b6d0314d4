"""The printed report: a header, one table a case, what was not compared and why."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stream_attention.bench.floor import ReadCurve
from stream_attention.bench.machine import Environment
from stream_attention.bench.results import CaseResult, Row
from stream_attention.bench.screen import stdout
from stream_attention.core.formulas import MIB

FULL_WIDTH = 136  # every column of a case table without a break in a number

_METHOD_TEXT = {
    "cuda_graph_cold": "CUDA-graph replay, cold L2",
    "cuda_graph_warm": "CUDA-graph replay, warm L2",
    "cuda_eager_cold": "eager launches (host cost included), cold L2",
    "cuda_eager_warm": "eager launches (host cost included), warm L2",
    "cpu_cold": "wall clock, cold L3",
    "cpu_warm": "wall clock, warm L3",
}
_STYLE = {
    "ok": "green",
    "unsupported": "dim",
    "failed": "red",
    "wrong": "bold red",
    "not_run": "dim",
}


def make_console() -> Console:
    """A console on stdout; wide enough for the tables also where there is no terminal.

    A character that stdout cannot encode is printed as a question mark. Where stdout is closed,
    printing raises `OSError`.
    """
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    file = stdout() if sys.stdout is None else None  # `None`: whatever sys.stdout is by then
    console = Console(highlight=False, file=file)
    if console.width < FULL_WIDTH and not console.is_terminal:
        return Console(highlight=False, width=FULL_WIDTH, file=file)
    return console


def print_header(console: Console, environment: Environment) -> None:
    """Where the run is made, before anything is measured."""
    for line in environment.lines():
        console.print(Text(line), soft_wrap=True)


def print_curve(console: Console, curve: ReadCurve) -> None:
    """The measured read curve, in one line."""
    points = ", ".join(f"{p.num_bytes / MIB:g} MiB {format_us(p.us)}" for p in curve.points)
    console.print(Text(f"floor   plain read: {points} (best {curve.best_gb_per_s:.0f} GB/s)"))


def print_case(console: Console, result: CaseResult) -> None:
    """One case's table, then the method, what was checked, and every reason."""
    console.print()
    if result.skipped:
        console.print(Text(_skipped(result)), soft_wrap=True)
        return
    console.print(case_table(result, console.width))
    for note in case_notes(result):
        console.print(Text(f"  {note}", style="dim"), soft_wrap=True)


def _skipped(result: CaseResult) -> str:
    return f"{result.case.name}: skipped: {result.skipped}"


def case_table(result: CaseResult, width: int = FULL_WIDTH) -> Table:
    """Contenders that ran, in that order; the fastest correct one in bold.

    A narrow terminal loses the columns of error and memory, which the JSON file keeps.
    """
    mib = result.kv_bytes / MIB
    title = f"{result.case.name}   KV {mib:.1f} MiB   floor {format_us(result.floor_us)}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("contender", no_wrap=True)
    for heading in ("time p50 [p20 – p80]", "n", "× floor", "GB/s", "vs peer"):
        table.add_column(heading, justify="right", no_wrap=True)
    full = width >= FULL_WIDTH
    if full:
        table.add_column("error / bound", justify="right", no_wrap=True)
        table.add_column("extra MiB", justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    fastest = fastest_row(result)
    for row in result.rows:
        if row.outcome == "unsupported":
            continue
        cells = [*_timing_cells(result, row), *(_check_cells(row) if full else ())]
        outcome = Text(row.outcome, style=_STYLE[row.outcome])
        table.add_row(*cells, outcome, style="bold" if row is fastest else "")
    return table


def fastest_row(result: CaseResult) -> Row | None:
    """The correct row with the smallest median."""
    right = [row for row in result.rows if row.outcome == "ok"]
    timed = [(row.timing.p50_us, row) for row in right if row.timing is not None]
    return min(timed, key=lambda pair: pair[0], default=(0.0, None))[1]


def _timing_cells(result: CaseResult, row: Row) -> list[str]:
    name = f"{row.contender} ({row.note})" if row.note else row.contender
    timing = row.timing
    if timing is None:
        return [name, "", "", "", "", ""]
    unit, scale = _unit(timing.p50_us)
    low, middle, high = (
        _digits(us / scale) for us in (timing.p20_us, timing.p50_us, timing.p80_us)
    )
    speed_up = result.speed_up(row)
    return [
        name,
        f"{middle} [{low} – {high}] {unit}",
        str(timing.n),
        f"{result.over_floor(row):.2f}",
        _digits(result.gb_per_s(row)),
        "" if speed_up is None else f"{speed_up:.2f} ×",
    ]


def _check_cells(row: Row) -> list[str]:
    extra = "" if row.extra_bytes is None else f"{row.extra_bytes / MIB:.1f}"
    if row.check is None or row.check.max_error is None:
        return ["", extra]
    return [f"{row.check.max_error:.1e} / {row.check.max_bound:.1e}", extra]


def case_notes(result: CaseResult) -> Iterator[str]:
    """Method, how much was checked, and the reasons of every row that is not ok."""
    methods = sorted({row.timing.method for row in result.rows if row.timing is not None})
    for method in methods:
        rotation = f"{result.rotation_bytes / MIB:.0f} MiB of KV in rotation"
        yield f"method: {_METHOD_TEXT[method]}, {rotation}"
        if method.endswith("_cold") and not result.cold:
            yield "the rotation is too small to leave the cache: read this case as warm"
    yield from _check_notes(result)
    grouped: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for row in result.rows:
        if row.reasons:
            grouped.setdefault((row.outcome, row.reasons), []).append(row.contender)
    for (outcome, reasons), names in grouped.items():
        yield f"{', '.join(names)}: {outcome}: {'; '.join(reasons)}"


def _check_notes(result: CaseResult) -> Iterator[str]:
    """What the rows that are right were checked for, and where that was not the timed runs."""
    right = [(row, row.check) for row in result.rows if row.outcome == "ok" and row.check]
    pools = max((row.timing.num_pools for row, _ in right if row.timing is not None), default=1)
    where, every = "", "all rows"
    if pools > 1:
        where, every = " of the first pool and of the last", f"all rows of all {pools} pools"

    def oracle(count: int) -> str:
        return f"checked against the fp64 oracle: {count} of {result.case.num_rows} rows{where}"

    timed = {check.rows_checked for _, check in right if not check.rerun and check.poisoned}
    for count in sorted(timed):
        yield f"{oracle(count)}; {every}: finite, and written when timed"
    for row, check in right:
        if not check.poisoned:
            why = "cannot be poisoned (a copy?), so that the timed runs wrote it was not seen"
            yield f"{row.contender}: {oracle(check.rows_checked)}; its output {why}"
        elif check.rerun:
            why = "one output for all pools, so each was run again, untimed"
            yield f"{row.contender}: {oracle(check.rows_checked)}; {why}"


def print_missing(console: Console, missing: dict[str, str]) -> None:
    """Packages that brought no contender, after an empty line."""
    console.print()
    for name, reason in missing.items():
        console.print(Text(f"  {name}: {reason}", style="dim"), soft_wrap=True)


def format_us(us: float) -> str:
    """Microseconds with a fitting unit: `12.5 us`, `1.23 ms`, `1.50 s`."""
    unit, scale = _unit(us)
    return f"{_digits(us / scale)} {unit}"


def _unit(us: float) -> tuple[str, float]:
    if us < 1e3:
        return "us", 1.0
    return ("ms", 1e3) if us < 1e6 else ("s", 1e6)


def _digits(value: float) -> str:
    """Three significant digits or the whole part, whichever shows more."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
