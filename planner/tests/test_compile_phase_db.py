"""The command: whole files, a summary that leaves nothing out, errors that name the file."""

import json
import os
import subprocess
import sys

import pytest

from stream_attention.planner import cell_requests
from stream_attention.planner.cell_requests import CellRequest
from stream_attention.planner.compile_phase_db import UNUSABLE, main
from stream_attention.planner.evidence_store import EvidenceStore
from stream_attention.planner.evidence_testing import (
    good_cell,
    good_pair,
    good_row,
    good_samples,
    lost_row,
)
from stream_attention.planner.phase_db import load

CELLS = [good_cell((1024 << n,) * 4) for n in range(6)]
REQUESTS = [
    CellRequest(cell=cell, name=f"cell {n}", baselines=("flashinfer_xqa",), weight=n + 1.0)
    for n, cell in enumerate(CELLS)
]
FILES = ["sm100.json", "sm80.json", "sm90.json"]


def rows():
    for n, cell in enumerate(CELLS[:5]):
        yield good_row(cell, "sm90_decode", 10.0 + n)
        yield good_row(cell, "triton", 14.0 + n)
        yield good_row(cell, "flashinfer_xqa", 12.0 + n)
        yield good_pair(cell, "sm90_decode", "flashinfer_xqa", 0.9)
    yield lost_row(CELLS[5], "sm90_decode", "failed", "out of memory")


@pytest.fixture
def folders(tmp_path):
    store = EvidenceStore(tmp_path / "evidence")
    store.append(rows())
    store.append([good_row(CELLS[5], "triton", timing=good_samples(method="host"))])
    store.append([good_row(CELLS[0], "sm80_decode", arch="sm_80")])
    (tmp_path / "cells.json").write_text(cell_requests.dumps(REQUESTS))
    (tmp_path / "out").mkdir()
    return tmp_path


def arguments(folder, *more):
    evidence, cells, out = (str(folder / name) for name in ("evidence", "cells.json", "out"))
    return [evidence, f"--cells={cells}", f"--output_dir={out}", *more]


def test_rows_of_which_no_database_is_made_are_told(folders, capsys):
    store = EvidenceStore(folders / "evidence")
    store.append([good_row(CELLS[0], "torch", arch="cpu"), good_row(CELLS[1], "torch", arch="cpu")])
    assert main(arguments(folders)) == 0
    *_, first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert first == "2 rows are of cpu: no database is made of those"
    assert second.startswith("sm_80: 0 of 6 cells decided; wrote ")
    assert third == f"sm_90: 5 of 6 cells decided; wrote {folders / 'out' / 'sm90.json'}"
    assert fourth.startswith("sm_100: 0 of 6 cells decided")


def test_the_command_writes_a_database_an_architecture_and_says_what_it_decided(folders):
    done = subprocess.run(
        [sys.executable, "-m", "stream_attention.planner.compile_phase_db", *arguments(folders)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(os.listdir(folders / "out")) == FILES
    database = load(folders / "out" / "sm90.json")
    assert [each.status for each in database.cells] == ["native"] * 5 + ["unresolved"]
    assert database.evidence == tuple(
        each for each in EvidenceStore(folders / "evidence").files() if "sm_90" in each[0]
    )
    assert len(database.evidence) == 2
    for words in (
        "sm_90 (Device of sm_90): 6 cells: 5 native, 0 portable, 0 external, 1 unresolved",
        "cell 0: sm90_decode: sm90_decode beats flashinfer_xqa (ratio 0.9000",
        "cell 5: unresolved",
        "missing: outcome of flashinfer_xqa, correct contender",
        "sm90_decode failed",
        "(triton): method: ",
        "model sm90_decode, ",
        "regret among ours: calibration: 0.00% over",
        "hold-out: ",
        "leave one out: 0.00% over 3 cells, 2 outside",
        "sm_100 (no evidence): 6 cells: 0 native, 0 portable, 0 external, 6 unresolved",
    ):
        assert words in done.stdout, words


def test_the_same_evidence_gives_the_same_bytes(folders, capsys):
    out = folders / "out"
    assert main(arguments(folders)) == 0
    first = {name: (out / name).read_bytes() for name in FILES}
    assert main(arguments(folders)) == 0
    assert {name: (out / name).read_bytes() for name in FILES} == first
    (folders / "other").mkdir()
    again = EvidenceStore(folders / "again")
    for row in reversed(EvidenceStore(folders / "evidence").rows()):
        again.append([row])
    other = arguments(folders)
    other[0], other[2] = str(folders / "again"), f"--output_dir={folders / 'other'}"
    assert main(other) == 0
    for name in FILES:  # but for the names of the files that the rows are in
        one, two = (load(folder / name) for folder in (out, folders / "other"))
        assert (one.cells, one.models, one.refused) == (two.cells, two.models, two.refused)
        assert (one.own_regret, one.all_regret) == (two.own_regret, two.all_regret)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: (path / "cells.json").unlink(), "--cells="),
        (lambda path: (path / "cells.json").write_text("{"), "cells.json: is no JSON"),
        (lambda path: (path / "cells.json").write_text("[]"), "schema=None"),
        (lambda path: (path / "cells.json").write_text("[" * 200_000), "cells.json: is nested"),
        (lambda path: (path / "cells.json").write_text('{"a":' * 2000), "cells.json: is nested"),
        (lambda path: (path / "cells.json").write_bytes(b"\xff"), "cells.json: is no JSON ("),
        (lambda path: (path / "out").rmdir(), "--output_dir="),
        (lambda path: (path / "evidence" / "sm_90-x.jsonl").write_text("{}"), "sm_90-x.jsonl"),
        (
            lambda path: EvidenceStore(path / "evidence").append(
                [good_row(CELLS[0], "sm90_decode", commit="f" * 40)]
            ),
            "mixed_commits",
        ),
    ],
)
def test_what_cannot_be_used_is_said_and_nothing_is_written(folders, capsys, spoil, words):
    spoil(folders)
    assert main(arguments(folders)) == UNUSABLE
    assert words in capsys.readouterr().err
    assert not (folders / "out").exists() or os.listdir(folders / "out") == []


