"""On a GPU: macro plans in graphs, without allocations and syncs, with native decode."""

import pytest
import torch

from stream_attention import ContiguousKVCache, PagedKVCache, StreamAttnEngine
from stream_attention.core.registry import default_registry
from stream_attention.core.testing.golden import golden

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

HEADS, DIM, PAGES = 8, 128, 16
LENS = (1, 40, 1, 4, 0, 1, 4, 70, 1)
MACROS = ["unified", "phases", "cohorts", "auto"]


def call(seed=0):
    """q and a paged bf16 cache on the GPU; lengths up to 256 tokens."""
    generator = torch.Generator().manual_seed(seed)
    batch = len(LENS)
    q = torch.randn(sum(LENS), HEADS, DIM, generator=generator)
    pool = torch.randn(2, PAGES * batch, 16, 2, DIM, generator=generator)
    table = torch.randperm(PAGES * batch, generator=generator).to(torch.int32).view(batch, PAGES)
    lens = torch.randint(0, 16 * PAGES + 1, (batch,), generator=generator, dtype=torch.int32)
    q, pool = (x.to("cuda", torch.bfloat16) for x in (q, pool))
    cache = PagedKVCache(
        key=pool[0], value=pool[1], page_table=table.cuda(), sequence_lengths=lens.cuda()
    )
    return q, cache


def offsets():
    return torch.tensor([0, *LENS]).cumsum(0).to("cuda", torch.int32)


@pytest.mark.parametrize("macro", MACROS)
def test_a_captured_macro_plan_follows_changes(macro):
    q, cache = call()
    plan = StreamAttnEngine().plan_batch(q, cache, LENS, macro=macro, return_lse=True)
    plan.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse, _ = plan.run()
    for turn in range(5):
        other_q, other = call(100 + turn)
        q.copy_(other_q)
        cache.page_table.copy_(other.page_table)
        cache.sequence_lengths.copy_(other.sequence_lengths)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        golden(q, cache, offsets()).check(out, lse)


@pytest.mark.parametrize("macro", MACROS)
def test_a_macro_run_neither_allocates_nor_syncs(macro):
    q, cache = call()
    plan = StreamAttnEngine().plan_batch(q, cache, LENS, macro=macro, return_lse=True)
    plan.run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            plan.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("macro", MACROS)
def test_scattered_requests_of_a_contiguous_cache(macro):
    q, _ = call()
    key, value = torch.randn(2, len(LENS), 300, 2, DIM, device="cuda").bfloat16().unbind()
    lens = torch.arange(len(LENS), device="cuda", dtype=torch.int32) * 37
    cache = ContiguousKVCache(key=key, value=value, sequence_lengths=lens)
    plan = StreamAttnEngine().plan_batch(q, cache, LENS, macro=macro, return_lse=True)
    golden(q, cache, offsets()).check(*plan.run()[:2])


def test_decode_and_verify_of_a_mix_go_to_native_decode():
    records = {record.route: record for record in default_registry().attention_records()}
    if torch.cuda.get_device_capability() != (9, 0) or "sm90_decode" not in records:
        pytest.skip("native decode is for sm_90, with its package installed")
    q, cache = call()
    plan = StreamAttnEngine().plan_batch(q, cache, LENS, macro="phases")
    assert plan.routes == ("sm90_decode", "sm90_decode", "triton")
