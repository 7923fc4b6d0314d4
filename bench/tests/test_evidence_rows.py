"""Runs of the bench as rows of evidence, kept and compiled: from a result to a phase database."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from absl import flags

from stream_attention.bench import calibrate, evidence_rows, paged_decode, record_evidence
from stream_attention.bench.cases import FP8, AttentionCase
from stream_attention.bench.check import Check
from stream_attention.bench.contenders import Contender
from stream_attention.bench.evidence_rows import cell_of, evidence_of, fingerprint_of
from stream_attention.bench.floor import ReadCurve, ReadPoint
from stream_attention.bench.kernel_facts import kernel_facts
from stream_attention.bench.lengths import parse_lengths, uniform
from stream_attention.bench.machine import Environment
from stream_attention.bench.manifest import exact_cells
from stream_attention.bench.paired_timing import PairedTiming
from stream_attention.bench.provenance import facts_of_row, versions_of
from stream_attention.bench.results import CaseResult, PairRow, Row, Run, to_json
from stream_attention.bench.routes import problem_of, route_contenders
from stream_attention.bench.supported import supported_range
from stream_attention.bench.timing import Timing
from stream_attention.core import resources
from stream_attention.core.registry import AttentionRecord, Registry, default_registry
from stream_attention.core.resources import ResourcesError
from stream_attention.core.testing.checks import H200
from stream_attention.planner import cell_requests
from stream_attention.planner.evidence import EvidenceRow
from stream_attention.planner.evidence_rules import Context, refusals
from stream_attention.planner.evidence_store import EvidenceStore
from stream_attention.planner.phase_db import load

CPU = torch.device("cpu")
CASE = AttentionCase(batch=4, lengths=uniform(4096))
CURVE = ReadCurve((ReadPoint(1, 20.0, "block"),), "cuda_graph_cold")
CHECK = Check(True, 1e-3, 3e-3, 1e-4, 3e-4, 4, 4)
ENVIRONMENT = Environment(
    device="Some GPU",
    device_type="cuda",
    arch="sm_90",
    cache_bytes=60 << 20,
    num_sms=132,
    sm_clock_mhz=1980,
    memory_clock_mhz=3201,
    threads=16,
    cpu="Some CPU",
    driver="580.1",
    cuda="13.0",
    python="3.12.3",
    torch="2.11.0",
    triton="3.6.0",
    flashinfer=None,
    commit="0123456789abcdef0123456789abcdef01234567",
    command="paged_decode.py",
    started_at="2026-01-02T03:04:05Z",
    load_average=0.1,
    num_cpus=16,
)


@pytest.fixture(autouse=True)
def routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two routes are registered, whatever packages are here."""
    registry = Registry(discover=False)
    for name, native in (("sm90_decode", True), ("triton", False)):
        record = AttentionRecord(name, "test", "test", (), lambda problem, device: 1.0)
        registry.register_attention(dataclasses.replace(record, native=native))
    monkeypatch.setattr(evidence_rows, "default_registry", lambda: registry)


def timing(us: float) -> Timing:
    return Timing(tuple(us * (1 + 0.001 * (i % 5)) for i in range(25)), "cuda_graph_cold", 10, 5)


def ok(name: str, kind: str, us: float, **fields) -> Row:
    facts = {
        "resolved": name,
        "workspace_bytes": 0,
        "timed_allocations": 0,
        "versions": (("torch", "2.11.0"),),
        "kernel": (("registers", "128"),) if name.startswith("sm90") else (),
    }
    return Row(name, kind, "ok", (), timing(us), CHECK, **{**facts, **fields})


def made_run(case: AttentionCase = CASE, **changes) -> Run:
    """Ours wins over the peer; the engine, what failed and what was not run stand beside."""
    rows = (
        ok("sm90_decode", "route", 40.0),
        ok("triton", "route", 60.0),
        ok("engine", "route", 41.0, resolved="sm90_decode"),
        ok("peer", "peer", 50.0),
        Row("slow", "peer", "unsupported", ("batch=4: too many",)),
        Row("later", "peer", "not_run", ("stopped",)),
    )
    result = CaseResult(case, 1 << 26, 1 << 26, 1, 20.0, 1 << 28, True, rows)
    paired = PairedTiming(timing(40.0), timing(50.0))
    pair = PairRow(
        case,
        "sm90_decode",
        "peer",
        "ok",
        (),
        paired,
        (CHECK, CHECK),
        versions=(("torch", "2.11.0"),),
    )
    fields = {"cases": (result,), "pairs": (pair,), **changes}
    return Run(ENVIRONMENT, {}, CURVE, **fields)


