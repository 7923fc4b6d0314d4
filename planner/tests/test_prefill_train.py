"""`prefill` and `train`: semantics of the contract, gradients, choice of route, info."""

import pytest
import torch

import stream_attention as stream_attn
from stream_attention import ContiguousKVCache, UnsupportedProblem, reference
from stream_attention.core.registry import AttentionRecord
from stream_attention.core.testing.golden import golden
from stream_attention.planner.differentiable import run_prefill, run_train
from stream_attention.planner.modes import PolicyIdentity
from stream_attention.planner.testing import FakeRoute, registry_of, write_batch

OPTIONS = [
    {},
    {"causal": False},
    {"window_left": 3},
    {"causal": False, "window_left": 2, "window_right": 1},
    {"logits_soft_cap": 2.0},
    {"sm_scale": 0.0},
    {"attn_sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
]


def tensors(qo_len=7, kv_len=11, **options):
    return tuple(
        torch.randn(2, n, h, 16, **options) for n, h in ((qo_len, 4), (kv_len, 2), (kv_len, 2))
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lens", [(7, 7), (7, 11), (9, 4), (1, 5)])
def test_prefill_agrees_with_the_oracle(options, lens):
    q, k, v = tensors(*lens)
    out, info = stream_attn.prefill(q, k, v, return_info=True, **options)
    golden(q, ContiguousKVCache(key=k, value=v), **options).check(out)
    assert info.guarantee == "exact"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lens", [(7, 7), (7, 11), (9, 4)])
def test_train_agrees_with_the_oracle_and_so_do_its_gradients(options, lens):
    inputs = [t.requires_grad_() for t in tensors(*lens)]
    out = stream_attn.train(*inputs, **options)
    golden(*_detached(inputs), **options).check(out.detach())
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = reference.attention(exact[0], (exact[1], exact[2]), **options)
    weights = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, weights)
    for mine, theirs in zip(got, torch.autograd.grad(want, exact, weights.double()), strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=2e-5, rtol=2e-4)


def _detached(inputs):
    q, k, v = (t.detach() for t in inputs)
    return q, ContiguousKVCache(key=k, value=v)


def test_the_sink_gets_a_gradient():
    q, k, v = tensors()
    sink = torch.zeros(4, requires_grad=True)
    stream_attn.train(q, k, v, attn_sink=sink).sum().backward()
    assert sink.grad is not None
    assert sink.grad.abs().sum() > 0


@pytest.mark.parametrize("function", ["prefill", "train"])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_join_the_other_masks(function, kind):
    q, k, v = tensors()
    mask = torch.rand(2, 1, 7, 11) > 0.4
    if kind == "additive":
        mask = torch.where(mask, torch.randn(2, 1, 7, 11), float("-inf"))
    out, info = getattr(stream_attn, function)(q, k, v, attn_mask=mask, return_info=True)
    golden(q, (k, v), attn_mask=mask).check(out)
    assert any(line.startswith("torch: mask=") for line in info.fallback_reasons) or any(
        line.startswith("torch: ") for line in info.fallback_reasons
    )


def test_lse_is_returned_by_a_route_that_has_it():
    q, k, v = tensors()
    for function in (stream_attn.prefill, stream_attn.train):
        out, lse = function(q, k, v, return_lse=True)
        golden(q, (k, v)).check(out, lse)


def test_prefill_writes_the_callers_out():
    q, k, v = tensors()
    out = torch.full_like(q, torch.nan)
    got, info = stream_attn.prefill(q, k, v, out=out, return_info=True)
    assert got.data_ptr() == out.data_ptr()
    golden(q, (k, v)).check(out)
    assert info.backend_used == "torch"


def test_dropout_is_reproducible_and_keeps_the_mean():
    q, k, v = tensors(64, 64)
    results = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(3)
        results.append(stream_attn.train(q, k, v, dropout_p=0.5, generator=generator))
    assert torch.equal(*results)
    plain = stream_attn.train(q, k, v)
    assert not torch.equal(results[0], plain)
    draws = torch.stack([stream_attn.train(q, k, v, dropout_p=0.2) for _ in range(200)])
    error = (draws.mean(0) - plain).abs().max() / draws.std(0).max()
    assert error < 6 / 200**0.5


def test_train_returns_out_alone_unless_info_is_asked_for():
    q, k, v = tensors()
    assert isinstance(stream_attn.train(q, k, v), torch.Tensor)
    _, info = stream_attn.train(q, k, v, return_info=True)
    assert info.route in ("torch_sdpa", "torch_math")
    assert any(line.startswith("torch: ") for line in info.fallback_reasons)


IDENTITY = {"mode": "exact_native", "identity": PolicyIdentity(), "attn_mask": None}
DROPOUT = {"dropout_p": 0.0, "generator": None}


def _applied(name, estimate, result=None, failure=None):
    def apply(problem, q, k, v, *, attn_sink, attn_mask, generator):
        if failure is not None:
            raise failure
        return (q * result if result is not None else q), None

    return AttentionRecord(name, name, "tests", (), lambda p, d: estimate, apply=apply)


def test_prefill_takes_the_cheaper_of_writing_and_applied_routes():
    q, k, v = tensors(5, 5)
    writer = FakeRoute("writer", estimate_us=2.0, body=write_batch)
    for cost, want in ((1.0, "applied"), (3.0, "writer")):
        registry = registry_of(writer, _applied("applied", cost, 2.0))
        out, _, info = run_prefill(q, k, v, registry=registry, **IDENTITY)
        assert info.route == want
        other = {"applied": "writer", "writer": "applied"}[want]
        assert any(line.startswith(f"{other}: legal, but") for line in info.fallback_reasons)
        assert torch.equal(out, q * 2.0 if want == "applied" else q[..., :1].expand_as(q))


def test_a_late_refusal_is_recorded_and_the_next_route_serves():
    q, k, v = tensors(5, 5)
    refusing = _applied("refusing", 0.1, failure=UnsupportedProblem("takes no odd lengths"))
    registry = registry_of(refusing, _applied("next", 1.0, 3.0))
    for call in (
        lambda: run_prefill(q, k, v, registry=registry, **IDENTITY),
        lambda: run_train(q, k, v, registry=registry, **IDENTITY, **DROPOUT),
    ):
        out, _, info = call()
        assert info.route == "next"
        assert torch.equal(out, q * 3.0)
        assert "refusing: takes no odd lengths" in info.fallback_reasons
        assert "once 1 refused" in info.reason


def test_no_differentiable_route_raises_with_every_reason():
    q, k, v = tensors(5, 5)
    with pytest.raises(UnsupportedProblem, match="fake: has no differentiable form"):
        run_train(q, k, v, registry=registry_of(FakeRoute()), **IDENTITY, **DROPOUT)


def test_prefill_needs_no_gradient_and_makes_none():
    q, k, v = tensors()
    assert not stream_attn.prefill(q, k, v).requires_grad
    with torch.no_grad():
        out = stream_attn.prefill(*(t.requires_grad_() for t in (q, k, v)))
    assert not out.requires_grad


def test_sequences_of_no_request_or_no_token():
    q, k, v = torch.empty(0, 5, 4, 16), torch.empty(0, 5, 2, 16), torch.empty(0, 5, 2, 16)
    assert stream_attn.prefill(q, k, v).shape == q.shape
    assert stream_attn.train(q, k, v).shape == q.shape
    q, k = torch.randn(2, 3, 4, 16), torch.empty(2, 0, 2, 16)
    assert not stream_attn.train(q, k, k).any()


@pytest.mark.parametrize("function", [stream_attn.prefill, stream_attn.train])
@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 2.0}], ids=str)
@pytest.mark.parametrize("shape", [(7, 5), (0, 1, 7, 5), (1, 8, 1, 1)])
def test_no_request_beside_a_mask_gives_no_row(function, options, shape):
    q, k = torch.randn(0, 7, 8, 16), torch.randn(0, 5, 2, 16)
    for mask in (torch.ones(shape, dtype=torch.bool), torch.zeros(shape)):
        assert function(q, k, k, attn_mask=mask, **options).shape == q.shape
        assert reference.attention(q, (k, k), attn_mask=mask, **options).shape == q.shape


