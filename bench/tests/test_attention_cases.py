"""Every form of a case: queries of each request, causal or not, paged or contiguous, made tiny."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_attention.bench import contenders as contenders_lib
from stream_attention.bench import routes, runner
from stream_attention.bench.cases import FP8, AttentionCase
from stream_attention.bench.floor import ReadCurve, ReadPoint
from stream_attention.bench.lengths import Lengths, parse_lengths, uniform
from stream_attention.bench.pools import build_pool
from stream_attention.bench.suites import SUITES
from stream_attention.core.describe import describe, phase_of
from stream_attention.planner.engine import checked

CPU = torch.device("cpu")
CURVE = ReadCurve((ReadPoint(1, 1.0, "sum"),), "cpu_cold")
SETTINGS = runner.Settings(replays=5, cold=False, max_seconds=0.1)
SMALL = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}


def case_of(lengths, queries=None, **fields):
    drawn = None if queries is None else parse_lengths(queries)
    lengths = parse_lengths(lengths)
    batch = len(lengths.numbers) if lengths.kind == "list" else fields.pop("batch", 2)
    return AttentionCase(
        **{**SMALL, "batch": batch, "lengths": lengths, "q_lengths": drawn, **fields}
    )


# By the phase that they are.
FORMS = {
    "decode": case_of("37,16,1", "1"),
    "verify": case_of("37,16", "3"),
    "append": case_of("64", "20"),
    "prefill": case_of("32", q_len=32, cache="contiguous"),
    "prefill-full": case_of("32", q_len=32, cache="contiguous", causal=False),
    "mixed": case_of("50,37,16,1", "20,1,1,1"),
    "mixed-ends": case_of("16,37,90,33", "1,20,0,33"),
    "mixed-full": case_of("50,37,16", "5,1,2", causal=False),
    "mixed-hnd": case_of("50,37,16", "5,1,2", layout="HND", page_size=8),
    "mixed-contiguous": case_of("50,37,16", "5,1,2", cache="contiguous", capacity=64),
    "mixed-fp8": case_of("50,37,16", "5,1,2", kv_dtype=FP8, dtype="bfloat16"),
    "mixed-wide": case_of("50,37,16", "5,1,2", capacity=4096),
    "mixed-invariant": case_of("50,37,16", "5,1,2", batch_invariant=True),
    "verify-full": case_of("37,16", q_len=3, causal=False),
    "drawn": case_of("mixed:1:64:20:1.0:0", "mixed:1:16:1:0:0", batch=5),
}


def forms(*names):
    return pytest.mark.parametrize("case", [FORMS[n] for n in names or FORMS], ids=names or FORMS)


def row_of(name, case):
    found = {c.name: c for c in routes.route_contenders()}
    entry = {**found, **contenders_lib.load_peers().peers}[name]
    (row,) = runner.run_case(case, [entry], CPU, SETTINGS, CURVE).rows
    return row


@forms()
@pytest.mark.parametrize("name", ["torch", "engine"])
def test_our_portable_route_serves_every_form(name, case):
    row = row_of(name, case)
    assert row.outcome == "ok", row.reasons
    assert row.check.rows_checked == row.check.rows == sum(case.q_lens)


@forms()
@pytest.mark.parametrize("name", ["sdpa_gather", "sdpa_flash", "sdpa_math"])
def test_sdpa_serves_every_form_that_peers_are_asked(name, case):
    row = row_of(name, case)
    if case.batch_invariant:
        assert row.outcome == "unsupported" and "no such promise" in row.reasons[0]
    else:
        assert row.outcome == "ok", row.reasons


@forms()
def test_the_problem_of_a_case_is_the_problem_described(case):
    pool = build_pool(case, CPU, seed=0)
    problem = routes.problem_of(case)
    assert routes.describe_pool(pool).problem == problem
    # A plan that validates finds the longest request by itself.
    options = {"causal": case.causal, "batch_invariant": case.batch_invariant}
    asked = describe(routes.query_of(pool), pool.cache, pool.qo_indptr, **options)
    assert checked(asked, None).problem == problem


@pytest.mark.parametrize("fields", [{"q_len": 4, "layout": "HND"}, {"kv_dtype": FP8}], ids=str)
def test_the_problem_of_a_plain_case_is_the_problem_described(fields):
    case = AttentionCase(batch=2, lengths=uniform(9), **fields)
    pool = build_pool(case, CPU, seed=0)
    assert routes.describe_pool(pool).problem == routes.problem_of(case)


def test_forms_are_in_the_phases_that_they_are_named_by():
    for name, case in FORMS.items():
        phase = phase_of(case.num_rows, case.batch, case.max_q_len, case.max_tokens)
        assert phase == routes.problem_of(case).phase
        assert name == "drawn" or name.startswith(phase), name


def test_the_engine_says_which_route_it_chose():
    case = FORMS["mixed"]
    found = {c.name: c for c in routes.route_contenders()}
    pool = build_pool(case, CPU, seed=0)
    for name in ("torch", "engine"):
        (work,) = found[name].build(case, [pool], CPU)
        assert work.resolved == ("torch" if name == "engine" else "")
        assert found[name].versions()["torch"] == torch.__version__


def test_queries_are_drawn_with_the_batch_and_their_rows_follow_each_other():
    case = FORMS["drawn"]
    assert case.q_lens == (16, 1, 1, 1, 1) and case.q_offsets == (0, 16, 17, 18, 19, 20)
    assert (case.num_rows, case.max_q_len, case.uniform_q_len) == (20, 16, None)
    pool = build_pool(case, CPU, seed=0)
    assert pool.q.shape == (20, 4, 16) and pool.qo_indptr.tolist() == [0, 16, 17, 18, 19, 20]
    assert pool.qo_indptr.dtype == torch.int32
    plain = case_of("64", q_len=3)
    assert build_pool(plain, CPU, seed=0).qo_indptr is None
    assert (plain.uniform_q_len, plain.is_decode, case_of("9", "1").is_decode) == (3, False, True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"q_lengths": 5}, "q_lengths=5: must be None or a Lengths"),
        (
            {"q_lengths": uniform(2), "q_len": 3},
            "q_len=3: must be left out where q_lengths says it; use the default, 1",
        ),
        ({"q_lengths": uniform(0)}, "q_lengths=.*: must give the batch one query at least"),
        ({"q_lengths": parse_lengths("1,2,3")}, "q_lengths=1,2,3: has 3 values.*batch=2"),
        (
            {"q_lengths": parse_lengths("mixed:3:5:1:0:0")},
            "q_lengths=mixed.*: has 3 long requests, more than batch=2; use --batch=3",
        ),
        ({"causal": 1}, "causal=1: must be a bool; use True"),
    ],
)
def test_bad_queries_name_rule_and_nearest(fields, message):
    with pytest.raises(ValueError, match=message):
        AttentionCase(batch=2, lengths=uniform(40), **fields)


def test_names_tell_queries_and_causality():
    assert case_of("64", q_len=2048).name.endswith("fp32 M2K")
    assert FORMS["drawn"].name == "B5 mixed:1:64:20:1:0 4/2 D16 NHD fp32 M=mixed:1:16:1:0:0"
    assert FORMS["prefill-full"].name.endswith("contiguous M32 full")
    many = case_of("64", ",".join(["1"] * 30), batch=30)
    assert many.name.endswith("M=30-lengths")


def test_a_case_with_queries_evaluates_back():
    case = FORMS["mixed-full"]
    assert eval(repr(case), {"AttentionCase": AttentionCase, "Lengths": Lengths}) == case


KEPT = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size", "layout", "dtype", "kv_dtype")
KEPT += ("cache", "causal", "batch_invariant", "batch", "label")


def kind(tokens, queries):
    return (tokens == 0, queries, tokens > queries, tokens == queries)


@given(data=st.data())
def test_tiny_keeps_what_is_compiled_and_few_tokens(data):
    batch = data.draw(st.integers(1, 6))
    sizes = st.integers(0, 5000)
    lens = data.draw(st.lists(sizes, min_size=batch, max_size=batch))
    counts = data.draw(st.lists(st.integers(0, 3000), min_size=batch, max_size=batch))
    counts[0] = max(1, counts[0])
    case = AttentionCase(
        batch=batch,
        lengths=Lengths("list", tuple(lens)),
        q_lengths=Lengths("list", tuple(counts)),
        page_size=32,
        causal=data.draw(st.booleans()),
    )
    tiny = case.tiny()
    assert {name: getattr(tiny, name) for name in KEPT} == {n: getattr(case, n) for n in KEPT}
    assert max(tiny.kv_lens) <= 256 + 64 and max(tiny.q_lens) <= 256
    for n, m, few, queries in zip(lens, counts, tiny.kv_lens, tiny.q_lens, strict=True):
        assert queries == min(m, 256)
        assert (few == 0) == (n == 0) or queries < m or n < m
        assert (few > queries) == (n > m)
    assert tiny.tiny() == tiny


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_can_be_made_tiny(suite):
    for case in SUITES[suite]:
        tiny = case.tiny()
        assert (tiny.q_lengths is None, tiny.is_decode) == (case.q_lengths is None, case.is_decode)
        assert (len(set(tiny.kv_lens)) == 1) == (len(set(case.kv_lens)) == 1)
        assert tiny.kv_bytes <= max(tiny.batch, 1) * (64 + tiny.max_q_len) * 16384
        assert dataclasses.replace(tiny, lengths=case.lengths, capacity=case.capacity).batch