def test_rows_of_one_source_can_be_asked_for(folders, capsys):
    other = good_row(CELLS[0], "sm90_decode", 90.0, commit="f" * 40)
    EvidenceStore(folders / "evidence").append([other])
    assert main(arguments(folders, f"--commit={good_row().commit}")) == 0
    assert f"refused {other.id} (sm90_decode): other_commit" in capsys.readouterr().out
    assert load(folders / "out" / "sm90.json").commit == good_row().commit


def test_requests_are_read_back():
    requests = (
        *REQUESTS,
        CellRequest(
            cell=good_cell((7,)), name="all", baselines=(), routes=("triton",), tie_margin=0.0
        ),
    )
    assert cell_requests.loads(cell_requests.dumps(requests)) == requests
    assert cell_requests.loads(cell_requests.dumps([])) == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": ""}, "name=''"),
        ({"weight": 0}, "must be a number > 0"),
        ({"weight": True}, "weight"),
        ({"tie_margin": 0.5}, "must be a number in 0..0.1"),
        ({"baselines": ["a", "a"]}, "each once"),
        ({"routes": ["flashinfer_xqa"]}, "none of them a baseline"),
        ({"speed": 1}, "speed=1: is no key of it"),
        ({"cell": {}}, "cell"),
    ],
)
def test_requests_that_are_wrong_are_all_named(changes, words):
    plain = json.loads(cell_requests.dumps(REQUESTS[:2]))
    plain["cells"][1].update(changes)
    with pytest.raises(ValueError, match=r"mine\.json: 1 bad cells\n  cells\[1\]: ") as raised:
        cell_requests.loads(json.dumps(plain), "mine.json")
    assert words in str(raised.value)


def written(folder):
    return {name: (folder / "out" / name).read_bytes() for name in os.listdir(folder / "out")}


@pytest.mark.parametrize("commit", ["", "0123456", "HEAD", "f" * 39, "F" * 40, "files-" + "f" * 64])
def test_a_commit_that_names_none_is_refused_and_nothing_is_written(folders, capsys, commit):
    assert main(arguments(folders)) == 0
    before = written(folders)
    assert main(arguments(folders, f"--commit={commit}")) == UNUSABLE
    said = capsys.readouterr().err
    assert f"--commit={commit!r}: must be 40 hexadecimal digits: of git, or behind files-" in said
    assert written(folders) == before


@pytest.mark.parametrize("commit", ["f" * 40, "files-" + "f" * 40])
def test_a_commit_of_no_row_writes_no_empty_databases_over_good_ones(folders, capsys, commit):
    assert main(arguments(folders)) == 0
    before = written(folders)
    assert main(arguments(folders, f"--commit={commit}")) == UNUSABLE
    said = capsys.readouterr().err
    assert "nothing is written: 2 faults" in said
    assert f"commit={commit!r}: none of the 1 rows of sm_80 counts (other_commit 1)" in said
    assert "none of the 22 rows of sm_90 counts (other_commit 22, method 1, implausible 1)" in said
    assert f"of commit {good_row().commit}" in said and "sm_100" not in said
    assert written(folders) == before


def test_a_commit_of_one_architecture_alone_is_refused_for_the_other(folders, capsys):
    files = "files-" + "f" * 40
    EvidenceStore(folders / "evidence").append([good_row(CELLS[0], "triton", commit=files)])
    assert main(arguments(folders, f"--commit={files}")) == UNUSABLE
    said = capsys.readouterr().err
    assert "rows of sm_80" in said and "rows of sm_90" not in said and written(folders) == {}


def test_rows_of_which_none_counts_are_no_database_either(tmp_path, capsys):
    EvidenceStore(tmp_path / "evidence").append([good_row(CELLS[0], command="")])
    (tmp_path / "cells.json").write_text(cell_requests.dumps(REQUESTS))
    (tmp_path / "out").mkdir()
    assert main(arguments(tmp_path)) == UNUSABLE
    assert "none of the 1 rows of sm_90 counts (command 1)" in capsys.readouterr().err
    assert written(tmp_path) == {}


def test_rows_of_cells_that_nobody_asked_for_are_let_alone(folders, capsys):
    EvidenceStore(folders / "evidence").append(
        [good_row(good_cell((7,)), "sm80_decode", arch="sm_100")]
    )
    assert main(arguments(folders)) == 0
    assert load(folders / "out" / "sm100.json").environment is None
    assert main(arguments(folders, f"--commit={good_row().commit}")) == UNUSABLE
    assert "rows of sm_100 counts (cell 1)" in capsys.readouterr().err


def test_paths_are_relative_to_where_the_user_stands(folders, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(folders))
    monkeypatch.chdir(tmp_path_factory.mktemp("runfiles"))
    assert main(["evidence", "--cells=cells.json", "--output_dir=out"]) == 0
    assert sorted(written(folders)) == FILES


@pytest.mark.parametrize("name", ["weight", "tie_margin"])
def test_a_number_that_no_float_holds_is_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"{name}=1000*\.\.\.: must be a number"):
        CellRequest(cell=CELLS[0], name="cell", baselines=(), **{name: 10**400})