@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 2.0}], ids=str)
def test_an_additive_mask_gets_a_gradient(options):
    inputs = tensors()
    mask, exact = (
        torch.zeros(7, 11, dtype=d, requires_grad=True) for d in (torch.float32, torch.float64)
    )
    stream_attn.train(*inputs, attn_mask=mask, **options).square().sum().backward()
    q, k, v = (t.double() for t in inputs)
    reference.attention(q, (k, v), attn_mask=exact, **options).square().sum().backward()
    torch.testing.assert_close(mask.grad.double(), exact.grad, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("function", [stream_attn.prefill, stream_attn.train])
@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 9.0}], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_whose_mask_is_no_number_is_nan_as_in_the_oracle(function, options, value):
    q, k, v = tensors()
    mask = torch.zeros(7, 11)
    mask[2, 1] = value
    mask[0, 10] = value  # causal: not seen
    unchecked = {"validate": False} if function is stream_attn.prefill else {}
    out = function(q, k, v, attn_mask=mask, **options, **unchecked)
    want = reference.attention(q, (k, v), attn_mask=mask, **options)
    assert want[:, 2].isnan().all()
    torch.testing.assert_close(out.double(), want, equal_nan=True, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 2.0}], ids=str)
@pytest.mark.parametrize("function", [stream_attn.prefill, stream_attn.train])
def test_autocast_rounds_neither_products_nor_results(function, options):
    q, k, v = tensors()
    want = function(q, k, v, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = function(q, k, v, **options)
    assert out.dtype == torch.float32
    assert torch.equal(out, want)


@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 2.0, "window_left": 3}], ids=str)
def test_train_works_inside_function_transforms(options):
    q, k, v = tensors()

    def loss(q, k, v):
        return stream_attn.train(q, k, v, **options).square().sum()

    leaf = q.clone().requires_grad_()
    loss(leaf, k, v).backward()
    torch.testing.assert_close(torch.func.grad(loss)(q, k, v), leaf.grad, atol=1e-5, rtol=1e-5)
    batched = torch.vmap(lambda q: stream_attn.train(q, k, v, **options))(torch.stack([q, 2 * q]))
    for scale, out in zip((1, 2), batched, strict=True):
        want = stream_attn.train(scale * q, k, v, **options)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def test_a_serving_call_inside_a_transform_is_refused():
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"q='transformed': .* use stream_attention\.train"):
        torch.vmap(lambda q: stream_attn.decode(q, k, v)[0])(q.unsqueeze(0))


@pytest.mark.parametrize("shapes", [((0, 5), 7), ((2, 5), 0), ((2, 0), 7)], ids=str)
@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("mask", [False, True])
def test_every_input_of_rows_that_see_nothing_gets_a_gradient_of_zeros(shapes, options, mask):
    (batch, qo_len), kv_len = shapes
    q = torch.randn(batch, qo_len, 4, 16, requires_grad=True)
    k = torch.randn(batch, kv_len, 2, 16, requires_grad=True)
    v = torch.randn(batch, kv_len, 2, 8, requires_grad=True)
    sink = torch.zeros(4, requires_grad=True)
    inputs = [q, k, v, sink]
    if mask:
        inputs.append(torch.zeros(qo_len, kv_len, requires_grad=True))
        options = {**options, "attn_mask": inputs[-1]}
    out = stream_attn.train(q, k, v, attn_sink=sink, **options)
    out = out[0] if isinstance(out, tuple) else out
    gradients = torch.autograd.grad(out.sum(), inputs)
    for tensor, gradient in zip(inputs, gradients, strict=True):
        assert torch.equal(gradient, torch.zeros_like(tensor))
