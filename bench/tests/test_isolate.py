"""Isolated workers: rows are merged, and a crash costs only the rows that it prevented."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import pytest

from stream_attention.bench import isolate, results
from stream_attention.bench.cases import DecodeCase
from stream_attention.bench.contenders import Contender
from stream_attention.bench.floor import ReadCurve, ReadPoint
from stream_attention.bench.lengths import uniform
from stream_attention.bench.machine import environment
from stream_attention.bench.results import CaseResult, Row, Run
from stream_attention.bench.timing import Timing

CURVE = ReadCurve((ReadPoint(1, 7.0, "sum"),), "cpu_cold")
CASES = tuple(
    DecodeCase(batch=1, lengths=uniform(tokens), dtype="float32", head_dim=8) for tokens in (8, 16)
)


def contender(name, kind="peer"):
    return Contender(name, kind, lambda case, pools, device: [])


def worker_run(name, num_cases):
    import torch

    row = Row(name, "peer", "ok", (), Timing((10.0, 11.0), "cpu_cold"))
    cases = tuple(
        CaseResult(case, case.kv_bytes, case.moved_bytes, case.flops, 1.0, 5, True, (row,))
        for case in CASES[:num_cases]
    )
    return Run(environment(torch.device("cpu")), {}, CURVE, cases)


def python(program):
    return [sys.executable, "-c", program]


def finished(entries, command, seconds=30):
    """All cases when the last worker has ended."""
    return list(isolate.run_workers(entries, CASES, CURVE, [], seconds=seconds, command=command))[
        -1
    ]


def test_what_is_done_is_given_after_every_worker():
    states = isolate.run_workers(
        [contender("first"), contender("second", "route")],
        CASES,
        CURVE,
        [],
        seconds=30,
        command=lambda entry, arguments, path: python(
            f"import shutil; shutil.copy({str(saved)!r}, {str(path)!r})"
        ),
    )
    with tempfile.TemporaryDirectory() as folder:
        saved = pathlib.Path(folder, "x.json")
        results.write_json(worker_run("first", 2), saved)
        early, late = next(states), next(states)
    assert [[row.outcome for row in case.rows] for case in early] == [["ok", "not_run"]] * 2
    assert early[0].rows[1].reasons == ("the run has not come to it, or was stopped before",)
    assert [[row.outcome for row in case.rows] for case in late] == [["ok", "ok"]] * 2


def test_a_worker_whose_parent_has_gone_does_not_begin():
    child = subprocess.run(
        [sys.executable, "-m", isolate.MODULE, str(2**30), "--nonsense"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
    )
    assert (child.returncode, child.stderr) == (137, b"")


def test_a_worker_is_this_command_with_one_contender(tmp_path):
    path = tmp_path / "x.json"
    command = isolate.worker_command(contender("sdpa"), ["--batch=2", "--routes=all"], path)
    assert command[1:3] == ["-m", isolate.MODULE]
    assert command[3:] == [
        str(os.getpid()),
        "--batch=2",
        "--routes=all",
        "--routes=none",
        "--peers=sdpa",
        f"--json={path}",
        "--noisolate",
    ]


def test_what_ends_the_users_flags_does_not_end_the_overrides(tmp_path):
    command = isolate.worker_command(contender("sdpa"), ["--batch=2", "--"], tmp_path / "x.json")
    assert "--" not in command and command[4] == "--batch=2" and command[-1] == "--noisolate"


def skipping(name, path, tmp_path):
    """The command of a worker that skips the first case and runs the second."""
    run = worker_run(name, 2)
    skipped = dataclasses.replace(run.cases[0], rows=(), skipped="lengths=8: 9 GiB; use 4")
    results.write_json(dataclasses.replace(run, cases=(skipped, run.cases[1])), tmp_path / name)
    return python(f"import shutil; shutil.copy({str(tmp_path / name)!r}, {str(path)!r})")


def test_a_contender_whose_worker_skipped_a_case_keeps_its_row_and_the_reason(tmp_path):
    def command(entry, arguments, path):
        if entry.name == "small":
            return skipping("small", path, tmp_path)
        results.write_json(worker_run("good", 2), tmp_path / "good")
        return python(f"import shutil; shutil.copy({str(tmp_path / 'good')!r}, {str(path)!r})")

    entries = [contender("small"), contender("good")]
    first, second = finished(entries, command)
    assert [(row.contender, row.outcome) for row in first.rows] == [
        ("small", "unsupported"),
        ("good", "ok"),
    ]
    assert first.rows[0].reasons == ("its worker skipped the case: lengths=8: 9 GiB; use 4",)
    assert first.skipped == "" and first.rotation_bytes == 5
    assert [row.outcome for row in second.rows] == ["ok", "ok"]


def test_a_case_that_every_worker_skipped_is_skipped_and_one_that_some_lost_is_not(tmp_path):
    def command(entry, arguments, path):
        return python("") if entry.name == "lost" else skipping(entry.name, path, tmp_path)

    names = ["a", "b"], ["a", "lost"]
    every, some = (finished([contender(name) for name in group], command)[0] for group in names)
    assert every.skipped == "lengths=8: 9 GiB; use 4" and every.rows == ()
    assert some.skipped == "" and [row.outcome for row in some.rows] == ["unsupported", "failed"]


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("import sys; sys.exit('out of luck')", "ended with status 1: out of luck"),
        ("import time; time.sleep(60)", "no result within 2 s"),
    ],
)
def test_a_crash_keeps_earlier_cases_and_other_contenders(program, reason):
    def command(entry, arguments, path):
        done = 2 if entry.name == "good" else 1
        results.write_json(worker_run(entry.name, done), path)
        return python("pass" if entry.name == "good" else program)

    first, second = finished([contender("bad"), contender("good")], command, seconds=2)
    assert [row.outcome for row in first.rows] == ["ok", "ok"]
    assert [row.outcome for row in second.rows] == ["failed", "ok"]
    assert reason in second.rows[0].reasons[0]
    assert second.case == CASES[1] and second.floor_us == CURVE.floor_us(CASES[1].moved_bytes)


@pytest.mark.parametrize("end", ["time.sleep(60)", "sys.exit(0)"])
def test_what_a_worker_started_ends_with_it(tmp_path, end):
    pid_file = tmp_path / "pid"
    program = (
        "import subprocess, sys, time; child = subprocess.Popen(['sleep', '60']); "
        f"open({str(pid_file)!r}, 'w').write(str(child.pid)); sys.stdout.close(); {end}"
    )
    finished([contender("bad")], lambda entry, arguments, path: python(program), seconds=2)
    stat = pathlib.Path("/proc", pid_file.read_text(), "stat")
    for _ in range(50):  # the kernel takes a moment
        state = stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else "gone"
        if state in ("gone", "Z"):
            break
        time.sleep(0.1)
    assert state in ("gone", "Z")


def test_all_workers_lost_still_gives_every_row():
    (one, _) = finished(
        [contender("bad")], lambda entry, arguments, path: python("import sys; sys.exit(3)")
    )
    assert one.rows[0].reasons == ("the worker ended with status 3",)
    assert one.moved_bytes == CASES[0].moved_bytes
