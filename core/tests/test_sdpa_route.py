"""Differentiable routes: results and gradients against fp64 autograd through the oracle."""

import dataclasses
import itertools
import math
import re

import pytest
import torch

from stream_attention.core import oracle
from stream_attention.core.device import DeviceFacts
from stream_attention.core.errors import UnsupportedProblem
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import Registry
from stream_attention.core.routes import sdpa_math, sdpa_route
from stream_attention.core.testing.checks import H200
from stream_attention.core.testing.golden import golden

CPU = DeviceFacts(type="cpu", num_sms=2)
ROUTES = ("torch_sdpa", "torch_sdpa_gqa_expanded", "torch_math")
APPLY = {
    "torch_sdpa": sdpa_route.apply_sdpa,
    "torch_sdpa_gqa_expanded": sdpa_route.apply_sdpa_expanded,
    "torch_math": sdpa_math.apply_math,
}


def _records():
    registry = Registry(discover=False)
    sdpa_route.register(registry)
    return {record.route: record for record in registry.attention_records()}


def _inputs(batch=2, qo_len=5, kv_len=5, heads=4, kv_heads=2, dim=8, dim_vo=8, dtype=torch.float64):
    rng = torch.Generator().manual_seed(0)
    shapes = ((batch, qo_len, heads, dim), (batch, kv_len, kv_heads, dim))
    shapes = (*shapes, (batch, kv_len, kv_heads, dim_vo), (heads,))
    return [torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes]


def _problem(q, k, v, **changes):
    dtype = str(q.dtype).removeprefix("torch.").replace("64", "32")
    fields = {
        "phase": "train",
        "batch": q.shape[0],
        "total_qo_len": q.shape[0] * q.shape[1],
        "max_qo_len": q.shape[1] if q.shape[0] else 0,
        "kv_capacity": k.shape[1],
        "num_qo_heads": q.shape[2],
        "num_kv_heads": k.shape[2],
        "head_dim_qk": q.shape[3],
        "head_dim_vo": v.shape[3],
        "q_dtype": dtype,
        "kv_dtype": dtype,
        "out_dtype": dtype,
        "cache_kind": "contiguous",
        "page_size": max(1, k.shape[1]),
        "sm_scale": q.shape[3] ** -0.5,
        "differentiable": True,
    }
    return AttentionProblem(**{**fields, **changes})


