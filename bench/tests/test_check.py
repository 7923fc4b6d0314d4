"""Which rows the oracle checks, and within which bounds."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_attention.bench import check
from stream_attention.bench.cases import FP8, AttentionCase
from stream_attention.bench.lengths import parse_lengths
from stream_attention.bench.pools import build_pool
from stream_attention.core import oracle


def requests_of(kv_lens, q_lens, heads, budget):
    return tuple(
        dict.fromkeys(r.request for r in check.sample_runs(kv_lens, q_lens, heads, budget))
    )


def test_longest_and_shortest_are_sampled_first_and_work_is_bounded():
    lens = [100, 7, 5000, 300, 20]
    ones = [1] * 5
    assert requests_of(lens, ones, 32, budget=32 * 5007) == (1, 2)
    assert requests_of(lens, ones, 32, budget=1) == (2,)
    assert requests_of(lens, ones, 32, budget=10**9) == (0, 1, 2, 3, 4)
    many = requests_of(list(range(1, 101)), [1] * 100, 1, budget=10**9)
    assert len(many) == check.MAX_REQUESTS and {0, 99} <= set(many)


def test_the_request_with_most_queries_is_always_sampled():
    lens, queries = [100, 9000, 5000, 300, 200], [1, 1, 0, 64, 64]
    assert requests_of(lens, queries, 1, budget=1) == (3,)
    assert requests_of(lens, queries, 1, budget=10**9) == (0, 1, 3, 4)


@given(queries=st.integers(1, 5000), rows=st.integers(0, 6000))
def test_runs_hold_the_first_row_and_the_last_and_never_share_one(queries, rows):
    runs = check._runs(7, queries, rows)
    assert {run.request for run in runs} == {7}
    assert (runs[0].start, runs[-1].stop) == (0, queries)
    assert all(one.start < one.stop <= two.start for one, two in zip(runs, runs[1:], strict=False))
    checked = sum(run.stop - run.start for run in runs)
    assert checked == queries or checked == check.RUN_ROWS * len(runs)
    if queries <= rows:
        assert checked == queries
    assert checked <= max(rows, 2 * check.RUN_ROWS)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cache", ["paged", "contiguous"])
@pytest.mark.parametrize("queries", ["100,1,0,3", "70,70,70,70"])
def test_runs_of_a_long_request_have_the_answers_of_their_rows(monkeypatch, causal, cache, queries):
    monkeypatch.setitem(check.ORACLE_BUDGET, "cpu", 1)
    case = AttentionCase(
        batch=4,
        lengths=parse_lengths("90,40,50,9"),
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim=8,
        dtype="float32",
        cache=cache,
        causal=causal,
        q_lengths=parse_lengths(queries),
    )
    pool = build_pool(case, torch.device("cpu"), seed=0)
    expected = check.expect(pool)
    last = case.q_lens[0]
    assert expected.runs == (check.Run(0, 0, 16), check.Run(0, last - 16, last))
    whole = oracle.attention(pool.q, pool.cache, pool.qo_indptr, causal=causal)
    right = whole.to(pool.q.dtype)
    verdict = expected.verdict(right)
    assert verdict.ok and (verdict.rows_checked, verdict.rows) == (32, case.num_rows)
    for row, seen in ((15, True), (16, False), (last - 17, False), (last - 16, True)):
        other = right.clone()
        other[row] = other[row] * 1.1 + 0.1
        assert expected.verdict(other).ok != seen, row


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("cache", ["paged", "contiguous"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", None), ("bfloat16", None), ("bfloat16", FP8)]
)
def test_a_part_of_the_requests_is_compared_row_by_row(
    monkeypatch, q_len, dtype, kv_dtype, cache, layout
):
    monkeypatch.setitem(check.ORACLE_BUDGET, "cpu", 1)  # one request only: the longest
    case = AttentionCase(
        batch=3,
        lengths=parse_lengths("5,40,9"),
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim=8,
        q_len=q_len,
        dtype=dtype,
        kv_dtype=kv_dtype,
        cache=cache,
        layout=layout,
    )
    pool = build_pool(case, torch.device("cpu"), seed=0)
    expected = check.expect(pool)
    assert expected.runs == (check.Run(1, 0, q_len),)
    q = pool.q.view(3, q_len, 4, 8)
    right = oracle.attention(q, pool.cache).to(pool.q.dtype).view_as(pool.q)
    verdict = expected.verdict(right)
    assert verdict.ok and (verdict.rows_checked, verdict.rows) == (q_len, 3 * q_len)
    other = right.clone()
    other[0] += 1  # finite, and not among the sampled rows
    assert expected.verdict(other).ok
    sampled = right.clone()
    sampled[q_len] *= 1.1
    failed = expected.verdict(sampled)
    assert not failed.ok and "max error" in failed.message
    unwritten = right.clone()
    unwritten[0, 0, 0] = float("nan")
    assert not expected.verdict(unwritten).ok


@pytest.mark.parametrize("scale", ["key_scale", "value_scale"])
def test_a_scale_that_is_left_out_is_wrong(scale):
    case = AttentionCase(batch=2, lengths=parse_lengths("50,90"), head_dim=16, kv_dtype=FP8)
    pool = build_pool(case, torch.device("cpu"), seed=0)
    expected = check.expect(pool)
    assert expected.verdict(oracle.attention(pool.q, pool.cache).to(pool.q.dtype)).ok
    without = dataclasses.replace(pool.cache, **{scale: None})
    assert not expected.verdict(oracle.attention(pool.q, without).to(pool.q.dtype)).ok
