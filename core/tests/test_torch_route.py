"""What is special to the torch route; the contract and the hostile list are in their own tests."""

import dataclasses
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from stream_attention.core.device import DeviceFacts
from stream_attention.core.routes import torch_route
from stream_attention.core.routes.torch_kv import PoolReader, head_rows
from stream_attention.core.routes.torch_softmax import add_weighted
from stream_attention.core.testing.checks import (
    H200,
    bind,
    check_built,
    check_route,
    find_record,
    launch,
)
from stream_attention.core.testing.golden import golden
from stream_attention.core.testing.hostile import HOSTILE
from stream_attention.core.testing.problems import Case, build
from stream_attention.core.tile_plan import AttentionTilePlan

SOME = tuple(case for index, case in enumerate(HOSTILE) if index % 3 == 0 or case.pool != "dense")
CPU = DeviceFacts(type="cpu", num_sms=2)


@pytest.fixture(scope="module")
def record():
    return find_record("torch", torch_route.register)


def _problem(**changes):
    return dataclasses.replace(bind(build(Case())).problem, **changes)


def _run(record, built, **options):
    step, described = launch(record, built, **options)
    step.run()
    return described.bound.out, described.bound.lse


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_many_small_chunks_agree_with_the_oracle(record, case, batch_invariant, monkeypatch):
    # Chunks of 16 tokens and items of few rows: every loop of the route runs more than once.
    monkeypatch.setattr(torch_route, "CHUNK_BYTES", 1)
    monkeypatch.setattr(torch_route, "MAX_ROWS", 3)
    monkeypatch.setattr(torch_route, "GROUP_TOKENS", 8)
    built = build(case)
    out, lse = _run(record, built, batch_invariant=batch_invariant)
    want = golden(built.q, built.cache, built.qo_indptr, **built.options)
    want.check(out.view(want.out.shape), lse.view(want.lse.shape), f"{case!r}: ")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 5, 16, 64, 2000])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_lengths_beyond_one_chunk_agree_with_the_oracle(record, layout, page_size, dtype):
    case = Case(
        qo_lens=(1, 2),
        kv_lens=(3000, 1025),
        num_kv_heads=2,
        head_dim_qk=512,
        page_size=page_size,
        layout=layout,
        dtype=dtype,
    )
    check_route(record, case)


