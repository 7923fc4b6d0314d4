"""A run that was stopped at any point goes on where it was, and only where it is the same run."""

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from absl import flags

from stream_attention.bench import json_text, paged_decode, results, resume
from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.contenders import Contender
from stream_attention.bench.floor import ReadCurve, ReadPoint
from stream_attention.bench.lengths import uniform
from stream_attention.bench.machine import environment
from stream_attention.bench.peers.sdpa import build_gather
from stream_attention.bench.results import Row, Run
from stream_attention.bench.runner import Settings, case_facts

CPU = torch.device("cpu")
CURVE = ReadCurve((ReadPoint(1, 7.0, "sum"),), "cpu_cold")
CASES = tuple(
    AttentionCase(
        batch=1,
        lengths=uniform(tokens),
        dtype="float32",
        num_qo_heads=2,
        num_kv_heads=1,
        head_dim=16,
    )
    for tokens in (8, 16)
)
NAMES = ("a", "b", "c")
FLAGS = ("--device=cpu", "--warm", "--replays=3", "--paired=a:b", "--pairs=2")


def earlier_run(**fields):
    facts = case_facts(CASES[0], CPU, Settings(), CURVE)
    rows = (
        Row("a", "peer", "failed", ("crashed",)),
        Row("b", "peer", "not_run", ("the run has not come to it",)),
    )
    case = dataclasses.replace(facts, rows=rows)
    settings = {"seed": 0, "suite": None, "peer_paths": {}}
    return Run(environment(CPU), settings, CURVE, (case,), **fields)


def keep(earlier, env=None, settings=None, cases=CASES, names=NAMES):
    here = {"seed": 0, "suite": "ragged", "peer_paths": {}} if settings is None else settings
    return resume.keep(earlier, env or environment(CPU), here, cases, names)


def test_what_was_made_is_kept_however_it_ended_and_what_was_not_run_is_not():
    kept = keep(earlier_run())
    assert list(kept.rows) == [(CASES[0], "a")] and kept.pairs == {}


def test_everything_that_differs_is_named_at_once():
    here = dataclasses.replace(
        environment(CPU), torch="9.9", device="Other", commit="abc", command="x", load_average=9.0
    )
    with pytest.raises(ValueError, match="of another run; use another file: 6 faults") as caught:
        keep(earlier_run(), here, {"seed": 1, "suite": None, "peer_paths": {}}, CASES[1:], ("b",))
    said = str(caught.value)
    assert re.search(r"torch='2.*': is what the file has, and this run has '9.9'", said)
    assert "--seed=0: is what the file has, and this run has 1" in said
    assert f"case={CASES[0].name!r}: is in the file and not in this run" in said
    assert "contender='a': is in the file and not in this run" in said
    assert "device=" in said and "commit=" in said and "command" not in said


BAD_FILES = [b"", b"{", b"[]", b'{"schema": "stream_attention.bench/1"}', b"\x80abc"]
DEEP = [b"[" * count for count in (1000, 100_000)]
DEEP += [b"[" * 1000 + b"]" * 1000, b'{"a":' * 1000 + b"1" + b"}" * 1000]


def test_a_run_that_goes_on_began_when_the_file_says():
    # Else rows that are kept would be rows of another time: evidence that supersedes itself.
    earlier = earlier_run()
    began = dataclasses.replace(earlier.environment, started_at="then", command="the first")
    now = dataclasses.replace(environment(CPU), load_average=7.5)
    earlier = dataclasses.replace(earlier, environment=began)
    found = resume.continued(earlier, now, CASES[:1])
    assert (found.started_at, found.command, found.load_average) == ("then", "the first", 7.5)
    # With more cases floors are measured anew: its rows are other rows, and of another time.
    assert resume.continued(earlier, now, CASES) is now
    assert resume.continued(None, now, CASES) is now


@pytest.mark.parametrize("text", [*BAD_FILES, *DEEP], ids=lambda text: repr(text[:9]))
def test_a_file_of_something_else_is_refused_and_stays(tmp_path, text):
    path = tmp_path / "run.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=r"is no file of this bench: .*; use another"):
        resume.load(path)
    assert path.read_bytes() == text
    assert resume.load(tmp_path / "absent.json") is None


def test_what_is_too_deep_says_so_and_what_is_not_is_read(tmp_path):
    with pytest.raises(ValueError, match="is nested too deeply, more than 64 levels"):
        json_text.parse("[" * 65 + "]" * 65)
    for text in ("[" * 64 + "]" * 64, "3", '{"a": [1, {"b": null}]}'):
        assert json_text.parse(text) == json.loads(text)


def call(*arguments):
    values = flags.FlagValues()
    paged_decode.define_flags(values)
    return paged_decode.main(values(["paged_decode", *FLAGS, *arguments]), values)


