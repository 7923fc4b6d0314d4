"""Which rows the oracle checks, and within which bounds."""

import dataclasses

import pytest
import torch

from stream_attention.bench import check
from stream_attention.bench.cases import FP8, DecodeCase
from stream_attention.bench.lengths import parse_lengths
from stream_attention.bench.pools import build_pool
from stream_attention.core import oracle


def test_longest_and_shortest_are_sampled_first_and_work_is_bounded():
    lens = [100, 7, 5000, 300, 20]
    assert check.sample_requests(lens, 32, budget=32 * 5007) == (1, 2)
    assert check.sample_requests(lens, 32, budget=1) == (2,)
    assert check.sample_requests(lens, 32, budget=10**9) == (0, 1, 2, 3, 4)
    many = check.sample_requests(list(range(1, 101)), 1, budget=10**9)
    assert len(many) == check.MAX_REQUESTS and {0, 99} <= set(many)


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
    case = DecodeCase(
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
    assert expected.requests == (1,)
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
    case = DecodeCase(batch=2, lengths=parse_lengths("50,90"), head_dim=16, kv_dtype=FP8)
    pool = build_pool(case, torch.device("cpu"), seed=0)
    expected = check.expect(pool)
    assert expected.verdict(oracle.attention(pool.q, pool.cache).to(pool.q.dtype)).ok
    without = dataclasses.replace(pool.cache, **{scale: None})
    assert not expected.verdict(oracle.attention(pool.q, without).to(pool.q.dtype)).ok
