"""The databases inside the wheel are what the command makes of the evidence in this tree."""

from pathlib import Path

import pytest

from stream_attention.planner.compile_phase_db import compile_all
from stream_attention.planner.evidence import EvidenceRow
from stream_attention.planner.evidence_rules import Context, refusals
from stream_attention.planner.evidence_store import EvidenceStore
from stream_attention.planner.phase_db import ARCHS, file_of, shipped

EVIDENCE = Path("planner/evidence")
PEERS = {
    *("flashinfer_fa2_cuda_core", "flashinfer_fa2_tensor_core", "flashinfer_fa3"),
    *("flashinfer_cudnn", "flashinfer_xqa", "flashinfer_holistic", "flash_attn_4"),
    *("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math"),
}


@pytest.fixture(scope="module")
def compiled():
    return {each.arch: each for each in compile_all(EVIDENCE, EVIDENCE / "cells.json")}


@pytest.mark.parametrize("arch", ARCHS)
def test_a_shipped_database_is_compiled_from_this_evidence(arch, compiled):
    file = Path("planner/stream_attention/planner/phase_db", file_of(arch))
    assert file.read_text(encoding="utf-8") == compiled[arch].dumps()
    assert shipped(arch) == compiled[arch]


def test_every_row_of_the_evidence_counts():
    rows = EvidenceStore(EVIDENCE).rows()
    assert len(rows) > 400
    assert [refusal for row in rows for refusal in refusals(row, Context())] == []
    assert shipped("sm_90").refused == ()


def test_every_measured_cell_has_an_outcome_of_ours_and_of_every_peer_or_of_none():
    rows = [row for row in EvidenceStore(EVIDENCE).rows() if isinstance(row, EvidenceRow)]
    outcomes: dict[str, set[str]] = {}
    for row in rows:
        outcomes.setdefault(row.cell.digest, set()).add(row.requested)
    assert all(each >= {"sm90_decode", "triton"} for each in outcomes.values())
    peers = [each & PEERS for each in outcomes.values()]
    assert [len(each) for each in peers if each] == [len(PEERS)] * 30
    assert len(peers) == 194  # those of the grid are ours alone


def test_dispatch_loses_little_on_cells_that_it_has_not_seen():
    for summary in (shipped("sm_90").own_regret, shipped("sm_90").all_regret):
        for regret, least in ((summary.hold_out, 39), (summary.leave_one_out, 188)):
            assert regret.num_cells >= least and regret.num_outside < least / 8
            assert regret.geometric_mean <= 0.03 and regret.worst <= 0.10


def test_what_was_not_measured_is_unresolved_and_says_what_is_missing():
    for arch in ARCHS:
        unresolved = [cell for cell in shipped(arch).cells if cell.status == "unresolved"]
        assert all(cell.missing for cell in unresolved)
    for arch in ("sm_80", "sm_100"):
        database = shipped(arch)
        assert database.cells
        assert database.environment is None
        assert {cell.status for cell in database.cells} == {"unresolved"}
