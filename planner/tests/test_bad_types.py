"""Arguments of a wrong type are refused by name, whatever they compare equal to or stand for."""

import math

import numpy as np
import pytest
import torch

import stream_attention as stream_attn
from stream_attention import ContiguousKVCache, PagedKVCache, StreamAttnEngine
from stream_attention.planner.modes import canonical_mode

NOT_COUNTS = (True, 1.0, np.int64(1), torch.tensor(1), np.array([1, 1]), "1", math.nan)
NOT_FLAGS = (None, 0, 1, "no", np.True_, np.array([True, False]), torch.tensor([True, False]))
TWO = np.array([1, 2])
PAIR = torch.tensor([1, 2])


def caches():
    pool = torch.randn(2, 40, 2, 16)
    return ContiguousKVCache(key=pool, value=pool.clone())


def decode(**options):
    return stream_attn.decode(torch.randn(2, 4, 16), caches(), **options)


def attention(**options):
    return stream_attn.attention(torch.randn(2, 4, 16), caches(), **options)


def packed(**options):
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
    return stream_attn.attention(torch.randn(2, 4, 16), caches(), offsets, **options)


def plan(**options):
    return StreamAttnEngine().plan(torch.randn(2, 4, 16), caches(), **options)


def prefill(**options):
    return stream_attn.prefill(*(torch.randn(1, 5, n, 16) for n in (4, 2, 2)), **options)


def train(**options):
    return stream_attn.train(*(torch.randn(1, 5, n, 16) for n in (4, 2, 2)), **options)


def oracle(**options):
    return stream_attn.reference.attention(torch.randn(2, 4, 16), caches(), **options)


def message(call, **options):
    with pytest.raises(ValueError) as caught:
        call(**options)
    return str(caught.value)


@pytest.mark.parametrize("value", NOT_COUNTS, ids=repr)
@pytest.mark.parametrize("call", [attention, packed, plan])
def test_max_qo_len_is_an_int(call, value):
    text = message(call, max_qo_len=value)
    assert f"max_qo_len={value!r}: must be an int >= 0" in text


FLAGS = ("causal", "return_lse", "batch_invariant")
TAKEN = {
    decode: (*FLAGS, "validate", "return_info"),
    packed: (*FLAGS, "validate", "return_info"),
    plan: (*FLAGS, "validate"),
    prefill: (*FLAGS, "validate", "return_info"),
    train: (*FLAGS, "return_info"),
}


@pytest.mark.parametrize("value", NOT_FLAGS, ids=repr)
@pytest.mark.parametrize(("call", "name"), [(call, n) for call in TAKEN for n in TAKEN[call]])
def test_a_flag_is_a_bool(call, name, value):
    assert f"{name}={value!r}: must be a bool; use True" in message(call, **{name: value})


def test_flags_come_beside_the_other_faults():
    text = message(decode, validate=None, return_info="x", window_left=-1)
    for part in ("attention: 3 faults", "validate=None", "return_info='x'", "window_left=-1"):
        assert part in text


@pytest.mark.parametrize("value", [TWO, PAIR], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", ["window_left", "window_right", "sm_scale", "logits_soft_cap"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("call", [decode, packed, plan, prefill, train, oracle])
def test_an_array_is_no_number(call, causal, name, value):
    text = message(call, causal=causal, **{name: value})
    assert text.count(name) == 1
    assert f"{name}={value!r}: must be " in text


@pytest.mark.parametrize("value", [TWO, np.array(["dense", "auto"]), ["dense"], 3], ids=repr)
def test_a_mode_is_a_string(value):
    assert f"mode={value!r}: must be one of exact_native" in message(decode, mode=value)


def test_modes_and_aliases_have_full_names():
    assert canonical_mode("dense") == canonical_mode("exact_native") == "exact_native"
    assert canonical_mode("auto") == canonical_mode("verified_auto") == "verified_auto"


@pytest.mark.parametrize("layout", [np.array(["NHD", "HND"]), ["NHD"], None, 3], ids=repr)
def test_a_layout_is_a_string(layout):
    pool, lens = torch.zeros(8, 16, 2, 16), torch.zeros(2, dtype=torch.int32)
    table = torch.zeros(2, 4, dtype=torch.int32)
    common = {"key": pool, "value": pool, "layout": layout}
    words = "layout=.*: must be 'NHD' or 'HND'; use 'NHD'"
    with pytest.raises(ValueError, match=words):
        PagedKVCache(page_table=table, sequence_lengths=lens, **common)
    with pytest.raises(ValueError, match=words):
        ContiguousKVCache(**common)


def test_a_head_dim_of_zero_blames_no_scale_that_was_not_given():
    q, pool = torch.zeros(2, 4, 0), torch.zeros(2, 8, 2, 0)
    with pytest.raises(ValueError, match="head_dim_qk=0: must be an int in") as caught:
        stream_attn.decode(q, pool, pool)
    assert "sm_scale" not in str(caught.value)
