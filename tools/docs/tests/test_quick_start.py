"""Calls in the form that users of the first StreamAttn know: same names, same order of arguments.

Sizes are those of serving. Where no CUDA device is there, the same calls run on the CPU.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import stream_attention as stream_attn
from stream_attention import StreamAttnEngine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """PyTorch's attention in fp32 over `[batch, seq, heads, head_dim]` tensors."""
    q, k, v = (tensor.detach().float().transpose(1, 2) for tensor in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)


def plain_grads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Gradients of `mean(out²)` by q and k through PyTorch's attention in `dtype`, in fp32."""
    q, k, v = (t.detach().to(dtype).transpose(1, 2).requires_grad_() for t in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out.square().mean().backward()
    return [t.grad.float().transpose(1, 2) for t in (q, k)]


def test_one_shot_decode_over_contiguous_caches() -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    q = torch.randn(4, 1, 16, 64, device=DEVICE, dtype=dtype)
    k_cache = torch.randn(4, 32768, 2, 64, device=DEVICE, dtype=dtype)
    v_cache = torch.randn_like(k_cache)

    output, info = stream_attn.decode(
        q,
        k_cache,
        v_cache,
        mode="exact_native",
    )

    assert output.shape == (4, 1, 16, 64)
    assert isinstance(info.backend_used, str)
    assert info.guarantee == "exact"
    torch.testing.assert_close(output.float(), plain(q, k_cache, v_cache), atol=1e-3, rtol=2e-2)


def test_engine_plans_a_paged_cache_and_runs_it_again() -> None:
    q = torch.randn(4, 1, 16, 64, device=DEVICE, dtype=torch.bfloat16)
    k_pages = torch.randn(8192, 2, 16, 64, device=DEVICE, dtype=torch.bfloat16)
    v_pages = torch.randn_like(k_pages)
    page_table = torch.arange(8192, device=DEVICE, dtype=torch.int32).view(4, 2048)
    sequence_lengths = torch.full((4,), 32768, device=DEVICE, dtype=torch.int32)

    cache = stream_attn.PagedKVCache(
        key=k_pages,
        value=v_pages,
        page_table=page_table,
        sequence_lengths=sequence_lengths,
        layout="HND",
    )
    plan = stream_attn.StreamAttnEngine().plan(
        q,
        cache,
        mode="exact_native",
    )
    output, info = plan.run()

    def rows(pages: torch.Tensor) -> torch.Tensor:
        return pages[page_table.long()].transpose(2, 3).reshape(4, 32768, 2, 64)

    assert info.guarantee == "exact"
    want = plain(q, rows(k_pages), rows(v_pages))
    torch.testing.assert_close(output.float(), want, atol=1e-3, rtol=2e-2)

    page_table.copy_(page_table.flip(0))
    q.copy_(q.flip(0))
    again, info = plan.run()
    torch.testing.assert_close(again.float(), want.flip(0), atol=1e-3, rtol=2e-2)


def test_engine_with_a_policy_that_is_not_there_is_exact_and_says_why() -> None:
    dtype = torch.float16 if DEVICE == "cuda" else torch.float32
    q = torch.randn(4, 1, 14, 64, device=DEVICE, dtype=dtype)
    k_cache = torch.randn(4, 32768, 2, 64, device=DEVICE, dtype=dtype)
    v_cache = torch.randn_like(k_cache)

    engine = StreamAttnEngine(
        policy_name="layer_8_at_32k",
        model_id="a-model",
        layer_id=8,
    )
    plan = engine.plan(
        q,
        k_cache,
        v_cache,
        mode="verified_auto",
    )
    output, info = plan.run()

    assert info.guarantee == "exact"
    assert "polic" in plan.reason
    torch.testing.assert_close(output.float(), plain(q, k_cache, v_cache), atol=1e-3, rtol=2e-2)

    k_cache.normal_()
    output, info = plan.run()
    torch.testing.assert_close(output.float(), plain(q, k_cache, v_cache), atol=1e-3, rtol=2e-2)


def test_prefill_and_train_over_compact_kv_heads() -> None:
    dtype = torch.float16
    q = torch.randn(2, 1024, 8, 64, device=DEVICE, dtype=dtype, requires_grad=True)
    k = torch.randn(2, 1024, 2, 64, device=DEVICE, dtype=dtype, requires_grad=True)
    v = torch.randn_like(k)

    prefill_output, prefill_info = stream_attn.prefill(
        q.detach(), k.detach(), v.detach(), causal=True, return_info=True
    )
    output = stream_attn.train(q, k, v, causal=True)
    output.square().mean().backward()

    want = plain(q, k, v, causal=True)
    assert prefill_info.guarantee == "exact"
    torch.testing.assert_close(prefill_output.float(), want, atol=2e-3, rtol=2e-2)
    torch.testing.assert_close(output.detach().float(), want, atol=2e-3, rtol=2e-2)

    # The gradient of a mean over 2^20 values is subnormal in fp16, so PyTorch's own error is the
    # measure: ours may round in another order, which we let cost half as much again.
    exact = plain_grads(q, k, v, torch.float32)
    rounded = plain_grads(q, k, v, torch.float16)
    for got, want, same in zip((q.grad, k.grad), exact, rounded, strict=True):
        assert (got.float() - want).norm() <= 1.5 * (same - want).norm() + 1e-3 * want.norm()
