"""A run that is stopped says so in one line, and leaves nothing running."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch
from absl import flags

from stream_attention.bench import host_cost, paged_decode, results, stopping, worker_marks
from stream_attention.bench.floor import ReadCurve, ReadPoint
from stream_attention.bench.isolate import Isolation, Workers
from stream_attention.bench.runner import Settings

CPU = torch.device("cpu")
CURVE = ReadCurve((ReadPoint(1, 1e-3, "sum"),), "cpu_cold")

TINY = ["--batch=2", "--lengths=16", "--num_qo_heads=4", "--num_kv_heads=2", "--head_dim=16"]
QUICK = ["--device=cpu", "--warm", "--replays=3", "--routes=torch", "--peers=none"]


def call(program, *arguments):
    values = flags.FlagValues()
    program.define_flags(values)
    rest = values([program.__name__.rpartition(".")[2], *arguments])
    return program.main(rest, values)


def interrupt(*args, **options):
    raise KeyboardInterrupt


def terminate(*args, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)


def test_an_interrupted_run_claims_no_file_of_an_earlier_run(capsys, monkeypatch, tmp_path):
    path = tmp_path / "run.json"
    path.write_text("of an earlier run")
    monkeypatch.setattr(paged_decode, "measure_read_curve", interrupt)
    status = call(paged_decode, *TINY, *QUICK, f"--json={path}")
    assert (status, capsys.readouterr().err) == (
        130,
        "read curve …\npaged_decode: interrupted\n",
    )


def test_an_interrupted_run_names_the_file_with_its_finished_cases(capsys, monkeypatch, tmp_path):
    path = tmp_path / "run.json"
    monkeypatch.setattr(paged_decode.report, "print_missing", interrupt)
    monkeypatch.setattr(paged_decode, "missing_packages", lambda: {"kernels": "not installed"})
    status = call(paged_decode, *TINY, *QUICK, f"--json={path}")
    assert status == 130 and path.exists()
    said = f"paged_decode: interrupted; what had finished is in {path}\n"
    assert capsys.readouterr().err.endswith(said)


def test_an_interrupt_ends_both_programs_with_130(capsys, monkeypatch):
    monkeypatch.setattr(host_cost, "measure_costs", interrupt)
    monkeypatch.setattr(paged_decode, "measure_read_curve", interrupt)
    assert call(host_cost, "--samples=1") == 130
    assert call(paged_decode, *TINY, *QUICK) == 130
    shown = capsys.readouterr().err
    assert "host_cost: interrupted\n" in shown and "paged_decode: interrupted\n" in shown


def test_host_cost_takes_no_arguments(capsys):
    assert call(host_cost, "extra") == 2
    said = "host_cost: argument 'extra': only flags are taken, as --name=value; use --help\n"
    assert capsys.readouterr().err == said


PEERS = """
import ctypes, os, subprocess, time
from stream_attention.bench.contenders import Work, peer
from stream_attention.bench.peers.sdpa import build_gather

def say_pid():
    path = os.environ["PID_FILE"]
    open(path + ".part", "w").write(str(os.getpid()))
    os.rename(path + ".part", path)

peer("first")(build_gather)

@peer("sleepy")
def build(case, pools, device):
    say_pid()
    time.sleep(300)

@peer("server")
def build_server(case, pools, device):
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    open(os.environ["PID_FILE"] + ".child", "w").write(str(child.pid))
    build(case, pools, device)

@peer("hung")
def build_hung(case, pools, device):
    libc, mutex = ctypes.CDLL(None), (ctypes.c_char * 64)()
    libc.pthread_mutex_lock(mutex)
    def run():
        say_pid()
        libc.pthread_mutex_lock(mutex)  # never comes back, nor lets Python look at signals
    return [Work(run=run, out=pool.q.clone()) for pool in pools]
