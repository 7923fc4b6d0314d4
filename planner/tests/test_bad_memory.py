"""Tensors that hold less memory than their shape says, and those that would want a gradient."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

import stream_attention as stream_attn
from stream_attention import ContiguousKVCache, PagedKVCache, StreamAttnEngine
from stream_attention.core.state import merge_many

FP8 = torch.float8_e4m3fn
STATES = ("out_a", "lse_a", "out_b", "lse_b")
NAMES = (
    "q",
    "key",
    "value",
    "page_table",
    "sequence_lengths",
    "key_scale",
    "value_scale",
    "qo_indptr",
    "attn_sink",
    "out",
    "lse",
)


def tensors():
    """One of each kind that a serving call takes."""
    pool = torch.randn(6, 16, 2, 16).to(FP8)
    return {
        "q": torch.randn(3, 4, 16),
        "key": pool,
        "value": pool.clone(),
        "page_table": torch.arange(6, dtype=torch.int32).view(2, 3),
        "sequence_lengths": torch.tensor([40, 7], dtype=torch.int32),
        "key_scale": torch.ones(2),
        "value_scale": torch.ones(2),
        "qo_indptr": torch.tensor([0, 1, 3], dtype=torch.int32),
        "attn_sink": torch.zeros(4),
        "out": torch.empty(3, 4, 16),
        "lse": torch.empty(3, 4),
    }


def one_shot(of):
    return stream_attn.attention(
        of["q"],
        cache_of(of),
        of["qo_indptr"],
        attn_sink=of["attn_sink"],
        out=of["out"],
        lse=of["lse"],
        return_lse=True,
    )


def planned(of):
    return StreamAttnEngine().plan_attention(
        of["q"],
        cache_of(of),
        of["qo_indptr"],
        attn_sink=of["attn_sink"],
        out=of["out"],
        lse=of["lse"],
        return_lse=True,
    )


def cache_of(of):
    names = ("key", "value", "page_table", "sequence_lengths", "key_scale", "value_scale")
    return PagedKVCache(**{name: of[name] for name in names})


@pytest.mark.parametrize("call", [one_shot, planned])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("left", ["nothing", "all but a byte"])
def test_a_storage_that_is_too_small_is_named(call, name, left):
    of = tensors()
    storage = of[name].untyped_storage()
    size = storage.nbytes()
    held = 0 if left == "nothing" else size - 1
    storage.resize_(held)
    rule = rf"{name}\.untyped_storage\(\)\.nbytes\(\)={held}: must hold the {size} bytes"
    with pytest.raises(ValueError, match=rule):
        call(of)
    storage.resize_(size)
    fresh = {**tensors(), name: of[name]}
    fresh[name].copy_(tensors()[name])
    call(fresh)


def test_a_view_may_leave_the_rest_of_its_storage_to_others():
    of = tensors()
    wide = torch.randn(9, 4, 16)
    views = wide[2:5], wide[6:], wide[::3]
    for view in views:
        one_shot({**of, "q": view})
    wide.untyped_storage().resize_(8 * 4 * 16 * 4)
    with pytest.raises(ValueError, match=r"q\.untyped_storage"):
        one_shot({**of, "q": views[1]})
    one_shot({**of, "q": views[0]})


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
def test_a_scale_that_wants_a_gradient_is_refused(name):
    k = torch.randn(2, 8, 2, 16).to(FP8)
    q, scale = torch.randn(2, 4, 16), torch.nn.Parameter(torch.ones(2))
    cache = ContiguousKVCache(key=k, value=k, **{name: scale})
    with pytest.raises(ValueError, match=rf"{name}\.requires_grad=True: a serving call returns no"):
        stream_attn.decode(q, cache)
    with torch.no_grad():
        want = stream_attn.decode(q, cache)[0]
    detached = ContiguousKVCache(key=k, value=k, **{name: scale.detach()})
    assert torch.equal(stream_attn.decode(q, detached)[0], want)


@pytest.mark.parametrize("name", ["sm_scale", "logits_soft_cap"])
def test_a_large_int_is_the_number_that_it_is(name):
    q, k = torch.zeros(2, 5, 4, 16), torch.randn(2, 5, 2, 16)
    for call in (stream_attn.decode, stream_attn.prefill, stream_attn.train):
        queries = q[:, 0] if call is stream_attn.decode else q
        options = {"return_info": False} if call is stream_attn.decode else {}
        got = call(queries, k, k, **{name: 10**30}, **options)
        assert torch.equal(got, call(queries, k, k, **{name: 1e30}, **options))


class Wrapper(torch.Tensor):
    """A tensor that stands for another and has no memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def inner(value):
            return value.inner if isinstance(value, cls) else value

        return tree_map(
            lambda value: cls(value) if isinstance(value, torch.Tensor) else value,
            func(*tree_map(inner, args), **tree_map(inner, kwargs or {})),
        )


