"""What the oracle refuses, by name and by value, and what it computes at the edge of its rules."""

import math

import pytest
import torch

from stream_attention.core.cache import ContiguousKVCache, PagedKVCache
from stream_attention.core.oracle import attention

REAL = "must be real and floating"


def _call(**changed):
    call = {
        "q": torch.randn(2, 4, 2, 8),
        "k": torch.randn(2, 7, 2, 8),
        "v": torch.randn(2, 7, 2, 8),
    }
    call.update(changed)
    return attention(call.pop("q"), (call.pop("k"), call.pop("v")), **call)


REFUSED = {
    "v_device": ({"v": torch.zeros(2, 7, 2, 8, device="meta")}, ["v.device='meta': must be k's"]),
    "complex_k": ({"k": torch.zeros(2, 7, 2, 8, dtype=torch.complex64)}, ["k.dtype=torch.complex"]),
    "complex_v": ({"v": torch.zeros(2, 7, 2, 8, dtype=torch.complex64)}, ["v.dtype=torch.complex"]),
    "int_k": ({"k": torch.zeros(2, 7, 2, 8, dtype=torch.int32)}, [f"k.dtype=torch.int32: {REAL}"]),
    "bool_k_and_v": (
        {name: torch.zeros(2, 7, 2, 8, dtype=torch.bool) for name in "kv"},
        [f"k.dtype=torch.bool: {REAL}", f"v.dtype=torch.bool: {REAL}"],
    ),
    "complex_sink": (
        {"attn_sink": torch.zeros(2, dtype=torch.complex64)},
        [f"attn_sink.dtype=torch.complex64: {REAL}"],
    ),
    "int_sink": ({"attn_sink": torch.zeros(2, dtype=torch.int64)}, ["attn_sink.dtype=torch.int64"]),
    "nan_sink": ({"attn_sink": torch.tensor([0.0, math.nan])}, ["attn_sink[1]=nan: must be a fin"]),
    "inf_sink": ({"attn_sink": torch.tensor([math.inf, 0.0])}, ["attn_sink[0]=inf: must be a fin"]),
    "lse_tensor": (
        {"return_lse": torch.tensor([1, 2])},
        ["return_lse=tensor([1, 2]): must be a b"],
    ),
    "lse_number": ({"return_lse": 1, "causal": 1}, ["return_lse=1: must be a bool", "causal=1"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_would_be_computed_with_or_not_understood_are_refused(name):
    changed, parts = REFUSED[name]
    with pytest.raises(ValueError) as caught:
        _call(**changed)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.0])
@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
def test_scales_are_checked_by_value(name, value):
    pool = torch.zeros(2, 7, 2, 8).to(torch.float8_e4m3fn)
    scale = torch.tensor([1.0, value])
    cache = ContiguousKVCache(key=pool, value=pool, **{name: scale})
    with pytest.raises(ValueError) as caught:
        attention(torch.zeros(2, 2, 8), cache)
    assert f"{name}[1]={value}: must be finite and > 0" in str(caught.value)


def test_legal_kinds_stay_legal():
    want = _call(
        q=torch.ones(2, 4, 2, 8).double(),
        k=torch.ones(2, 7, 2, 8).double(),
        v=torch.ones(2, 7, 2, 8),
    )
    torch.testing.assert_close(want, torch.ones(2, 4, 2, 8).double())
    fp8 = torch.ones(2, 7, 2, 8).to(torch.float8_e4m3fn)
    sink = torch.full((2,), -math.inf, dtype=torch.float64)  # no sink
    got = _call(q=torch.ones(2, 4, 2, 8), k=fp8, v=fp8, attn_sink=sink)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("cap", [10**30, 10**300])
def test_a_cap_that_is_a_huge_int_caps_nothing(cap):
    options = {
        "q": torch.ones(2, 4, 2, 8),
        "k": torch.ones(2, 7, 2, 8),
        "v": torch.ones(2, 7, 2, 8),
    }
    torch.testing.assert_close(_call(**options, logits_soft_cap=cap), _call(**options))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_mask_that_is_no_number_makes_its_row_nan_where_it_is_seen(value):
    mask = torch.zeros(4, 7)
    mask[1, 2] = mask[0, 6] = value  # the second is not seen
    q, k, v = torch.randn(2, 4, 2, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    out, lse = attention(q, (k, v), attn_mask=mask, return_lse=True)
    want, want_lse = attention(q, (k, v), return_lse=True)
    want[:, 1], want_lse[:, 1] = math.nan, math.nan
    assert torch.equal(out.nan_to_num(7.0), want.nan_to_num(7.0))
    assert torch.equal(lse.nan_to_num(7.0), want_lse.nan_to_num(7.0))


@pytest.mark.parametrize("shape", [(7, 5), (0, 1, 7, 5), (1, 8, 1, 1)])
def test_no_request_beside_a_mask_gives_no_row(shape):
    q, k = torch.randn(0, 7, 8, 16), torch.randn(0, 5, 2, 16)
    out = attention(q, (k, k), attn_mask=torch.ones(shape, dtype=torch.bool))
    assert out.shape == q.shape


@pytest.mark.parametrize("left", [0, 3])
@pytest.mark.parametrize("name", ["q", "k", "v", "attn_sink", "attn_mask"])
def test_a_tensor_without_its_memory_is_named(name, left):
    of = {
        "q": torch.randn(2, 3, 4, 16),
        "k": torch.randn(2, 6, 2, 16),
        "v": torch.randn(2, 6, 2, 8),
    }
    of |= {"attn_sink": torch.zeros(4), "attn_mask": torch.zeros(3, 6)}
    of[name].untyped_storage().resize_(left)
    rule = rf"{name}\.untyped_storage\(\)\.nbytes\(\)={left}: must hold"
    with pytest.raises(ValueError, match=rule):
        attention(of.pop("q"), (of.pop("k"), of.pop("v")), **of)


@pytest.mark.parametrize("name", ["key", "value", "page_table", "sequence_lengths", "key_scale"])
def test_a_tensor_of_a_cache_without_its_memory_is_named(name):
    pool = torch.randn(4, 16, 2, 16).to(torch.float8_e4m3fn)
    cache = PagedKVCache(
        key=pool,
        value=pool.clone(),
        page_table=torch.arange(4, dtype=torch.int32).view(2, 2),
        sequence_lengths=torch.tensor([20, 7], dtype=torch.int32),
        key_scale=torch.ones(2),
        value_scale=torch.ones(2),
    )
    getattr(cache, name).untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=rf"{name}\.untyped_storage\(\)\.nbytes\(\)=0: must hold"):
        attention(torch.randn(2, 4, 16), cache)
