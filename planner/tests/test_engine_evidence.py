"""What an engine takes for `phase_db`, what it says of bad ones, and what a pickle keeps of it."""

import array
import collections
import copy
import dataclasses
import json
import os
import pathlib
import pickle

import pytest
import torch

from stream_attention import StreamAttnEngine
from stream_attention.core.problem import AttentionProblem
from stream_attention.planner import engine as engine_module
from stream_attention.planner.databases import SHIPPED
from stream_attention.planner.phase_db import PhaseDatabase
from stream_attention.planner.testing import H200, FakeRoute, database_of, registry_of

QUICK = {"ours": lambda problem: 2.0, "portable": lambda problem: 3.0}


def problems(head_dim=64):
    return [
        AttentionProblem(
            batch=batch,
            total_qo_len=batch,
            max_qo_len=1,
            kv_capacity=64,
            num_qo_heads=4,
            num_kv_heads=2,
            sm_scale=0.1,
            cache_kind="contiguous",
            page_size=64,
            **dict.fromkeys(("head_dim_qk", "head_dim_vo"), head_dim),
            **dict.fromkeys(("q_dtype", "kv_dtype", "out_dtype"), "float32"),
        )
        for batch in (1, 2, 4, 8)
    ]


@pytest.fixture
def database():
    return database_of(problems(), QUICK, native=["ours"])


@pytest.fixture
def path(database, tmp_path):
    database.save(tmp_path / "mine.json")
    return tmp_path / "mine.json"


@pytest.fixture(autouse=True)
def on_h200(monkeypatch):
    monkeypatch.setattr(engine_module, "device_facts", lambda device: H200)


def planned(phase_db, registry=None):
    """The route that an engine with `phase_db` takes; by cost model it would be `portable`."""
    if registry is None:
        registry = registry_of(FakeRoute("ours", 9.0, True), FakeRoute("portable", 1.0))
    k = torch.zeros(2, 64, 2, 64)
    return StreamAttnEngine(registry=registry, phase_db=phase_db).plan(torch.zeros(2, 4, 64), k, k)


