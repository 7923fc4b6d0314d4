"""Compiles the phase databases of all architectures from a folder of evidence.

    python -m stream_attention.planner.compile_phase_db EVIDENCE --cells=FILE --output_dir=DIR

EVIDENCE is a folder as `evidence_store` keeps it, FILE what `cell_requests.dumps` writes. Writes
`sm80.json`, `sm90.json` and `sm100.json`, each whole or as it was, none where one cannot be made;
prints what was decided, what is missing, which rows did not count, and the regret of the models.
The same evidence gives the same bytes. Exits with 2 where the input cannot be used, also where
there are rows of an architecture and none of them counts: its database would say nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from stream_attention.core.errors import Fault, Faults
from stream_attention.core.user_paths import user_path
from stream_attention.planner import cell_requests
from stream_attention.planner.evidence import Row
from stream_attention.planner.evidence_finding import COMMIT_FORM, is_commit
from stream_attention.planner.evidence_rules import Context
from stream_attention.planner.evidence_store import EvidenceStore, EvidenceStoreError
from stream_attention.planner.phase_build import HOLD_OUT_SHARE, NOT_ASKED, SALT, compile_database
from stream_attention.planner.phase_db import (
    ARCHS,
    STATUSES,
    PhaseDatabase,
    Regret,
    RegretSummary,
    file_of,
)

UNUSABLE = 2  # exit status where the input cannot be used, as argparse has it


def compile_all(
    evidence: Path,
    cells: Path,
    *,
    commit: str | None = None,
    salt: str = SALT,
    hold_out_share: float = HOLD_OUT_SHARE,
) -> tuple[PhaseDatabase, ...]:
    """The database of each of `ARCHS`.

    commit: the source that rows must be of; `None` = any one. Raises `OSError`, `ValueError` and
    `EvidenceStoreError` for what cannot be read or may not count together, and where none counts of
    the rows of an architecture.
    """
    context = Context(commit=commit)
    try:
        text = cells.read_bytes()
    except FileNotFoundError:
        rule = "there is no such file; use what record_evidence --cells writes"
        raise ValueError(f"--cells={str(cells)!r}: {rule}") from None
    requests = cell_requests.loads(text, str(cells))
    store = EvidenceStore(evidence)
    rows, files = store.rows(), store.files()
    databases = tuple(
        compile_database(
            arch,
            rows,
            cell_requests.of_arch(requests, arch),
            context=context,
            salt=salt,
            hold_out_share=hold_out_share,
            evidence=[each for each in files if each[0].startswith(f"{arch}-")],
        )
        for arch in ARCHS
    )
    _check_that_rows_count(databases, rows, commit)
    return databases


def _check_that_rows_count(
    databases: Sequence[PhaseDatabase], rows: Sequence[Row], commit: str | None
) -> None:
    """Raise `ValueError` for every database that would be empty though there are rows for it.

    Rows of cells that nobody asked for are not for it, unless their source was asked for by name.
    """
    faults = Faults()
    for database in databases:
        refused = [
            each
            for each in database.refused
            if commit is not None or not any(why.startswith(NOT_ASKED) for why in each.reasons)
        ]
        if database.environment is not None or not refused:
            continue
        reasons = Counter(why.partition(":")[0] for each in refused for why in each.reasons)
        why = ", ".join(f"{name} {count}" for name, count in reasons.most_common())
        sources = {row.commit for row in rows if row.environment.arch == database.arch}
        rule = f"none of the {len(refused)} rows of {database.arch} counts ({why}), of commit"
        faults.add("commit", commit, f"{rule} {' or '.join(sorted(sources)[:4])}")
    faults.raise_if_any("nothing is written")


def summary(database: PhaseDatabase) -> str:
    """What was decided, in words: a line a fact."""
    return "\n".join(_summary(database))


def _summary(database: PhaseDatabase) -> Iterator[str]:
    counts = Counter(cell.status for cell in database.cells)
    decided = ", ".join(f"{counts[status]} {status}" for status in STATUSES)
    device = database.environment.device if database.environment else "no evidence"
    yield f"{database.arch} ({device}): {len(database.cells)} cells: {decided}"
    for cell in database.cells:
        missing = f"; missing: {', '.join(cell.missing)}" if cell.missing else ""
        yield f"  {cell.name}: {cell.chosen or 'unresolved'}: {cell.reason}{missing}"
    for refused in database.refused:
        yield f"  refused {refused.row} ({refused.contender}): {'; '.join(refused.reasons)}"
    for model in database.models:
        errors = "not enough to leave out"
        if model.error_p50 is not None and model.error_max is not None:
            errors = f"off by {model.error_p50:.1%}, at most {model.error_max:.1%}"
        yield f"  model {model.route}, {len(model.points)} cells, {model.family}: {errors}"
    for name, regret in (("ours", database.own_regret), ("all", database.all_regret)):
        yield f"  regret among {name}: {_spelled(regret)}"


def _spelled(summary: RegretSummary) -> str:
    parts = {
        "calibration": summary.calibration,
        "hold-out": summary.hold_out,
        "leave one out": summary.leave_one_out,
    }
    return "; ".join(f"{name}: {_figures(regret)}" for name, regret in parts.items())


def _figures(regret: Regret) -> str:
    outside = f", {regret.num_outside} outside" if regret.num_outside else ""
    if regret.geometric_mean is None or regret.worst is None:
        return f"no cells{outside}"
    return (
        f"{regret.geometric_mean:.2%} over {regret.num_cells} cells{outside}, "
        f"worst {regret.worst:.2%} ({regret.worst_cell})"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compile_phase_db", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("evidence", type=user_path, help="folder of evidence")
    parser.add_argument(
        "--cells", type=user_path, required=True, help="file of the cells to decide"
    )
    parser.add_argument("--output_dir", type=user_path, required=True, help="folder to write to")
    parser.add_argument("--commit", help="count rows of this source alone")
    parser.add_argument(
        "--salt", default=SALT, help="names the split into calibration and hold-out"
    )
    parser.add_argument("--hold_out_share", type=float, default=HOLD_OUT_SHARE)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    flags = _parser().parse_args(arguments)
    try:
        if flags.commit is not None and not is_commit(flags.commit):
            raise ValueError(str(Fault("--commit", flags.commit, COMMIT_FORM, "git rev-parse")))
        if not flags.output_dir.is_dir():
            shown = str(flags.output_dir)
            raise ValueError(f"--output_dir={shown!r}: must be a folder; mkdir -p {shown}")
        databases = compile_all(
            flags.evidence,
            flags.cells,
            commit=flags.commit,
            salt=flags.salt,
            hold_out_share=flags.hold_out_share,
        )
        for database in databases:
            database.save(flags.output_dir / file_of(database.arch))
    except (OSError, ValueError, EvidenceStoreError) as error:
        print(f"compile_phase_db: {error}", file=sys.stderr)
        return UNUSABLE
    for database in databases:
        print(summary(database))
    rows = Counter(row.environment.arch for row in EvidenceStore(flags.evidence).rows())
    for arch in sorted(set(rows) - set(ARCHS)):
        print(f"{rows[arch]} rows are of {arch}: no database is made of those")
    for database in databases:
        resolved = sum(cell.status != "unresolved" for cell in database.cells)
        counted = f"{resolved} of {len(database.cells)} cells decided"
        print(f"{database.arch}: {counted}; wrote {flags.output_dir / file_of(database.arch)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
