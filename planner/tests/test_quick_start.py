"""The quick-start code as users find it, run as written.

Where there is no GPU, the word "cuda" becomes "cpu"; nothing else is changed.
"""

import pytest
import torch

ONE_SHOT = """
import torch
import stream_attention as stream_attn

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32

q = torch.randn(4, 1, 16, 64, device=device, dtype=dtype)
k_cache = torch.randn(4, 32768, 2, 64, device=device, dtype=dtype)
v_cache = torch.randn_like(k_cache)

output, info = stream_attn.decode(
    q,
    k_cache,
    v_cache,
    mode="exact_native",
)

print(output.shape)
print(info.backend_used)
"""

PAGED = """
import torch
import stream_attention as stream_attn

q = torch.randn(4, 1, 16, 64, device="cuda", dtype=torch.bfloat16)
k_pages = torch.randn(8192, 2, 16, 64, device="cuda", dtype=torch.bfloat16)
v_pages = torch.randn_like(k_pages)
page_table = torch.arange(
    8192, device="cuda", dtype=torch.int32
).view(4, 2048)
sequence_lengths = torch.full(
    (4,), 32768, device="cuda", dtype=torch.int32
)

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
"""

PLAN_ONCE = """
import torch
from stream_attention import StreamAttnEngine

q = torch.randn(4, 1, 14, 64, device="cuda", dtype=torch.float16)
k_cache = torch.randn(4, 32768, 2, 64, device="cuda", dtype=torch.float16)
v_cache = torch.randn_like(k_cache)

engine = StreamAttnEngine(
    policy_name="qwen25_05b_l8_32k_seed_only_batched",
    model_id="Qwen/Qwen2.5-0.5B-Instruct",
    layer_id=8,
)

plan = engine.plan(
    q,
    k_cache,
    v_cache,
    mode="verified_auto",
)

# Update q/k_cache/v_cache contents in place between decode steps.
output, info = plan.run()
print(info.backend_used, plan.reason)
"""

SEQUENCES = """
import torch
import stream_attention as stream_attn

q = torch.randn(2, 1024, 8, 64, device="cuda", dtype=torch.float16,
                requires_grad=True)
k = torch.randn(2, 1024, 2, 64, device="cuda", dtype=torch.float16,
                requires_grad=True)
v = torch.randn_like(k)

prefill_output, prefill_info = stream_attn.prefill(
    q.detach(), k.detach(), v.detach(), causal=True, return_info=True
)
output = stream_attn.train(q, k, v, causal=True)
output.square().mean().backward()
"""


def run(block):
    torch.manual_seed(0)
    if not torch.cuda.is_available():
        block = block.replace('"cuda"', '"cpu"') if "is_available" not in block else block
    names = {}
    exec(compile(block, "quick start", "exec"), names)
    return names


def test_one_shot_exact_decode(capsys):
    names = run(ONE_SHOT)
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["torch.Size([4, 1, 16, 64])", names["info"].backend_used]
    _agrees(names, names["k_cache"], names["v_cache"])


def test_exact_decode_from_a_paged_cache():
    names = run(PAGED)
    tokens = [
        pages.view(4, 2048, 2, 16, 64).transpose(2, 3).reshape(4, 32768, 2, 64)
        for pages in (names["k_pages"], names["v_pages"])
    ]
    _agrees(names, *tokens)


def test_plan_once_for_a_decode_loop(capsys):
    names = run(PLAN_ONCE)
    _agrees(names, names["k_cache"], names["v_cache"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"{names['info'].backend_used} verified_auto: no policy cell is insta")
    names["q"].mul_(-1)
    names["v_cache"].add_(1)
    names["output"], _ = names["plan"].run()
    _agrees(names, names["k_cache"], names["v_cache"])


def test_prefill_and_training_attention():
    names = run(SEQUENCES)
    assert names["prefill_output"].shape == names["q"].shape
    # On a GPU two routes serve these, each with roundings of its own.
    torch.testing.assert_close(
        names["prefill_output"], names["output"].detach(), atol=2e-3, rtol=2e-2
    )
    assert names["q"].grad.isfinite().all()
    assert names["k"].grad.abs().sum() > 0
    assert names["prefill_info"].guarantee == "exact"


def _agrees(names, key, value):
    """Against plain softmax in fp32; rounding of a half-precision result is a few 2^-9."""
    q = names["q"].float().squeeze(1).unflatten(1, (2, -1))
    scores = torch.einsum("bhgd,bnhd->bhgn", q, key.float()) / 8
    want = torch.einsum("bhgn,bnhd->bhgd", scores.softmax(-1), value.float())
    got = names["output"].float().squeeze(1).unflatten(1, (2, -1))
    assert got.shape == want.shape
    error = (got - want).abs().max() / want.abs().max()
    assert error < 2**-7


def test_the_check_of_this_file_can_fail():
    q, k = torch.randn(1, 1, 4, 64), torch.randn(1, 8, 2, 64)
    with pytest.raises(AssertionError):
        _agrees({"q": q, "output": torch.ones_like(q)}, k, k)
