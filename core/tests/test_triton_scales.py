"""Scales at the ends of float32: wherever scores are small, a route gives the oracle's answer.

The torch route, and the Triton route through Triton's CPU interpreter.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import dataclasses

import pytest
import torch

from stream_attention.core.routes import torch_route
from stream_attention.core.testing.checks import check_built, find_record
from stream_attention.core.testing.problems import Case, build

PORTABLE = ("torch", "triton")
# sm_scale, and factors on q and K that bring the scores back to the size of one.
ENDS = {
    "huge": (1e38, 10.0, 1e-39),
    "largest": (3.4e38, 1e-19, 3e-20),
    "negative": (-1e38, 10.0, 1e-39),
    "large": (1e32, 1e-16, 1e-16),
    "above_one": (1e4, 1e35, 1e-38),
    "small": (1e-35, 1e17, 1e18),
    "tiny": (1.2e-38, 1e18, 1e19),
    "zero": (0.0, 1.0, 1.0),
}


def _scaled(case: Case, name: str):
    """The case built with q and K by the factors; unused slots keep their poison."""
    scale, q_factor, k_factor = ENDS[name]
    built = build(dataclasses.replace(case, sm_scale=scale), 0)
    built.q.mul_(q_factor)
    built.cache.key.mul_(k_factor)
    return built


@pytest.mark.parametrize("name", sorted(ENDS))
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("route", PORTABLE)
def test_a_scale_at_the_end_of_float32_gives_the_oracles_answer(route, cap, name):
    record = find_record(route)
    for call in ({"qo_lens": (1, 3)}, {"qo_lens": (1, 1), "call": "batch"}):
        case = Case(kv_lens=(40, 300), head_dim_qk=16, dtype="float32", sink=1.0, **call)
        check_built(record, _scaled(dataclasses.replace(case, logits_soft_cap=cap), name))


@pytest.mark.parametrize("cap", [1e-37, 1e35, 3e38])
@pytest.mark.parametrize("scale", [0.25, 1e31])
@pytest.mark.parametrize("route", PORTABLE)
def test_a_cap_at_the_end_of_float32_gives_the_oracles_answer(route, scale, cap):
    case = Case(kv_lens=(40,), head_dim_qk=16, dtype="float32", logits_soft_cap=cap)
    built = build(dataclasses.replace(case, sm_scale=scale), 0)
    built.q.mul_(1 / scale)
    check_built(find_record(route), built)


@pytest.mark.parametrize(
    ("scale", "key_scale"), [(1e-30, 1e30), (1e30, 1e-30), (1e8, 1e-8), (0.25, 1.5), (2.0, 0.5)]
)
@pytest.mark.parametrize("lens", [(40, 20), (300, 20), ((40, 9), (20, 30))])
@pytest.mark.parametrize("route", PORTABLE)
def test_a_key_scale_that_undoes_the_scale_gives_the_oracles_answer(route, lens, scale, key_scale):
    case = Case(
        qo_lens=(1, 2), kv_lens=lens, head_dim_qk=16, dtype="float16", kv_dtype="float8_e4m3fn"
    )
    built = build(dataclasses.replace(case, kv_scales="head", sm_scale=scale), 0)
    scales = torch.full_like(built.cache.key_scale, key_scale)
    scales[1] *= 1.25
    cache = dataclasses.replace(built.cache, key_scale=scales)
    check_built(find_record(route), dataclasses.replace(built, cache=cache))


def test_a_sum_of_scaled_values_beyond_float32_is_not_formed():
    case = Case(kv_lens=(300,), head_dim_qk=16, dtype="float32", kv_dtype="float8_e4m3fn")
    built = build(dataclasses.replace(case, kv_scales="head", value_mean=2.0, sm_scale=0.0), 0)
    scales = torch.full_like(built.cache.value_scale, 3e37)
    cache = dataclasses.replace(built.cache, value_scale=scales)
    check_built(find_record("torch", torch_route.register), dataclasses.replace(built, cache=cache))
