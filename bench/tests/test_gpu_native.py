"""On an H100 or H200 the engine serves decode by the native route, and says why not the others."""

import pytest
import torch

from stream_attention.bench import host_cost
from stream_attention.core.testing.problems import Case, build
from stream_attention.kernels_sm90.library import LIBRARY
from stream_attention.planner.engine import StreamAttnEngine


@pytest.fixture(autouse=True)
def device():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    assert LIBRARY.reason() is None, LIBRARY.reason()


def test_the_engine_chooses_the_native_route_and_says_so():
    built = build(Case(qo_lens=(1, 1), kv_lens=(500, 40), call="batch"), 0, "cuda")
    plan = StreamAttnEngine().plan(built.q, built.cache)
    assert plan.route == "sm90_decode"
    rejected = {rejection.route for rejection in plan.backend_plan.rejections}
    assert {"triton", "torch"} <= rejected


def test_what_it_refuses_goes_to_the_portable_route_with_the_reason():
    case = Case(qo_lens=(1, 1), kv_lens=(500, 40), call="batch", head_dim_qk=88)
    built = build(case, 0, "cuda")
    plan = StreamAttnEngine().plan(built.q, built.cache)
    assert plan.route == "triton"
    assert any("head_dim (qk, vo)=(88, 88)" in line for line in plan.info.fallback_reasons)


def test_the_host_cost_of_a_native_launch_is_measured():
    """Parts cost less than the whole: by the least of many samples, for machines may be busy."""
    costs = host_cost.native_costs(samples=25)
    assert [cost.missing for cost in costs] == [""] * 3
    run, launch, checks = (min(cost.timing.samples_us) for cost in costs)
    assert 0 < launch < run < 1000
    assert 0 < checks < run


def test_a_native_run_without_tokens_costs_the_host_at_most_3_us():
    """The least of many samples, so that a busy machine cannot raise it."""
    run, launch, checks = host_cost.native_costs(samples=50)
    least, *parts = (min(cost.timing.samples_us) for cost in (run, launch, checks))
    print(f"plan.run(): {least:.2f} us; its launch and its check alone: {parts}")
    assert least <= run.bar_us == 3.0