FORMS = {
    "database": lambda path, database: database,
    "path": lambda path, database: path,
    "text": lambda path, database: str(path),
    "list": lambda path, database: [path],
    "tuple of both": lambda path, database: (database, str(path)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_database_is_given_as_itself_as_a_path_or_among_others(form, path, database):
    assert planned(FORMS[form](path, database)).route == "ours"
    assert planned(()).route == "portable"


def test_the_first_of_several_databases_of_a_device_decides(database, path):
    slow = dict(zip(QUICK, reversed(QUICK.values()), strict=True))
    other = database_of(problems(), slow, native=["ours"])
    assert planned([other, database]).route == "portable"
    assert planned([path, other]).route == "ours"
    elsewhere = database_of(problems(), slow, native=["ours"], device="NVIDIA H100")
    assert planned([elsewhere, database]).route == "ours"
    of_other_problems = database_of(problems(128), slow, native=["ours"])
    assert planned([of_other_problems, database]).route == "ours"


def edited(path):
    path.write_text(path.read_text().replace("0123abc", "9999999"))


def of_another_schema(path):
    plain = json.loads(path.read_text())
    path.write_text(json.dumps({**plain, "schema": "stream_attention.phase_db/9"}))


def a_folder(path):
    path.unlink()
    path.mkdir()


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


BAD = {
    "pipe": (a_pipe, "cannot be read: Is a pipe, must be a regular file"),
    "gone": (os.unlink, "cannot be read: No such file or directory"),
    "folder": (a_folder, "cannot be read: Is a directory"),
    "edited": (edited, "sha256="),
    "cut off": (lambda p: p.write_text(p.read_text()[:-99]), "is no JSON"),
    "empty": (lambda p: p.write_text(""), "is no JSON"),
    "binary": (lambda p: p.write_bytes(b"\xff\xfe\x00"), "can't decode byte 0xff"),
    "a list": (lambda p: p.write_text("[]"), "must be a JSON object"),
    "deep": (lambda p: p.write_text("[" * 200_000), "is nested too deeply"),
    "other schema": (of_another_schema, "schema='stream_attention.phase_db/9'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named_with_what_is_wrong(name, path):
    spoil, said = BAD[name]
    spoil(path)
    with pytest.raises(ValueError) as caught:
        StreamAttnEngine(phase_db=path)
    text = str(caught.value)
    assert text.startswith(f"StreamAttnEngine: phase_db={str(path)!r}: ")
    assert said in text and text.count(str(path)) == 1


def test_every_fault_of_every_database_is_named_at_once(path, database):
    bad = [database, "/nowhere/a.json", 3, None, path, "/nowhere/b.json"]
    with pytest.raises(ValueError) as caught:
        StreamAttnEngine(phase_db=bad, registry=7)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert lines[0] == "StreamAttnEngine: 5 faults"
    for number in (1, 5):
        assert any(line.startswith(f"phase_db[{number}]='/nowhere/") for line in lines)
    for number, value in ((2, 3), (3, None)):
        rule = f"phase_db[{number}]={value}: must be a path or a PhaseDatabase; use None"
        assert rule in lines


NO_DATABASES = [
    *(3, True, False, b"x.json", {"a": 1}, {1}, object(), range(0), range(2), memoryview(b"")),
    *(bytearray(), array.array("b"), collections.deque(), iter(()), {}, set(), frozenset()),
    *(torch.zeros(0), collections.UserList(), (each for each in ())),
]


@pytest.mark.parametrize("value", NO_DATABASES, ids=lambda value: type(value).__name__)
def test_what_is_no_database_is_refused(value):
    with pytest.raises(
        ValueError, match=r"phase_db=.*: must be None .the shipped ones., a path, a Ph"
    ):
        StreamAttnEngine(phase_db=value)


def test_a_file_is_read_when_the_engine_is_made(path):
    registry = registry_of(FakeRoute("ours", 9.0, True), FakeRoute("portable", 1.0))
    engine = StreamAttnEngine(registry=registry, phase_db=path)
    path.unlink()
    k = torch.zeros(2, 64, 2, 64)
    assert engine.plan(torch.zeros(2, 4, 64), k, k).route == "ours"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_engine_keeps_its_databases(protocol, path, database):
    for given, own, shipped in (((), 0, False), (path, 1, True), ([path, database], 2, True)):
        engine = StreamAttnEngine(phase_db=given)
        loaded = pickle.loads(pickle.dumps(engine, protocol=protocol))
        assert loaded._databases.own == engine._databases.own
        assert len(loaded._databases.own) == own
        assert loaded._databases.with_shipped is shipped
        assert copy.deepcopy(engine) is engine
    plain = pickle.loads(pickle.dumps(StreamAttnEngine(), protocol=protocol))
    assert plain._databases is SHIPPED


def test_a_pickle_from_before_there_were_databases_uses_the_shipped_ones():
    fields, slots = StreamAttnEngine().__getstate__()
    fields = {name: value for name, value in fields.items() if name != "_databases"}
    engine = StreamAttnEngine.__new__(StreamAttnEngine)
    engine.__setstate__((fields, slots))
    assert engine._databases is SHIPPED


def test_a_loaded_engine_plans_by_its_own_evidence(database, monkeypatch):
    registry = registry_of(FakeRoute("ours", 9.0, True), FakeRoute("portable", 1.0))
    monkeypatch.setattr(engine_module, "default_registry", lambda: registry)
    engine = pickle.loads(pickle.dumps(StreamAttnEngine(phase_db=database)))
    k = torch.zeros(2, 64, 2, 64)
    assert engine.plan(torch.zeros(2, 4, 64), k, k).route == "ours"


def chosen(text, label):
    return next(line for line in text.splitlines() if line.startswith(label))


def test_explain_shows_candidates_estimates_evidence_and_other_software(database):
    refused = FakeRoute("odd", refusal="page_size=64: takes 16; use 16")
    unmeasured = FakeRoute("new", 0.5)
    registry = registry_of(
        refused, unmeasured, FakeRoute("ours", 9.0, True), FakeRoute("portable", 1.0)
    )
    plan = planned(database, registry)
    text = plan.explain()
    rows = ", ".join(plan.backend_plan.evidence)
    start = next(i for i, line in enumerate(text.splitlines()) if line.startswith("candidates"))
    table = [line[12:].split() for line in text.splitlines()[start : start + 4]]
    assert table[0] == ["route", "native", "estimate", "outcome", "basis"]
    assert table[1][:5] == ["ours", "yes", "2.0", "us", "chosen"]
    assert " ".join(table[1][5:]) == f"by evidence of NVIDIA H200, rows {rows}"
    assert table[2][:6] == ["portable", "no", "3.0", "us", "not", "needed"]
    assert table[3][:6] == ["new", "no", "0.5", "us", "not", "needed"]
    assert " ".join(table[3][6:]).startswith("by cost model: the route was not measured")
    columns = {line.index(" by ") for line in text.splitlines()[start + 1 : start + 4]}
    assert len(columns) == 1  # aligned
    assert chosen(text, "estimate").endswith("2.0 us, by evidence")
    assert "used: 4 cells of NVIDIA H200 (sm_90), commit 0123abc" in chosen(text, "evidence")
    assert f"measured with torch 2.11.0, here {torch.__version__}" in text
    assert "rejected    odd: page_size=64: takes 16; use 16" in text
    order = [text.index(f"\n{name} ") for name in ("problem", "tile plan", "launch", "candidates")]
    assert order == sorted(order)


def test_explain_says_nothing_of_software_that_is_the_same(database):
    here = dataclasses.replace(
        database.environment,
        torch=torch.__version__,
        driver=None,
        cuda=torch.version.cuda,
        triton=None,
    )
    assert "measured with" not in planned(dataclasses.replace(database, environment=here)).explain()


def test_explain_as_json_has_all_that_the_text_has(database):
    refused = FakeRoute("odd", refusal="page_size=64: takes 16; use 16")
    endless = FakeRoute("endless", float("inf"))
    late = FakeRoute("ours", 9.0, True)
    plan = planned(database, registry_of(refused, endless, late, FakeRoute("portable", 1.0)))
    text, plain = plan.explain(), json.loads(plan.explain(format="json"))
    assert plain["schema"] == "stream_attention.plan/1"
    assert AttentionProblem(**plain["problem"]) == plan.problem
    assert plain["tile_plan"]["kind"] == plan.tile_plan.kind
    assert (plain["route"], plain["reason"]) == (plan.route, plan.reason)
    assert plain["evidence"] == list(plan.backend_plan.evidence)
    assert [launch["kernel"] for launch in plain["launches"]] == ["ours_kernel"]
    found = {each["route"]: each for each in plain["candidates"]}
    assert list(found) == ["ours", "portable", "endless"]
    assert found["endless"]["estimate_us"] is None  # JSON has no infinity
    assert found["ours"]["outcome"] == "chosen" and found["ours"]["estimated_by"] == "evidence"
    for each in found.values():
        assert each["basis"] in text and each["outcome"] in text
    shown = plain["phase_database"]
    assert shown["used"] and shown["device"] == "NVIDIA H200" and shown["num_cells"] == 4
    assert {other["name"] for other in shown["other_software"]} >= {"torch"}
    for other in shown["other_software"]:
        assert f"measured with {other['name']} {other['measured']}, here {other['here']}" in text
    for rejection in plain["rejected"]:
        for reason in rejection["reasons"]:
            assert f"{rejection['route']}: {reason}" in text


def test_explain_says_why_there_is_no_evidence():
    plan = planned(())
    assert "evidence    none: phase_db=(): no evidence is used" in plan.explain()
    shown = json.loads(plan.explain("json"))["phase_database"]
    assert shown == {"used": False, "why": "phase_db=(): no evidence is used"}


def test_explain_tells_what_was_asked_in_vain(database):
    k = torch.zeros(2, 4096, 2, 64)
    registry = registry_of(FakeRoute("ours", 9.0, True), FakeRoute("portable", 1.0))
    engine = StreamAttnEngine(registry=registry, phase_db=database)
    text = engine.plan(torch.zeros(2, 4, 64), k, k).explain()
    assert "asked, and none of it is near: 4 cells" in chosen(text, "evidence")
    assert "by cost model: kv_bytes=" in text and "longest=4096: measured 64 to 64" in text


def test_a_route_that_refused_to_build_is_shown_as_such(database):
    from stream_attention import UnsupportedProblem

    ours = FakeRoute("ours", native=True, failure=UnsupportedProblem("not these strides"))
    plan = planned(database, registry_of(ours, FakeRoute("portable", 1.0)))
    found = json.loads(plan.explain("json"))["candidates"]
    assert [each["outcome"] for each in found] == ["refused to build", "chosen"]
    assert "refused to build" in plan.explain()


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Stands for a record of how a kernel works."""

    name: str
    stages: int


@dataclasses.dataclass(frozen=True)
class Described:
    """A record that also says how its kernels work."""

    record: object
    given: list

    def __getattr__(self, name):
        return getattr(self.record, name)

    def schedules(self, problem, device):
        self.given.append((problem, device))
        return (Schedule("split", 4), Schedule("merge", 0))


def test_schedules_of_the_chosen_record_are_shown_where_it_has_them(database):
    plan = planned(database)
    assert "schedule" not in plan.explain()
    assert json.loads(plan.explain("json"))["schedules"] == []
    first, *others = plan._ranking.candidates
    described = Described(first.record, [])
    candidates = (first._replace(record=described), *others)
    plan._ranking = dataclasses.replace(plan._ranking, candidates=candidates)
    assert "\nschedule    Schedule(name='split', stages=4)\nschedule    Sched" in plan.explain()
    shown = json.loads(plan.explain("json"))["schedules"]
    assert shown == [{"name": "split", "stages": 4}, {"name": "merge", "stages": 0}]
    assert described.given == [(plan.problem, H200)] * 2


@pytest.mark.parametrize(
    ("format", "nearest"), [("jsn", "'json'"), ("txt", "'text'"), ("", "'"), (None, "'"), ([], "'")]
)
def test_an_unknown_format_names_the_nearest(format, nearest, database):
    rule = f"explain: format=.*must be one of text, json; use {nearest}"
    with pytest.raises(ValueError, match=rule):
        planned(database).explain(format=format)


def test_paths_of_other_kinds_are_paths(path):
    class Named:
        def __fspath__(self):
            return str(path)

    assert planned(Named()).route == planned(pathlib.PurePath(path)).route == "ours"
    assert isinstance(StreamAttnEngine(phase_db=path)._databases.own[0], PhaseDatabase)