def _gradients(call, tensors):
    """Result and gradients of `sum(out * fixed)`; a tensor that takes no part has gradient 0."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = call(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ((out.double() * weight).sum() + 0 * sum(leaf.sum() for leaf in leaves)).backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _check_gradients(route, tensors, mask=None, sink=False, **options):
    q, k, v, _ = tensors
    kind = None if mask is None else ("bool" if mask.dtype == torch.bool else "additive")
    problem = _problem(q, k, v, mask=kind, has_sink=sink, **options)
    options = {
        name: getattr(problem, name)
        for name in ("sm_scale", "causal", "window_left", "window_right", "logits_soft_cap")
    }
    leaves = tensors if sink else tensors[:3]
    additive = mask is not None and mask.dtype.is_floating_point
    leaves = [*leaves, mask] if additive else leaves

    def split(rest):
        rest = list(rest)
        return (rest.pop(0) if sink else None), (rest.pop(0) if additive else mask)

    def ours(q, k, v, *rest):
        s, m = split(rest)
        return APPLY[route](problem, q, k, v, attn_sink=s, attn_mask=m)[0]

    def want(q, k, v, *rest):
        s, m = split(rest)
        return oracle.attention(q, (k, v), attn_sink=s, attn_mask=m, **options)

    got, expected = _gradients(ours, leaves), _gradients(want, leaves)
    names = ("out", "dq", "dk", "dv", *(("dsink",) if sink else ()), *(("dmask",) * additive))
    for name, a, b in zip(names, got, expected, strict=True):
        assert a.isfinite().all(), f"{name} is not finite"
        # fp64 through and through; a fused kernel sums in another order
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


SHAPES = {
    "square": {},
    "more keys": {"qo_len": 3, "kv_len": 9},
    "more queries": {"qo_len": 9, "kv_len": 4},
    "one query": {"qo_len": 1, "kv_len": 7},
    "no keys": {"kv_len": 0},
    "no queries": {"qo_len": 0},
    "no requests": {"batch": 0},
    "unequal dims": {"dim": 8, "dim_vo": 4},
    "one head each": {"heads": 2, "kv_heads": 2},
}
MASKS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window_left": 2},
    "both sides": {"causal": False, "window_left": 1, "window_right": 1},
    "right side": {"causal": False, "window_right": 0},
}
SCALES = {"default": {}, "zero": {"sm_scale": 0.0}, "negative": {"sm_scale": -0.4}}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_agree_with_fp64_autograd(route, shape, mask):
    _check_gradients(route, _inputs(**SHAPES[shape]), **MASKS[mask])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("shape", ["square", "more keys", "more queries"])
@pytest.mark.parametrize("mask", ["causal", "window"])
@pytest.mark.parametrize("scale", SCALES)
def test_gradients_with_a_sink_and_any_scale(route, shape, mask, scale):
    options = {**MASKS[mask], **SCALES[scale]}
    _check_gradients(route, _inputs(**SHAPES[shape]), sink=True, **options)
    _check_gradients(route, _inputs(**SHAPES[shape]), **options)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("axes", [(2, 4), (1, 1), (2, 1), (1, 4)])
@pytest.mark.parametrize("sink", [False, True])
def test_callers_masks_and_rows_they_empty(route, kind, axes, sink):
    rng = torch.Generator().manual_seed(1)
    for shape, causal in itertools.product(("square", "more keys", "more queries"), (True, False)):
        tensors = _inputs(**SHAPES[shape])
        lengths = tensors[0].shape[1], tensors[1].shape[1]
        mask = torch.rand(*axes, *lengths, generator=rng) < 0.6
        mask[:, :, 1] = False  # a row that sees nothing
        mask[:, :, -1] = True
        if kind == "additive":
            bias = torch.randn(mask.shape, generator=rng, dtype=torch.float64)
            mask = torch.where(mask, bias, -math.inf)
        _check_gradients(route, tensors, mask, sink, causal=causal)


@pytest.mark.parametrize("shape", [(1, 1, 1, 5), (5, 1), (1, 5), (5,)])
@pytest.mark.parametrize("route", ROUTES)
def test_masks_broadcast_over_any_axis(route, shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.6
    for sink in (False, True):
        _check_gradients(route, _inputs(), mask, sink, causal=False)


@pytest.mark.parametrize("cap", [0.5, 30.0])
@pytest.mark.parametrize("sink", [False, True])
def test_cap_and_lse_come_from_the_math_route(cap, sink):
    tensors = _inputs(qo_len=6, kv_len=4)
    _check_gradients("torch_math", tensors, sink=sink, logits_soft_cap=cap)
    q, k, v, attn_sink = tensors
    attn_sink = attn_sink if sink else None
    problem = _problem(q, k, v, logits_soft_cap=cap, has_sink=sink, return_lse=True)
    _, lse = sdpa_math.apply_math(problem, q, k, v, attn_sink=attn_sink)
    _, want = oracle.attention(q, (k, v), logits_soft_cap=cap, attn_sink=attn_sink, return_lse=True)
    assert lse.dtype == torch.float32
    assert torch.equal(lse == -math.inf, want == -math.inf) and (lse[:, :2] == -math.inf).all()
    torch.testing.assert_close(lse[:, 2:].double(), want[:, 2:], rtol=1e-6, atol=1e-6)


def test_lse_is_differentiable_and_gradcheck_holds():
    q, k, v, sink = (t.requires_grad_() for t in _inputs(1, 3, 2, 2, 1, 3, 2))
    problem = _problem(q, k, v, has_sink=True, return_lse=True, logits_soft_cap=2.0)

    def call(q, k, v, sink):
        out, lse = sdpa_math.apply_math(problem, q, k, v, attn_sink=sink)
        return out, lse[:, 1:].double()

    # lse is rounded to fp32, so finite differences need a step far above its last place
    assert torch.autograd.gradcheck(call, (q, k, v, sink), eps=1e-2, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sink", [False, True])
def test_low_precision_is_within_the_one_tolerance(route, dtype, sink):
    for lengths, options in (
        ((70, 70), {}),
        ((20, 70), {"window_left": 9}),
        ((70, 20), {"causal": True}),
        ((33, 40), {"causal": False, "sm_scale": 0.3}),
    ):
        q, k, v, attn_sink = _inputs(2, *lengths, 6, 2, 64, 64, dtype)
        attn_sink = attn_sink.float() if sink else None
        problem = _problem(q, k, v, has_sink=sink, **options)
        out, _ = APPLY[route](problem, q, k, v, attn_sink=attn_sink)
        want = golden(q, (k, v), attn_sink=attn_sink, **options)
        assert out.dtype == dtype and out.shape == want.out.shape
        want.check(out)


@pytest.mark.parametrize("route", ROUTES)
def test_fp32_masks_are_not_rounded_to_the_query_dtype(route):
    q, k, v, _ = _inputs(1, 40, 40, 4, 2, 64, 64, torch.bfloat16)
    mask = torch.randn(40, 40, generator=torch.Generator().manual_seed(0)) * 30
    problem = _problem(q, k, v, mask="additive", causal=False)
    out, _ = APPLY[route](problem, q, k, v, attn_mask=mask)
    golden(q, (k, v), attn_mask=mask, causal=False).check(out)


@pytest.mark.parametrize("return_lse", [False, True])
def test_math_in_blocks_gives_the_same_as_in_one(return_lse, monkeypatch):
    q, k, v, sink = _inputs(2, 11, 9)
    problem = _problem(q, k, v, has_sink=True, window_left=3, return_lse=return_lse)
    whole = sdpa_math.apply_math(problem, q, k, v, attn_sink=sink)
    monkeypatch.setattr(sdpa_math, "BLOCK_SCORES", 2 * 4 * 9 * 2)
    parts = sdpa_math.apply_math(problem, q, k, v, attn_sink=sink)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-12)


def test_batch_invariant_math_gives_the_bits_of_each_request_alone(monkeypatch):
    *qkv, sink = _inputs(5, 7, 33, dtype=torch.float32)
    q, k, v = (x[..., :5].contiguous() for x in qkv)  # requests at odd addresses
    mask = torch.rand(5, 1, 7, 33, generator=torch.Generator().manual_seed(0)) < 0.7
    options = {"has_sink": True, "batch_invariant": True, "mask": "bool"}
    problem = _problem(q, k, v, **options)
    out, lse = sdpa_math.apply_math(problem, q, k, v, attn_sink=sink, attn_mask=mask)
    calls, real = [], sdpa_math._apply
    monkeypatch.setattr(sdpa_math, "_apply", lambda *given: calls.append(given) or real(*given))
    again = sdpa_math.apply_math(problem, q, k, v, attn_sink=sink, attn_mask=mask)
    assert len(calls) == 5 and torch.equal(again[0], out)
    for x in (x for call in calls for x in call[1:4]):  # of one request, dense at an even address
        assert len(x) == 1 and x.is_contiguous() and x.data_ptr() % 64 == 0
    for b in range(5):
        one = [t[b : b + 1] for t in (q, k, v)]
        alone = sdpa_math.apply_math(
            _problem(*one, **options), *one, attn_sink=sink, attn_mask=mask[b : b + 1]
        )
        assert torch.equal(alone[0][0], out[b]) and torch.equal(alone[1][0], lse[b])


@pytest.mark.parametrize("route", ROUTES)
def test_dropout_keeps_the_mean_and_follows_its_generator(route):
    q, k, v, _ = _inputs(1, 4, 64, 2, 2, dtype=torch.float32)
    v = torch.ones_like(v)
    problem = _problem(q, k, v, dropout_p=0.25, causal=False)
    torch.manual_seed(0)
    draws = [APPLY[route](problem, q, k, v)[0] for _ in range(200)]
    torch.manual_seed(0)
    assert torch.equal(draws[0], APPLY[route](problem, q, k, v)[0])
    assert not torch.equal(draws[0], draws[1])
    # 200 draws x 8 rows x ~64 keys: the mean of a weight sum is within a few percent of 1
    assert abs(float(torch.stack(draws).mean()) - 1.0) < 0.05


def test_a_generator_goes_to_the_math_route():
    q, k, v, _ = _inputs(dtype=torch.float32)
    problem = _problem(q, k, v, dropout_p=0.5)
    with pytest.raises(UnsupportedProblem, match=r"generator=given.*torch_math"):
        sdpa_route.apply_sdpa(problem, q, k, v, generator=torch.Generator())
    first, second = (
        sdpa_math.apply_math(problem, q, k, v, generator=torch.Generator().manual_seed(5))[0]
        for _ in range(2)
    )
    assert torch.equal(first, second)


def _sdpa_arguments(monkeypatch, problem, *tensors, **options):
    seen = {}
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, **kwargs):
        seen.update(kwargs, heads=args[1].shape[1])
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    sdpa_route.apply_sdpa(problem, *tensors, **options)
    return seen


@pytest.mark.parametrize(
    ("shape", "options", "is_causal", "has_mask"),
    [
        ({}, {}, True, False),
        ({}, {"causal": False}, False, False),
        ({"qo_len": 9}, {}, True, False),  # the rows that see nothing are cut off first
        ({"qo_len": 1, "kv_len": 9}, {}, False, False),
        ({"qo_len": 3, "kv_len": 9}, {}, False, True),
        ({}, {"window_left": 2}, False, True),
        ({}, {"window_left": 1000, "causal": False}, False, False),
    ],
)
def test_fused_kernels_get_no_mask_where_semantics_allow(
    monkeypatch, shape, options, is_causal, has_mask
):
    q, k, v, _ = _inputs(**shape)
    seen = _sdpa_arguments(monkeypatch, _problem(q, k, v, **options), q, k, v)
    assert seen["is_causal"] is is_causal
    assert (seen["attn_mask"] is not None) is has_mask
    assert seen["enable_gqa"] and seen["heads"] == 2
    seen = _sdpa_arguments(monkeypatch, _problem(q, k, v, **options), q, k, v, expand=True)
    assert not seen["enable_gqa"] and seen["heads"] == 4


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_fused_kernels_never_get_a_row_that_sees_nothing(monkeypatch, kind):
    # Kernels differ in what they make of such a row; here it sees all and its result is dropped.
    q, k, v, _ = _inputs()
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    given = mask if kind == "bool" else torch.zeros(5, 5).masked_fill(~mask, -math.inf)
    problem = _problem(q, k, v, mask=kind, causal=False)
    seen = _sdpa_arguments(monkeypatch, problem, q, k, v, attn_mask=given)["attn_mask"]
    assert (seen if kind == "bool" else seen == 0).all()
    out, _ = sdpa_route.apply_sdpa(problem, q, k, v, attn_mask=given)
    assert not out[:, 2].any() and (out[:, [0, 1, 3, 4]] != 0).all()


@pytest.mark.parametrize("route", ROUTES)
def test_compiles_without_a_graph_break(route):
    q, k, v, sink = _inputs(1, 3, 6, dtype=torch.float32)
    problem = _problem(q, k, v, has_sink=True)

    def call(q, k, v, sink):
        return APPLY[route](problem, q, k, v, attn_sink=sink)[0]

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, sink), call(q, k, v, sink))


RULES = [
    ({"phase": "decode"}, ROUTES, r"phase='decode'.*prefill or train"),
    ({"cache_kind": "paged"}, ROUTES, r"cache_kind='paged'.*contiguous"),
    ({"layout": "HND"}, ROUTES, r"layout='HND'.*use 'NHD'"),
    ({"kv_dtype": "float8_e4m3fn"}, ROUTES, r"kv_dtype='float8_e4m3fn'.*no fp8"),
    ({"per_head_lists": True}, ROUTES, r"per_head_lists=True.*one length"),
    ({"total_qo_len": 9}, ROUTES, r"total_qo_len=9.*same number of queries"),
    ({"logits_soft_cap": 3.0}, ROUTES[:2], r"logits_soft_cap=3.0.*torch_math"),
    ({"return_lse": True}, ROUTES[:2], r"return_lse=True.*torch_math"),
    ({"out_dtype": "bfloat16"}, ROUTES[:2], r"out_dtype='bfloat16'.*q's dtype"),
    ({"batch_invariant": True}, ROUTES[:2], r"batch_invariant=True.*torch_math"),
]


@pytest.mark.parametrize(("changes", "refusing", "text"), RULES)
def test_rules_name_what_they_refuse(changes, refusing, text):
    records = _records()
    problem = _problem(*_inputs()[:3])
    assert records["torch_sdpa"].reasons(problem, CPU) == ()
    changed = dataclasses.replace(problem, **changes)
    for route, record in records.items():
        found = [r for r in record.reasons(changed, CPU) if re.search(text, r)]
        assert bool(found) is (route in refusing), (route, record.reasons(changed, CPU))


@pytest.mark.parametrize(
    ("dtype", "options", "expanded"),
    [
        (torch.bfloat16, {}, False),
        (torch.bfloat16, {"window_left": 2}, True),
        (torch.bfloat16, {"mask": "bool"}, True),
        (torch.float32, {}, True),
    ],
)
def test_exactly_one_sdpa_record_serves_grouped_heads(dtype, options, expanded):
    records = _records()
    problem = _problem(*_inputs(dtype=dtype)[:3], **options)
    for device, chosen in ((CPU, "torch_sdpa"), (H200, ROUTES[1] if expanded else ROUTES[0])):
        legal = [r for r in ROUTES[:2] if not records[r].reasons(problem, device)]
        assert legal == [chosen]


def test_sinks_are_not_rounded_on_cuda():
    problem = _problem(*_inputs(dtype=torch.bfloat16)[:3], has_sink=True)
    for route in ROUTES[:2]:
        reasons = _records()[route].reasons(problem, H200)
        assert any(re.search(r"has_sink=True.*round the sink.*torch_math", r) for r in reasons)


def test_fused_routes_are_estimated_below_the_math_route():
    problem = _problem(*_inputs(1, 512, 512, 8, 2, 64, 64)[:3])
    records = _records()
    for device in (CPU, H200):
        times = [records[route].estimate_us(problem, device) for route in ROUTES]
        assert 0 < times[0] < times[1] < times[2]
