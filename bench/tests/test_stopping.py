"""A run that is stopped says so in one line, and leaves nothing running."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from absl import flags

from stream_attention.bench import host_cost, paged_decode, stopping

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
    said = f"paged_decode: interrupted; finished cases are in {path}\n"
    assert capsys.readouterr().err.endswith(said)


@pytest.mark.parametrize(("stop", "status"), [(interrupt, 130), (terminate, 143)])
def test_a_stop_ends_both_programs_with_its_status(capsys, monkeypatch, stop, status):
    before = signal.getsignal(signal.SIGTERM)
    # pytest would be ended by a signal that the program does not take.
    monkeypatch.setattr(host_cost, "measure_costs", stop)
    monkeypatch.setattr(paged_decode, "measure_read_curve", stop)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        assert call(host_cost, "--samples=1") == status
        assert call(paged_decode, *TINY, *QUICK) == status
    finally:
        signal.signal(signal.SIGTERM, before)
    word = {130: "interrupted", 143: "terminated"}[status]
    shown = capsys.readouterr().err
    assert f"host_cost: {word}\n" in shown and f"paged_decode: {word}\n" in shown


def test_sigterm_is_not_an_error_of_a_contender_and_its_old_handler_comes_back():
    before = signal.getsignal(signal.SIGTERM)
    assert not issubclass(stopping.Terminated, (Exception, SystemExit))
    with pytest.raises(stopping.Terminated), stopping.sigterm_raises():
        terminate()
    assert signal.getsignal(signal.SIGTERM) is before


def test_host_cost_takes_no_arguments(capsys):
    assert call(host_cost, "extra") == 2
    said = "host_cost: argument 'extra': only flags are taken, as --name=value; use --help\n"
    assert capsys.readouterr().err == said


def test_sigterm_ends_an_isolated_worker_too(tmp_path):
    (tmp_path / "sleepy.py").write_text(
        "import os, time\n"
        "from stream_attention.bench.contenders import peer\n"
        "@peer('sleepy')\n"
        "def build(case, pools, device):\n"
        f"    open({str(tmp_path / 'pid')!r} + '.part', 'w').write(str(os.getpid()))\n"
        f"    os.rename({str(tmp_path / 'pid')!r} + '.part', {str(tmp_path / 'pid')!r})\n"
        "    time.sleep(300)\n"
    )
    path = os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry)])
    program = [sys.executable, "-m", "stream_attention.bench.paged_decode", *TINY]
    chosen = ["--device=cpu", "--warm", "--isolate", "--routes=none", "--peers=sleepy"]
    run = subprocess.Popen(
        [*program, *chosen, "--contender_modules=sleepy", "--"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for _ in range(600):
            if (tmp_path / "pid").exists() or run.poll() is not None:
                break
            time.sleep(0.1)
        worker = (tmp_path / "pid").read_text()
        run.terminate()
        _, errors = run.communicate(timeout=30)
    finally:
        run.kill()
    assert run.returncode == 143 and errors.endswith("paged_decode: terminated\n")
    stat = pathlib.Path("/proc", worker, "stat")
    for _ in range(50):  # the kernel takes a moment
        state = stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else "gone"
        if state in ("gone", "Z"):
            break
        time.sleep(0.1)
    if state not in ("gone", "Z"):
        os.kill(int(worker), signal.SIGKILL)
    assert state in ("gone", "Z")
