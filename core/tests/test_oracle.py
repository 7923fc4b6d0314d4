"""The oracle: against torch SDPA in fp64, hand-computed cases, and a scalar loop over tokens."""

import dataclasses
import math
import random

import pytest
import torch

from stream_attention import reference
from stream_attention.core.cache import ContiguousKVCache, PagedKVCache
from stream_attention.core.oracle import attention
from stream_attention.core.testing.golden import golden
from stream_attention.core.testing.problems import Case, build, random_case


def scalar_loop(built):
    """The shortest loop of the contract: one query, head and token at a time, in Python floats."""
    case, cache = built.case, built.cache
    lens = case.lens_of
    q = built.q.reshape(-1, case.num_qo_heads, case.head_dim_qk).double()
    options, row = built.options, 0
    scale = options["sm_scale"]
    scale = case.head_dim_qk**-0.5 if scale is None else scale
    out = torch.zeros(q.shape[0], case.num_qo_heads, case.dim_vo, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for request, qo_len in enumerate(case.qo_lens):
        for i in range(qo_len):
            for head in range(case.num_qo_heads):
                kv_head = head // case.group
                kv_len = lens(request)[kv_head]
                position = kv_len - qo_len + i
                first, last = 0, kv_len - 1
                if options["causal"]:
                    last = min(last, position)
                elif options["window_right"] is not None:
                    last = min(last, position + options["window_right"])
                if options["window_left"] is not None:
                    first = max(first, position - options["window_left"])
                logits, values = [], []
                for token in range(first, last + 1):
                    k, v = slot(cache, request, kv_head, token)
                    logit = scale * float(q[row, head] @ k)
                    if options["logits_soft_cap"] is not None:
                        cap = options["logits_soft_cap"]
                        logit = cap * math.tanh(logit / cap)
                    logits.append(logit)
                    values.append(v)
                if logits:
                    terms = list(logits)
                    if options["attn_sink"] is not None:
                        terms.append(float(options["attn_sink"][head]))
                    top = max(terms)
                    lse[row, head] = top + math.log(sum(math.exp(t - top) for t in terms))
                    for logit, v in zip(logits, values, strict=True):
                        out[row, head] += math.exp(logit - lse[row, head]) * v
            row += 1
    return out, lse


def slot(cache, request, head, token):
    found = []
    for pool, scale in ((cache.key, cache.key_scale), (cache.value, cache.value_scale)):
        page, offset = request, token
        if isinstance(cache, PagedKVCache):
            table = cache.page_table[request]
            table = table[head] if table.dim() == 2 else table
            page, offset = int(table[token // cache.page_size]), token % cache.page_size
        index = (page, offset, head) if cache.layout == "NHD" else (page, head, offset)
        factor = 1.0
        if isinstance(scale, torch.Tensor):
            factor = float(scale[head if len(scale) > 1 else 0])
        elif scale is not None:
            factor = scale
        found.append(pool[index].double() * factor)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_oracle_equals_a_scalar_loop_over_tokens(seed):
    case = random_case(random.Random(seed))
    case = dataclasses.replace(case, kv_lens=tuple(_short(n) for n in case.kv_lens))
    built = build(case, seed)
    out, lse = attention(built.q, built.cache, built.qo_indptr, **built.options, return_lse=True)
    want, want_lse = scalar_loop(built)
    torch.testing.assert_close(out.reshape(want.shape), want, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse.reshape(want_lse.shape), want_lse, rtol=1e-11, atol=1e-12)


def _short(n):
    return tuple(map(_short, n)) if isinstance(n, tuple) else n % 20


def _kv(batch, n, heads, dim, dim_vo=None, seed=0):
    rng = torch.Generator().manual_seed(seed)
    key = torch.randn(batch, n, heads, dim, dtype=torch.float64, generator=rng)
    value = torch.randn(batch, n, heads, dim_vo or dim, dtype=torch.float64, generator=rng)
    return key, value


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sm_scale", [None, 0.0, 0.7])
def test_agrees_with_sdpa_in_fp64(causal, sm_scale):
    q = torch.randn(2, 5, 6, 16, dtype=torch.float64)
    k, v = _kv(2, 9, 2, 16, 24)
    out = attention(q, (k, v), causal=causal, sm_scale=sm_scale)
    mask = torch.ones(5, 9, dtype=torch.bool)
    if causal:
        mask = mask.tril(9 - 5)
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.repeat_interleave(3, 2).transpose(1, 2),
        v.repeat_interleave(3, 2).transpose(1, 2),
        attn_mask=mask,
        scale=sm_scale,
    ).transpose(1, 2)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_mask_joins_after_causal_and_agrees_with_sdpa(kind):
    q = torch.randn(2, 4, 2, 8, dtype=torch.float64)
    k, v = _kv(2, 7, 2, 8)
    seen = torch.rand(2, 1, 4, 7) > 0.3
    seen[..., 0] = True
    mask = seen if kind == "bool" else torch.randn(2, 1, 4, 7).masked_fill(~seen, -math.inf)
    out = attention(q, (k, v), causal=False, attn_mask=mask)
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask if kind == "bool" else mask.double(),
    )
    torch.testing.assert_close(out, want.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_two_tokens_by_hand():
    # q·k = (ln 3, 0): weights 3/4 and 1/4, so out = 3/4 · 4 + 1/4 · 8 = 5 and lse = ln(3 + 1).
    q = torch.tensor([[[math.log(3.0)]]], dtype=torch.float64)
    k = torch.tensor([1.0, 0.0], dtype=torch.float64).view(1, 2, 1, 1)
    v = torch.tensor([4.0, 8.0], dtype=torch.float64).view(1, 2, 1, 1)
    out, lse = attention(q, (k, v), sm_scale=1.0, return_lse=True)
    assert out.item() == pytest.approx(5.0, abs=1e-14)
    assert lse.item() == pytest.approx(math.log(4.0), abs=1e-14)
    # A sink of ln 4 makes the denominator 8: out = (3 · 4 + 1 · 8) / 8.
    sink = torch.tensor([math.log(4.0)], dtype=torch.float64)
    out, lse = attention(q, (k, v), sm_scale=1.0, attn_sink=sink, return_lse=True)
    assert out.item() == pytest.approx(2.5, abs=1e-14)
    assert lse.item() == pytest.approx(math.log(8.0), abs=1e-14)


def test_scale_zero_is_the_mean_of_what_is_seen():
    k, v = _kv(1, 5, 1, 4)
    out, lse = attention(
        torch.randn(1, 2, 1, 4), (k, v), sm_scale=0.0, window_left=2, return_lse=True
    )
    torch.testing.assert_close(out[0, 0, 0], v[0, 1:4, 0].mean(0))
    torch.testing.assert_close(out[0, 1, 0], v[0, 2:5, 0].mean(0))
    assert lse.flatten().tolist() == pytest.approx([math.log(3)] * 2)


def test_negative_positions_are_empty_also_with_a_sink():
    k, v = _kv(1, 2, 1, 4)
    out, lse = attention(
        torch.randn(1, 5, 2, 4), (k, v), attn_sink=torch.tensor([3.0, -3.0]), return_lse=True
    )
    assert out[0, :3].count_nonzero() == 0
    assert (lse[0, :3] == -math.inf).all()
    assert lse[0, 3:].isfinite().all()


LARGE = [1e8, 1e15, 1e16, 1e30, torch.finfo(torch.float32).max]


@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("with_sink", [False, True])
def test_scores_of_any_size_have_weights_that_sum_to_one(size, sign, with_sink):
    q, (k, _) = torch.randn(1, 3, 2, 8), _kv(1, 5, 2, 8)
    mask = torch.full((3, 5), sign * size)
    options = {"causal": False, "sm_scale": 0.0, "attn_mask": mask}
    if with_sink:  # as large as a score: one more equal share of the denominator
        options["attn_sink"] = torch.full((2,), sign * size)
    out, lse = attention(q, (k, torch.ones(1, 5, 2, 8)), **options, return_lse=True)
    shares = 6 if with_sink else 5
    torch.testing.assert_close(out, torch.full_like(out, 5 / shares), rtol=1e-15, atol=0)
    want = torch.full_like(lse, float(mask[0, 0])) + math.log(shares)
    torch.testing.assert_close(lse, want, rtol=1e-15, atol=0)


def test_a_large_scale_picks_the_largest_score_and_halves_a_tie():
    q = torch.ones(1, 1, 1, 2)
    k = torch.tensor([[1.0, 1.0], [3.0, 0.0], [2.0, 1.0]]).view(1, 3, 1, 2)
    v = torch.tensor([1.0, 10.0, 100.0]).view(1, 3, 1, 1)
    for scale, want in ((1e20, 55.0), (-1e20, 1.0)):
        assert attention(q, (k, v), sm_scale=scale).item() == want


def test_gradients_at_large_scores_are_those_of_the_same_scores_moved_to_zero():
    q = torch.randn(1, 3, 2, 8, dtype=torch.float64)
    k, v = (t.requires_grad_() for t in _kv(1, 5, 2, 8))
    found = []
    for size in (0.0, -1e30):
        mask = torch.full((3, 5), size, requires_grad=True)
        out = attention(q, (k, v), causal=False, sm_scale=0.0, attn_mask=mask)
        found.append(torch.autograd.grad(out.square().sum(), (v, mask)))
    for moved, plain in zip(*found, strict=True):
        torch.testing.assert_close(moved, plain)


@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("with_sink", [False, True])
def test_golden_of_large_scores_accepts_its_own_answer(size, with_sink):
    q, (k, v) = torch.randn(1, 3, 2, 8), _kv(1, 5, 2, 8)
    # The sink is far above the scores where there is one: the denominator is the sink's alone.
    options = {"attn_sink": torch.full((2,), 300.0)} if with_sink else {}
    mask = torch.full((3, 5), -size)
    want = golden(q, (k.float(), v.float()), causal=False, attn_mask=mask, **options)
    assert want.out_noise.isfinite().all() and want.reference_lse.isfinite().all()
    want.check(want.out.float(), want.lse.float())
    want.check(want.reference_out, want.reference_lse)


def test_unseen_nan_takes_no_part():
    k, v = _kv(1, 6, 1, 4)
    want = attention(torch.ones(1, 3, 1, 4), (k, v), window_left=1)
    k[0, :2] = math.nan
    v[0, :2] = math.inf
    got = attention(torch.ones(1, 3, 1, 4), (k, v), window_left=1)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_long_cache_equals_its_two_halves_merged():
    q = torch.randn(1, 2, 64, dtype=torch.float64)
    k, v = _kv(1, 40_000, 1, 64)  # more tokens than one chunk holds
    out, lse = attention(q, (k, v), return_lse=True)
    parts = [attention(q, (k[:, s], v[:, s]), return_lse=True) for s in _halves(40_000)]
    total = torch.logaddexp(parts[0][1], parts[1][1])
    want = sum(torch.exp(p[1] - total).unsqueeze(-1) * p[0] for p in parts)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse, total, rtol=1e-12, atol=1e-12)


def _halves(n):
    return slice(0, n // 2), slice(n // 2, n)


def test_cached_and_plain_tensors_agree():
    k, v = (t.float() for t in _kv(2, 6, 2, 8))
    q = torch.randn(2, 4, 8)
    want = attention(q, (k, v))
    assert torch.equal(attention(q, k, v=v), want)
    assert torch.equal(attention(q, ContiguousKVCache(key=k, value=v)), want)
    flipped = ContiguousKVCache(key=k.transpose(1, 2), value=v.transpose(1, 2), layout="HND")
    assert torch.equal(attention(q, flipped), want)
    assert torch.equal(reference.attention(q.unsqueeze(1), (k, v)), want.unsqueeze(1))


def test_gradients_are_finite_beside_empty_rows():
    q = torch.randn(1, 4, 2, 4, dtype=torch.float64, requires_grad=True)
    k, v = (t.requires_grad_() for t in _kv(1, 3, 1, 4))
    assert torch.autograd.gradcheck(lambda *t: attention(t[0], (t[1], t[2])), (q, k, v))


def _message(*args, **options):
    with pytest.raises(ValueError) as caught:
        attention(*args, **options)
    return str(caught.value)


def test_bad_arguments_are_named_all_at_once():
    k, v = _kv(2, 4, 2, 8)
    q = torch.randn(2, 4, 8)
    text = _message(q, (k, v), sm_scale=math.nan, window_left=-1, logits_soft_cap=0)
    assert "3 faults" in text
    for part in ("sm_scale=nan", "window_left=-1", "logits_soft_cap=0"):
        assert part in text
    assert "window_right=2: a causal problem" in _message(q, (k, v), window_right=2)
    assert "num_qo_heads=3: must be a multiple of num_kv_heads = 2; use 2" in _message(
        torch.randn(2, 3, 8), (k, v)
    )
    assert "q.shape[-1]=4: must equal head_dim of the keys; use 8" in _message(
        torch.randn(2, 4, 4), (k, v)
    )
    assert "v.shape" in _message(q, (k, v[:, :3]))
    assert "cache_or_kv='int'" in _message(q, 3)
    assert "attn_sink=(3,)" in _message(q, (k, v), attn_sink=torch.zeros(3))
    assert "attn_mask.shape" in _message(q, (k, v), attn_mask=torch.ones(3, 5, dtype=torch.bool))
    assert "q='list'" in _message([1.0], (k, v))


def test_bad_contents_are_named_with_request_and_column():
    built = build(Case(qo_lens=(1, 1), kv_lens=(20, 40)))
    built.cache.page_table[1, 2] = 99
    built.cache.sequence_lengths[0] = 10_000
    text = _message(built.q, built.cache, built.qo_indptr)
    assert "page_table[1, 2]=99" in text
    assert "sequence_lengths[0]=10000: must be in 0..80" in text
    built.cache.sequence_lengths[0] = -1
    assert "sequence_lengths[0]=-1" in _message(built.q, built.cache, built.qo_indptr)
    bad = torch.tensor([0, 2, 1], dtype=torch.int32)
    assert "qo_indptr=[0, 2, 1]" in _message(built.q, built.cache, bad)


HOSTILE_CALLS = {
    "huge_scale": ({"sm_scale": 10**400}, "sm_scale="),
    "flag_scale": ({"sm_scale": True}, "sm_scale=True"),
    "huge_cap": ({"logits_soft_cap": 10**400}, "logits_soft_cap="),
    "sink_device": ({"attn_sink": torch.zeros(2, device="meta")}, "attn_sink="),
    "mask_device": ({"attn_mask": torch.zeros(7, device="meta")}, "attn_mask="),
    "q_sparse": ({"q": torch.zeros(2, 4, 2, 8).to_sparse()}, "q='Tensor': must be dense"),
    "no_heads": ({"k": torch.zeros(2, 7, 0, 8), "v": torch.zeros(2, 7, 0, 8)}, "num_kv_heads"),
    "no_dim": (
        {name: torch.zeros(2, 7, 2, 0) for name in ("q", "k", "v")},
        "num_kv_heads, head_dim=(2, 0): must be >= 1",
    ),
    "k_sparse": ({"k": torch.zeros(2, 7, 2, 8).to_sparse()}, "cache_or_kv="),
    "no_data": (
        {
            "q": torch.zeros(2, 4, 2, 8, device="meta"),
            "k": torch.zeros(2, 7, 2, 8, device="meta"),
            "v": torch.zeros(2, 7, 2, 8, device="meta"),
        },
        "q.device='meta': tensors there hold no data",
    ),
}


@pytest.mark.parametrize("name", HOSTILE_CALLS)
def test_hostile_arguments_are_refused_by_name(name):
    changed, part = HOSTILE_CALLS[name]
    call = {
        "q": torch.zeros(2, 4, 2, 8),
        "k": torch.zeros(2, 7, 2, 8),
        "v": torch.zeros(2, 7, 2, 8),
    }
    call.update(changed)
    with pytest.raises(ValueError) as caught:
        attention(call.pop("q"), (call.pop("k"), call.pop("v")), **call)
    assert part in str(caught.value)


def test_a_window_beyond_int64_sees_everything():
    q = torch.randn(2, 4, 2, 8)
    k, v = _kv(2, 7, 2, 8)
    want = attention(q, (k, v), causal=False)
    for window in (2**63 - 1, 2**70):
        for side in ("window_left", "window_right"):
            assert torch.equal(attention(q, (k, v), causal=False, **{side: window}), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_golden_accepts_the_rounded_answer_and_refuses_the_next_dtype_down(dtype):
    built = build(Case(dtype="float32", qo_lens=(1, 3), kv_lens=(90, 40)))
    want = golden(built.q, built.cache, built.qo_indptr, out_dtype=dtype, **built.options)
    want.check(want.out.to(dtype), want.lse.float())
    want.check(want.reference_out, want.reference_lse)
    coarse = {torch.float32: torch.float16}.get(dtype, torch.float8_e4m3fn)
    with pytest.raises(AssertionError, match="out: max error"):
        want.check(want.out.to(coarse).to(dtype))
    with pytest.raises(AssertionError, match="lse: max error"):
        want.check(want.out.to(dtype), (want.lse + 1e-4).float())
    with pytest.raises(AssertionError, match="out: dtype"):
        want.check(want.out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_golden_is_the_same_under_autocast(dtype):
    built = build(Case(dtype="float16", qo_lens=(1, 3), kv_lens=(90, 40)))
    want = golden(built.q, built.cache, built.qo_indptr, **built.options)
    with torch.autocast("cpu", dtype=dtype):
        got = golden(built.q, built.cache, built.qo_indptr, **built.options)
    for field in dataclasses.fields(want):
        mine, theirs = getattr(got, field.name), getattr(want, field.name)
        assert mine is theirs if field.name == "dtype" else torch.equal(mine, theirs)
