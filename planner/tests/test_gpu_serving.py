"""On a GPU: graphs, streams, memory and compiled steps of planned and one-shot calls."""

import gc

import pytest
import torch

import stream_attention as stream_attn
from stream_attention import PagedKVCache, StreamAttnEngine
from stream_attention.core.testing.golden import golden
from stream_attention.planner.plan_cache import PlanCache
from stream_attention.planner.serve import serve

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

HEADS, DIM, PAGES = 8, 128, 64


def call(batch=4, seed=0):
    """q and a paged bf16 cache on the GPU; lengths up to 1024 tokens."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, 1, HEADS, DIM, generator=generator)
    pool = torch.randn(2, PAGES * batch, 16, 2, DIM, generator=generator)
    table = torch.randperm(PAGES * batch, generator=generator).to(torch.int32).view(batch, PAGES)
    lens = torch.randint(0, 16 * PAGES + 1, (batch,), generator=generator, dtype=torch.int32)
    q, pool = (x.to("cuda", torch.bfloat16) for x in (q, pool))
    cache = PagedKVCache(
        key=pool[0],
        value=pool[1],
        page_table=table.cuda(),
        sequence_lengths=lens.cuda(),
    )
    return q, cache


def mutate(q, cache, turn):
    """Other lengths, pages and queries, in place."""
    other_q, other = call(q.shape[0], seed=100 + turn)
    q.copy_(other_q)
    cache.page_table.copy_(other.page_table)
    cache.sequence_lengths.copy_(other.sequence_lengths)


def test_a_captured_plan_follows_changes_and_equals_eager():
    q, cache = call()
    plan = StreamAttnEngine().plan(q, cache, return_lse=True)
    plan.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse, _ = plan.run()
    for turn in range(50):
        mutate(q, cache, turn)
        graph.replay()
        replayed = out.clone(), lse.clone()
        out.fill_(torch.nan)
        eager = plan.run()
        assert torch.equal(replayed[0], eager[0])
        assert torch.equal(replayed[1], eager[1])
    golden(q, cache).check(out, lse)


def test_a_captured_one_shot_call_follows_changes():
    q, cache = call()
    stream_attn.decode(q, cache, return_lse=True)  # kernels are compiled and loaded before
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse, _ = stream_attn.decode(q, cache, return_lse=True)
    for turn in range(10):
        mutate(q, cache, turn)
        graph.replay()
        golden(q, cache).check(out, lse)


def test_run_allocates_nothing():
    q, cache = call()
    plan = StreamAttnEngine().plan(q, cache)
    plan.run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        plan.run()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_run_does_not_sync():
    q, cache = call()
    plan = StreamAttnEngine().plan(q, cache)
    plan.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_of_planning_only_the_validation_syncs():
    q, cache = call()
    engine = StreamAttnEngine()
    engine.plan(q, cache)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.plan(q, cache, validate=False)
        with pytest.raises(RuntimeError, match="synchroniz"):
            engine.plan(q, cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_two_streams_with_a_plan_each_do_not_disturb_each_other():
    calls = [call(seed=seed) for seed in (1, 2)]
    plans = [StreamAttnEngine().plan(*made) for made in calls]
    want = [plan.run()[0].clone() for plan in plans]
    streams = [torch.cuda.Stream() for _ in plans]
    torch.cuda.synchronize()
    for _ in range(100):
        for plan, stream in zip(plans, streams, strict=True):
            with torch.cuda.stream(stream):
                plan.run()
    torch.cuda.synchronize()
    for plan, before in zip(plans, want, strict=True):
        assert torch.equal(plan._result[0], before)


def test_one_shot_calls_on_two_streams_use_two_launches():
    plans = PlanCache()
    q, cache = call()
    want, _, _ = serve(q, cache, plans=plans)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        got, _, _ = serve(q, cache, plans=plans)
    torch.cuda.synchronize()
    assert torch.equal(got, want)
    assert len(plans) == 2


def test_a_cached_plan_keeps_no_memory_of_the_call():
    def once():
        q, cache = call()
        stream_attn.decode(q, cache)

    once()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    once()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_contents_at_fault_are_named():
    q, cache = call()
    cache.sequence_lengths[2] = 16 * PAGES + 1
    cache.page_table[1, 0] = -1
    cache.sequence_lengths[1] = 5
    with pytest.raises(ValueError) as caught:
        stream_attn.decode(q, cache)
    assert f"sequence_lengths[2]={16 * PAGES + 1}: request 2" in str(caught.value)
    assert "page_table[1, 0]=-1: request 1, column 0" in str(caught.value)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step_equals_eager(mode):
    def step(q, cache, token):
        position = cache.sequence_lengths.long()
        rows = torch.arange(position.shape[0], device=q.device)
        page, slot = cache.page_table[rows, position // 16].long(), position % 16
        cache.key[page, slot] = token
        cache.value[page, slot] = token
        cache.sequence_lengths.add_(1)
        return stream_attn.decode(q, cache, return_info=False)

    torch._dynamo.reset()
    function = torch.compile(step, fullgraph=True, mode=mode)
    (q, mine), (_, theirs) = call(), call()
    for cache in (mine, theirs):
        cache.sequence_lengths.fill_(100)
    for turn in range(5):
        token = torch.full((4, 2, DIM), 0.1 * turn, device="cuda", dtype=torch.bfloat16)
        got = function(q, mine, token).clone()
        assert torch.equal(got, step(q, theirs, token))
        assert torch.equal(mine.sequence_lengths, theirs.sequence_lengths)
