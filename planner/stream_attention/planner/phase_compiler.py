"""From rows of evidence to decisions: which contender a cell is served by, and why.

The rules, in order:

1. A row counts once `evidence_rules` accepts it, its cell was asked for, and it is of the one
   environment; of several of one contender the newest counts. Every other row is reported.
2. Each eligible baseline needs a row, of whatever outcome, or the cell is unresolved.
3. Only correct contenders compete. Of the peers, and of ours, those whose runs allocate nothing
   compete first; those that allocate compete only where none else is correct.
4. Native is chosen where the fastest correct native route ties or beats the best baseline by the
   interval of their paired ratio, and no portable route is faster. Without that pair the cell is
   unresolved: medians of separate runs decide nothing between us and a peer.
5. Else the portable route or the peer is chosen, and the native loss stays in the decision.

Ties go to native before portable before external, then by name.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stream_attention.core.statistics import median_interval
from stream_attention.planner.cell_requests import CellRequest
from stream_attention.planner.evidence import ROLES, EvidenceRow, PairRow
from stream_attention.planner.phase_db import CandidateOutcome, CellDecision, Ratio

LEVEL = 0.95
"""Of the interval of a paired ratio."""


@dataclass(frozen=True, slots=True)
class CellEvidence:
    """Rows of one cell that count, a contender and a pair once."""

    rows: tuple[EvidenceRow, ...] = ()
    pairs: tuple[PairRow, ...] = ()


def decide(request: CellRequest, evidence: CellEvidence, hold_out: bool = False) -> CellDecision:
    """The decision on one cell by the rules above."""
    candidates = tuple(sorted(map(outcome_of, evidence.rows), key=_order))
    ours, peers = competing(request, candidates)
    own, native, portable = best(ours), best(ours, "native"), best(ours, "portable")
    baseline = best(peers)
    known = {each.route for each in candidates}
    missing = [
        f"outcome of {name}" for name in (*request.baselines, *request.routes) if name not in known
    ]
    ratio: Ratio | None = None
    if native is not None and baseline is not None:
        ratio = _ratio(native.route, baseline.route, evidence.pairs)
        if ratio is None:
            missing.append(f"pair {native.route}:{baseline.route}")
    if own is None and baseline is None:
        missing.append("correct contender")
    chosen: CandidateOutcome | None = None
    if not missing:
        if native is not None and own is native and _holds(request, ratio):
            chosen = native
        else:
            chosen = best([each for each in (portable, baseline) if each is not None])
    fastest = min((each.us for each in (*ours, *peers)), default=None)
    return CellDecision(
        cell=request.cell,
        name=request.name,
        status="unresolved" if chosen is None else chosen.role,
        chosen="" if chosen is None else chosen.route,
        own="" if own is None else own.route,
        baseline="" if baseline is None else baseline.route,
        ratio=ratio,
        regret=_regret(chosen, fastest),
        # Before the cell is resolved the fastest may be one that is missing.
        own_regret=None if chosen is None else _regret(own, fastest),
        missing=tuple(missing),
        reason=_reason(request, evidence, candidates, chosen, own, native, baseline, ratio),
        hold_out=hold_out,
        candidates=candidates,
    )


def outcome_of(row: EvidenceRow) -> CandidateOutcome:
    """What a row says of its contender."""
    is_ok = row.outcome == "ok" and row.timing is not None
    return CandidateOutcome(
        route=row.requested,
        role=row.role,
        outcome=row.outcome,
        reasons=row.reasons,
        p50_us=statistics.median(row.timing.samples_us) if is_ok and row.timing else None,
        row=row.id,
        allocation_free=None if row.timed_allocations is None else row.timed_allocations == 0,
    )


def competing(
    request: CellRequest, candidates: Iterable[CandidateOutcome]
) -> tuple[list[CandidateOutcome], list[CandidateOutcome]]:
    """Ours and the eligible peers that are correct and, where any is, free of allocations."""
    correct = [each for each in candidates if each.outcome == "ok"]
    return (
        _allocation_free_first([each for each in correct if each.role != "external"]),
        _allocation_free_first(
            [e for e in correct if e.role == "external" and e.route in request.baselines]
        ),
    )


def best(candidates: Sequence[CandidateOutcome], role: str = "") -> CandidateOutcome | None:
    """The fastest of `candidates`, or of those with `role`; ties by role, then by name."""
    of_role = [each for each in candidates if role in ("", each.role)]
    return min(of_role, key=lambda each: (each.us, *_order(each)), default=None)


def _holds(request: CellRequest, ratio: Ratio | None) -> bool:
    """Whether native ties or beats the best baseline, or there is none."""
    return ratio is None or ratio.high <= 1 + request.tie_margin


def _order(candidate: CandidateOutcome) -> tuple[int, str]:
    return ROLES.index(candidate.role), candidate.route


def _allocation_free_first(correct: list[CandidateOutcome]) -> list[CandidateOutcome]:
    return [each for each in correct if each.allocation_free] or correct


def _regret(candidate: CandidateOutcome | None, fastest: float | None) -> float | None:
    if candidate is None or fastest is None:
        return None
    return candidate.us / fastest - 1


def _ratio(first: str, second: str, pairs: Iterable[PairRow]) -> Ratio | None:
    """The paired ratio of exactly these two; `None` without an ok pair of a bounded interval."""
    for pair in pairs:
        if (pair.first, pair.second) != (first, second) or pair.outcome != "ok":
            continue
        low, high = median_interval(pair.ratios, LEVEL)
        if not math.isfinite(high):  # too few pairs for the level
            continue
        return Ratio(
            first=first,
            second=second,
            p50=statistics.median(pair.ratios),
            low=low,
            high=high,
            level=LEVEL,
            num_pairs=len(pair.ratios),
            row=pair.id,
        )
    return None


def _reason(
    request: CellRequest,
    evidence: CellEvidence,
    candidates: Sequence[CandidateOutcome],
    chosen: CandidateOutcome | None,
    own: CandidateOutcome | None,
    native: CandidateOutcome | None,
    baseline: CandidateOutcome | None,
    ratio: Ratio | None,
) -> str:
    """The decision in words; who is out, and who was faster and did not compete, is never left
    out.
    """
    if chosen is None:
        words = ["not every outcome that decides is known"]
    elif chosen is native and ratio is None:
        asked = "no eligible baseline is correct here" if request.baselines else "asked for alone"
        words = [f"{chosen.route}: {asked}"]
    elif chosen is native:
        assert ratio is not None
        verb = "beats" if ratio.high < 1 else "ties"
        words = [f"{chosen.route} {verb} {ratio.second} ({_spelled(ratio)})"]
    elif own is chosen:
        words = [f"{chosen.route} is our fastest, and no baseline is faster"]
    else:
        words = [f"{chosen.route} is the fallback"]
    if native is not None and chosen is not None and chosen is not native:
        lost = f"native {native.route} is not chosen"
        if ratio is not None and not _holds(request, ratio):
            lost += f": neither beats nor ties {ratio.second} ({_spelled(ratio)})"
        elif own is not None:
            lost += f": {own.route} of ours takes {own.us:.4g} us, it {native.us:.4g}"
        words.append(lost)
    if native is not None and baseline is not None and ratio is None:
        words.extend(
            f"pair {pair.first}:{pair.second} is {pair.outcome}: "
            f"{'; '.join(pair.reasons) or f'{len(pair.ratios)} samples are too few'}"
            for pair in evidence.pairs
            if (pair.first, pair.second) == (native.route, baseline.route)
        )
    out = [f"{each.route} {each.outcome}" for each in candidates if each.outcome != "ok"]
    words += [f"out: {', '.join(out)}"] if out else []
    limit = chosen or own
    ours, peers = competing(request, candidates)
    for each in candidates:
        if each.outcome != "ok" or each in ours or each in peers or limit is None:
            continue
        if each.us < limit.us:
            why = "allocates" if each.role != "external" or each.route in request.baselines else ""
            words.append(f"faster, but {why or 'not eligible'}: {each.route} {each.us:.4g} us")
    return "; ".join(words)


def _spelled(ratio: Ratio) -> str:
    return (
        f"ratio {ratio.p50:.4f}, {ratio.low:.4f}..{ratio.high:.4f} at {ratio.level:.0%} "
        f"of {ratio.num_pairs} pairs"
    )