def test_each_outcome_is_a_row_but_for_the_engine_and_what_was_not_run() -> None:
    rows = evidence_of(made_run())
    singles = {row.requested: row for row in rows if isinstance(row, EvidenceRow)}
    assert list(singles) == ["sm90_decode", "triton", "peer", "slow"]
    roles = [row.role for row in singles.values()]
    assert roles == ["native", "portable", "external", "external"]
    assert singles["slow"].reasons == ("batch=4: too many",)
    assert singles["sm90_decode"].timing.samples_us == timing(40.0).samples_us
    assert singles["sm90_decode"].correctness.max_bound == 3e-3
    (pair,) = rows[len(singles) :]
    assert pair.ratios == pytest.approx([0.8] * 25)


def test_a_row_that_the_bench_found_right_is_accepted_by_every_rule() -> None:
    rows = evidence_of(made_run())
    assert [fault for row in rows for fault in refusals(row, Context())] == []


def test_a_check_that_never_came_to_numbers_gives_no_correctness() -> None:
    failed = Check(False, None, None, None, None, 0, 4, "not written")
    row = Row("peer", "peer", "wrong", ("not written",), timing(1.0), failed)
    result = dataclasses.replace(made_run().cases[0], rows=(row,))
    (found,) = evidence_of(made_run(cases=(result,), pairs=()))
    assert found.correctness is None
    assert found.outcome == "wrong"


def test_a_route_that_nobody_registered_is_not_lost_in_silence(tmp_path: Path) -> None:
    row = ok("sm120_decode", "route", 30.0)
    result = dataclasses.replace(made_run().cases[0], rows=(*made_run().cases[0].rows, row))
    with pytest.raises(ValueError, match="route=sm120_decode: must be registered here"):
        record_evidence.record(made_run(cases=(result,)), EvidenceStore(tmp_path))


def test_the_fingerprint_has_what_all_rows_share() -> None:
    found = fingerprint_of(ENVIRONMENT)
    assert (found.device, found.arch, found.l2_bytes) == ("Some GPU", "sm_90", 60 << 20)
    again = dataclasses.replace(ENVIRONMENT, load_average=9.0, command="other", started_at="later")
    assert fingerprint_of(again) == found


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        AttentionCase(batch=3, lengths=parse_lengths("7,0,300"), cache="contiguous"),
        AttentionCase(batch=2, lengths=uniform(64), q_lengths=parse_lengths("1,64"), kv_dtype=FP8),
    ],
    ids=lambda case: case.name,
)
def test_a_cell_has_the_problem_and_the_lengths_of_its_case(case: AttentionCase) -> None:
    cell = cell_of(case)
    assert cell.problem == problem_of(case)
    assert (cell.qo_lens, cell.kv_lens) == (case.q_lens, case.kv_lens)


def test_what_was_recorded_is_not_recorded_again(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path)
    assert record_evidence.record(made_run(), store) == (5, ())
    assert record_evidence.record(made_run(), store) == (0, ())
    assert len(store.rows()) == 5


def test_a_row_that_counts_nowhere_is_refused_by_rule_and_not_added(tmp_path: Path) -> None:
    dirty = dataclasses.replace(ENVIRONMENT, commit=f"{ENVIRONMENT.commit}+changes")
    added, refused = record_evidence.record(
        dataclasses.replace(made_run(), environment=dirty), EvidenceStore(tmp_path)
    )
    assert added == 0
    assert len(refused) == 5
    assert refused[0].startswith("sm90_decode on cell ")
    assert refused[-1].startswith("sm90_decode:peer on cell ")
    assert not list(tmp_path.glob("*.jsonl"))


def test_every_peer_of_a_run_is_a_baseline_and_every_route_of_ours_is_asked() -> None:
    (request,) = record_evidence.requests_of([made_run(), made_run()])
    assert request.baselines == ("peer", "slow", "later")
    assert request.routes == ("sm90_decode", "triton")
    assert request.archs == ("sm_90",)


