"""A run that is stopped says so in one line, and leaves nothing running."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from absl import flags

from stream_attention.bench import host_cost, paged_decode, results

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
import ctypes, os, time
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
    for pid in begun:
        if state_of(pid) not in ("gone", "Z"):
            os.kill(pid, signal.SIGKILL)


def state_of(pid):
    stat = pathlib.Path("/proc", str(pid), "stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


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
    for _ in range(50):  # the kernel takes a moment
        if state_of(worker) in ("gone", "Z"):
            break
        time.sleep(0.1)
    assert state_of(worker) in ("gone", "Z")
    (case,) = results.from_json(json.loads(path.read_text())).cases
    assert [(row.contender, row.outcome) for row in case.rows] == [
        ("first", "ok"),
        ("sleepy", "not_run"),
    ]
