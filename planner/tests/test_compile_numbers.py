"""Compiled calls whose numbers change from call to call, or follow from symbolic sizes."""

import enum

import pytest
import torch

import stream_attention as stream_attn
from stream_attention import ContiguousKVCache

FLOATS = {"sm_scale": (0.1, 0.2, 0.3, 0.4), "logits_soft_cap": (0.5, 1.5, 2.5, 3.5)}
INTS = {"window_left": (1, 2, 3, 5), "window_right": (3, 0, 2, 1), "layer_id": (0, 3, 4, 5)}
NUMBERS = {**FLOATS, **INTS}


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def decode(q, k, **options):
    return stream_attn.decode(q, k, k, **options)


def attention(q, k, **options):
    return stream_attn.attention(q, k, v_cache=k, return_info=True, **options)


def attention_without_info(q, k, **options):
    return stream_attn.attention(q, k, v_cache=k, **options)


def prefill(q, k, **options):
    return stream_attn.prefill(q, k, k, return_info=True, **options)


def train(q, k, **options):
    return stream_attn.train(q, k, k, return_info=True, **options)


FUNCTIONS = (decode, attention, attention_without_info, prefill, train)


def inputs():
    return torch.randn(2, 6, 4, 16), torch.randn(2, 9, 2, 16)


def same(got, want):
    """The results, and the route where the calls tell one."""
    if isinstance(want, tuple):
        assert got[-1].route == want[-1].route
        got, want = got[0], want[0]
    torch.testing.assert_close(got, want)


def in_turn(run, values):
    q, k = inputs()
    function = compiled(run)
    for value in values:
        same(function(q, k, value), run(q, k, value))


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_number_may_change_from_call_to_call(function, name):
    rest = {"causal": False} if name == "window_right" else {}
    in_turn(lambda q, k, x: function(q, k, **{name: x}, **rest), NUMBERS[name])


@pytest.mark.parametrize("values", [(1, 2, 3, 4), (1, 0.5, 2, 0.25)], ids=["ints", "mixed"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_scale_may_be_an_int(function, values):
    in_turn(lambda q, k, x: function(q, k, sm_scale=x), values)


@pytest.mark.parametrize("function", [attention, attention_without_info])
def test_the_longest_request_may_change(function):
    q, k = torch.randn(7, 4, 16), torch.randn(2, 9, 2, 16)
    indptr = torch.tensor([0, 3, 7], dtype=torch.int32)

    def run(q, k, longest):
        return function(q, k, qo_indptr=indptr, max_qo_len=longest)

    call = compiled(run)
    for longest in (4, 5, 6, 7):
        same(call(q, k, longest), run(q, k, longest))


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
@pytest.mark.parametrize("return_info", [False, True])
def test_a_scale_of_a_cache_made_inside_may_change(return_info, name):
    def run(q, k, scale):
        cache = ContiguousKVCache(key=k, value=k, **{name: scale})
        return stream_attn.attention(q, cache, return_info=return_info)

    call = compiled(run)
    q, k = inputs()
    k = k.to(torch.float8_e4m3fn)
    for scale in (0.5, 1.5, 0.25, 2.0):
        same(call(q, k, scale), run(q, k, scale))


@pytest.mark.parametrize("option", ["dropout_p", *FLOATS, "window_left"])
def test_gradients_follow_a_number_that_changes(option):
    values = {"dropout_p": (0.1, 0.5, 0.3, 0.7), **NUMBERS}[option]
    q, k = (t.requires_grad_() for t in inputs())

    def run(q, k, x):
        return train(q, k, **{option: x})[0]

    function = compiled(run)
    for value in values:
        results = []
        for call in (function, run):
            torch.manual_seed(3)
            out = call(q, k, value)
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k))))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want)


DERIVED = {
    "scale": lambda q, k: {"sm_scale": q.shape[-1] ** -0.5 / 2},
    "cap": lambda q, k: {"logits_soft_cap": k.shape[1] / 2},
    "window": lambda q, k: {"window_left": k.shape[1] // 2},
    "right": lambda q, k: {"window_right": k.shape[1] // 3, "causal": False},
}


@pytest.mark.parametrize("name", DERIVED)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_number_may_follow_from_a_symbolic_size(function, name):
    def run(q, k):
        return function(q, k, **DERIVED[name](q, k))

    call = compiled(run, dynamic=True)
    for length in (9, 12, 15, 18):
        q, k = torch.randn(2, 6, 4, 16), torch.randn(2, length, 2, 16)
        same(call(q, k), run(q, k))


FLAGGED = (*FLOATS, "window_left", "layer_id")


@pytest.mark.parametrize(
    ("function", "name"),
    [*((function, name) for function in FUNCTIONS for name in FLAGGED), (train, "dropout_p")],
)
def test_a_flag_among_the_numbers_is_still_refused(function, name):
    """Whatever was seen before it."""
    q, k = inputs()
    values = {"dropout_p": (0.1, 0.2), **NUMBERS}[name]
    call = compiled(lambda q, k, x: function(q, k, **{name: x}))
    for value in values[:2]:
        call(q, k, value)
    with pytest.raises(Exception, match=f"{name}=True: must be"):
        call(q, k, True)


class Width(enum.IntEnum):
    """Ints that torch takes for constants, and guards no number of."""

    NARROW = 2
    WIDE = 5


class Factor(float):
    """A float of a class of its own."""


class Subclass(torch.Tensor):
    """A tensor that goes through the operator because torch may have more to do with it."""


@pytest.mark.parametrize(
    "options", [{"window_left": Width.NARROW}, {"sm_scale": Factor(0.5)}], ids=["int", "float"]
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_number_of_a_subclass_is_a_constant(function, options):
    if "sm_scale" in options and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 takes no float of a class of its own into a graph")
    q, k = inputs()
    want = function(q, k, **options)
    same(compiled(lambda q, k: function(q, k, **options))(q, k), want)


@pytest.mark.parametrize(
    "options", [{"window_left": Width.NARROW}, {"sm_scale": Factor(0.5)}], ids=["int", "float"]
)
def test_a_number_of_a_subclass_is_taken_beside_a_tensor_of_one(options):
    q, k = inputs()
    out, _ = decode(q.as_subclass(Subclass), k, **options)
    assert torch.equal(out.as_subclass(torch.Tensor), decode(q, k, **options)[0])