def test_the_manifests_cells_are_asked_for_their_architectures() -> None:
    manifest = exact_cells()
    requests = record_evidence.requests_of([made_run()], manifest)
    for arch in ("sm_80", "sm_90", "sm_100"):
        of_arch = [r for r in cell_requests.of_arch(requests, arch) if r.name != CASE.name]
        assert {r.name for r in of_arch} == {cell.name for cell in manifest.of_arch(arch)}
    text = cell_requests.dumps(requests)
    assert cell_requests.loads(text) == requests


def test_calibration_keeps_evidence_and_compiles_what_an_engine_takes(tmp_path: Path) -> None:
    path, database, refused = calibrate.compiled([made_run()], tmp_path)
    assert refused == ()
    assert path == tmp_path / "phase_db" / "sm90.json"
    assert load(path) == database
    (cell,) = database.cells
    assert cell.status == "unresolved"
    assert cell.missing == ("outcome of later",)
    rows = made_run().cases[0].rows[:-1]
    whole = made_run(cases=(dataclasses.replace(made_run().cases[0], rows=rows),))
    _, database, _ = calibrate.compiled([whole], tmp_path / "again")
    (cell,) = database.cells
    assert (cell.status, cell.chosen, cell.baseline) == ("native", "sm90_decode", "peer")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "--out_dir=None: must name a folder"),
        (["--out_dir=o", "--json=x.json"], "--json='x.json': is OUT_DIR/run.json here"),
        (["--out_dir=o", "--eager"], "--eager: evidence is of cold graph replays alone"),
        (["--out_dir=o", "--warm"], "--warm: evidence is of cold graph replays alone"),
        (["--out_dir=o", "--nocheck"], "--nocheck: evidence is checked against the oracle"),
        (["--out_dir=o", "--device=cpu"], "--device=cpu: phase databases are of CUDA devices"),
    ],
)
def test_calibration_refuses_what_is_no_evidence(
    given: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    values = flags.FlagValues()
    calibrate.define_flags(values)
    assert calibrate.main(values(["calibrate", *given]), values) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def calibrated(folder: Path, *given: str) -> int:
    values = flags.FlagValues()
    calibrate.define_flags(values)
    return calibrate.main(values(["calibrate", f"--out_dir={folder}", *given]), values)


def test_calibration_goes_on_with_its_files_and_pairs_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def measured(argv, values):
        asked.append((values.suite, values.paired, values.peers, values.isolate, values.resume))
        Path(values.json).write_text(json.dumps(to_json(made_run())))
        return 0

    monkeypatch.setattr(paged_decode, "main", measured)
    monkeypatch.setattr(paged_decode, "chosen_device", lambda name: torch.device("cuda", 0))
    out = tmp_path / "out"
    for _ in range(2):
        assert calibrated(out, "--isolate", "--peer_paths=x=/x") == 0
    evidence, grid = ("evidence", "best", "all", True), ("evidence_grid", None, "none", False)
    assert asked == [(*evidence, False), (*grid, False), (*evidence, True), (*grid, True)]
    assert "StreamAttnEngine(phase_db=" in capsys.readouterr().out
    assert len(EvidenceStore(out / "evidence").rows()) == 5
    # Cases that the user names are all that is measured.
    for named in ("--suite=evidence_grid", "--suite=small_cuda", "--batch=4"):
        asked.clear()
        assert calibrated(tmp_path / named, named) == 0
        assert [each[1:4] for each in asked] == [("best", "all", False)]


def test_calibration_compiles_nothing_of_cells_that_were_not_all_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(argv, values):
        if values.suite != "evidence":
            return 130
        Path(values.json).write_text(json.dumps(to_json(made_run())))
        return 1

    monkeypatch.setattr(paged_decode, "main", measured)
    monkeypatch.setattr(paged_decode, "chosen_device", lambda name: torch.device("cuda", 0))
    assert calibrated(tmp_path / "out") == 130
    assert (tmp_path / "out" / "run.json").exists()
    assert not (tmp_path / "out" / "phase_db").exists()


def test_two_calibrations_do_not_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meanwhile = []

    def measured(argv, values):
        meanwhile.append(calibrated(tmp_path / "out"))
        Path(values.json).write_text(json.dumps(to_json(made_run())))
        return 0

    monkeypatch.setattr(paged_decode, "main", measured)
    monkeypatch.setattr(paged_decode, "chosen_device", lambda name: torch.device("cuda", 0))
    assert calibrated(tmp_path / "out") == 0
    assert meanwhile == [2, 2]
    said = capsys.readouterr().err
    assert "another calibration is at work there; wait for its end, or use another folder" in said


def test_a_calibration_of_chosen_cases_does_not_drop_those_of_the_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(argv, values):
        Path(values.json).write_text(json.dumps(to_json(made_run())))
        return 0

    monkeypatch.setattr(paged_decode, "main", measured)
    monkeypatch.setattr(paged_decode, "chosen_device", lambda name: torch.device("cuda", 0))
    assert calibrated(tmp_path / "out") == 0
    before = (tmp_path / "out" / "phase_db" / "sm90.json").read_bytes()
    assert calibrated(tmp_path / "out", "--suite=evidence") == 2
    assert "has grid.json, which this run leaves out" in capsys.readouterr().err
    assert (tmp_path / "out" / "phase_db" / "sm90.json").read_bytes() == before


def test_a_run_that_was_interrupted_is_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_decode, "main", lambda argv, values: 130)
    monkeypatch.setattr(paged_decode, "chosen_device", lambda name: torch.device("cuda", 0))
    values = flags.FlagValues()
    calibrate.define_flags(values)
    argv = values(["calibrate", f"--out_dir={tmp_path / 'out'}"])
    assert calibrate.main(argv, values) == 130
    assert not (tmp_path / "out" / "phase_db").exists()


