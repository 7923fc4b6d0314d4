"""From rows of evidence and a list of cells to the phase database of one architecture.

A pure function of its inputs: rows in any order, and any number of times, give the same bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stream_attention.planner.cell_requests import CellRequest, check_distinct
from stream_attention.planner.evidence import EvidenceRow, Fingerprint, PairRow, Row
from stream_attention.planner.evidence_rules import (
    CELL_RULES,
    SET_RULES,
    Context,
    check_set,
    latest,
    refusals,
)
from stream_attention.planner.phase_compiler import CellEvidence, decide
from stream_attention.planner.phase_db import PhaseDatabase, RefusedRow
from stream_attention.planner.phase_regret import Judged, models_of, regrets
from stream_attention.planner.split import HOLD_OUT, assignment

SALT = "phase_db"
HOLD_OUT_SHARE = 0.25
NOT_ASKED = "cell"
"""What a row is refused by whose cell nobody asked for, before the colon."""


@dataclass(slots=True)
class _Sifted:
    """Rows that count, and why the others do not."""

    rows: tuple[Row, ...] = ()
    environment: Fingerprint | None = None
    refused: list[RefusedRow] = field(default_factory=list)

    def refuse(self, row: Row, *reasons: str) -> None:
        contender = f"{row.first}:{row.second}" if isinstance(row, PairRow) else row.requested
        self.refused.append(
            RefusedRow(row=row.id, contender=contender, cell=row.cell.digest[:16], reasons=reasons)
        )


def compile_database(
    arch: str,
    rows: Iterable[Row],
    requests: Sequence[CellRequest],
    *,
    context: Context | None = None,
    salt: str = SALT,
    hold_out_share: float = HOLD_OUT_SHARE,
    evidence: Iterable[tuple[str, str]] = (),
) -> PhaseDatabase:
    """The database of `arch`: a decision a request, and models of the calibration cells.

    rows: of any architecture; those of others are not for this database. context: what rows are
    judged against; its environment is by default the one with the most good rows. evidence: (file,
    SHA-256) of where rows come from. Raises `ValueError` for requests that are there twice, and
    where rows that are good one by one may not count together.
    """
    check_distinct(requests)
    ordered = sorted(requests, key=lambda each: each.name)
    sifted = _sift(arch, rows, ordered, context or Context())
    evidence_of = _by_cell(sifted.rows)
    judged = [
        Judged(
            request,
            decide(
                request,
                evidence_of.get(request.cell.digest, CellEvidence()),
                assignment(request.cell.digest, salt, hold_out_share) == HOLD_OUT,
            ),
        )
        for request in ordered
    ]
    models = models_of(judged)
    own_regret, all_regret = regrets(judged, models)
    return PhaseDatabase(
        arch=arch,
        environment=sifted.environment,
        cells=tuple(each.decision for each in judged),
        models=models,
        evidence=tuple(sorted(set(evidence))),
        commit=",".join(sorted({row.commit for row in sifted.rows})),
        compiled_at=max((row.taken_at for row in sifted.rows), default=""),
        own_regret=own_regret,
        all_regret=all_regret,
        refused=tuple(sorted(sifted.refused, key=lambda each: (each.cell, each.row))),
    )


def _sift(
    arch: str, rows: Iterable[Row], requests: Sequence[CellRequest], context: Context
) -> _Sifted:
    sifted = _Sifted()
    asked = {each.cell.digest for each in requests}
    # By id: the same row twice is one row, and the order of the rows does not count.
    here = {row.id: row for row in rows if row.environment.arch == arch}
    good: list[Row] = []
    for _, row in sorted(here.items()):
        reasons = [str(each) for each in refusals(row, context)]
        if row.cell.digest not in asked:
            reasons.append(f"{NOT_ASKED}: is not among those that were asked for")
        if reasons:
            sifted.refuse(row, *reasons)
        else:
            good.append(row)
    if not good:
        return sifted
    counts = Counter(row.environment for row in good)
    environment = max(counts, key=lambda each: (counts[each], each.digest))
    same = []
    for row in good:
        if row.environment == environment:
            same.append(row)
        else:
            differs = "; ".join(row.environment.differences(environment))
            sifted.refuse(row, f"environment: is not that of most rows: {differs}")
    kept, superseded = latest(same)
    for row in superseded:
        sifted.refuse(row, "superseded: the same was measured again later")
    sound = _sound(kept, context, sifted)
    if sound:
        sifted.environment = environment
        sifted.rows = tuple(sound)
    return sifted


def _sound(kept: Sequence[Row], context: Context, sifted: _Sifted) -> Sequence[Row]:
    """The rows but those of cells that break one of `CELL_RULES`, refused with the reason.

    One bad row costs its cell and not the database, as a store keeps every row for good. Raises
    `ValueError` where a rule of the whole set is broken.
    """
    verdict = check_set(kept, context)
    if any(each.rule not in CELL_RULES for each in verdict.refusals):
        verdict.rows()
    rules = [rule for rule in SET_RULES if rule.name in CELL_RULES]
    by_cell: defaultdict[str, list[Row]] = defaultdict(list)
    for row in kept:
        by_cell[row.cell.digest].append(row)
    sound: list[Row] = []
    for rows in by_cell.values():
        reasons = [str(each) for each in check_set(rows, context, rules).refusals]
        if reasons:
            for row in rows:
                sifted.refuse(row, *reasons)
        else:
            sound += rows
    return sound


def _by_cell(rows: Iterable[Row]) -> dict[str, CellEvidence]:
    singles: defaultdict[str, list[EvidenceRow]] = defaultdict(list)
    pairs: defaultdict[str, list[PairRow]] = defaultdict(list)
    for row in rows:
        if isinstance(row, PairRow):
            pairs[row.cell.digest].append(row)
        else:
            singles[row.cell.digest].append(row)
    return {
        cell: CellEvidence(tuple(singles[cell]), tuple(pairs[cell]))
        for cell in {**singles, **pairs}
    }