@pytest.mark.parametrize("call", [stream_attn.train, stream_attn.prefill])
@pytest.mark.parametrize("mask", [False, True])
def test_tensors_that_stand_for_others_have_no_memory_to_look_at(call, mask):
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16)
    bias = torch.zeros(5, 5)

    def attend(q, k, bias):
        return call(q, k, k, attn_mask=bias if mask else None)

    want = attend(q, k, bias)
    with FakeTensorMode():
        fake = attend(torch.empty(2, 5, 4, 16), torch.empty(2, 5, 2, 16), torch.empty(5, 5))
    assert fake.shape == want.shape
    assert torch.equal(torch.func.functionalize(attend)(q, k, bias), want)
    sink = torch.zeros(q.shape[-2])
    options = {"attn_mask": bias, "return_info": False}
    of_sink = torch.func.functionalize(
        lambda sink: stream_attn.prefill(q, k, k, attn_sink=sink, **options)
    )
    assert torch.equal(of_sink(sink), stream_attn.prefill(q, k, k, attn_sink=sink, **options))
    assert torch.allclose(attend(Wrapper(q), Wrapper(k), Wrapper(bias)).inner, want, atol=1e-6)
    every = torch.func.vmap(attend, in_dims=(None, None, 0))(q, k, bias.expand(3, -1, -1))
    assert torch.allclose(every, want.expand_as(every), atol=1e-6)


def test_states_that_stand_for_others_are_merged():
    out, lse = torch.randn(3, 4, 8), torch.randn(3, 4)
    want = stream_attn.merge_states(out, lse, out, lse)
    with FakeTensorMode():
        out_fake, lse_fake = torch.empty(3, 4, 8), torch.empty(3, 4)
        fake = stream_attn.merge_states(out_fake, lse_fake, out_fake, lse_fake)
    assert [t.shape for t in fake] == [t.shape for t in want]
    got = torch.func.functionalize(stream_attn.merge_states)(out, lse, out, lse)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("call", [stream_attn.train, stream_attn.prefill])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
@pytest.mark.parametrize("left", [0, 5])
@pytest.mark.parametrize("name", ["q", "k", "v", "attn_sink", "attn_mask"])
def test_a_sequence_or_a_mask_without_its_memory_is_named(call, dtype, left, name):
    of = {
        "q": torch.randn(2, 3, 4, 16),
        "k": torch.randn(2, 6, 2, 16),
        "v": torch.randn(2, 6, 2, 16),
        "attn_sink": torch.zeros(4),
        "attn_mask": torch.zeros(3, 6, dtype=dtype),
    }
    of[name].untyped_storage().resize_(left)
    told = {"k": "key", "v": "value"}.get(name, name)
    rule = rf"{told}\.untyped_storage\(\)\.nbytes\(\)={left}: must hold"
    for flags in ({}, {"validate": False}) if call is stream_attn.prefill else ({},):
        with pytest.raises(ValueError, match=rule):
            call(**of, **flags)


@pytest.mark.parametrize("left", [0, 5])
@pytest.mark.parametrize("name", STATES)
def test_a_state_without_its_memory_is_named(left, name):
    of = {n: torch.randn(3, 4, 8) if "out" in n else torch.randn(3, 4) for n in STATES}
    of[name].untyped_storage().resize_(left)
    with pytest.raises(ValueError, match=rf"{name}\.untyped_storage\(\)\.nbytes\(\)={left}"):
        stream_attn.merge_states(**of)


@pytest.mark.parametrize("name", ["outs", "lses", "attn_sink"])
def test_many_states_without_their_memory_are_named(name):
    of = {"outs": torch.randn(2, 3, 4, 8), "lses": torch.randn(2, 3, 4), "attn_sink": torch.ones(4)}
    of[name].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=rf"{name}\.untyped_storage\(\)\.nbytes\(\)=0"):
        merge_many(**of)


def test_a_serving_call_in_a_transform_is_told_so():
    q, k = torch.randn(2, 4, 16), torch.randn(2, 8, 2, 16)
    call = torch.func.functionalize(lambda q: stream_attn.decode(q, k, k)[0])
    with pytest.raises(ValueError, match="q='transformed': a serving call takes tensors with mem"):
        call(q)
