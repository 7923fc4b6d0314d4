"""Compiled calls refuse by name what other calls refuse, and take what those take."""

import pytest
import torch
import torch._dynamo.testing

import stream_attention as stream_attn
from stream_attention import ContiguousKVCache, PagedKVCache


def tensors():
    return {
        "key": torch.randn(8, 16, 2, 16),
        "value": torch.randn(8, 16, 2, 16),
        "page_table": torch.arange(8, dtype=torch.int32).view(2, 4),
        "sequence_lengths": torch.tensor([33, 20], dtype=torch.int32),
    }


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", **{"fullgraph": True, **options})


def told(function, *arguments):
    """What a compiled call says in one graph, and the same call where the graph may break."""
    with pytest.raises(Exception, match=r"=.*: (must|a) ") as caught:
        compiled(function)(*arguments)
    with pytest.raises(ValueError) as plain:
        compiled(function, fullgraph=False)(*arguments)
    assert "InternalTorchDynamoError" not in type(caught.value).__name__
    return str(caught.value), str(plain.value)


KINDS = {
    "scale": ({"sm_scale": True}, "sm_scale=True: must be"),
    "huge scale": ({"sm_scale": 10**400}, "that float32 can hold"),
    "cap": ({"logits_soft_cap": True}, "logits_soft_cap=True: must be"),
    "window": ({"window_left": True}, "window_left=True: must be None"),
    "right": ({"window_right": False, "causal": False}, "window_right=False: must be None"),
    "causal": ({"causal": None}, "causal=None: must be a bool"),
    "validate": ({"validate": None}, "validate=None: must be a bool"),
    "info": ({"return_info": "x"}, "return_info='x': must be a bool"),
    "mode": ({"mode": None}, "mode=None: must be one of exact_native"),
    "model": ({"model_id": 5}, "model_id=5: must be None or a non-empty string"),
    "layer": ({"layer_id": True}, "layer_id=True: must be None or an int"),
    "sink": ({"attn_sink": 0.5}, "attn_sink="),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_wrong_kind_is_named(name):
    options, part = KINDS[name]
    cache, q = PagedKVCache(**tensors()), torch.randn(2, 4, 16)

    def run(q, cache):
        return stream_attn.decode(q, cache, **{"return_info": False, **options})

    in_graph, plain = told(run, q, cache)
    assert part in in_graph
    assert part.split(":")[0] in plain


SEQUENCE_KINDS = {
    "dropout": ({"dropout_p": "x"}, "dropout_p='x': must be"),
    "no dropout": ({"dropout_p": None}, "dropout_p=None: must be"),
    "flag dropout": ({"dropout_p": True}, "dropout_p=True: must be"),
    "nan dropout": ({"dropout_p": float("nan")}, "dropout_p=nan: must be in [0, 1)"),
    "large dropout": ({"dropout_p": 1.5}, "dropout_p=1.5: must be in [0, 1)"),
    "scale": ({"sm_scale": True}, "sm_scale=True: must be"),
    "window": ({"window_left": -1}, "window_left=-1: must be None (off) or an int >= 0"),
    "flag": ({"causal": 1}, "causal=1: must be a bool"),
    "info": ({"return_info": "x"}, "return_info='x': must be a bool"),
    "mask": ({"attn_mask": "x"}, "attn_mask="),
}


@pytest.mark.parametrize(
    ("function", "name"),
    [
        *((stream_attn.train, name) for name in SEQUENCE_KINDS),
        *((stream_attn.prefill, name) for name in ("window", "flag")),
    ],
)
def test_a_fault_of_a_sequence_call_is_named_and_is_no_internal_error(function, name):
    options, part = SEQUENCE_KINDS[name]
    q, k = torch.randn(1, 5, 4, 16), torch.randn(1, 5, 2, 16)
    in_graph, plain = told(lambda q, k: function(q, k, k, **options), q, k)
    assert part in in_graph
    assert part.split(":")[0] in plain


@pytest.mark.parametrize("wanted", ["q", "key", "value", "attn_sink", "out"])
def test_a_gradient_that_nobody_gives_is_refused(wanted):
    made = tensors()
    given = {"q": torch.randn(2, 4, 16), "attn_sink": torch.randn(4), "out": torch.randn(2, 4, 16)}
    {**made, **given}[wanted].requires_grad_()

    def run(q, attn_sink, out, cache):
        options = {"attn_sink": attn_sink, "out": out, "return_info": False}
        return stream_attn.decode(q, cache, **options)

    for text in told(run, *given.values(), PagedKVCache(**made)):
        assert f"{wanted}.requires_grad=True: a" in text
    with torch.no_grad():
        compiled(run)(*given.values(), PagedKVCache(**made))


@pytest.mark.parametrize("other", ["q", "key", "value"])
def test_an_output_that_is_an_input_is_refused(other):
    pool = torch.randn(2, 4, 4, 16)
    cache = ContiguousKVCache(key=pool, value=torch.randn(2, 4, 4, 16))
    q = torch.randn(2, 4, 4, 16)
    out = {"q": q, "key": cache.key, "value": cache.value}[other]

    def run(q, cache, out):
        return stream_attn.attention(q, cache, out=out)

    for text in told(run, q, cache, out):
        assert f"out='overlaps {other}': must have memory of its own" in text


@pytest.mark.parametrize("return_info", [False, True])
def test_a_paged_cache_without_lengths_is_refused(return_info):
    def run(q, key, value, table):
        cache = PagedKVCache(key=key, value=value, page_table=table, sequence_lengths=None)
        return stream_attn.decode(q, cache, return_info=return_info)

    made = tensors()
    arguments = (torch.randn(2, 4, 16), made["key"], made["value"], made["page_table"])
    with pytest.raises(ValueError, match=r"sequence_lengths='NoneType': must be \[2\] int32"):
        compiled(run)(*arguments)
    cache = (made["key"], made["value"], made["page_table"], None)
    rest = (None, None, None, None, "NHD", None, None, None, None, True, None, None, None)
    tail = (False, False, True, "dense", None, None, None)
    with pytest.raises(ValueError, match="sequence_lengths='NoneType'"):
        torch.ops.stream_attn.attention(torch.randn(2, 4, 16), *cache, *rest, *tail)


def test_a_paged_cache_without_a_table_is_not_taken_for_a_contiguous_one():
    def run(q, key, value, lens):
        cache = PagedKVCache(key=key, value=value, page_table=None, sequence_lengths=lens)
        return stream_attn.decode(q, cache, return_info=False)

    pool, lens = torch.randn(2, 16, 2, 16), torch.tensor([9, 4], dtype=torch.int32)
    for text in told(run, torch.randn(2, 4, 16), pool, pool.clone(), lens):
        assert "page_table='NoneType': must be" in text


def test_values_beside_a_cache_are_refused_and_values_alone_are_asked_for():
    cache, q = PagedKVCache(**tensors()), torch.randn(2, 4, 16)
    pool = torch.randn(2, 9, 2, 16)
    for text in told(lambda q, c, v: stream_attn.decode(q, c, v)[0], q, cache, pool):
        assert "v_cache='Tensor': a cache object brings its own" in text
    for text in told(lambda q, k: stream_attn.decode(q, k)[0], q, pool):
        assert "v_cache=None: a key tensor comes with a value tensor; use v_cache=v, or" in text


@pytest.mark.parametrize("scale", [True, "1"])
def test_a_scale_of_a_cache_made_inside_is_a_number(scale):
    def run(q, key, value):
        cache = ContiguousKVCache(key=key, value=value, key_scale=scale)
        return stream_attn.decode(q, cache, return_info=False)

    pool = torch.randn(2, 9, 2, 16).to(torch.float8_e4m3fn)
    for text in told(run, torch.randn(2, 4, 16), pool, pool.clone()):
        assert f"key_scale={scale!r}: must be" in text


@pytest.mark.parametrize("size", [2**40, 2**63, 2**70, 10**400])
def test_a_window_of_any_size_is_taken(size):
    cache, q = PagedKVCache(**tensors()), torch.randn(2, 3, 4, 16)

    def run(q, cache):
        options = {"causal": False, "window_left": size, "window_right": size}
        return stream_attn.attention(q, cache, **options)

    want = stream_attn.attention(q, cache, causal=False)
    assert torch.equal(compiled(run)(q, cache), want)
    assert torch.equal(run(q.as_subclass(Subclass), cache).as_subclass(torch.Tensor), want)


class Subclass(torch.Tensor):
    """A tensor that goes through the operator because torch may have more to do with it."""


def test_a_window_that_changes_stays_symbolic():
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    cache, q = PagedKVCache(**tensors()), torch.randn(2, 4, 16)

    def run(q, cache, window):
        return stream_attn.decode(q, cache, window_left=window, return_info=False)

    torch._dynamo.reset()
    function = torch.compile(run, fullgraph=True, backend=counter)
    for window in (3, 5, 7, 11):
        assert torch.equal(function(q, cache, window), run(q, cache, window))
    assert counter.frame_count <= 2
