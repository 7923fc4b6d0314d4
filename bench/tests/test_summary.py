"""The summary: geometric means, and each case beside its plain form."""

import dataclasses
import io

import pytest
from rich.console import Console

from stream_attention.bench import summary
from stream_attention.bench.cases import FP8, AttentionCase
from stream_attention.bench.lengths import uniform
from stream_attention.bench.results import CaseResult, Row
from stream_attention.bench.suites import SUITES
from stream_attention.bench.timing import Timing

CASE = AttentionCase(batch=2, lengths=uniform(64))


def timed(name, us, kind="route"):
    return Row(name, kind, "ok", (), Timing((us,), "cpu_cold"))


def result(case, *rows, floor_us=10.0):
    return CaseResult(case, case.kv_bytes, case.moved_bytes, 1, floor_us, 0, True, rows)


def test_means_are_geometric_and_count_what_they_are_made_of():
    results = (
        result(CASE, timed("engine", 20.0), timed("sdpa", 40.0, "peer")),
        result(CASE, timed("engine", 80.0), timed("sdpa", 40.0, "peer")),
        result(CASE, timed("engine", 10.0), Row("sdpa", "peer", "failed", ("why",))),
        result(CASE, Row("engine", "route", "failed", ("why",))),
    )
    (mean,) = summary.means(results)
    assert (mean.contender, mean.cases, mean.compared) == ("engine", 3, 2)
    assert mean.over_floor == pytest.approx((2 * 8 * 1) ** (1 / 3))
    assert mean.speed_up == pytest.approx(1.0) and mean.slowest == pytest.approx(0.5)
    assert summary.mean_lines(results) == (
        "geometric mean  engine: 2.520 × floor over 3 cases, "
        "1.000 × as fast as the best peer over 2 (least 0.500)",
    )


def test_a_mean_without_a_peer_claims_no_speed_up():
    (mean,) = summary.means((result(CASE, timed("torch", 20.0)),))
    assert mean.speed_up is None and mean.compared == 0
    assert summary.mean_lines((result(CASE, timed("torch", 20.0)),)) == (
        "geometric mean  torch: 2.000 × floor over 1 cases",
    )


@pytest.mark.parametrize(
    ("suite", "plain"),
    [
        ("decode_pages", [4] * 4 + [None] + [4] * 5 + [None, 10, 10]),
        ("decode_fp8", [None, 0, None, 2]),
        ("decode_capacity", [None, 0]),
        ("decode_invariant", [None, 0, None, 2, None, 4, None, 6, None, 8]),
        ("decode_dims", [None] * 8),
        ("performance_decode", [None] * 25),
    ],
)
def test_every_form_in_a_suite_is_compared_with_its_plain_one(suite, plain):
    results = [result(case) for case in SUITES[suite]]
    found = [summary.plain_form(one, results) for one in results]
    assert [None if one is None else results.index(one) for one in found] == plain


def test_the_ratio_is_of_one_contender_in_both_forms():
    plain = result(CASE, timed("engine", 40.0), timed("torch", 1.0))
    fp8 = result(dataclasses.replace(CASE, kv_dtype=FP8), timed("engine", 20.0))
    results = (plain, fp8)
    assert summary.over_plain(fp8, results, "engine") == pytest.approx(0.5)
    assert summary.over_plain(plain, results, "engine") is None
    assert summary.over_plain(fp8, results, "torch") is None


def printed(*results):
    stream = io.StringIO()
    summary.print_summary(Console(file=stream, width=136, highlight=False), results)
    return stream.getvalue()


def test_the_table_shows_the_engine_beside_floor_peer_and_plain_form():
    text = printed(
        result(CASE, timed("torch", 50.0), timed("engine", 40.0), timed("sdpa", 60.0, "peer")),
        result(dataclasses.replace(CASE, page_size=1), timed("engine", 60.0)),
        result(dataclasses.replace(CASE, cache="contiguous"), timed("torch", 70.0)),
    )
    assert "summary of engine" in text
    lines = {line.split("  ")[1]: line.split() for line in text.splitlines() if "B2 N64" in line}
    shown = {name: cells[len(name.split()) :] for name, cells in lines.items()}
    first = ["0.5", "10.0", "us", "40.0", "us", "4.000", "60.0", "us", "1.500"]
    assert shown[CASE.name] == first
    assert shown[f"{CASE.name} page1"] == ["0.5", "10.0", "us", "60.0", "us", "6.000", "1.500"]
    assert shown[f"{CASE.name} contiguous"] == ["0.5", "10.0", "us"]
    assert "geometric mean  torch: 5.916 × floor over 2 cases" in text
    assert "geometric mean  engine: 4.899 × floor over 2 cases" in text


def test_without_a_route_there_is_no_summary():
    assert printed(result(CASE, timed("sdpa", 60.0, "peer"))) == ""
    assert "summary of torch" in printed(result(CASE, timed("torch", 50.0)))
