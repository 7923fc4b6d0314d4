"""`prefill` and `train` on a GPU: every option in every dtype, with gradients, against the oracle.

Gradients are judged beside PyTorch's own: the error against fp64 may be a few times that of a plain
fp32 computation rounded to the dtype, not more.
"""

import pytest
import torch

import stream_attention as stream_attn
from stream_attention import ContiguousKVCache, reference
from stream_attention.core.testing.golden import golden

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
OPTIONS = {
    "plain": {},
    "not_causal": {"causal": False},
    "window": {"window_left": 30},
    "window_both": {"causal": False, "window_left": 9, "window_right": 5},
    "cap": {"logits_soft_cap": 2.0},
    "scale_0": {"sm_scale": 0.0},
    "scale_negative": {"sm_scale": -0.2},
    "sink": {"attn_sink": True},
    "mask": {"attn_mask": "bool"},
    "additive": {"attn_mask": "additive"},
    "lse": {"return_lse": True},
}
LENS = [(64, 64), (33, 100), (100, 33), (1, 70)]


def call(lens, dtype, options, head_dim=64, heads=(8, 2)):
    generator = torch.Generator(device=DEVICE).manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, device=DEVICE, generator=generator)

    qo_len, kv_len = lens
    q = normal(2, qo_len, heads[0], head_dim).to(dtype)
    k, v = (normal(2, kv_len, heads[1], head_dim).to(dtype) for _ in "kv")
    options = dict(options)
    if options.get("attn_sink"):
        options["attn_sink"] = normal(heads[0])
    kind = options.get("attn_mask")
    if kind is not None:
        seen = torch.rand(2, 1, qo_len, kv_len, device=DEVICE, generator=generator) > 0.3
        bias = torch.where(seen, normal(2, 1, qo_len, kv_len), float("-inf"))
        options["attn_mask"] = seen if kind == "bool" else bias
    return q, k, v, options


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lens", LENS, ids=str)
@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_prefill_agrees_with_the_oracle(name, lens, dtype):
    q, k, v, options = call(lens, dtype, OPTIONS[name])
    result = stream_attn.prefill(q, k, v, return_info=True, **options)
    assert result[-1].guarantee == "exact"
    lse = result[1] if options.pop("return_lse", False) else None
    golden(q, ContiguousKVCache(key=k, value=v), **options).check(result[0], lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lens", LENS, ids=str)
@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_train_and_its_gradients_agree_with_the_oracle(name, lens, dtype):
    q, k, v, options = call(lens, dtype, OPTIONS[name])
    inputs = [t.requires_grad_() for t in (q, k, v)]
    result = stream_attn.train(*inputs, **options)
    lse_too = options.pop("return_lse", False)
    out = result[0] if lse_too else result
    cache = ContiguousKVCache(key=k.detach(), value=v.detach())
    golden(q.detach(), cache, **options).check(
        out.detach(), result[1].detach() if lse_too else None
    )
    weights = torch.randn_like(out)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = reference.attention(exact[0], (exact[1], exact[2]), **options)
    wanted = torch.autograd.grad(want, exact, weights.double())
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}[dtype]
    for mine, theirs in zip(torch.autograd.grad(out, inputs, weights), wanted, strict=True):
        assert mine.isfinite().all()
        scale = max(float(theirs.norm()), 1e-3 * float(weights.double().norm()))
        assert float((mine.double() - theirs).norm()) <= tolerance * scale


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_square_causal_prefill_runs_a_fused_kernel(head_dim):
    """Peak memory stays far below the scores' matrix, which only the unfused kernel makes."""
    q, k, v, _ = call((4096, 4096), torch.bfloat16, {}, head_dim, heads=(16, 4))
    stream_attn.prefill(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, info = stream_attn.prefill(q, k, v, return_info=True)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - out.nbytes
    scores = 2 * 16 * 4096 * 4096 * 2
    assert extra < scores / 4, info


def test_dropout_is_reproducible_by_its_generator():
    q, k, v, _ = call((64, 64), torch.float32, {})
    outs = [
        stream_attn.train(
            q, k, v, dropout_p=0.4, generator=torch.Generator(device=DEVICE).manual_seed(seed)
        )
        for seed in (1, 1, 2)
    ]
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
