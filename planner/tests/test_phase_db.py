"""Files of databases: whole, hashed, read back, and refused by name where they are not."""

import dataclasses
import json
import os

import pytest

from stream_attention.planner import phase_db
from stream_attention.planner.cost_model import Measured, fit
from stream_attention.planner.evidence_testing import good_cell, good_fingerprint
from stream_attention.planner.phase_db import (
    CandidateOutcome,
    CellDecision,
    PhaseDatabase,
    RefusedRow,
    load,
    loads,
    shipped,
)
from stream_attention.planner.plain import digest_of

NATIVE = CandidateOutcome(route="sm90_decode", role="native", outcome="ok", p50_us=5.0, row="a")
LOST = CandidateOutcome(
    route="flashinfer_xqa", role="external", outcome="failed", reasons=("out of memory",)
)
DECISION = CellDecision(
    cell=good_cell(),
    name="cell",
    status="native",
    chosen="sm90_decode",
    own="sm90_decode",
    regret=0.0,
    own_regret=0.0,
    reason="it is the only one",
    candidates=(NATIVE, LOST),
)
MODEL = fit(
    "sm90_decode",
    "native",
    [Measured(good_cell((1024 << n,) * 2), f"row{n}", 3.0 + 2**n) for n in range(5)],
)
DATABASE = PhaseDatabase(
    arch="sm_90",
    environment=good_fingerprint(),
    cells=(DECISION,),
    models=(MODEL,),
    evidence=(("sm_90-0123.jsonl", "ab"),),
    commit="c",
    compiled_at="2025-01-02T03:04:05Z",
    refused=(RefusedRow(row="b", contender="triton", cell="c", reasons=("floor: none",)),),
)


def edited(**changes):
    """The file with other content, and the hash that it had."""
    return json.dumps({**json.loads(DATABASE.dumps()), **changes})


def signed(**changes):
    """The file with other content and its right hash."""
    plain = {**json.loads(DATABASE.dumps()), **changes}
    plain.pop("sha256")
    return json.dumps({**plain, "sha256": digest_of(plain)})


def test_a_database_is_read_back_as_it_was(tmp_path):
    path = tmp_path / "sm90.json"
    DATABASE.save(path)
    assert load(path) == DATABASE and load(str(path)).dumps() == path.read_text()
    assert load(path).digest == json.loads(path.read_text())["sha256"]
    assert os.listdir(tmp_path) == ["sm90.json"]
    assert loads(json.dumps(json.loads(DATABASE.dumps()))) == DATABASE  # spaces do not count


def test_a_save_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "sm90.json"
    PhaseDatabase(arch="sm_90").save(path)
    before = path.read_text()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        DATABASE.save(path)
    assert path.read_text() == before and os.listdir(tmp_path) == ["sm90.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no JSON"),
        (DATABASE.dumps()[:-30], "is no JSON"),
        ("[]", "must be a JSON object"),
        ("[" * 200_000, "is nested too deeply, at most 64 levels; compile it again"),
        ('{"a":' * 900 + "1" + "}" * 900, "is nested too deeply"),
        ('{"schema": 1, "schema": 1}', "key 'schema' is given 2 times"),
        (edited(schema="stream_attention.phase_db/0"), "schema='stream_attention.phase_db/0'"),
        (edited(commit="d"), "was edited or cut off; compile it again"),
        (edited(sha256="0" * 64), "was edited or cut off"),
        (edited(sha256=None), "sha256=None"),
        (edited(commit=float("nan")), "compile it again"),
        (signed(speed=1), "speed=1: is no key of it"),
        (signed(arch="turing"), "must be a CUDA architecture; use 'sm_90'"),
        (signed(cells="none"), "cells"),
        (signed(cells=[{}]), "is missing"),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_database_is_refused_with_the_name_of_its_file(tmp_path, text, words):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"broken\.json: ") as raised:
        load(path)
    assert words in str(raised.value)


