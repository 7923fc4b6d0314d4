"""Runs of the bench become evidence: `record_evidence --run=run.json --evidence=FOLDER`.

    ./bazelw run //bench:paged_decode -- --suite=evidence --isolate --paired=best --json=run.json
    ./bazelw run //bench:record_evidence -- --run=run.json --evidence=evidence --cells=cells.json
    python -m stream_attention.planner.compile_phase_db evidence --cells=cells.json --output_dir=DIR

Adds the rows and pairs of each run to the folder, those that are there already left out, and writes
with --cells which cells are to be decided and by which baselines: every peer that the runs name.
Rows that no database would count are refused by name and rule, and not added.

Exit status: 0; 1 when a row was refused; 2 for bad flags or files; 4 when the folder or the file
could not be written; 130 when interrupted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from absl import app, flags

from stream_attention.bench import flag_types, resume
from stream_attention.bench.evidence_rows import cell_of, evidence_of
from stream_attention.bench.manifest import Manifest, exact_cells
from stream_attention.bench.output import UNWRITTEN
from stream_attention.bench.results import Run
from stream_attention.bench.routes import ENGINE
from stream_attention.bench.screen import say, say_interrupted
from stream_attention.core.atomic_files import replace_file
from stream_attention.core.user_paths import user_path
from stream_attention.planner import cell_requests
from stream_attention.planner.cell_requests import CellRequest
from stream_attention.planner.cells import Cell
from stream_attention.planner.evidence import EvidenceRow, Row
from stream_attention.planner.evidence_rules import Context, refusals
from stream_attention.planner.evidence_store import EvidenceStore, EvidenceStoreError

FLAGS = flags.FLAGS
PROGRAM = "record_evidence"


def requests_of(runs: Iterable[Run], manifest: Manifest | None = None) -> tuple[CellRequest, ...]:
    """A request a case and architecture: its baselines are all peers that some run there asked on
    it, its routes ours. The engine is no route of its own.

    manifest: cells to be decided whether they ran or not, each for the architectures that it is
    declared for, with their baselines and weights added to what ran.
    """
    found: dict[tuple[str, str], CellRequest] = {}
    for run in runs:
        arch = run.environment.arch
        peers, routes = (_names(run, kind) for kind in ("peer", "route"))
        for result in run.cases:
            cell = cell_of(result.case)
            asked = CellRequest(
                cell=cell, name=result.case.name, baselines=peers, routes=routes, archs=(arch,)
            )
            _join(found, asked)
    for declared in () if manifest is None else manifest.cells:
        batch = declared.batch
        cell = Cell(problem=batch.problem(), qo_lens=batch.qo_lens, kv_lens=batch.kv_lens)
        for arch in declared.archs:
            asked = CellRequest(
                cell=cell,
                name=declared.name,
                baselines=declared.baselines_on(arch),
                weight=sum(declared.weights.values()) or 1.0,
                archs=(arch,),
            )
            _join(found, asked)
    return tuple(found.values())


def _join(found: dict[tuple[str, str], CellRequest], asked: CellRequest) -> None:
    """Add a request, or what it asks to the one of the same cell and architecture."""
    key = (asked.cell.digest, asked.archs[0])
    if (known := found.get(key)) is None:
        found[key] = asked
        return
    found[key] = dataclasses.replace(
        known,
        baselines=tuple(dict.fromkeys((*known.baselines, *asked.baselines))),
        routes=tuple(dict.fromkeys((*known.routes, *asked.routes))),
        weight=max(known.weight, asked.weight),
    )


def _names(run: Run, kind: str) -> tuple[str, ...]:
    """Contenders of `kind` that a run asked on any case."""
    rows = (row for result in run.cases for row in result.rows)
    names = dict.fromkeys(row.contender for row in rows if row.kind == kind)
    return tuple(name for name in names if name != ENGINE)


def _spelled(row: Row) -> str:
    who = row.requested if isinstance(row, EvidenceRow) else f"{row.first}:{row.second}"
    return f"{who} on cell {row.cell.digest[:16]}"


def record(run: Run, store: EvidenceStore) -> tuple[int, tuple[str, ...]]:
    """Add what `run` says and `store` has not; gives how many rows, and what was refused and why.

    Raises `EvidenceStoreError`, `ValueError` and `OSError`.
    """
    known = {row.id for row in store.rows()} if store.path.is_dir() else set()
    fresh: list[Row] = []
    refused = []
    for row in evidence_of(run):
        faults = refusals(row, Context())
        if faults:
            why = "; ".join(f"{fault.rule}: {fault.message}" for fault in faults)
            refused.append(f"{_spelled(row)}: {why}")
        elif row.id not in known:
            fresh.append(row)
    if fresh:
        store.append(fresh)
    return len(fresh), tuple(refused)


def define_flags(values: flags.FlagValues) -> None:
    """Register this binary's flags in `values`."""
    define = flag_types.FlagDefiner(values)
    define.names("run", "Files that paged_decode wrote with --json.")
    define.text("evidence", None, "Folder of evidence; made where it is missing.")
    define.text("cells", None, "File to write the cells to, for compile_phase_db.")
    define.switch("manifest", False, "Have the manifest's cells decided too, run or not.")


def _given(text: str) -> Path:
    """A path relative to where the user stands, also under `bazel run`."""
    return user_path(text)


def _runs(values: flags.FlagValues) -> list[Run]:
    if not values.run:
        raise ValueError("--run: must name a file of paged_decode; use --run=run.json")
    if not values.evidence:
        raise ValueError(f"--evidence={values.evidence!r}: must name a folder; use evidence")
    runs = []
    for name in values.run:
        run = resume.load(_given(name), "--run", "a file that paged_decode wrote with --json")
        if run is None:
            raise ValueError(f"--run={name!r}: there is no such file; use --run=run.json")
        try:  # before anything is added of any run
            evidence_of(run)
        except ValueError as error:
            raise ValueError(f"--run={name!r}: {error}") from None
        runs.append(run)
    return runs


def main(argv: Sequence[str], values: flags.FlagValues = FLAGS) -> int:
    """Read, add, write; gives the exit status."""
    try:
        flag_types.refuse_arguments(argv)
        runs = _runs(values)
    except ValueError as error:
        say(f"{PROGRAM}: {error}")
        return 2
    status = 0
    try:
        folder = _given(values.evidence)
        folder.mkdir(parents=True, exist_ok=True)
        store = EvidenceStore(folder)
        for name, run in zip(values.run, runs, strict=True):
            added, refused = record(run, store)
            print(f"{name}: {added} rows added, {len(refused)} refused")
            for line in refused:
                print(f"  refused {line}")
                status = 1
        if values.cells is not None:
            requests = requests_of(runs, exact_cells() if values.manifest else None)
            replace_file(_given(values.cells), cell_requests.dumps(requests).encode())
    except ValueError as error:
        say(f"{PROGRAM}: {error}")
        return 2
    except (EvidenceStoreError, OSError) as error:
        say(f"{PROGRAM}: {error}")
        return UNWRITTEN
    except KeyboardInterrupt:
        return say_interrupted(PROGRAM)
    return status


if __name__ == "__main__":
    define_flags(FLAGS)
    app.run(main, flags_parser=flag_types.parse_flags)