@pytest.mark.parametrize("page_size", [4, 64])
def test_a_copying_reader_never_hands_out_the_pool(page_size):
    # Batch invariance: products read every tile at one base alignment, wherever its page lies.
    stored = torch.randn(6 * page_size * 3 * 8 + 4)[4:].view(6, page_size, 3, 8)
    for copy in (False, True):
        tile = PoolReader(stored, 3, 16, copy=copy).tile(torch.tensor([2]), 0, 4, None)
        assert torch.equal(tile, stored[2, :4].transpose(0, 1))
        same = tile.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
        assert same is not copy
        assert not copy or tile.data_ptr() % 64 == 0


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_permuting_pages_gives_the_same_bits(record, batch_invariant):
    case = Case(qo_lens=(1, 4, 1, 1), kv_lens=(300, 90, 17, 16), dtype="float32")
    built = build(case)
    want = _run(record, built, batch_invariant=batch_invariant)
    cache = built.cache
    order = torch.randperm(cache.num_pages, generator=torch.Generator().manual_seed(1))
    key, value = torch.empty_like(cache.key), torch.empty_like(cache.value)
    key[order], value[order] = cache.key, cache.value
    table = cache.page_table.clone()
    used = -(-cache.sequence_lengths // cache.page_size)
    for request, count in enumerate(used.tolist()):
        table[request, :count] = order[table[request, :count].long()].int()
    moved = dataclasses.replace(cache, key=key, value=value, page_table=table)
    got = _run(record, dataclasses.replace(built, cache=moved), batch_invariant=batch_invariant)
    assert torch.equal(want[0], got[0]) and torch.equal(want[1], got[1])


@pytest.mark.parametrize("group_tokens", [0, 256])
@pytest.mark.parametrize(
    ("pool", "bad"),
    [("key", math.nan), ("value", math.nan), ("value", math.inf), ("value", -math.inf)],
)
def test_a_token_hidden_from_a_row_takes_no_part(record, pool, bad, group_tokens, monkeypatch):
    monkeypatch.setattr(torch_route, "GROUP_TOKENS", group_tokens)
    case = Case(qo_lens=(6, 6), kv_lens=(40, 40), dtype="float32", window_left=20)
    built = build(case)
    cache = built.cache
    last = int(cache.page_table[0, 2])  # token 39 of request 0: its last row alone sees it
    getattr(cache, pool)[last, 39 - 2 * cache.page_size, 0, 1] = bad
    check_built(record, built)
    out, _ = _run(record, built)
    assert out[:5].isfinite().all() and not out[5].isfinite().all()


def test_add_weighted_skips_hidden_values_only():
    weights = torch.tensor([[[0.5, 0.0, 0.5], [0.25, 0.75, 0.0]]])
    value = torch.tensor([[[1.0, 2.0], [math.inf, 3.0], [4.0, math.nan]]])
    mask = weights == 0
    for acc in (None, torch.ones(1, 2, 2)):
        start = 0.0 if acc is None else 1.0
        got = add_weighted(acc, weights, value, mask)[0]
        assert got[0, 0] == 2.5 + start and got[0, 1].isnan()
        assert got[1, 0] == math.inf and got[1, 1] == 2.75 + start


def test_lengths_outside_the_capacity_are_clamped(record):
    case = Case(qo_lens=(1, 1), kv_lens=(48, 48), spare=0)
    built = build(case)
    step, described = launch(record, built)
    step.run()
    full = described.bound.out.clone()
    built.cache.sequence_lengths.copy_(torch.tensor([1 << 30, -5], dtype=torch.int32))
    step.run()
    assert torch.equal(described.bound.out[0], full[0])
    assert not described.bound.out[1].any()
    assert (described.bound.lse[1] == -math.inf).all()


def test_rebind_reads_and_writes_the_new_tensors_only(record):
    case = Case(qo_lens=(1, 3), kv_lens=(50, 20), layout="HND")
    first, second = build(case, 1), build(case, 2)
    step, of_first = launch(record, first)
    of_second = bind(second)
    step.rebind(of_second.bound)
    step.run()
    assert of_first.bound.out.isnan().all()
    want = golden(second.q, second.cache, second.qo_indptr, **second.options)
    want.check(of_second.result(), of_second.result_lse())


def test_capture_is_refused_by_name(record, monkeypatch):
    step, described = launch(record, build(Case()))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    step.rebind(dataclasses.replace(described.bound, q=_OnCuda(described.bound.q)))
    with pytest.raises(RuntimeError, match=r"route='torch'.*cannot be captured.*triton"):
        step.run()


class _OnCuda(SimpleNamespace):
    """A stand-in for a CUDA tensor, as far as the capture check looks."""

    def __init__(self, tensor):
        super().__init__(is_cuda=True, shape=tensor.shape)


_MEMORY = """
import re, torch
from stream_attention.core.cache import PagedKVCache
from stream_attention.core.describe import describe
from stream_attention.core.device import device_facts
from stream_attention.core.routes import torch_route
from stream_attention.core.tile_plan import AttentionTilePlan

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

batch, tokens, heads, dim, page = 8, 2048, 8, 128, 16
pages = batch * tokens // page
key, value = torch.zeros(pages, page, heads, dim), torch.zeros(pages, page, heads, dim)
key += 0.5
value += 0.5
table = torch.randperm(pages).view(batch, -1).int()
lens = torch.full((batch,), tokens, dtype=torch.int32)
call = describe(torch.randn(batch, 32, dim), PagedKVCache(key, value, table, lens))
call.bound.out.zero_()
torch.ones(64, 64) @ torch.ones(64, 64)
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
plan = AttentionTilePlan.for_problem(call.problem)
launch = torch_route.build(call.problem, plan, device_facts(key.device), call.bound)
launch.run()
print("extra", status("VmHWM") - before, (key.nbytes + value.nbytes) / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_peak_memory_is_a_small_part_of_the_cache():
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=False
    )
    found = re.search(r"extra (\S+) (\S+)", done.stdout)
    if found is None and "clear_refs" in done.stderr:
        pytest.skip("the peak of a process cannot be reset here")
    assert found, done.stderr
    extra, cache = float(found[1]), float(found[2])
    assert cache == 128.0
    assert extra < 64.0, f"{extra} MB beside a cache of {cache} MB"


def test_scratch_does_not_grow_with_the_batch(record):
    sizes = []
    for batch in (1, 64):
        case = Case(qo_lens=(1,) * batch, kv_lens=(40,) * batch)
        sizes.append(launch(record, build(case))[0].backend_plan.workspace_bytes)
    assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mask": "bool"}, r"mask='bool'.*torch_sdpa"),
        ({"differentiable": True}, r"differentiable=True.*torch_sdpa"),
    ],
)
def test_rules_name_what_they_refuse(record, changes, text):
    assert record.reasons(_problem(), CPU) == ()
    (reason,) = record.reasons(_problem(**changes), CPU)
    assert re.search(text, reason)


def test_a_fixed_subset_must_be_lowered_first(record):
    described = bind(build(Case()))
    plan = AttentionTilePlan(kind="fixed_subset", tiles=((0,),))
    with pytest.raises(ValueError, match=r"fixed_subset.*page_lists"):
        record.build(described.problem, plan, CPU, described.bound)


def test_estimate_grows_with_the_work_and_charges_the_sync_on_cuda(record):
    small, large = _problem(kv_capacity=1 << 10), _problem(kv_capacity=1 << 16)
    assert 0 < record.estimate_us(small, CPU) < record.estimate_us(large, CPU)
    window = dataclasses.replace(large, window_left=16)
    assert record.estimate_us(window, CPU) < record.estimate_us(large, CPU)
    assert record.estimate_us(small, H200) > 1000


@pytest.mark.parametrize("layers", [1, 3])
def test_head_rows_are_the_pages_of_an_hnd_pool(layers):
    pool = torch.arange(4 * layers * 2 * 3 * 5).view(4, layers, 2, 3, 5)[:, layers - 1]
    pool = pool.transpose(1, 2)  # [pages, page_size, heads, dim]
    rows, per_page = head_rows(pool)
    for page in range(4):
        for head in range(2):
            assert torch.equal(rows[page * per_page + head], pool[page, :, head])
    assert head_rows(pool.transpose(1, 2).contiguous().transpose(1, 2).contiguous()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("page_size", [2, 64])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_tiles_of_both_readers_are_the_stored_tokens(dtype, page_size, layout):
    shape = (page_size, 3) if layout == "NHD" else (3, page_size)
    stored = torch.randn(6, 2, *shape, 8).to(dtype)[:, 1]  # layer 1 of 2 in each page
    stored = stored if layout == "NHD" else stored.transpose(1, 2)
    pages = torch.tensor([4, 1]) if page_size == 2 else torch.tensor([4])
    want = stored[pages].float().flatten(0, 1)[1:4].transpose(0, 1)  # [heads, tokens, dim]
    reader = PoolReader(stored, 3, 16, copy=False)
    assert torch.equal(reader.tile(pages, 1, len(want[0]), None), want)
    token = torch.arange(1, 1 + want.shape[1]).unsqueeze(0)
    page, slot = pages[token // page_size], token % page_size
    assert torch.equal(reader.tiles(page, slot, None), want)
    assert torch.equal(reader.tiles(page, slot, torch.tensor([2])), want[2:])


@pytest.mark.parametrize("window", [2**63 - 1, 2**63, 2**70])
def test_a_window_beyond_int64_sees_everything(record, window):
    built = build(Case(qo_lens=(1, 6), kv_lens=(300, 20)))
    want, _ = _run(record, built, causal=False)
    for side in ("window_left", "window_right"):
        out, _ = _run(record, built, causal=False, **{side: window})
        assert torch.equal(out, want)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_heads_and_tokens_that_share_memory_are_read(layout):
    shape = (16, 3) if layout == "NHD" else (3, 16)
    stored = torch.randn(6, 1, 1, 8).expand(6, *shape, 8)
    stored = stored if layout == "NHD" else stored.transpose(1, 2)
    reader = PoolReader(stored, 3, 64, copy=False)
    tile = reader.tile(torch.tensor([4, 1]), 0, 32, None)
    assert torch.equal(tile, stored[[4, 1]].flatten(0, 1).transpose(0, 1))
