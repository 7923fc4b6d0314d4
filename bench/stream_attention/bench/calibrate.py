"""Calibrates this machine: measures routes, keeps the evidence, compiles a phase database.

    ./bazelw run //bench:calibrate -- --out_dir=calibration
    ./bazelw run //bench:calibrate -- --out_dir=mine --suite=performance_decode
    python -m stream_attention.bench.calibrate --out_dir=calibration

Takes the flags of `paged_decode` too. Measures the cases of --suite (default: evidence) with every
route of ours and every peer that is installed, first alone and then in turns, and, where no flag
names cases, those of evidence_grid with our routes alone. Checks all against the oracle, adds the
rows to OUT_DIR/evidence and writes OUT_DIR/phase_db/sm90.json or such:

    engine = StreamAttnEngine(phase_db="calibration/phase_db/sm90.json")

Called again after an interruption it goes on where it was stopped; what was measured is kept in
OUT_DIR/run.json and grid.json. Called again when it is done, with the same flags, it measures
nothing. The database is written whole, or stays as it was.

Exit status: that of `paged_decode` where it is not 0 or 1; else 0, 1 when a route of ours failed,
was wrong or was refused as evidence, 2 for bad flags, 4 when a file could not be written.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import app, flags

from stream_attention.bench import decode_flags, flag_types, paged_decode, resume
from stream_attention.bench.output import UNWRITTEN
from stream_attention.bench.record_evidence import record, requests_of
from stream_attention.bench.results import Run
from stream_attention.bench.screen import say, say_interrupted
from stream_attention.core.user_paths import user_path
from stream_attention.planner.compile_phase_db import summary
from stream_attention.planner.evidence_rules import Context
from stream_attention.planner.evidence_store import EvidenceStore, EvidenceStoreError
from stream_attention.planner.phase_build import compile_database
from stream_attention.planner.phase_db import PhaseDatabase, file_of

FLAGS = flags.FLAGS
PROGRAM = "calibrate"
RUN, GRID, EVIDENCE, DATABASES = "run.json", "grid.json", "evidence", "phase_db"
LOCK = ".lock"
_MEASURED = (0, 1)  # statuses of paged_decode with a file of results


def define_flags(values: flags.FlagValues) -> None:
    """Register this binary's flags in `values`."""
    decode_flags.define_flags(values)
    flag_types.FlagDefiner(values).text("out_dir", None, "Folder for what is measured and made.")


def compiled(runs: Sequence[Run], folder: Path) -> tuple[Path, PhaseDatabase, tuple[str, ...]]:
    """Keep the evidence of `runs` below `folder` and compile all that lies there.

    runs: of one machine and commit. Gives the database with its file, and what was refused. Raises
    `OSError`, `ValueError` and `EvidenceStoreError`.
    """
    arch, commit = runs[0].environment.arch, runs[0].environment.commit
    evidence, databases = folder / EVIDENCE, folder / DATABASES
    evidence.mkdir(parents=True, exist_ok=True)
    databases.mkdir(exist_ok=True)
    store = EvidenceStore(evidence)
    refused = [line for run in runs for line in record(run, store)[1]]
    database = compile_database(
        arch,
        store.rows(),
        requests_of(runs),
        context=Context(commit=commit),
        evidence=[each for each in store.files() if each[0].startswith(f"{arch}-")],
    )
    path = databases / file_of(arch)
    database.save(path)
    return path, database, tuple(refused)


