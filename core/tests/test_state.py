"""Merge algebra: right, associative, commutative, with empty states as the identity."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stream_attention
from stream_attention.core import state
from stream_attention.core.oracle import attention
from stream_attention.core.registry import MergeRecord
from stream_attention.core.state import merge_many, merge_states, torch_merge
from stream_attention.core.testing.state_cases import merge_oracle
from stream_attention.core.testing.tolerance import assert_close, assert_lse_close

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _states(count, rows=(3, 4), dim=8, dtype=torch.float32, seed=0, empty=0.3, spread=5.0):
    """Random states; empty ones hold NaN or Inf in `out`."""
    rng = torch.Generator().manual_seed(seed)
    outs = torch.randn(count, *rows, dim, generator=rng).to(dtype)
    lses = torch.randn(count, *rows, generator=rng) * spread
    gone = torch.rand(count, *rows, generator=rng) < empty
    lses[gone] = -math.inf
    outs[gone] = (math.nan, math.inf)[seed % 2]
    return outs, lses


def _exact(outs, lses, sink=None):
    """The definition in fp64, row by row."""
    count, dim = outs.shape[0], outs.shape[-1]
    flat, logs = outs.double().reshape(count, -1, dim), lses.double().reshape(count, -1)
    out = torch.zeros(flat.shape[1:], dtype=torch.float64)
    lse = torch.full(logs.shape[1:], -math.inf, dtype=torch.float64)
    for row in range(flat.shape[1]):
        live = [i for i in range(count) if logs[i, row] > -math.inf]
        if not live:
            continue
        terms = [float(logs[i, row]) for i in live]
        if sink is not None:
            terms.append(float(sink[row % len(sink)]))
        top = max(terms)
        lse[row] = top + math.log(sum(math.exp(t - top) for t in terms))
        for i in live:
            out[row] += math.exp(float(logs[i, row]) - float(lse[row])) * flat[i, row]
    return out.reshape(outs.shape[1:]), lse.reshape(lses.shape[1:])


def _noise(outs, lses):
    """fp32 rounding of exp and its argument, at most 8 units of the largest term."""
    live = (lses > -math.inf).unsqueeze(-1)
    size = torch.where(live, outs.double().abs(), 0.0).amax(0)
    shift = torch.where(lses > -math.inf, lses.abs(), 0.0).double().amax(0).unsqueeze(-1)
    return size * (1 + shift) * 2.0**-24 * 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 17])
@pytest.mark.parametrize("with_sink", [False, True])
def test_merge_many_equals_the_definition(dtype, count, with_sink):
    outs, lses = _states(count, dtype=dtype, seed=count)
    sink = torch.randn(4) if with_sink else None
    out, lse = merge_many(outs, lses, sink)
    want, want_lse = _exact(outs, lses, sink)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_close(out, want, dtype, noise=_noise(outs, lses))
    assert_lse_close(lse, want_lse)


@pytest.mark.parametrize("size", [-3e38, -1e20, 0.0, 1e20])
@pytest.mark.parametrize("with_sink", [False, True])
def test_equal_states_of_any_size_have_weights_that_sum_to_one(size, with_sink):
    lses = torch.full((5, 4), size)
    sink = lses[0].clone() if with_sink else None
    outs = torch.ones(5, 4, 8)
    want = 5 / 6 if with_sink else 1.0
    for merge in (merge_oracle, merge_many):
        out, lse = merge(outs, lses, sink)[:2]
        torch.testing.assert_close(out, torch.full_like(out, want))
        torch.testing.assert_close(lse, lses[0].to(lse.dtype) + math.log(6 if with_sink else 5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_states_equals_the_definition(dtype):
    outs, lses = _states(2, dtype=dtype, rows=(2, 5), dim=33)
    out, lse = merge_states(outs[0], lses[0], outs[1], lses[1])
    want, want_lse = _exact(outs, lses)
    assert_close(out, want, dtype, noise=_noise(outs, lses))
    assert_lse_close(lse, want_lse)


def test_parts_of_an_attention_merge_to_the_whole():
    q = torch.randn(2, 4, 16)
    k, v = torch.randn(2, 30, 2, 16), torch.randn(2, 30, 2, 16)
    sink = torch.randn(4)
    parts = [slice(0, 7), slice(7, 7), slice(7, 8), slice(8, 30)]
    found = [attention(q, (k[:, s], v[:, s]), causal=False, return_lse=True) for s in parts]
    outs = torch.stack([out for out, _ in found]).float()
    lses = torch.stack([lse for _, lse in found]).float()
    out, lse = merge_many(outs, lses, sink)
    want, want_lse = attention(q, (k, v), causal=False, attn_sink=sink, return_lse=True)
    assert_close(out, want, torch.float32, noise=_noise(outs, lses))
    assert_lse_close(lse, want_lse)


_logs = st.one_of(st.just(-math.inf), st.floats(-80, 80, width=32))


@st.composite
def _triples(draw):
    rows = draw(st.integers(1, 4))
    lses = torch.tensor([[draw(_logs) for _ in range(rows)] for _ in range(3)])
    outs = torch.randn(
        3, rows, 4, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
    )
    outs[lses == -math.inf] = math.nan
    return outs, lses


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(_triples())
def test_merge_commutes_and_associates(triple):
    outs, lses = triple
    (a, b, c), (x, y, z) = outs, lses
    ab, ba = merge_states(a, x, b, y), merge_states(b, y, a, x)
    assert torch.equal(ab[0], ba[0]) and torch.equal(ab[1], ba[1])  # to the bit
    left = merge_states(*ab, c, z)
    right = merge_states(a, x, *merge_states(b, y, c, z))
    many = merge_many(outs, lses)
    want, want_lse = _exact(outs, lses)
    for out, lse in (left, right, many):
        assert_close(out, want, torch.float32, noise=4 * _noise(outs, lses))
        assert_lse_close(lse, want_lse)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(_triples(), st.sampled_from([math.nan, math.inf, -math.inf, 3.0]))
def test_an_empty_state_is_the_identity_whatever_it_holds(triple, garbage):
    outs, lses = triple
    empty = torch.full_like(lses[0], -math.inf)
    held = torch.full_like(outs[0], garbage)
    alone_out, alone_lse = merge_many(outs[:1], lses[:1])
    for pair in ((outs[0], lses[0], held, empty), (held, empty, outs[0], lses[0])):
        out, lse = merge_states(*pair)
        assert torch.equal(out, alone_out) and torch.equal(lse, alone_lse)
    live = lses[0] > -math.inf
    assert torch.equal(alone_out[live], outs[0][live])
    assert torch.equal(alone_lse, lses[0])


@pytest.mark.parametrize("count", [0, 1, 2, 5])
@pytest.mark.parametrize("sink", [None, 4.0, 1e4])
def test_merging_only_empty_states_is_empty(count, sink):
    outs = torch.full((count, 3, 2, 8), math.nan, dtype=torch.bfloat16)
    lses = torch.full((count, 3, 2), -math.inf)
    out, lse = merge_many(outs, lses, None if sink is None else torch.full((2,), sink))
    assert out.shape == (3, 2, 8) and out.count_nonzero() == 0
    assert lse.shape == (3, 2) and bool((lse == -math.inf).all())


def test_a_sink_of_minus_infinity_changes_nothing():
    outs, lses = _states(3)
    want = merge_many(outs, lses)
    got = merge_many(outs, lses, torch.full((4,), -math.inf))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_a_huge_sink_takes_everything_without_overflow():
    outs, lses = _states(3, empty=0.0)
    out, lse = merge_many(outs, lses, torch.full((4,), 1e4))
    assert out.count_nonzero() == 0
    assert bool((lse == 1e4).all())


def test_out_dtype_is_chosen_and_rounded_once():
    outs, lses = _states(4, empty=0.0)
    exact, _ = merge_many(outs, lses)
    out, _ = merge_many(outs, lses, out_dtype=torch.bfloat16)
    assert torch.equal(out, exact.bfloat16())


def test_strided_inputs_are_taken_as_they_are():
    outs, lses = _states(2, rows=(4, 3))
    want = merge_states(outs[0], lses[0], outs[1], lses[1])
    wide = outs.transpose(1, 2).contiguous().transpose(1, 2)
    tall = lses.transpose(1, 2).contiguous().transpose(1, 2)
    got = merge_states(wide[0], tall[0], wide[1], tall[1])
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_gradients_are_right_and_finite_beside_empty_states():
    outs = torch.randn(3, 2, 2, 4, dtype=torch.float64)
    lses = torch.randn(3, 2, 2, dtype=torch.float64)
    lses[0, 0, 0] = -math.inf
    lses[:, 1, 1] = -math.inf
    sink = torch.randn(2, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (outs, lses, sink)]
    out, lse = torch_merge(*inputs)
    (out.sum() + torch.where(lse > -math.inf, lse, 0.0).sum()).backward()
    for tensor in inputs:
        assert bool(tensor.grad.isfinite().all())
    live = torch.randn(3, 2, 2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(torch_merge, (inputs[0].detach().requires_grad_(), live))


def test_compiles_without_a_graph_break():
    outs, lses = _states(2)
    pair = torch.compile(merge_states, fullgraph=True, backend="eager")
    many = torch.compile(merge_many, fullgraph=True, backend="eager")
    want = merge_states(outs[0], lses[0], outs[1], lses[1])
    for got in (pair(outs[0], lses[0], outs[1], lses[1]), many(outs, lses)):
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def _refusal(call, *args, **options):
    with pytest.raises(ValueError) as caught:
        call(*args, **options)
    return str(caught.value)


def test_bad_arguments_are_named_all_at_once():
    out, lse = torch.randn(2, 3, 8), torch.randn(2, 3)
    text = _refusal(merge_states, out, lse.double(), out.double(), lse[0])
    assert "merge_states: 3 faults" in text
    assert (
        "lse_a.dtype=torch.float64: must be torch.float32 (natural log); use lse_a.float()" in text
    )
    assert "out_b.dtype=torch.float64: must be one of bfloat16, float16, float32" in text
    assert "lse_b.shape=(3,): must be out_b.shape without head_dim; use (2, 3)" in text
    assert "out_b.shape=(2, 2, 8): must equal out_a.shape; use (2, 3, 8)" in _refusal(
        merge_states, out, lse, out[:, :2], lse[:, :2]
    )
    assert "out_b.dtype=torch.float16: must equal out_a.dtype; use torch.float32" in _refusal(
        merge_states, out, lse, out.half(), lse
    )
    assert "out_a='list': must be a torch.Tensor" in _refusal(merge_states, [1], lse, out, lse)
    assert "lse_b.device='meta'" in _refusal(merge_states, out, lse, out, lse.to("meta"))
    assert "attn_sink.shape=(2,): must be [num_heads]" in _refusal(
        merge_many, out[None], lse[None], torch.zeros(2)
    )
    assert "attn_sink.dtype=torch.float64" in _refusal(
        merge_many, out[None], lse[None], torch.zeros(3, dtype=torch.float64)
    )
    assert "out_dtype=torch.int8" in _refusal(
        merge_many, out[None], lse[None], out_dtype=torch.int8
    )
    assert "outs.shape=(8,)" in _refusal(merge_many, torch.zeros(8), torch.zeros(()))


def test_public_name_is_this_function():
    assert stream_attention.merge_states is merge_states


class _Recorder:
    """A merge kernel that notes what it was given and computes it with torch."""

    def __init__(self):
        self.calls = []

    def record(self, **changes):
        base = MergeRecord(name="recorder", package="test", rules=(), build=self.build)
        return dataclasses.replace(base, **changes)

    def build(self, outs, lses, out, lse, sink):
        self.calls.append((outs, lses, out, lse, sink))
        return self

    def run(self):
        outs, lses, out, lse, sink = self.calls[-1]
        if isinstance(outs, tuple):
            outs, lses = torch.stack(outs), torch.stack(lses)
        if sink is not None:
            sink = sink.repeat(lses.shape[1] // len(sink))
        got = torch_merge(outs, lses, sink, out.dtype)
        out.copy_(got[0])
        lse.copy_(got[1])


def test_kernel_gets_flat_views_and_fills_new_tensors():
    recorder = _Recorder()
    outs, lses = _states(3, rows=(2, 4), dim=8)
    sink = torch.randn(4)
    got = state._launch(
        recorder.record(), outs.view(3, 8, 8), lses.view(3, 8), lses.shape[1:], 8, outs.dtype, sink
    )
    want = merge_many(outs, lses, sink)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    given_outs, _, out, lse, _ = recorder.calls[0]
    assert given_outs.data_ptr() == outs.data_ptr()
    assert out.shape == (8, 8) and lse.shape == (8,)


def test_cpu_tensors_stay_with_torch():
    outs, lses = _states(2)
    assert state._kernel((outs,), (lses,), 2, outs.dtype, None) is None


def test_tensors_that_are_not_dense_are_refused():
    out, lse = torch.randn(2, 3, 8), torch.randn(2, 3)
    text = _refusal(merge_states, out.to_sparse(), lse, out, torch.nested.nested_tensor([lse[0]]))
    assert "out_a.layout=torch.sparse_coo: must be dense; use out_a.to_dense()" in text
    assert "lse_b.layout='nested': must be dense" in text
    outs, lses = _states(2)
    sink = torch.zeros(lses.shape[-1])
    for bad, named in (
        (sink.to_sparse(), "attn_sink.layout=torch.sparse_coo: must be dense"),
        (torch.nested.nested_tensor([sink]), "attn_sink.layout='nested': must be dense"),
        (torch._neg_view(sink), "attn_sink.is_neg()=True"),
        ([0.0], "attn_sink='list': must be a torch.float32 tensor"),
    ):
        assert named in _refusal(merge_many, outs, lses, bad)


def test_a_sink_without_its_memory_is_named_beside_its_other_faults():
    outs, lses = _states(2)
    sink = torch.zeros(lses.shape[-1] + 1, dtype=torch.float64)
    sink.untyped_storage().resize_(0)
    text = _refusal(merge_many, outs, lses, sink)
    assert "merge_many: 3 faults" in text
    for named in ("attn_sink.dtype=", "attn_sink.shape=", "attn_sink.untyped_storage().nbytes()=0"):
        assert text.count(named) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_changes_no_merge(dtype, autocast):
    outs, lses = _states(3, dtype=dtype)
    sink = torch.randn(4)
    calls = (
        lambda: merge_states(outs[0], lses[0], outs[1], lses[1]),
        lambda: merge_many(outs, lses, sink),
        lambda: merge_many(outs, lses, out_dtype=torch.float32),
        lambda: torch_merge(outs.double(), lses.double()),
    )
    for call in calls:
        want = call()
        with torch.autocast("cpu", dtype=autocast):
            got = call()
        for mine, theirs in zip(got, want, strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)


def test_tensors_without_memory_are_merged():
    out, lse = torch.empty(3, 4, 8, device="meta"), torch.empty(3, 4, device="meta")
    merged = merge_states(out, lse, out, lse)
    assert [t.shape for t in merged] == [out.shape, lse.shape]
