"""Tables and JSON: what is printed is what was measured, and a file reads back equal."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from stream_attention.bench import pairs, report, results, summary
from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.check import Check
from stream_attention.bench.floor import ReadCurve, ReadPoint
from stream_attention.bench.lengths import parse_lengths
from stream_attention.bench.machine import Environment
from stream_attention.bench.paired_timing import PairedTiming
from stream_attention.bench.results import CaseResult, PairRow, Row, Run
from stream_attention.bench.spent import Spent
from stream_attention.bench.timing import Timing

CASE = AttentionCase(batch=2, lengths=parse_lengths("lognormal:64:0.5:1"), dtype="float32")
CHECK = Check(True, 1e-7, 2e-6, 1e-8, 1e-7, 2, 2)
ENVIRONMENT = Environment(
    device="Some CPU",
    device_type="cpu",
    arch="cpu",
    cache_bytes=32 << 20,
    num_sms=2,
    sm_clock_mhz=None,
    memory_clock_mhz=None,
    threads=2,
    cpu="Some CPU",
    driver=None,
    cuda=None,
    python="3.11.0",
    torch="2.13.0",
    triton=None,
    flashinfer=None,
    commit="files-0",
    started_at="2026-01-02T03:04:05Z",
    command="paged_decode.py --batch=2",
    load_average=0.2,
    num_cpus=2,
)


def timing(us):
    return Timing((us * 0.9, us, us * 1.1), "cpu_cold", 1, 2)


def result(*rows, **fields):
    facts = {
        "case": CASE,
        "kv_bytes": 2 << 20,
        "moved_bytes": 2_000_000,
        "flops": 10,
        "floor_us": 50.0,
        "rotation_bytes": 64 << 20,
        "cold": True,
    }
    return CaseResult(**{**facts, **fields}, rows=rows)


ROWS = (
    Row("ours", "route", "ok", (), timing(100.0), CHECK, 3 << 20, "2 splits", "ours", 4096, 0, 1.5),
    Row("gather", "peer", "ok", (), timing(250.0), CHECK),
    Row("other", "peer", "ok", (), timing(400.0), None),
    Row("broken", "peer", "failed", ("RuntimeError: no luck",)),
    Row("liar", "peer", "wrong", ("max error 1",), check=CHECK),
    Row("lazy", "peer", "wrong", ("poison",), check=Check(False, *[None] * 4, 0, 2, "poison")),
    Row("gpu_a", "peer", "unsupported", ("needs CUDA",)),
    Row("gpu_b", "peer", "unsupported", ("needs CUDA",)),
)


def printed(found, width=report.FULL_WIDTH):
    stream = io.StringIO()
    report.print_case(Console(file=stream, width=width, highlight=False), found)
    return stream.getvalue()


def cells(text, name):
    (line,) = [line for line in text.splitlines() if line.strip().startswith(f"{name} ")]
    return line


def test_ratios_use_medians_and_the_best_correct_peer():
    found = result(*ROWS)
    ours, gather, other = ROWS[:3]
    assert found.best_peer() is gather
    assert found.over_floor(ours) == pytest.approx(2.0)
    assert found.speed_up(ours) == pytest.approx(2.5)
    assert found.speed_up(other) == pytest.approx(0.625)
    assert found.gb_per_s(ours) == pytest.approx(20.0)
    assert result(ROWS[0], ROWS[3]).speed_up(ours) is None


def test_a_wrong_row_is_neither_the_best_peer_nor_the_fastest():
    rows = [Row(f"{kind} liar", kind, "wrong", ("no",), timing(1.0)) for kind in ("peer", "route")]
    found = result(*rows, *ROWS)
    assert found.best_peer() is ROWS[1] and found.speed_up(ROWS[0]) == pytest.approx(2.5)
    assert report.fastest_row(found) is ROWS[0]
    assert summary.timed_row(found, "peer liar") is None


def test_table_shows_time_floor_speed_up_error_memory_and_outcome():
    line = cells(printed(result(*ROWS)), "ours")
    shown = ("ours (2 splits)", "100 [94.0 – 106] us", " 3 ", "2.00", "20.0", "2.50 ×")
    assert all(text in line for text in (*shown, "1.0e-07 / 2.0e-06", "3.0", "ok")), line


def test_losing_rows_stay_with_their_reasons():
    text = printed(result(*ROWS))
    assert cells(text, "broken").rstrip().endswith("failed")
    assert cells(text, "liar").rstrip().endswith("wrong")
    assert cells(text, "lazy").split() == ["lazy", "wrong"]
    assert "broken: failed: RuntimeError: no luck" in text
    assert "gpu_a, gpu_b: unsupported: needs CUDA" in text


def test_a_narrow_terminal_keeps_time_and_outcome():
    text = printed(result(*ROWS), width=90)
    assert "100 [94.0 – 106] us" in text and "error / bound" not in text


def test_method_and_checked_rows_are_stated():
    text = printed(result(*ROWS))
    assert "method: wall clock, cold L3, 64 MiB of KV in rotation" in text
    oracle = "checked against the fp64 oracle: 2 of 2 rows of the first pool and of the last; "
    assert f"{oracle}all rows of all 2 pools: finite, and written when timed" in text
    assert "untimed" not in text
    assert "too small to leave the cache" not in text
    assert "too small to leave the cache" in printed(result(*ROWS, cold=False))


def test_one_pool_is_checked_as_a_whole_and_a_shared_output_is_stated():
    one = dataclasses.replace(ROWS[0], timing=Timing((1.0,), "cpu_warm"))
    assert "oracle: 2 of 2 rows; all rows: finite, and written when timed" in printed(result(one))
    shared = dataclasses.replace(ROWS[1], check=dataclasses.replace(CHECK, rerun=True))
    text = printed(result(ROWS[0], shared))
    assert (
        "gather: checked against the fp64 oracle: 2 of 2 rows of the first pool and of the last; "
        "one output for all pools, so each was run again, untimed"
    ) in text
    assert "ours: one output" not in text
    assert "written when timed" not in printed(result(shared))
    copied = dataclasses.replace(ROWS[1], check=dataclasses.replace(CHECK, poisoned=False))
    text = printed(result(copied))
    assert "gather: checked against the fp64 oracle: 2 of 2 rows" in text
    assert "; its output cannot be poisoned (a copy?), so that the timed runs wrote it was" in text
    assert "written when timed" not in text


def test_a_wrong_row_keeps_its_time_and_counts_nowhere():
    fast = Row("liar", "peer", "wrong", ("implausible",), timing(1.0), CHECK)
    found = result(ROWS[0], ROWS[1], fast)
    assert found.best_peer() is ROWS[1] and report.fastest_row(found) is ROWS[0]
    assert found.speed_up(fast) is None and "1.00 [" in cells(printed(found), "liar")


def test_a_skipped_case_says_why():
    text = printed(result(skipped="does not fit"))
    assert f"{CASE.name}: skipped: does not fit" in text


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0.936, "0.94 us"),
        (12.54, "12.5 us"),
        (470.4, "470 us"),
        (1234.0, "1.23 ms"),
        (2e6, "2.00 s"),
    ],
)
def test_times_have_three_digits_and_a_unit(us, text):
    assert report.format_us(us) == text


def pair(*samples, **fields):
    sides = (Timing(tuple(side), "cpu_cold") for side in zip(*samples, strict=True))
    facts = {
        "timing": PairedTiming(*sides),
        "checks": (CHECK, None),
        "resolved": ("torch", "gather"),
    }
    return PairRow(CASE, "ours", "gather", "ok", **{**facts, **fields})


def full_run():
    curve = ReadCurve((ReadPoint(1 << 20, 2.0, "sum"), ReadPoint(4 << 20, 3.0, "max")), "cpu_cold")
    cases = (result(*ROWS), result(skipped="does not fit"))
    lost = PairRow(CASE, "ours", "liar", "wrong", ("liar: max error 1",))
    return Run(
        ENVIRONMENT,
        {"seed": 0},
        curve,
        cases,
        {"kernels_sm90": "not installed"},
        pairs=(pair(*[(90.0, 100.0)] * 6), pair((90.0, 100.0)), lost),
    )


def test_json_reads_back_equal_and_keeps_raw_samples(tmp_path):
    path = tmp_path / "run.json"
    results.write_json(full_run(), path)
    data = json.loads(path.read_text())
    assert results.from_json(data) == full_run()
    row = data["cases"][0]["rows"][0]
    assert row["timing"]["samples_us"] == [90.0, 100.0, pytest.approx(110.0)]
    assert row["derived"]["n"] == 3 and row["derived"]["speed_up_vs_best_peer"] == 2.5
    assert data["cases"][0]["name"] == data["pairs"][0]["name"] == CASE.name
    assert data["pairs"][0]["derived"] == {
        "n": 6,
        "ratio_p50": 0.9,
        "ratio_low_95": 0.9,
        "ratio_high_95": 0.9,
    }
    few = data["pairs"][1]["derived"]
    assert few["ratio_low_95"] is None and few["ratio_high_95"] is None
    assert [entry.name for entry in path.parent.iterdir()] == ["run.json"]


def test_a_file_from_before_caches_had_a_form_still_reads():
    data = results.to_json(full_run())
    for case in data["cases"]:
        for name in ("kv_dtype", "cache", "capacity", "batch_invariant"):
            del case["case"][name]
    assert results.from_json(data) == full_run()


def test_another_schema_is_refused():
    data = results.to_json(full_run())
    for old in ("stream_attention.bench.paged_decode/1", "x"):
        with pytest.raises(ValueError, match=f"schema='{old}': must be 'stream_attention.*/2'"):
            results.from_json({**data, "schema": old})


@pytest.mark.parametrize(
    ("outcome", "reasons", "message"),
    [
        ("odd", (), "outcome='odd': must be one of ok, unsupported, failed, wrong"),
        ("ok", ("why",), "every outcome but ok gives a reason"),
        ("failed", (), "every outcome but ok gives a reason"),
    ],
)
def test_a_row_has_a_known_outcome_and_a_reason_unless_ok(outcome, reasons, message):
    with pytest.raises(ValueError, match=message):
        Row("name", "peer", outcome, reasons)
    with pytest.raises(ValueError, match=message):
        PairRow(CASE, "name", "other", outcome, reasons)


def test_header_names_device_versions_commit_and_command():
    text = "\n".join(ENVIRONMENT.lines())
    assert "Some CPU, 2 threads, L3 32 MiB" in text
    assert "python 3.11.0, torch 2.13.0" in text and "triton" not in text
    assert "BUSY" not in text
    busy = dataclasses.replace(ENVIRONMENT, load_average=1.5).lines()[-1]
    assert busy.startswith("BUSY    load average 1.5 on 2 CPUs")
    assert "commit  files-0" in text and "command paged_decode.py --batch=2" in text


def test_a_pair_is_one_line_with_its_interval_or_its_reasons():
    same, few, lost = full_run().pairs
    assert pairs.pair_line(same) == (
        "ours / gather = 0.900 [0.900, 0.900] (95 %, 6 pairs; 90.0 us / 100 us)"
    )
    assert pairs.pair_line(few) == (
        "ours / gather = 0.900 (too few for an interval at 95 %: 1 pairs; 90.0 us / 100 us)"
    )
    assert pairs.pair_line(lost) == "ours / liar: wrong: liar: max error 1"


def test_time_spent_adds_up_to_the_whole():
    spent = Spent()
    spent.add({"inputs": 1.5, "timing": 2.0})
    spent.add({"timing": 1.0})
    assert spent.line(10.0) == "time    10 s: inputs 1.5 s, timing 3.0 s, the rest 5.5 s"
    with pytest.raises(ValueError, match="part='sleep': must be one of read curve, start-up"):
        spent.add({"sleep": 1.0})