LONG = json.loads(DATABASE.dumps())["cells"][0] | {"reason": "word " * 9999}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cells": [LONG] * 7 + [{**LONG, "status": "best" * 9999}]}, "[7]: CellDecision: "),
        ({"cells": [LONG] * 3 + [{**LONG, "candidates": [{}]}] + [LONG] * 9}, "[3]: CellDecision"),
        ({"cells": [LONG] * 3 + [{**LONG, "cell": [1] * 9999}]}, "[3]: CellDecision: cell="),
        (
            {"cells": [{**LONG, "cell": {**LONG["cell"], "kv_lens": [[1] * 9999]}}]},
            "kv_lens=[1, 1,",
        ),
        ({"models": [LONG]}, "[0]: RouteModel: "),
        ({"schema": ["stream"] * 9999}, "schema=['stream', 'stream', "),
    ],
)
def test_a_bad_record_is_named_by_its_place_in_a_short_error(changes, words):
    with pytest.raises(ValueError) as raised:
        loads(signed(**changes), "mine.json")
    assert str(raised.value).startswith("mine.json: ") and words in str(raised.value)
    assert len(str(raised.value)) < 6000


@pytest.mark.parametrize(
    ("record", "name", "value", "words"),
    [
        (NATIVE, "role", "peer", "must be one of native"),
        (NATIVE, "outcome", "fast", "must be one of ok"),
        (NATIVE, "p50_us", None, "a finite number > 0"),
        (NATIVE, "p50_us", -1.0, "a finite number > 0"),
        (LOST, "p50_us", 5.0, "else None"),
        (LOST, "reasons", (), "must be a tuple of strings"),
        (NATIVE, "route", "", "non-empty"),
        (DECISION, "status", "best", "must be one of native, portable"),
        (DECISION, "status", "external", "of the role that status names"),
        (DECISION, "status", "unresolved", "'' where the cell is unresolved"),
        (DECISION, "chosen", "", "of the role that status names"),
        (DECISION, "chosen", "flashinfer_xqa", "a correct candidate"),
        (DECISION, "own", "triton", "a correct candidate"),
        (DECISION, "baseline", "flashinfer_xqa", "a correct candidate"),
        (DECISION, "missing", ("pair a:b",), "must name what is missing"),
        (DECISION, "candidates", (NATIVE, NATIVE), "a route once"),
        (DECISION, "reason", "", "non-empty"),
        (DATABASE, "environment", None, "there where cells have candidates"),
        (DATABASE, "environment", good_fingerprint("sm_80"), "of the same arch"),
        (DATABASE, "cells", (DECISION, DECISION), "distinct cells"),
        (DATABASE, "models", (MODEL, MODEL), "one a route and family"),
        (DATABASE, "evidence", (("b", "1"), ("a", "1")), "ascending"),
    ],
)
def test_records_refuse_what_contradicts_itself(record, name, value, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(record, **{name: value})


def test_the_shipped_databases_are_of_their_architectures():
    for arch in phase_db.ARCHS:
        found = shipped(arch)
        assert found is not None and found.arch == arch and shipped(arch) is found
    assert shipped("sm_70") is None and shipped("cpu") is None


def test_a_shipped_file_that_is_damaged_or_of_another_architecture_is_refused(
    tmp_path, monkeypatch
):
    folder = tmp_path / "phase_db"
    folder.mkdir()
    monkeypatch.setattr(phase_db.importlib.resources, "files", lambda package: tmp_path)
    of = shipped.__wrapped__
    assert of("sm_90") is None
    PhaseDatabase(arch="sm_80").save(folder / "sm90.json")
    with pytest.raises(ValueError, match="arch='sm_80': must be 'sm_90'"):
        of("sm_90")
    (folder / "sm90.json").write_text("{}")
    with pytest.raises(ValueError, match=r"sm90\.json: schema=None"):
        of("sm_90")


def test_a_lookup_asks_the_models():
    (found,) = DATABASE.lookup(good_cell((4096,) * 2).problem)
    assert found.inside and found.rows[0] == "row2"
    assert PhaseDatabase(arch="sm_90").lookup(good_cell().problem) == ()
    assert DATABASE.index is DATABASE.index
