"""Two contenders on one case in turns: which pairs a run asks for, and how one is run and printed.

Both are checked as single rows are, on outputs that were poisoned before the samples. They share
the pools, so that both read the same bytes.
"""

from __future__ import annotations

import difflib
import gc
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.text import Text

from stream_attention.bench.check import Check, judge_timed
from stream_attention.bench.contenders import PEER_POISON, Contender, Work
from stream_attention.bench.paired_timing import measure_pairs
from stream_attention.bench.provenance import versions_of
from stream_attention.bench.report import format_us
from stream_attention.bench.results import CaseResult, PairRow
from stream_attention.bench.runner import (
    Setting,
    build_works,
    lost_device,
    one_line,
    refusals,
    too_fast,
)
from stream_attention.core.errors import Faults
from stream_attention.core.registry import Registry, default_registry

BEST = "best"


@dataclass(frozen=True, slots=True)
class Pairing:
    """The pairs of a run. named: by name, the same in every case. best: each of our native routes
    beside the case's best peer, and beside the best whose runs allocate nothing: phase databases
    hold native against that one first.
    """

    named: tuple[tuple[str, str], ...] = ()
    best: bool = False

    def of(self, result: CaseResult, native: Collection[str]) -> tuple[tuple[str, str], ...]:
        """Pairs of names for a case whose rows are there. native: names of our native routes."""
        if not self.best:
            return self.named
        rivals = (result.best_peer(), result.best_peer(allocation_free=True))
        right = [r for r in result.rows if r.outcome == "ok" and r.contender in native]
        found = [(r.contender, peer.contender) for r in right for peer in rivals if peer]
        return tuple(dict.fromkeys((*self.named, *found)))


def parse_pairing(text: str | None, known: Mapping[str, Contender]) -> Pairing:
    """`None`, `best`, or `ROUTE:PEER` separated by commas. Raises `ValueError` with every fault."""
    faults, named, best = Faults(), [], False
    for part in () if text is None else text.split(","):
        first, colon, second = (piece.strip() for piece in part.partition(":"))
        if first == BEST and not colon:
            best = True
            continue
        if not colon or not first or not second:
            faults.add("--paired", part, "must be best or ROUTE:PEER", "--paired=best")
            continue
        for name in (first, second):
            if name not in known:
                close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
                rule = f"must name a contender out of {', '.join(known)}"
                faults.add("--paired", name, rule, close[0] if close else None)
        faults.require(first != second, "--paired", part, "must name two contenders", BEST)
        named.append((first, second))
    faults.raise_if_any()
    return Pairing(tuple(dict.fromkeys(named)), best)


def native_routes(registry: Registry | None = None) -> frozenset[str]:
    """Names of the routes that are this project's own architecture kernels."""
    registry = default_registry() if registry is None else registry
    return frozenset(record.route for record in registry.attention_records() if record.native)


def run_pair(first: Contender, second: Contender, setting: Setting) -> PairRow:
    """Both in turns, then both checked: always a row. What fails says whose fault it is."""
    begin = time.monotonic()
    with setting.spent.on("timing"):
        row = _try(first, second, setting)
        gc.collect()
    versions = versions_of(first, second)
    return replace(row, seconds=time.monotonic() - begin, versions=versions)


def _try(first: Contender, second: Contender, setting: Setting) -> PairRow:
    row = PairRow(setting.case, first.name, second.name, "failed", ("not run",))
    works: list[list[Work]] = []
    at = first.name
    try:
        reasons: list[str] = []
        for contender in (first, second):
            at = contender.name
            found = refusals(contender, setting.case, setting.device, setting.settings.graph)
            reasons += [f"{contender.name}: {reason}" for reason in found]
        if reasons:
            return replace(row, outcome="unsupported", reasons=tuple(reasons))
        # One filling for both: NaN is for those that promised not to look at it.
        fills = {contender.unused_fill for contender in (first, second)}
        for pool in setting.pools:
            pool.fill_unused(PEER_POISON if PEER_POISON in fills else first.unused_fill)
        for contender in (first, second):
            at = contender.name
            works.append(build_works(contender, setting))
        at = "pair"
        return _time(row, works[0], works[1], setting)
    except (Exception, SystemExit) as error:  # whatever a contender raises is the pair's outcome
        reason = f"{at}: {one_line(error)}"
        del error
        works.clear()
        gc.collect()
        return replace(row, reasons=(reason, *lost_device(setting.device)))


def _time(row: PairRow, ours: list[Work], theirs: list[Work], setting: Setting) -> PairRow:
    settings = setting.settings

    def poison() -> None:
        for work in (*ours, *theirs):
            work.poison()

    timing = measure_pairs(
        [work.run for work in ours],
        [work.run for work in theirs],
        device=setting.device,
        cold=settings.cold,
        graph=settings.graph,
        pairs=settings.pairs,
        max_seconds=settings.max_seconds,
        before_samples=poison,
    )
    names = (row.first, row.second)
    checks: list[Check | None] = [None, None]
    reasons = []
    if setting.expected:
        verdicts = [judge_timed(w, setting.pools, setting.expected) for w in (ours, theirs)]
        checks = [*verdicts]
        bad = [(name, v) for name, v in zip(names, verdicts, strict=True) if not v.ok]
        reasons += [f"{name}: after the timed runs: {verdict.message}" for name, verdict in bad]
    for name, side in zip(names, (timing.first, timing.second), strict=True):
        if side.p50_us < setting.least_us:
            reasons.append(f"{name}: {too_fast(side, setting.least_us)}")
    return replace(
        row,
        outcome="wrong" if reasons else "ok",
        reasons=tuple(reasons),
        timing=timing,
        checks=(checks[0], checks[1]),
        resolved=(ours[0].resolved or row.first, theirs[0].resolved or row.second),
    )


def print_pairs(console: Console, pairs: Sequence[PairRow]) -> None:
    """A line a pair: ratio of times, its interval and the medians, or why there is none."""
    for pair in pairs:
        console.print(Text(f"  in turns: {pair_line(pair)}"), soft_wrap=True)


def pair_line(pair: PairRow) -> str:
    """`ours / peer = 0.931 [0.925, 0.940] (95 %, 50 pairs; 12.1 us / 13.0 us)`."""
    names = f"{pair.first} / {pair.second}"
    if pair.outcome != "ok" or pair.timing is None:
        return f"{names}: {pair.outcome}: {'; '.join(pair.reasons)}"
    low, high = pair.timing.confidence_interval()
    interval = f"[{low:.3f}, {high:.3f}] (95 %, {pair.timing.n} pairs"
    if not math.isfinite(high):
        interval = f"(too few for an interval at 95 %: {pair.timing.n} pairs"
    sides = (pair.timing.first, pair.timing.second)
    medians = " / ".join(format_us(side.p50_us) for side in sides)
    return f"{names} = {pair.timing.ratio_p50:.3f} {interval}; {medians})"
