"""Launches that were unbound keep no tensor alive, and serve other tensors after a rebind."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import dataclasses
import gc
import math
import weakref

import pytest

from stream_attention.core.device import DeviceFacts
from stream_attention.core.routes import torch_route, triton_route
from stream_attention.core.testing.checks import bind, find_record, launch
from stream_attention.core.testing.golden import golden
from stream_attention.core.testing.problems import Case, build

CASES = (
    Case(name="ragged", qo_lens=(1, 3), kv_lens=(40, 25), dtype="float16", sink="random"),
    Case(name="per_head", qo_lens=(1, 2), kv_lens=((9, 30), (0, 17)), dtype="float32"),
    Case(
        name="fp8",
        qo_lens=(1, 1),
        kv_lens=(20, 33),
        dtype="float16",
        kv_dtype="float8_e4m3fn",
        kv_scales="head",
    ),
    Case(name="split", kv_lens=(200,), dtype="float16", cache_kind="contiguous", call="batch"),
)


def _record(route):
    if route == "torch":
        return find_record("torch", torch_route.register)
    many = DeviceFacts(type="cpu", num_sms=32)  # so that the sequence is split
    found = find_record("triton", triton_route.register)
    return dataclasses.replace(
        found, rules=(), build=lambda p, t, d, b: triton_route.TritonLaunch(p, many, b)
    )


def _tensors(built, described):
    cache = built.cache
    held = [built.q, cache.key, cache.value, cache.sequence_lengths, built.qo_indptr]
    held += [getattr(cache, "page_table", None), cache.key_scale, built.options["attn_sink"]]
    held += [described.bound.out, described.bound.lse]
    return [weakref.ref(t.untyped_storage()) for t in held if t is not None]


@pytest.mark.parametrize("route", ["torch", "triton"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_unbound_launch_lets_go_and_can_be_rebound(route, case):
    built = build(case, seed=0)
    made, described = launch(_record(route), built)
    made.run()
    alive = _tensors(built, described)
    made.unbind()
    del built, described
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)
    other = build(case, seed=1)
    described = bind(other)
    described.bound.out.fill_(math.nan)
    made.rebind(described.bound)
    made.run()
    want = golden(other.q, other.cache, other.qo_indptr, **other.options)
    want.check(described.result(), described.result_lse())


@pytest.mark.parametrize("route", ["torch", "triton"])
def test_an_unbound_launch_does_not_run(route):
    made, _ = launch(_record(route), build(CASES[0]))
    made.unbind()
    with pytest.raises(AttributeError):
        made.run()