def test_the_range_of_a_contender_is_what_it_answers() -> None:
    def supports(case: AttentionCase, device: torch.device) -> tuple[str, ...]:
        fits = case.head_dim in (64, 128) and case.page_size >= 16 and not case.contiguous
        return () if fits else ("no",)

    picky = Contender("picky", "peer", lambda case, pools, device: [], supports)
    found = dict(line.split(": ", 1) for line in supported_range(picky, CASE, CPU))
    assert found["head_dim"] == "64, 128"
    assert found["page_size"] == "16, 32, 64, 128, 256"
    assert found["cache"] == "paged"
    assert found["kv_dtype"] == f"bfloat16, {FP8}"
    assert found["batch_invariant"] == "False"  # a peer makes no such promise
    never = Contender("never", "peer", lambda case, pools, device: [], lambda *_: 1 / 0)
    assert set(supported_range(never, CASE, CPU)) == {f"{name}: " for name in found}


def test_versions_and_facts_of_a_contender_that_cannot_answer_are_none() -> None:
    broken = Contender(
        "broken",
        "peer",
        lambda case, pools, device: [],
        versions=lambda: 1 / 0,
        kernel=lambda case, device: 1 / 0,
    )
    facts = facts_of_row(broken, CASE, CPU, timed=True)
    assert (facts["versions"], facts["kernel"], facts["clocks"]) == ((), (), ())
    good = Contender(
        "good", "peer", lambda case, pools, device: [], versions=lambda: {"b": "2", "a": "1"}
    )
    assert versions_of(good, broken) == (("a", "1"), ("b", "2"))


def test_facts_of_a_native_kernel_are_those_of_the_library_or_an_error() -> None:
    records = {record.route: record for record in default_registry().attention_records()}
    problem = problem_of(CASE)
    assert kernel_facts(records["torch"], problem, H200) == ()
    library = pytest.importorskip("stream_attention.kernels_sm90.library").LIBRARY
    if resources.reason(library) is not None:
        with pytest.raises(ResourcesError, match=r"resources\.json"):
            kernel_facts(records["sm90_decode"], problem, H200)
        return
    facts = dict(kernel_facts(records["sm90_decode"], problem, H200))
    assert int(facts["registers"]) > 32
    assert int(facts["spill_bytes"]) == 0
    assert facts["kernel"].startswith("decode_")


def test_our_routes_are_asked_for_their_kernels() -> None:
    torch_route = next(c for c in route_contenders() if c.name == "torch")
    assert torch_route.kernel(CASE, CPU) == ()


def recorded(tmp_path: Path, data: object, *given: str) -> int:
    """`record_evidence` on a run file that holds `data`; gives its status."""
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    (tmp_path / "run.json").write_bytes(raw)
    values = flags.FlagValues()
    record_evidence.define_flags(values)
    chosen = [f"--run={tmp_path / 'run.json'}", f"--evidence={tmp_path / 'evidence'}", *given]
    argv = values(["record_evidence", *chosen])
    return record_evidence.main(argv, values)


