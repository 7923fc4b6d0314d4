"""Each contender in a process of its own (`--isolate`): a crash costs its rows and nobody else's.

A worker is the same command with one contender and a JSON file; it writes the file after every
case, so the cases before a crash are kept. Every worker makes the same inputs from the same seed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from stream_attention.bench.cases import DecodeCase
from stream_attention.bench.contenders import Contender
from stream_attention.bench.floor import ReadCurve
from stream_attention.bench.results import CaseResult, Row, from_json

MODULE = "stream_attention.bench.worker"
_TAIL_LINES = 3


def worker_command(contender: Contender, arguments: Sequence[str], path: Path) -> list[str]:
    """The command of one worker: its parent, the user's flags, the overrides that single it out.

    A `--` at the end of the user's flags is left out: what follows it would be no flag.
    """
    if arguments and arguments[-1] == "--":
        arguments = arguments[:-1]
    chosen = {"route": "none", "peer": "none", contender.kind: contender.name}
    return [
        sys.executable,
        "-m",
        MODULE,
        str(os.getpid()),
        *arguments,
        f"--routes={chosen['route']}",
        f"--peers={chosen['peer']}",
        f"--json={path}",
        "--noisolate",
    ]


def run_workers(
    contenders: Sequence[Contender],
    cases: Sequence[DecodeCase],
    curve: ReadCurve,
    arguments: Sequence[str],
    *,
    seconds: float,
    progress: Callable[[str], None] = lambda message: None,
    command: Callable[[Contender, Sequence[str], Path], list[str]] = worker_command,
) -> Iterator[tuple[CaseResult, ...]]:
    """All contenders on all cases, one process a contender, one after the other.

    Gives all cases after every worker; the rows of those to come say that they were not run.
    curve: this process's, for all floors. seconds: limit on one worker. command: replaced in tests.
    """
    parts: list[tuple[CaseResult, ...]] = []
    lost: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for index, contender in enumerate(contenders):
            progress(contender.name)
            path = Path(folder, f"{index}.json")
            lost.append(_run(command(contender, arguments, path), seconds))
            parts.append(from_json(json.loads(path.read_text())).cases if path.exists() else ())
            yield tuple(
                _merge(case, index, contenders, parts, lost, curve)
                for index, case in enumerate(cases)
            )


def _run(command: Sequence[str], seconds: float) -> str:
    """Run a worker; gives how it ended, for cases that it left without a result."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    # A session of its own: what the worker started, such as a compiler, ends with it, and neither
    # disturbs the next measurement nor holds the pipes open.
    worker = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = worker.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"the worker gave no result within {seconds:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    how = f"ended with status {worker.returncode}"
    if worker.returncode < 0:
        how = f"was killed by {signal.Signals(-worker.returncode).name}"
    tail = " | ".join(errors.strip().splitlines()[-_TAIL_LINES:])
    return f"the worker {how}: {tail}" if tail else f"the worker {how}"


def _merge(
    case: DecodeCase,
    index: int,
    contenders: Sequence[Contender],
    parts: Sequence[tuple[CaseResult, ...]],
    lost: Sequence[str],
    curve: ReadCurve,
) -> CaseResult:
    rows: list[Row] = []
    found: list[CaseResult] = []
    for contender, part, reason in zip(contenders, parts, lost, strict=False):
        if index < len(part):
            found.append(part[index])
            rows += part[index].rows or (_skipped(contender, part[index]),)
        else:
            rows.append(Row(contender.name, contender.kind, "failed", (reason,)))
    for contender in contenders[len(parts) :]:
        reason = "the run has not come to it, or was stopped before"
        rows.append(Row(contender.name, contender.kind, "not_run", (reason,)))
    base = next((result for result in found if not result.skipped), None)
    if base is None and len(found) == len(contenders):
        base, rows = found[0], []  # the case does not fit, whoever asks
    if base is None:
        base = CaseResult(
            case=case,
            kv_bytes=case.kv_bytes,
            moved_bytes=case.moved_bytes,
            flops=case.flops,
            floor_us=0.0,
            rotation_bytes=0,
            cold=False,
        )
    return replace(base, floor_us=curve.floor_us(case.moved_bytes), rows=tuple(rows))


def _skipped(contender: Contender, result: CaseResult) -> Row:
    """The row of a contender whose worker skipped a case that others could run."""
    reason = f"its worker skipped the case: {result.skipped or 'no reason given'}"
    return Row(contender.name, contender.kind, "unsupported", (reason,))
