"""A report that cannot be printed costs no result of a file, and has a status of its own."""

import io
import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

from stream_attention.bench import results, screen

DECODE = [sys.executable, "-m", "stream_attention.bench.paged_decode", "--batch=2", "--lengths=16"]
TINY = ["--num_qo_heads=4", "--num_kv_heads=2", "--head_dim=16", "--device=cpu", "--warm"]
QUICK = [*DECODE, *TINY, "--replays=3", "--routes=torch", "--peers=none"]


HOST = [sys.executable, "-m", "stream_attention.bench.host_cost"]
CLOSED = "closed"  # a stdout


def run(command, stdout, **environment):
    if stdout is CLOSED:
        command, stdout = ["sh", "-c", 'exec "$@" >&-', "sh", *command], None
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(params=["full", "pipe", "closed"])
def broken(request):
    """A stdout that takes nothing, and why."""
    if request.param == "closed":
        yield CLOSED, "Bad file descriptor"
        return
    if request.param == "full":
        with open("/dev/full", "w") as file:
            yield file, "No space left on device"
        return
    reader, writer = os.pipe()
    os.close(reader)
    yield writer, "Broken pipe"
    os.close(writer)


def test_a_failing_stdout_ends_with_5_and_every_case_is_in_the_file(broken, tmp_path):
    path, (stdout, why) = tmp_path / "run.json", broken
    done = run([*QUICK, f"--json={path}"], stdout)
    assert done.returncode == screen.UNPRINTED == 5, done.stderr
    said = f"paged_decode: the report could not be printed ({why}); the run goes on for --json\n"
    assert done.stderr.count(said) == 1 and "Traceback" not in done.stderr
    (case,) = results.from_json(json.loads(path.read_text())).cases
    assert [(row.contender, row.outcome) for row in case.rows] == [("torch", "ok")]


def test_a_failing_stdout_without_a_file_ends_the_run_at_once(broken):
    stdout, why = broken
    done = run(QUICK, stdout)
    said = f"paged_decode: the report could not be printed ({why})\n"
    assert (done.returncode, done.stderr) == (5, said)  # no progress: nothing was measured


def test_both_streams_may_fail(tmp_path):
    path = tmp_path / "run.json"
    with open("/dev/full", "w") as file:
        done = subprocess.run(
            [*QUICK, f"--json={path}"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=file,
            stderr=file,
        )
    assert done.returncode == 5 and len(json.loads(path.read_text())["cases"]) == 1


def test_a_stdout_of_ascii_takes_the_report():
    done = run(QUICK, subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "torch" in done.stdout, done.stderr


def test_host_cost_writes_its_file_where_stdout_fails(broken, tmp_path):
    path, (stdout, why) = tmp_path / "host.json", broken
    few = ["--samples=1", "--imports=1", "--repeats=50"]
    done = run([*HOST, *few, f"--json={path}"], stdout)
    # 1 where a cost misses its bar, as it may on a busy machine
    assert done.returncode in (1, 5) and f"could not be printed ({why})" in done.stderr
    assert json.loads(path.read_text())["costs"]
    assert run([*HOST, *few], stdout).returncode == 5


@pytest.mark.parametrize("program", [DECODE[:3], HOST])
def test_help_that_cannot_be_printed_ends_with_5_too(broken, program):
    stdout, why = broken
    done = run([*program, "--help"], stdout)
    name = program[-1].rpartition(".")[2]
    said = f"{name}: the help could not be printed ({why})\n"
    assert (done.returncode, done.stderr) == (5, said)


def test_a_file_of_flags_that_cannot_be_read_is_a_bad_flag():
    done = run([*HOST, "--flagfile=/proc/self/mem"], None)
    said = "host_cost: a file of flags cannot be read (Input/output error); use --help\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_both_streams_may_be_closed(tmp_path):
    path = tmp_path / "run.json"
    done = run(["sh", "-c", 'exec "$@" 2>&-', "sh", *QUICK, f"--json={path}"], CLOSED)
    assert done.returncode == 5
    assert len(json.loads(path.read_text())["cases"]) == 1


def test_nothing_is_printed_after_a_failure(capsys):
    def refuse(console):
        raise SystemExit(1)  # as rich does

    shown = screen.Screen("p", Console(file=io.StringIO()), kept=True)
    shown.show(refuse)
    shown.show(Console.print, "more")
    assert shown.error == "the report could not be printed (Broken pipe)"
    assert shown.console.file.getvalue() == ""
    assert capsys.readouterr().err == f"p: {shown.error}; the run goes on for --json\n"
    with pytest.raises(screen.Unprintable):
        screen.Screen("p", Console(file=io.StringIO()), kept=False).show(refuse)