def _folder(values: flags.FlagValues) -> Path:
    """The folder of --out_dir, made; what the other flags may not say is refused."""
    if not values.out_dir:
        raise ValueError(f"--out_dir={values.out_dir!r}: must name a folder; use calibration")
    if values.json is not None:
        raise ValueError(f"--json={values.json!r}: is OUT_DIR/{RUN} here; leave it out")
    for name in ("eager", "warm"):
        if getattr(values, name):
            raise ValueError(f"--{name}: evidence is of cold graph replays alone; leave it out")
    if not values.check:
        raise ValueError("--nocheck: evidence is checked against the oracle; leave it out")
    asked = "cuda" if values.device == "auto" else values.device  # says why there is none
    device = paged_decode.chosen_device(asked)
    if device.type != "cuda":
        raise ValueError(
            f"--device={device.type}: phase databases are of CUDA devices; use cuda where there is "
            "one"
        )
    folder = user_path(values.out_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out_dir={values.out_dir!r}: cannot be made ({error})") from None
    return folder


def _load(path: Path) -> Run | None:
    return resume.load(path, "--out_dir", "another folder")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder: two at once would overwrite each other's results. Raises `ValueError`."""
    named = f"--out_dir={str(folder)!r}"
    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ValueError(f"{named}: cannot be written ({error.strerror}); use another") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            rule = "another calibration is at work there; wait for its end, or use another folder"
            raise ValueError(f"{named}: {rule}") from None
        except OSError as error:
            raise ValueError(f"{named}: cannot be locked ({error.strerror}); use another") from None
        yield
    finally:
        os.close(handle)


def main(argv: Sequence[str], values: flags.FlagValues = FLAGS) -> int:
    """Measure or go on, record, compile; gives the exit status."""
    with contextlib.ExitStack() as held:
        return _main(argv, values, held)


def _main(argv: Sequence[str], values: flags.FlagValues, held: contextlib.ExitStack) -> int:
    """The same; what is held until the end goes to `held`."""
    try:
        flag_types.refuse_arguments(argv)
        folder = _folder(values).resolve()
        held.enter_context(_locked(folder))
        shapes = (getattr(values, name) for name in decode_flags.SHAPE_FLAGS)
        is_whole = values.suite is None and all(value is None for value in shapes)
        files = [folder / RUN, folder / GRID][: 2 if is_whole else 1]
        if not is_whole and (folder / GRID).exists():  # its cells would leave the database
            raise ValueError(
                f"--out_dir={values.out_dir!r}: has {GRID}, which this run leaves out; leave "
                "--suite and shapes out, or use another folder"
            )
        for path in files:
            _load(path)  # a file that is none is this command's, before it is that of --json
    except ValueError as error:
        say(f"{PROGRAM}: {error}")
        return 2
    worst = 0
    for path in files:
        _aim(values, path, is_whole)
        status = paged_decode.main(argv, values)
        if status not in _MEASURED:
            return status
        worst = max(worst, status)
    return _finish(files, folder) or worst


def _aim(values: flags.FlagValues, path: Path, is_whole: bool) -> None:
    """Set the flags of `paged_decode` for the run that is kept in `path`.

    is_whole: the cases are not the user's choice: those of evidence, or of the grid.
    """
    values["json"].value, values["resume"].value = str(path), path.exists()
    if path.name == RUN:
        if values.paired is None:
            values["paired"].value = "best"
        if is_whole:
            values["suite"].value = "evidence"
        return
    values["suite"].value, values["paired"].value = "evidence_grid", None
    values["peers"].value, values["peer_paths"].value = "none", []
    values["isolate"].value = False  # what is ours runs in one process, and shares its inputs


def _finish(files: Sequence[Path], folder: Path) -> int:
    """Record and compile what was measured, and say so; gives the exit status."""
    try:
        runs = [run for run in map(_load, files) if run is not None]
        file, database, refused = compiled(runs, folder)
    except (EvidenceStoreError, OSError, ValueError) as error:
        say(f"{PROGRAM}: {error}")
        return UNWRITTEN
    except KeyboardInterrupt:
        return say_interrupted(PROGRAM, f"; what was measured is in {folder}")
    print(summary(database))
    for line in refused:
        print(f"  refused {line}")
    print(f'database: {file}; use StreamAttnEngine(phase_db="{file}")')
    return 1 if refused else 0


if __name__ == "__main__":
    define_flags(FLAGS)
    app.run(main, flags_parser=flag_types.parse_flags)
