"""The command that turns a phase database and its evidence into a page."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from stream_attention.planner.evidence_store import EvidenceStore
from stream_attention.planner.evidence_testing import (
    good_cell,
    good_fingerprint,
    good_row,
    role_of,
)
from stream_attention.planner.phase_db import CandidateOutcome, CellDecision, PhaseDatabase

PROGRAM = [sys.executable, "-m", "stream_attention.bench.evidence_report"]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder with sm90.json and its evidence: one cell in which a peer is faster."""
    cell = good_cell((4096,) * 2)
    rows = [good_row(cell, name, us) for name, us in (("sm90_decode", 60.0), ("peer", 50.0))]
    EvidenceStore(tmp_path / "evidence").path.mkdir()
    EvidenceStore(tmp_path / "evidence").append(rows)
    candidates = tuple(
        CandidateOutcome(
            route=row.requested,
            role=role_of(row.requested),
            outcome="ok",
            p50_us=statistics.median(row.timing.samples_us),
            row=row.id,
            allocation_free=True,
        )
        for row in rows
    )
    decision = CellDecision(
        cell=cell,
        name="the cell",
        status="external",
        chosen="peer",
        reason="the peer is faster",
        candidates=candidates,
    )
    database = PhaseDatabase(arch="sm_90", environment=good_fingerprint(), cells=(decision,))
    database.save(tmp_path / "sm90.json")
    return tmp_path


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *flags], cwd=folder, env=environment(), capture_output=True, text=True
    )


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "200"}


def test_page_and_plots_are_written_and_the_loss_is_told(made: Path) -> None:
    done = run(made, "--phase_db=sm90.json", "--evidence=evidence", "--out_dir=new/report")
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (made / "new" / "report").iterdir())
    assert names == ["index.html", "over_floor.png", "speed_up.png", "times_0.png"]
    assert "slower than a peer in 1" in done.stdout
    assert "the cell" in done.stdout and "0.833" in done.stdout
    assert "the peer is faster" in (made / "new" / "report" / "index.html").read_text()


def test_without_evidence_the_plot_over_the_floor_is_left_out(made: Path) -> None:
    done = run(made, "--phase_db=sm90.json", "--out_dir=report")
    assert done.returncode == 0, done.stderr
    assert not (made / "report" / "over_floor.png").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--phase_db=sm90.json",), "--out_dir=None: must name a folder"),
        (("--phase_db=none.json", "--out_dir=r"), "cannot be read (No such file or directory)"),
        (("--phase_db=sm90.json", "--out_dir=sm90.json"), "is a file; use another name"),
        (("--phase_db=sm90.json", "--evidence=no", "--out_dir=r"), "must be a folder of evidence"),
        (("--phase_db=bad.json", "--out_dir=r"), "was edited or cut off"),
        (("--phase_db=sm90.json", "--evidence=torn", "--out_dir=r"), "is not in index.json"),
        (("extra", "--out_dir=r"), "only flags are taken"),
    ],
)
def test_bad_flags_and_files_end_with_2_and_write_nothing(
    made: Path, flags: tuple[str, ...], message: str
) -> None:
    text = (made / "sm90.json").read_text()
    (made / "bad.json").write_text(text.replace("the cell", "a cell"))
    (made / "torn").mkdir()
    (made / "torn" / "sm_90-0123456789abcdef.jsonl").write_text("{}\n")
    done = run(made, *flags)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert not (made / "r").exists()


def test_a_folder_that_takes_no_files_ends_with_4(made: Path) -> None:
    (made / "report" / "index.html").mkdir(parents=True)
    done = run(made, "--phase_db=sm90.json", "--out_dir=report")
    assert done.returncode == 4
    assert "could not be written" in done.stderr
