"""What the host pays for planning and running, measured with a launch that does nothing.

Each figure is the least of many short repeats, so that a busy machine cannot raise it; the limits
are the ones the project promises, a few times what was measured when they were set.
"""

import os
import subprocess
import sys
import timeit

import pytest
import torch

import stream_attention as stream_attn
from stream_attention import PagedKVCache, StreamAttnEngine
from stream_attention.planner.plan_cache import PlanCache
from stream_attention.planner.serve import serve
from stream_attention.planner.testing import FakeRoute, registry_of

RUN_US = 8.0
PLAN_US = 500.0
IMPORT_S = 0.3

IMPORTS = """
import sys, time
import torch
before = time.perf_counter()
import stream_attention
facade = time.perf_counter() - before
for name in ("decode", "attention", "prefill", "train", "StreamAttnEngine", "PagedKVCache"):
    getattr(stream_attention, name)
heavy = [name for name in ("torch._dynamo", "torch._inductor", "triton") if name in sys.modules]
print(facade, heavy)
"""


@pytest.fixture
def call():
    torch.manual_seed(0)
    q = torch.randn(8, 32, 128)
    pool = torch.randn(64, 16, 8, 128)
    cache = PagedKVCache(
        key=pool,
        value=pool + 1,
        page_table=torch.arange(64, dtype=torch.int32).repeat(8, 8),
        sequence_lengths=torch.full((8,), 8000, dtype=torch.int32),
    )
    return q, cache, registry_of(FakeRoute())


def least_us(function, number, repeats=60):
    function()
    return min(timeit.repeat(function, number=number, repeat=repeats)) / number * 1e6


@pytest.mark.parametrize("options", [{}, {"return_lse": True, "attn_sink": torch.zeros(32)}])
def test_run_costs_at_most_8_us(call, options):
    q, cache, registry = call
    plan = StreamAttnEngine(registry=registry).plan(q, cache, **options)
    cost = least_us(plan.run, 200)
    print(f"plan.run(): {cost:.2f} us")
    assert cost <= RUN_US


def test_a_warm_plan_with_validation_costs_at_most_500_us(call):
    q, cache, registry = call
    engine = StreamAttnEngine(registry=registry)
    cost = least_us(lambda: engine.plan(q, cache), 10)
    print(f"plan(): {cost:.1f} us")
    assert cost <= PLAN_US


def test_a_one_shot_call_on_a_cached_plan_costs_at_most_500_us(call):
    q, cache, registry = call
    plans = PlanCache()
    cost = least_us(lambda: serve(q, cache, registry=registry, plans=plans), 10)
    print(f"one-shot: {cost:.1f} us")
    assert cost <= PLAN_US


def test_the_real_route_adds_its_work_to_plan_only_once(call):
    q, cache, _ = call
    engine = StreamAttnEngine()
    cost = least_us(lambda: engine.plan(q, cache), 5, repeats=30)
    print(f"plan() of {engine.plan(q, cache).route}: {cost:.1f} us")
    assert cost <= 4 * PLAN_US
    assert stream_attn.decode(q, cache)[1].route == engine.plan(q, cache).route


def test_importing_costs_little_and_loads_no_compiler():
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    shown = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    seconds, _, heavy = shown.strip().partition(" ")
    assert float(seconds) <= IMPORT_S
    assert heavy == "[]"
