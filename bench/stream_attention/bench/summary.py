"""What a run comes to: one line a case, ratios between the forms of a case, and geometric means."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.report import format_us
from stream_attention.bench.results import CaseResult, Row
from stream_attention.core.formulas import MIB

ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Mean:
    """Geometric means of one contender over the cases that it was timed in.

    over_floor: `time / floor`, of `cases` cases. speed_up: best peer's time over its own, of the
    `compared` cases that have a peer; `None` without one. slowest: the least of those speed-ups.
    """

    contender: str
    cases: int
    over_floor: float
    compared: int
    speed_up: float | None
    slowest: float | None


def timed_row(result: CaseResult, contender: str) -> Row | None:
    """The row of `contender` where it was right and timed."""
    rows = [row for row in result.rows if row.contender == contender and row.outcome == "ok"]
    return next((row for row in rows if row.timing is not None), None)


def means(results: Sequence[CaseResult], kind: str = "route") -> tuple[Mean, ...]:
    """One `Mean` a contender of `kind` that was timed, in the order of rows."""
    names = dict.fromkeys(
        row.contender for result in results for row in result.rows if row.kind == kind
    )
    found = (_mean(results, name) for name in names)
    return tuple(mean for mean in found if mean is not None)


def _mean(results: Sequence[CaseResult], contender: str) -> Mean | None:
    pairs = [(result, timed_row(result, contender)) for result in results]
    timed = [(result, row) for result, row in pairs if row is not None]
    if not timed:
        return None
    speed_ups = [result.speed_up(row) for result, row in timed]
    known = [ratio for ratio in speed_ups if ratio is not None]
    return Mean(
        contender,
        len(timed),
        statistics.geometric_mean(result.over_floor(row) for result, row in timed),
        len(known),
        statistics.geometric_mean(known) if known else None,
        min(known) if known else None,
    )


def plain_form(result: CaseResult, results: Sequence[CaseResult]) -> CaseResult | None:
    """The case of the run that `result` is another form of; `None` where it is the plain one.

    Forms differ in page size, capacity, dtype of K and V, contiguity and batch invariance alone.
    Plain is the one with fewest of these: paged by 16, in q's dtype, of the least capacity.
    """
    shape = _shape(result.case)
    plain = min((other for other in results if _shape(other.case) == shape), key=_oddity)
    return None if _oddity(plain) == _oddity(result) else plain


def _shape(case: AttentionCase) -> AttentionCase:
    return replace(
        case, page_size=16, kv_dtype=None, cache="paged", capacity=None, batch_invariant=False
    )


def _oddity(result: CaseResult) -> tuple[Any, ...]:
    case = result.case
    odd = (case.batch_invariant, case.contiguous, case.stored_dtype != case.dtype)
    return (sum(odd), *odd, abs(case.page_size - 16), case.page_size, case.max_tokens)


def over_plain(result: CaseResult, results: Sequence[CaseResult], contender: str) -> float | None:
    """The contender's time over its own in the plain form of the case."""
    plain = plain_form(result, results)
    mine = timed_row(result, contender)
    base = None if plain is None else timed_row(plain, contender)
    if mine is None or base is None:
        return None
    assert mine.timing is not None and base.timing is not None
    return mine.timing.p50_us / base.timing.p50_us


def subject(results: Sequence[CaseResult]) -> str | None:
    """Whose line a summary shows: the engine's, else the first route's that was timed."""
    names = [mean.contender for mean in means(results)]
    return ENGINE if ENGINE in names else (names[0] if names else None)


def summary_table(results: Sequence[CaseResult], contender: str) -> Table:
    """One row a case: the contender beside the floor, the best peer and the plain form."""
    table = Table(
        title=f"summary of {contender}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("case", no_wrap=True)
    for heading in ("KV MiB", "floor", "time", "× floor", "best peer", "vs peer", "× plain form"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(result.case.name, *_cells(result, results, contender))
    return table


def _cells(result: CaseResult, results: Sequence[CaseResult], contender: str) -> list[str]:
    row, best = timed_row(result, contender), result.best_peer()
    peer = "" if best is None or best.timing is None else format_us(best.timing.p50_us)
    cells = [f"{result.kv_bytes / MIB:.1f}", format_us(result.floor_us)]
    if row is None or row.timing is None:
        return [*cells, "", "", peer, "", ""]
    speed_up, ratio = result.speed_up(row), over_plain(result, results, contender)
    return [
        *cells,
        format_us(row.timing.p50_us),
        f"{result.over_floor(row):.3f}",
        peer,
        "" if speed_up is None else f"{speed_up:.3f}",
        "" if ratio is None else f"{ratio:.3f}",
    ]


def mean_lines(results: Sequence[CaseResult]) -> tuple[str, ...]:
    """One line a route that was timed."""
    lines = []
    for mean in means(results):
        text = f"{mean.contender}: {mean.over_floor:.3f} × floor over {mean.cases} cases"
        if mean.speed_up is not None:
            text += (
                f", {mean.speed_up:.3f} × as fast as the best peer over {mean.compared} "
                f"(least {mean.slowest:.3f})"
            )
        lines.append(f"geometric mean  {text}")
    return tuple(lines)


def print_summary(console: Console, results: Sequence[CaseResult]) -> None:
    """The table of the engine, or of the first route that was timed, and the means of all."""
    contender = subject(results)
    if contender is None:
        return
    console.print()
    console.print(summary_table(results, contender))
    for line in mean_lines(results):
        console.print(Text(f"  {line}"), soft_wrap=True)