def leaves(data: object, where: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The place of every value that JSON data holds; of a list the first and the last."""
    if where:
        yield where
    entries: list[tuple[str | int, object]] = []
    if isinstance(data, dict):
        entries = list(data.items())
    elif isinstance(data, list):
        entries = [(index, data[index]) for index in sorted({0, len(data) - 1}) if data]
    for key, entry in entries:
        yield from leaves(entry, (*where, key))


def edited(data: object, where: tuple[str | int, ...], value: object) -> object:
    copy = json.loads(json.dumps(data))
    *path, last = where
    inner = copy
    for key in path:
        inner = inner[key]
    inner[last] = value
    return copy


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("cases.0.rows.0.check.max_bound", None, "check.max_bound=None: must be a number, as its"),
        ("pairs.0.checks.1.rms_error", None, "check.rms_error=None: must be a number, as its"),
        ("cases.0.rows.0.kind", 3, "kind=3: must be one of route, peer; use 'peer'"),
        ("cases.0.rows.0.kind", ["route"], "kind=['route']: must be one of route, peer"),
        ("cases.0.rows.0.contender", 3, "cases[0].rows[0].contender=3: must be a str"),
        ("cases.0.rows.0.contender", {"a": 1}, "cases[0].rows[0].contender={'a': 1}: must be a s"),
        (
            "cases.0.case.batch",
            10**9,
            "batch=1000000000: must be an int in 1..1048576; use 1048576",
        ),
        ("cases.0.case.batch", 1e9, "batch=1000000000.0: must be an int in 1..1048576"),
        ("cases.0.case.batch", "x", "batch='x': must be an int in 1..1048576"),
        ("cases.0.rows.0.timing.samples_us.0", "x", "samples_us[0]='x': must be a finite number"),
        ("cases.0.rows.0.timing.samples_us.0", 1e999, "samples_us[0]=inf: must be a finite number"),
        ("cases.0.case.capacity", 1e999, "capacity='inf with longest length 4096, page_size=16'"),
        ("environment.arch", 3, "environment.arch=3: must be a str"),
        ("environment.sm_clock_mhz", "x", "environment.sm_clock_mhz='x': must be an int or None"),
        ("pairs.0.first", None, "pairs[0].first=None: must be a str"),
    ],
)
def test_an_edited_run_is_an_error_of_one_line_that_names_the_file(
    where: str, value: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tuple(int(key) if key.isdigit() else key for key in where.split("."))
    assert recorded(tmp_path, edited(to_json(made_run()), path, value)) == 2
    said = capsys.readouterr().err
    assert said.startswith("record_evidence: --run")
    assert message in said
    assert said.count("\n") == 1
    assert "run.json" in said
    assert "--resume" not in said
    assert not (tmp_path / "evidence").exists()


def test_a_run_file_that_is_no_text_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert recorded(tmp_path, b"{\n\x80") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"record_evidence: --run: {tmp_path / 'run.json'} is no file of this")
    assert "line 2: byte 0x80 is no UTF-8" in said


BAD_VALUES = (None, True, -1, 0, 10**9, 1e999, 10**400, "x", "\x00\ud800", [], {}, [[]], [3, "x"])


def test_no_edit_of_a_run_file_ends_in_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(json.dumps(to_json(made_run())))
    rng = random.Random(0)
    places = list(leaves(data))
    assert len(places) > 200
    for where in places:
        value = rng.choice(BAD_VALUES)
        status = recorded(tmp_path, edited(data, where, value), f"--cells={tmp_path / 'cells'}")
        assert status in (0, 1, 2), (where, value)
    capsys.readouterr()


def test_calibration_names_its_own_flag_where_its_file_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paged_decode, "chosen_device", lambda name: torch.device("cuda", 0))
    (tmp_path / "run.json").write_text("{")
    values = flags.FlagValues()
    calibrate.define_flags(values)
    assert calibrate.main(values(["calibrate", f"--out_dir={tmp_path}"]), values) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"calibrate: --out_dir: {tmp_path / 'run.json'} is no file of this")
    assert "use another folder" in said
