"""`torch_math`: scores that float32 can hold, of products that it cannot."""

import pytest
import torch

from stream_attention.core.oracle import attention
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.routes.sdpa_math import apply_math


def _problem(q, k, **changed):
    fields = {
        "phase": "train",
        "batch": q.shape[0],
        "total_qo_len": q.shape[0] * q.shape[1],
        "max_qo_len": q.shape[1],
        "kv_capacity": k.shape[1],
        "num_qo_heads": q.shape[2],
        "num_kv_heads": k.shape[2],
        "head_dim_qk": q.shape[3],
        "head_dim_vo": k.shape[3],
        "q_dtype": "float32",
        "kv_dtype": "float32",
        "out_dtype": "float32",
        "cache_kind": "contiguous",
        "sm_scale": 1.0,
        "differentiable": True,
        **changed,
    }
    return AttentionProblem(**fields)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(("size", "scale"), [(1e20, 1e-40), (1e-15, 1e30), (1e10, 1e-20)])
def test_a_small_scale_meets_the_query_and_a_large_one_the_score(size, scale, sign):
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 4, 8, generator=rng)
    k, v = (torch.randn(2, 6, 2, 8, generator=rng) for _ in "kv")
    leaves = [(q * size).requires_grad_(), (k * size).requires_grad_(), v.requires_grad_()]
    scale *= sign
    out, lse = apply_math(_problem(q, k, sm_scale=scale), *leaves)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want, want_lse = attention(exact[0], exact[1], v=exact[2], sm_scale=scale, return_lse=True)
    # 1e-40 is subnormal in float32, good to 17 bits.
    torch.testing.assert_close(out.double(), want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-4)
    weights = torch.randn(out.shape, generator=rng)
    got = torch.autograd.grad(out, leaves, weights)
    theirs = torch.autograd.grad(want, exact, weights.double())
    for mine, other in zip(got, theirs, strict=True):
        unit = other.abs().max()
        torch.testing.assert_close(mine.double() / unit, other / unit, atol=1e-3, rtol=1e-3)
