"""One-shot calls: the hostile list through the public functions, and every form of the result."""

import pytest
import torch

import stream_attention as stream_attn
from stream_attention import ContiguousKVCache, PagedKVCache, StreamAttnEngine, UnsupportedProblem
from stream_attention.core.info import AttentionInfo
from stream_attention.core.testing.checks import check_route
from stream_attention.core.testing.golden import golden
from stream_attention.core.testing.hostile import HOSTILE


def _one_shot(built):
    if built.case.call == "ragged":
        return stream_attn.attention(
            built.q, built.cache, built.qo_indptr, return_lse=True, **built.options
        )
    return stream_attn.decode(
        built.q, built.cache, return_lse=True, return_info=False, **built.options
    )


def _planned(built):
    plan = StreamAttnEngine().plan_attention(
        built.q, built.cache, built.qo_indptr, return_lse=True, **built.options
    )
    out, lse, _ = plan.run()
    out.fill_(torch.nan)
    lse.fill_(torch.nan)
    return plan.run()[:2]


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case.name)
def test_one_shot_calls_agree_with_the_oracle(case):
    check_route(_one_shot, case)


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case.name)
def test_planned_calls_agree_with_the_oracle(case):
    check_route(_planned, case)


def _call(heads=4):
    q, k, v = torch.randn(2, 1, heads, 16), torch.randn(2, 20, 2, 16), torch.randn(2, 20, 2, 8)
    return q, k, v


def test_decode_returns_out_and_info_by_default():
    q, k, v = _call()
    out, info = stream_attn.decode(q, k, v, mode="exact_native")
    golden(q, ContiguousKVCache(key=k, value=v)).check(out)
    assert out.shape == (2, 1, 4, 8)
    assert isinstance(info, AttentionInfo)
    assert (info.guarantee, info.policy_id, info.arch) == ("exact", None, "cpu")
    assert info.reason.startswith("exact_native")


def test_decode_forms_of_the_result():
    q, k, v = _call()
    out, lse, info = stream_attn.decode(q, k, v, return_lse=True)
    assert (out.shape, lse.shape) == ((2, 1, 4, 8), (2, 1, 4))
    assert isinstance(info, AttentionInfo)
    alone = stream_attn.decode(q, k, v, return_info=False)
    assert torch.equal(alone, out)
    pair = stream_attn.decode(q, k, v, return_lse=True, return_info=False)
    assert torch.equal(pair[0], out)
    assert torch.equal(pair[1], lse)


def test_attention_forms_of_the_result():
    q, k, v = _call()
    cache = ContiguousKVCache(key=k, value=v)
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
    packed = q.flatten(0, 1)
    out = stream_attn.attention(packed, cache, offsets, causal=True)
    golden(packed, cache, offsets).check(out)
    with_lse = stream_attn.attention(packed, cache, offsets, return_lse=True)
    assert len(with_lse) == 2
    with_info = stream_attn.attention(packed, cache, offsets, return_info=True)
    assert with_info[1].route
    assert torch.equal(stream_attn.attention(q, k, v_cache=v).flatten(0, 1), out)


def test_attention_takes_max_qo_len():
    q = torch.randn(6, 4, 16)
    cache = ContiguousKVCache(key=torch.randn(2, 9, 2, 16), value=torch.randn(2, 9, 2, 16))
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    out = stream_attn.attention(q, cache, offsets, max_qo_len=5)
    golden(q, cache, offsets).check(out)


def test_identity_and_mode_reach_the_reason():
    q, k, v = _call()
    _, info = stream_attn.decode(q, k, v, model_id="m", layer_id=3)
    assert "model_id='m', layer_id=3" in info.reason
    with pytest.raises(UnsupportedProblem, match="no policy cell is installed"):
        stream_attn.decode(q, k, v, mode="seed_only_native", model_id="m", layer_id=3)
    with pytest.raises(ValueError, match="layer_id='x': must be None or an int >= 0"):
        stream_attn.decode(q, k, v, layer_id="x")


def test_rejected_candidates_are_in_info():
    q, k, v = _call()
    _, info = stream_attn.decode(q, k, v)
    assert any(line.startswith("triton: ") for line in info.fallback_reasons)


def test_one_shot_results_are_not_overwritten_by_later_calls():
    q, k, v = _call()
    first, _ = stream_attn.decode(q, k, v)
    kept = first.clone()
    stream_attn.decode(torch.randn_like(q), k, v)
    assert torch.equal(first, kept)


def test_inference_mode_and_no_grad_serve_parameters():
    q, k, v = _call()
    want, _ = stream_attn.decode(q, k, v)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            out, _ = stream_attn.decode(torch.nn.Parameter(q), k, v)
            assert torch.equal(out, want)


def test_number_scales_follow_the_call():
    fp8 = torch.float8_e4m3fn
    q = torch.randn(1, 4, 16)
    pool = torch.randn(4, 16, 2, 16).to(fp8)
    for scale in (1.0, 0.5, 2.0):
        cache = PagedKVCache(
            key=pool,
            value=pool,
            page_table=torch.arange(4, dtype=torch.int32).view(1, 4),
            sequence_lengths=torch.tensor([50], dtype=torch.int32),
            key_scale=scale,
            value_scale=scale,
        )
        golden(q, cache).check(stream_attn.decode(q, cache)[0])


@pytest.mark.parametrize("inside", [False, True])
def test_results_made_in_inference_mode_are_written(inside):
    q, k, v = _call()
    want, lse, _ = stream_attn.decode(q, k, v, return_lse=True)
    with torch.inference_mode():
        results = {"out": torch.empty_like(want), "lse": torch.empty_like(lse)}
    with torch.inference_mode(inside):
        stream_attn.decode(q, k, v, return_lse=True, **results)
    assert torch.equal(results["out"], want)
    assert torch.equal(results["lse"], lse)


@pytest.mark.parametrize("tokens", [20, 600])
def test_autocast_rounds_nothing(tokens):
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, tokens, 2, 16), torch.randn(2, tokens, 2, 16)
    want, _ = stream_attn.decode(q, k, v)
    plan = StreamAttnEngine().plan(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(stream_attn.decode(q, k, v)[0], want)
        assert torch.equal(plan.run()[0], want)
