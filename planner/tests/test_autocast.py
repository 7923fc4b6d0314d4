"""No public function rounds otherwise, or raises, under a caller's autocast, whatever its dtype."""

import contextlib

import pytest
import torch

import stream_attention as stream_attn
from stream_attention import PagedKVCache, StreamAttnEngine

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn


def paged(dtype):
    pool = torch.randn(2, 8, 16, 2, 16).to(dtype)
    return PagedKVCache(
        key=pool[0],
        value=pool[1],
        page_table=torch.arange(8, dtype=torch.int32).view(2, 4),
        sequence_lengths=torch.tensor([33, 20], dtype=torch.int32),
        key_scale=torch.tensor([0.5, 2.0]) if dtype == FP8 else None,
    )


def decode(dtype):
    return stream_attn.decode(torch.randn(2, 4, 16).to(dtype), paged(dtype), return_lse=True)[:2]


def decode_of_fp8(dtype):
    q, sink = torch.randn(2, 4, 16).to(dtype), torch.randn(4)
    return stream_attn.decode(q, paged(FP8), attn_sink=sink)[:1]


def packed(dtype):
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    return stream_attn.attention(torch.randn(5, 4, 16).to(dtype), paged(dtype), offsets)


def plan(dtype):
    plan = StreamAttnEngine().plan(torch.randn(2, 4, 16).to(dtype), paged(dtype), return_lse=True)
    return plan.run()[:2]


def merge(dtype):
    outs, lses = torch.randn(2, 3, 4, 16).to(dtype), torch.randn(2, 3, 4)
    lses[:, 0] = -torch.inf
    return stream_attn.merge_states(outs[0], lses[0], outs[1], lses[1])


def oracle(dtype):
    q = torch.randn(2, 4, 16).to(dtype)
    return stream_attn.reference.attention(q, paged(dtype), return_lse=True)


def sequences(function, **options):
    def call(dtype):
        q, k, v = (torch.randn(2, n, h, 16).to(dtype) for n, h in ((6, 4), (9, 2), (9, 2)))
        return function(q, k, v, **options)

    return call


def gradients(**options):
    """Forward under autocast, backward outside of it, as torch asks."""

    def call(dtype, context):
        q, k, v = (torch.randn(2, n, h, 16).to(dtype) for n, h in ((6, 4), (9, 2), (9, 2)))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        with context:
            out = stream_attn.train(*leaves, **options)
        return torch.autograd.grad(out.float().square().sum(), leaves)

    return call


CALLS = {
    "decode": decode,
    "decode of fp8": decode_of_fp8,
    "packed": packed,
    "plan": plan,
    "merge": merge,
    "oracle": oracle,
}
OPTIONS = {
    "plain": {},
    "lse": {"return_lse": True},
    "sink": {"attn_sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "mask": {"attn_mask": torch.randn(6, 9)},
    "cap": {"logits_soft_cap": 2.0},
    "window": {"window_left": 2},
    "invariant": {"batch_invariant": True},
}
for _name, _options in OPTIONS.items():
    CALLS[f"prefill {_name}"] = sequences(stream_attn.prefill, **_options)
    CALLS[f"train {_name}"] = sequences(stream_attn.train, **_options)


def assert_same(got, want):
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_a_call_gives_the_same_bits(name, dtype, autocast):
    torch.manual_seed(0)
    want = CALLS[name](dtype)
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=autocast):
        got = CALLS[name](dtype)
    assert_same(got, want)


@pytest.mark.parametrize("name", ["plain", "lse", "mask"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_the_same_bits(name, dtype, autocast):
    options = {n: x for n, x in OPTIONS[name].items() if n != "return_lse"}
    torch.manual_seed(0)
    want = gradients(**options)(dtype, contextlib.nullcontext())
    torch.manual_seed(0)
    got = gradients(**options)(dtype, torch.autocast("cpu", dtype=autocast))
    assert_same(got, want)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_a_compiled_merge_gives_the_same_bits(autocast):
    def run(outs, lses):
        with torch.autocast("cpu", dtype=autocast):
            return stream_attn.merge_states(outs[0], lses[0], outs[1], lses[1])

    torch._dynamo.reset()
    outs, lses = torch.randn(2, 3, 4, 16).half(), torch.randn(2, 3, 4)
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(outs, lses)
    assert_same(got, stream_attn.merge_states(outs[0], lses[0], outs[1], lses[1]))