@pytest.fixture
def fakes(monkeypatch):
    """Three peers on two cases; the build number `stop` is interrupted, `None` = none is."""
    state = {"count": 0, "stop": None}

    def build(case, pools, device):
        state["count"] += 1
        if state["count"] - 1 == state["stop"]:
            raise KeyboardInterrupt
        return build_gather(case, pools, device)

    entries = tuple(Contender(name, "peer", build) for name in NAMES)
    chosen = paged_decode.Chosen(entries, {entry.name: entry for entry in entries}, {})
    monkeypatch.setattr(paged_decode, "chosen_contenders", lambda *given: chosen)
    monkeypatch.setattr(paged_decode, "measure_read_curve", lambda *given, **options: CURVE)
    here = environment(CPU)
    monkeypatch.setattr(paged_decode, "environment", lambda device: here)
    monkeypatch.setattr(paged_decode, "chosen_cases", lambda *given: CASES)
    return state


# Of a case: two builds a row, then two of the pair.
@pytest.mark.parametrize("stop", [0, 1, 2, 5, 6, 7, 8, 15])
def test_an_interrupt_at_any_build_loses_nothing_that_was_made(fakes, tmp_path, capsys, stop):
    path = tmp_path / "run.json"
    fakes["stop"] = stop
    assert call(f"--json={path}") == 130
    assert path.exists() == (stop >= 2)
    before = resume.load(path)
    fakes.update(count=0, stop=None)
    assert call(f"--json={path}", "--resume") == 0, capsys.readouterr()
    after = resume.load(path)
    made = [row for case in after.cases for row in case.rows]
    assert [row.outcome for row in made] == ["ok"] * 6 and len(after.pairs) == 2
    cases_done, within = divmod(stop, 8)
    assert fakes["count"] == 16 - 8 * cases_done - min(2 * (within // 2), 6)
    if before is not None:
        old = [row for case in before.cases for row in case.rows if row.outcome != "not_run"]
        assert len(old) == 3 * cases_done + min(within // 2, 3)
        assert all(row in made for row in old) and set(before.pairs) <= set(after.pairs)


def test_a_run_that_is_complete_makes_nothing_again(fakes, tmp_path):
    path = tmp_path / "run.json"
    assert call(f"--json={path}", "--resume") == 0 and fakes["count"] == 16
    made = resume.load(path)
    assert call(f"--json={path}", "--resume") == 0 and fakes["count"] == 16
    again = resume.load(path)
    assert (again.cases, again.pairs) == (made.cases, made.pairs)
    assert again.environment.started_at == made.environment.started_at


def test_a_run_that_differs_ends_with_2_and_leaves_the_file(fakes, tmp_path, capsys):
    path = tmp_path / "run.json"
    assert call(f"--json={path}") == 0
    text = path.read_text()
    capsys.readouterr()
    assert call(f"--json={path}", "--resume", "--seed=3") == 2
    assert "--seed=0: is what the file has, and this run has 3" in capsys.readouterr().err
    assert path.read_text() == text
    assert call("--resume") == 2
    assert "--resume: needs the file to go on with; use --json=FILE" in capsys.readouterr().err


PEERS = """
import time
from stream_attention.bench.contenders import Work, peer
from stream_attention.bench.peers.sdpa import build_gather

def slow(case, pools, device):
    time.sleep(0.05)
    return build_gather(case, pools, device)

for index in range(20):
    peer(f"slow{index}")(slow)
"""


def test_a_run_killed_at_random_leaves_a_whole_file_that_is_gone_on_with(tmp_path):
    (tmp_path / "slow_peers.py").write_text(PEERS)
    path, rng = tmp_path / "run.json", random.Random()
    names = ",".join(f"slow{index}" for index in range(20))
    command = [sys.executable, "-m", "stream_attention.bench.paged_decode", *FLAGS[:3]]
    command += ["--batch=1", "--lengths=16", "--num_qo_heads=2", "--num_kv_heads=1"]
    command += ["--head_dim=16", "--routes=none", f"--peers={names}", f"--json={path}"]
    command += ["--contender_modules=slow_peers", "--resume"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}

    def begin():
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=env, **quiet)

    run = begin()
    while not path.exists() and run.poll() is None:
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 1.5))
    run.kill()
    run.communicate()
    assert run.returncode == -signal.SIGKILL
    (case,) = results.from_json(json.loads(path.read_text())).cases
    old = [row for row in case.rows if row.outcome != "not_run"]
    assert 0 < len(old) < 20
    run = begin()
    _, errors = run.communicate()
    assert run.returncode == 0, errors
    (case,) = results.from_json(json.loads(path.read_text())).cases
    assert [row.outcome for row in case.rows] == ["ok"] * 20
    assert all(row in case.rows for row in old)