"""


@pytest.fixture
def start(tmp_path):
    """`start(flags)` begins the bench and waits for a peer of `PEERS`; gives it and the peer's."""
    (tmp_path / "stopped_peers.py").write_text(PEERS)
    path = os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry)])
    pid_file = tmp_path / "pid"
    program = [sys.executable, "-m", "stream_attention.bench.paged_decode", *TINY, "--routes=none"]
    chosen = ["--device=cpu", "--warm", "--replays=3", "--contender_modules=stopped_peers"]
    begun = []

    def begin(*arguments):
        run = subprocess.Popen(
            [*program, *chosen, *arguments],
            env={**os.environ, "PYTHONPATH": path, "PID_FILE": str(pid_file)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        begun.append(run.pid)
        for _ in range(1200):
            if pid_file.exists() or run.poll() is not None:
                break
            time.sleep(0.1)
        begun.append(int(pid_file.read_text()))
        return run, begun[-1]

    yield begin
    child = pathlib.Path(f"{pid_file}.child")
    for pid in [*begun, *([int(child.read_text())] if child.exists() else [])]:
        if state_of(pid) not in ("gone", "Z"):
            os.kill(pid, signal.SIGKILL)


def state_of(pid):
    stat = pathlib.Path("/proc", str(pid), "stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def ends(pid):
    for _ in range(50):  # the kernel takes a moment
        if state_of(pid) in ("gone", "Z"):
            return True
        time.sleep(0.1)
    return False


def test_one_sigterm_ends_a_call_that_never_comes_back(start):
    run, _ = start("--peers=hung")
    time.sleep(0.5)
    run.terminate()
    assert run.wait(10) == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_worker_ends_with_its_parent_and_what_was_done_is_in_the_file(start, tmp_path, number):
    path = tmp_path / "run.json"
    chosen = ["--isolate", "--nowarm_up", "--peers=first,sleepy"]
    run, worker = start(*chosen, f"--json={path}", "--")
    assert worker != run.pid and state_of(worker) not in ("gone", "Z")
    run.send_signal(number)
    assert run.wait(10) == -number
    assert ends(worker)
    (case,) = results.from_json(json.loads(path.read_text())).cases
    assert [(row.contender, row.outcome) for row in case.rows] == [
        ("first", "ok"),
        ("sleepy", "not_run"),
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_a_worker_started_ends_too_where_the_run_can_see_to_it(start, tmp_path, number):
    run, worker = start("--isolate", "--nowarm_up", "--peers=server")
    child = int((tmp_path / "pid.child").read_text())
    run.send_signal(number)
    run.send_signal(number)  # as `timeout` does: to the process, then to its group
    assert run.wait(20) == -number
    assert ends(worker) and ends(child)


def test_what_a_killed_run_left_ends_when_the_next_workers_start(start, tmp_path):
    run, worker = start("--isolate", "--nowarm_up", "--peers=server")
    child = int((tmp_path / "pid.child").read_text())
    with Workers(Isolation(), CPU, Settings(), CURVE):
        time.sleep(0.2)
        assert state_of(worker) not in ("gone", "Z"), "its run is alive"
        assert state_of(child) not in ("gone", "Z"), "its run is alive"
    run.kill()
    run.wait(10)
    assert ends(worker)
    assert state_of(child) not in ("gone", "Z")
    with Workers(Isolation(), CPU, Settings(), CURVE):
        assert ends(child)


def dead_mark():
    """The mark of a process that has ended."""
    code = "from stream_attention.bench.worker_marks import new_mark; print(new_mark())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True
    ).stdout.strip()


def test_only_a_run_that_is_known_to_have_ended_has_orphans():
    worker, space, pid, began = dead_mark().split(":")
    mine, init = os.getpid(), "1"
    marks = {
        f"{worker}:{space}:{pid}:{began}": True,
        f"{worker}:{space}:{mine}:{began}": True,  # its number was given to another
        worker_marks.new_mark(): False,
        f"{worker}:{space}:{init}:0": False,  # when it began was not to be found out
        f"{worker}:elsewhere:{pid}:{began}": False,
        f"{worker}::{pid}:{began}": False,
        f"{worker}:{space}:{pid}": False,
        f"{worker}:{space}:-{pid}:{began}": False,
        f"{worker}:{space}:\u00b2:{began}": False,
        worker: False,
    }
    found = []
    for mark in marks:
        child = subprocess.Popen(["sleep", "300"], env={worker_marks.VARIABLE: mark})
        while worker_marks._mark_of(child.pid) != mark:  # a process that is being set up has none
            time.sleep(0.01)
        worker_marks.kill_orphans()
        found.append(ends(child.pid) if marks[mark] else child.poll() is not None)
        child.kill()
        child.wait()
    assert found == list(marks.values())


def test_signals_are_as_before_once_a_run_is_over():
    before = [signal.getsignal(number) for number in stopping.SIGNALS]
    with pytest.raises(stopping.Stopped) as stopped, stopping.stoppable():
        signal.raise_signal(signal.SIGTERM)
    assert stopped.value.name == "SIGTERM"
    assert [signal.getsignal(number) for number in stopping.SIGNALS] == before


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping.stoppable():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
