"""Evidence as a page: time against floor, speed-up over peers, losses, ranges, environment.

    ./bazelw run //bench:evidence_report -- --phase_db=sm90.json --out_dir=report
    ./bazelw run //bench:evidence_report -- --evidence=FOLDER --out_dir=report

Writes OUT_DIR/index.html, which needs nothing beside it, and its plots as PNG files; prints a
summary. Without --phase_db: the database that is installed for --arch. Floors are in the rows of
--evidence; without them the plots over the floor are left out.

Exit status: 0; 2 for bad flags or files; 4 when a file could not be written; 5 when the summary
could not be printed; 130 when interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import app, flags
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stream_attention.bench import flag_types, report
from stream_attention.bench.output import UNWRITTEN
from stream_attention.bench.report_data import (
    ReportData,
    format_bytes,
    format_ratio,
    format_time,
    report_data,
)
from stream_attention.bench.report_page import page, summary_lines
from stream_attention.bench.report_plots import plots
from stream_attention.bench.screen import UNPRINTED, Screen, Unprintable, say, say_interrupted
from stream_attention.core.atomic_files import replace_file
from stream_attention.core.user_paths import user_path
from stream_attention.planner.evidence import EvidenceRow
from stream_attention.planner.evidence_store import EvidenceStore, EvidenceStoreError
from stream_attention.planner.phase_db import ARCHS, PhaseDatabase, load, shipped

FLAGS = flags.FLAGS
PROGRAM = "evidence_report"


def define_flags(values: flags.FlagValues) -> None:
    """Register this binary's flags in `values`."""
    define = flag_types.FlagDefiner(values)
    define.text("phase_db", None, "File of a phase database (default: the one installed).")
    define.choice("arch", "sm_90", ARCHS, "Whose installed database to show.")
    define.text("evidence", None, "Folder of evidence, for the floors.")
    define.text("out_dir", None, "Folder for index.html and the plots; made where it is missing.")


def resolve(values: flags.FlagValues) -> tuple[ReportData, Path]:
    """What to show and where to write it. Raises `ValueError` for bad flags and bad files."""
    if not values.out_dir:
        raise ValueError(f"--out_dir={values.out_dir!r}: must name a folder; use report")
    out = _given(values.out_dir)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out_dir={values.out_dir!r}: is a file; use another name")
    rows: list[EvidenceRow] = []
    if values.evidence is not None:
        folder = _given(values.evidence)
        if not folder.is_dir():
            raise ValueError(f"--evidence={values.evidence!r}: must be a folder of evidence")
        rows = [row for row in EvidenceStore(folder).rows() if isinstance(row, EvidenceRow)]
    return report_data(_database(values), rows), out


def _given(text: str) -> Path:
    """A path relative to where the user stands, also under `bazel run`."""
    return user_path(text)


def _database(values: flags.FlagValues) -> PhaseDatabase:
    if values.phase_db is not None:
        try:
            return load(_given(values.phase_db))
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"--phase_db={values.phase_db!r}: cannot be read ({reason})") from None
    found = shipped(values.arch)
    if found is None:
        raise ValueError(f"--arch={values.arch}: no database is installed for it; use --phase_db")
    return found


def write(data: ReportData, out: Path) -> tuple[Path, ...]:
    """index.html and its plots below `out`, each whole or as before. Raises `OSError`."""
    out.mkdir(parents=True, exist_ok=True)
    drawn = plots(data)
    files = {**drawn, "index.html": page(data, drawn).encode()}
    for name, content in files.items():
        replace_file(out / name, content)
    return tuple(out / name for name in files)


def print_summary(console: Console, data: ReportData, files: Sequence[Path]) -> None:
    """A line a cell, losses in red, then what it comes to and the files."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("cell", "K and V", "floor, us", "ours", "us", "× floor", "best peer", "us"):
        table.add_column(name, justify="left" if name in ("cell", "ours", "best peer") else "right")
    table.add_column("speed-up", justify="right")
    table.add_column("decision")
    for cell in data.cells:
        own, peer = cell.own, cell.peer
        table.add_row(
            Text(cell.name),
            format_bytes(cell.kv_bytes),
            format_time(cell.floor_us),
            own.route if own else "–",
            format_time(own.p50_us if own else None),
            format_ratio(cell.over_floor(own) if own else None),
            peer.route if peer else "–",
            format_time(peer.p50_us if peer else None),
            format_ratio(cell.speed_up),
            cell.decision.status,
            style="red" if cell.is_loss else "",
        )
    console.print(table)
    for cell in data.unresolved:
        missing = ", ".join(cell.decision.missing)
        console.print(Text(f"unresolved: {cell.name}: missing {missing}"), soft_wrap=True)
    for line in (*summary_lines(data), f"page: {files[-1]}"):
        console.print(Text(line), soft_wrap=True)


def main(argv: Sequence[str], values: flags.FlagValues = FLAGS) -> int:
    """Read, draw, write, print; gives the exit status."""
    try:
        try:
            flag_types.refuse_arguments(argv)
            data, out = resolve(values)
        except (ValueError, EvidenceStoreError) as error:
            say(f"{PROGRAM}: {error}")
            return 2
        try:
            files = write(data, out)
        except OSError as error:
            say(f"{PROGRAM}: --out_dir={str(out)!r}: could not be written ({error})")
            return UNWRITTEN
        screen = Screen(PROGRAM, report.make_console(), kept=True)
        screen.show(print_summary, data, files)
    except KeyboardInterrupt:
        return say_interrupted(PROGRAM)
    except Unprintable:
        return UNPRINTED
    return UNPRINTED if screen.error else 0


if __name__ == "__main__":
    define_flags(FLAGS)
    app.run(main, flags_parser=flag_types.parse_flags)
