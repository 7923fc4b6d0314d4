"""Macro plans over the Triton route, through Triton's CPU interpreter; fp16 stands in for bf16."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import dataclasses
import math

import pytest
import torch

from stream_attention import StreamAttnEngine
from stream_attention.core.routes import triton_route
from stream_attention.core.testing.checks import find_record
from stream_attention.core.testing.golden import golden
from stream_attention.core.testing.problems import Case, build
from stream_attention.planner.testing import registry_of

LENS = {"qo_lens": (1, 3, 0, 9, 1, 3), "kv_lens": (30, 3, 5, 17, 0, 40)}
CASES = [
    Case(name="paged", sink="random", **LENS),
    Case(name="windowed", window_left=7, layout="HND", q_form="strided", **LENS),
    Case(name="contiguous", cache_kind="contiguous", **LENS),
    Case(name="per_head", qo_lens=(1, 3, 1), kv_lens=((20, 0), (7, 33), (1, 2))),
]


@pytest.mark.parametrize("macro", ["unified", "phases", "cohorts"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_scattered_mix_equals_the_oracle(case, macro):
    built = build(dataclasses.replace(case, dtype="float16", head_dim_qk=16))
    registry = registry_of(find_record("triton", triton_route.register))
    plan = StreamAttnEngine(registry=registry).plan_batch(
        built.q, built.cache, case.qo_lens, macro=macro, return_lse=True, **built.options
    )
    for _ in range(2):
        plan._result[0].fill_(math.nan)
        out, lse, info = plan.run()
        golden(built.q, built.cache, built.qo_indptr, **built.options).check(out, lse)
        assert info.route == f"macro({macro}): triton"
        built.q.copy_(torch.randn(built.q.shape))
