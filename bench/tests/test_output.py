"""Results reach their file whole, or the file is as before and the run says why."""

import errno
import os
import stat
import subprocess
import sys

import pytest
import torch
from absl import flags

from stream_attention.bench import host_cost, output, paged_decode, results
from stream_attention.bench.floor import ReadCurve, ReadPoint
from stream_attention.bench.machine import environment
from stream_attention.bench.results import Run, Sink

RUN = Run(environment(torch.device("cpu")), {}, ReadCurve((ReadPoint(1, 1.0, "a"),), "x"), ())
TINY = ["--batch=2", "--lengths=16", "--num_qo_heads=4", "--num_kv_heads=2", "--head_dim=16"]
QUICK = ["--device=cpu", "--warm", "--replays=3", "--routes=torch", "--peers=none"]


def fail(*args, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", ["", "folder", "file/x.json", "/proc/self/x.json"])
def test_a_path_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    text = str(tmp_path / name) if name else name
    with pytest.raises(ValueError, match=r"--json='.*': must (name a file|be writable)"):
        output.output_path(text)


def test_a_folder_that_is_not_there_is_refused_and_not_made(tmp_path):
    path = tmp_path / "a" / "b" / "x.json"
    with pytest.raises(ValueError, match="must be in a folder that exists") as caught:
        output.output_path(str(path))
    assert f"{tmp_path / 'a' / 'b'} does not; use mkdir -p, or {tmp_path / 'x.json'}" in str(
        caught.value
    )
    assert list(tmp_path.iterdir()) == []
    assert output.output_path(str(tmp_path / "x.json")) == tmp_path / "x.json"


def test_writing_keeps_links_and_devices(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    output.write_text(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    output.write_text(output.output_path(str(pipe)), "piped")
    assert os.read(reader, 10) == b"piped" and pipe.is_fifo()
    os.close(reader)
    assert {path.name for path in tmp_path.iterdir()} == {"target.json", "link.json", "pipe"}


@pytest.mark.parametrize("step", ["fchmod", "replace"])
def test_a_write_that_breaks_off_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch, step):
    path = tmp_path / "run.json"
    output.write_text(path, "old")
    monkeypatch.setattr(os, step, fail)
    monkeypatch.setattr(type(path), "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        output.write_text(path, "new and longer")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EBUSY, errno.EXDEV])
def test_a_file_that_cannot_be_replaced_is_written_in_place(tmp_path, monkeypatch, number):
    def refuse(source, target):
        raise OSError(number, os.strerror(number))

    path = tmp_path / "run.json"
    path.write_text("old and longer")
    monkeypatch.setattr(os, "replace", refuse)
    output.write_text(path, "new")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_the_file_that_the_report_goes_to_is_refused(tmp_path, stream):
    path = tmp_path / "log"
    program = [sys.executable, "-m", "stream_attention.bench.host_cost"]
    with path.open("w") as file:
        other = {"stdout": "stderr", "stderr": "stdout"}[stream]
        done = subprocess.run(
            [*program, f"--json=/dev/{stream}"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            text=True,
            **{stream: file, other: subprocess.PIPE},
        )
    said = path.read_text() if stream == "stderr" else done.stderr
    rule = "must not be the file that stdout or stderr goes to; use out.json"
    assert (done.returncode, said) == (2, f"host_cost: --json='/dev/{stream}': {rule}\n")


def test_the_target_is_whole_at_every_moment(tmp_path, monkeypatch):
    path, seen = tmp_path / "run.json", []
    output.write_text(path, "old")
    replace = os.replace

    def spy(source, target):
        seen.append((path.read_text(), open(source).read()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    output.write_text(path, "new")
    assert seen == [("old", "new")] and path.read_text() == "new"


def test_no_other_file_of_the_user_is_touched(tmp_path):
    (tmp_path / "run.json.part").write_text("mine")
    output.write_text(tmp_path / "run.json", "new")
    assert (tmp_path / "run.json.part").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_new_file_has_the_mode_of_the_umask_and_an_old_one_keeps_its_own(tmp_path):
    old = tmp_path / "old.json"
    old.touch()
    old.chmod(0o640)
    before = os.umask(0o027)
    try:
        output.write_text(tmp_path / "new.json", "x")
        output.write_text(old, "x")
    finally:
        assert os.umask(before) == 0o027
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new.json", "old.json")]
    assert modes == [0o640, 0o640]


def test_a_sink_counts_what_it_wrote_and_keeps_what_failed(tmp_path, monkeypatch):
    sink = Sink(tmp_path / "run.json")
    sink.path.write_text("of an earlier run")
    assert sink.kept == "" and Sink().kept == ""
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        sink.write(RUN)
    assert (sink.num_cases, sink.kept) == (0, "") and sink.path.read_text() == "of an earlier run"
    assert sink.error == (
        f"--json={str(sink.path)!r}: could not be written (No space left on device); use another"
    )
    sink.write(RUN)
    assert sink.error == "" and sink.kept == ""  # a file without a case is no result
    Sink().write(RUN)


def test_a_full_disk_loses_no_printed_result_and_ends_with_4(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "write_text", fail)
    values = flags.FlagValues()
    paged_decode.define_flags(values)
    path = tmp_path / "run.json"
    rest = values(["paged_decode", *TINY, *QUICK, f"--json={path}"])
    status = paged_decode.main(rest, values)
    shown = capsys.readouterr()
    assert status == 4 and "torch" in shown.out and "raw samples" not in shown.out
    assert f"paged_decode: --json={str(path)!r}: could not be written (No space left" in shown.err


def test_host_cost_says_that_its_file_could_not_be_written(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(host_cost, "write_text", fail)
    monkeypatch.setattr(host_cost, "import_costs", lambda samples: ())
    monkeypatch.setattr(host_cost, "measure_costs", lambda **options: ())
    values = flags.FlagValues()
    host_cost.define_flags(values)
    path = tmp_path / "host.json"
    status = host_cost.main(values(["host_cost", f"--json={path}", "--samples=1"]), values)
    assert status in (1, 4)  # 1 where a native route misses its bar
    assert "could not be written (No space left on device)" in capsys.readouterr().err


def test_offers_are_written_as_long_as_writing_takes_little_of_the_time(tmp_path, monkeypatch):
    now, written = [0.0], []

    def write(run, path):
        written.append(now[0])
        now[0] += 1.0

    monkeypatch.setattr(results, "write_json", write)
    sink = Sink(tmp_path / "run.json", clock=lambda: now[0])
    run = Run(None, {}, None, ())
    sink.offer(run)
    sink.offer(run)
    now[0] = 20.9
    sink.offer(run)
    assert written == [0.0]
    now[0] = 21.0
    sink.offer(run)
    sink.write(run)
    assert written == [0.0, 21.0, 22.0]
