"""Pools hold random tokens where requests have them, and poison everywhere else."""

import dataclasses

import pytest
import torch

from stream_attention.bench import pools
from stream_attention.bench.cases import FP8, AttentionCase
from stream_attention.bench.lengths import parse_lengths, uniform
from stream_attention.bench.suites import SUITES
from stream_attention.core.cache import ContiguousKVCache
from stream_attention.core.describe import describe
from stream_attention.core.validate import validate

CPU = torch.device("cpu")
RAGGED = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 8, "page_size": 4, "dtype": "float32"}


def token_slots(pool):
    """The loop that a page table means: (page, slot) of each token."""
    size = pool.case.page_size
    for request, tokens in enumerate(pool.kv_lens):
        for position in range(tokens):
            yield int(pool.cache.page_table[request, position // size]), position % size


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_tokens_are_random_and_every_other_slot_is_poison(layout):
    case = AttentionCase(batch=4, lengths=parse_lengths("9,0,4,1"), layout=layout, **RAGGED)
    pool = pools.build_pool(case, CPU, seed=3)
    used = set(token_slots(pool))
    assert len(used) == 14  # shuffled pages, shared by nobody
    for tensor in (pool.cache.key, pool.cache.value):
        rows = tensor if layout == "NHD" else tensor.transpose(1, 2)
        for page in range(rows.shape[0]):
            for slot in range(4):
                finite = rows[page, slot].isfinite()
                assert finite.all() if (page, slot) in used else not finite.any(), (page, slot)
        live = torch.stack([rows[page, slot] for page, slot in used])
        assert 0.7 < live.std() < 1.3 and live.abs().min() > 0


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_a_contiguous_pool_holds_tokens_and_poison_behind_them(layout, kv_dtype):
    fields = {**RAGGED, "page_size": 16}
    case = AttentionCase(
        batch=3,
        lengths=parse_lengths("9,0,16"),
        layout=layout,
        cache="contiguous",
        capacity=32,
        kv_dtype=kv_dtype,
        **fields,
    )
    pool = pools.build_pool(case, CPU, seed=3)
    assert isinstance(pool.cache, ContiguousKVCache) and pool.cache.capacity == 32
    for tensor in (pool.cache.key, pool.cache.value):
        rows = (tensor if layout == "NHD" else tensor.transpose(1, 2)).float()
        for request, tokens in enumerate(case.kv_lens):
            assert rows[request, :tokens].isfinite().all()
            assert not rows[request, tokens:].isfinite().any()
        assert 0.7 < rows[2, :16].std() < 1.3
    validate(describe(pool.q, pool.cache))


def test_fp8_pools_have_a_scale_each_and_the_nearest_number_as_poison():
    case = AttentionCase(batch=2, lengths=parse_lengths("5,3"), kv_dtype=FP8, **RAGGED)
    pool = pools.build_pool(case, CPU, seed=0)
    cache = pool.cache
    assert cache.key.dtype == cache.value.dtype == torch.float8_e4m3fn
    assert pool.q.dtype == torch.float32
    assert (float(cache.key_scale), float(cache.value_scale)) == (0.75, 1.5)
    unused = cache.key.numel() - 8 * 2 * 8  # 8 tokens, 2 heads, dim 8
    assert int(cache.key.float().isnan().sum()) == unused
    pool.fill_unused(1000.0)
    assert int((cache.key.float() == 448.0).sum()) == unused
    validate(describe(pool.q, cache))


def test_scales_are_exact_in_every_dtype_of_q():
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()]
    for scale in (pools.KEY_SCALE, pools.VALUE_SCALE):
        for dtype in (torch.bfloat16, torch.float16):
            assert torch.equal((numbers.to(dtype) * scale).float(), numbers * scale)


def test_fp8_numbers_drawn_in_parts_are_the_same_for_a_seed(monkeypatch):
    monkeypatch.setattr(pools, "_RANDOM_AT_ONCE", 100)
    case = AttentionCase(batch=1, lengths=uniform(64), kv_dtype=FP8, **RAGGED)
    first, second = (pools.build_pool(case, CPU, seed=5).cache.key for _ in range(2))
    assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    tokens = first.float()[first.float().isfinite()]
    assert tokens.numel() == 64 * 2 * 8 and 0.8 < tokens.std() < 1.2


def test_capacity_widens_the_table_with_invalid_ids_and_adds_no_page():
    plain = AttentionCase(batch=2, lengths=parse_lengths("9,4"), **RAGGED)
    wide = dataclasses.replace(plain, capacity=4000)
    cache = pools.build_pool(wide, CPU, seed=0).cache
    assert cache.capacity == 4000 and cache.page_table.shape == (2, 1000)
    assert (cache.page_table[0, 3:] == 2**30).all() and (cache.page_table[1, 1:] == 2**30).all()
    assert cache.num_pages == pools.build_pool(plain, CPU, seed=0).cache.num_pages
    assert pools.pool_bytes(wide) - pools.pool_bytes(plain) == 4 * 2 * (1000 - 3)


def test_fill_unused_changes_no_token():
    case = AttentionCase(batch=2, lengths=parse_lengths("5,3"), **RAGGED)
    pool = pools.build_pool(case, CPU, seed=0)
    before = [pool.cache.key[page, slot].clone() for page, slot in token_slots(pool)]
    pool.fill_unused(1000.0)
    after = [pool.cache.key[page, slot] for page, slot in token_slots(pool)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert pool.cache.key.isfinite().all()
    assert int((pool.cache.key == 1000.0).sum()) == pool.cache.key.numel() - 8 * 2 * 8


def test_pages_are_shuffled_and_ids_past_a_request_are_out_of_the_pool():
    case = AttentionCase(batch=2, lengths=parse_lengths("200,4"), **RAGGED)
    pool = pools.build_pool(case, CPU, seed=0)
    row = pool.cache.page_table[0, :50].tolist()
    assert row != sorted(row)
    assert (pool.cache.page_table[1, 1:] == 2**30).all()


def test_pools_pass_the_projects_own_validation():
    case = AttentionCase(batch=3, lengths=parse_lengths("9,0,4"), **RAGGED)
    pool = pools.build_pool(case, CPU, seed=0)
    validate(describe(pool.q, pool.cache))


def test_pools_of_a_rotation_differ_and_repeat_for_a_seed():
    case = AttentionCase(batch=1, lengths=uniform(8), **RAGGED)
    first, second = (pools.build_pool(case, CPU, seed=seed) for seed in (0, 1))
    assert not torch.equal(first.q, second.q)
    assert torch.equal(first.q, pools.build_pool(case, CPU, seed=0).q)


def test_pool_bytes_are_the_storage():
    case = AttentionCase(batch=2, lengths=parse_lengths("9,4"), **RAGGED)
    pool = pools.build_pool(case, CPU, seed=0)
    cache = pool.cache
    tensors = (cache.key, cache.value, cache.page_table, pool.q, pool.q)  # out is as large as q
    assert pools.pool_bytes(case) == sum(tensor.nbytes for tensor in tensors)
    fields = {**RAGGED, "page_size": 16, "dtype": "bfloat16"}
    row = AttentionCase(
        batch=2, lengths=uniform(3), cache="contiguous", capacity=64, kv_dtype=FP8, **fields
    )
    pool = pools.build_pool(row, CPU, seed=0)
    tensors = (pool.cache.key, pool.cache.value, pool.q, pool.q)
    assert pools.pool_bytes(row) == sum(tensor.nbytes for tensor in tensors)


def test_a_query_or_a_table_that_does_not_fit_is_seen_before_it_is_made():
    wide = AttentionCase(batch=1, lengths=uniform(1), num_qo_heads=2**31 - 1, num_kv_heads=1)
    ragged = AttentionCase(batch=2**20, lengths=parse_lengths("skewed:2147483647:1"), page_size=1)
    for case in (wide, ragged):
        with pytest.raises(pools.NotEnoughMemory):
            pools.check_memory(case, CPU, 1)


def test_a_rotation_exceeds_the_cache(monkeypatch):
    monkeypatch.setattr(pools, "cold_rotation_bytes", lambda device: 10_000)
    case = AttentionCase(batch=1, lengths=uniform(8), **RAGGED)  # 1024 bytes of KV
    assert case.kv_bytes == 1024
    assert pools.num_pools(case, CPU) == 10
    assert pools.num_pools(case, CPU, cold=False) == 1
    monkeypatch.setattr(pools, "cold_rotation_bytes", lambda device: 10)
    assert pools.num_pools(case, CPU) == 2


def test_the_smallest_cell_of_the_suites_leaves_an_l2_of_60_mib(monkeypatch):
    needed = int(4.5 * (60 << 20)) + 1
    monkeypatch.setattr(pools, "cold_rotation_bytes", lambda device: needed)
    smallest = min(
        (case for name, cases in SUITES.items() if "cpu" not in name for case in cases),
        key=lambda case: case.kv_bytes,
    )
    assert pools.num_pools(smallest, CPU) * smallest.kv_bytes >= needed


def test_too_large_a_case_says_what_would_fit(monkeypatch):
    monkeypatch.setattr(pools, "available_bytes", lambda device: 2**30)
    case = AttentionCase(batch=2, lengths=uniform(2**20))
    with pytest.raises(
        pools.NotEnoughMemory, match=r"lengths='1048576': .*free on cpu; use at most"
    ):
        pools.build_pools(case, CPU)


@pytest.mark.parametrize("cache", ["paged", "contiguous"])
def test_a_capacity_that_does_not_fit_is_named(monkeypatch, cache):
    monkeypatch.setattr(pools, "available_bytes", lambda device: 2**26)
    case = AttentionCase(batch=2, lengths=uniform(16), cache=cache, capacity=2**30)
    with pytest.raises(
        pools.NotEnoughMemory, match=r"capacity='1073741824': .*free on cpu; use at most \d+$"
    ) as caught:
        pools.build_pools(case, CPU, cold=False)
    fits = int(str(caught.value).split()[-1])
    pools.check_memory(dataclasses.replace(case, capacity=fits), CPU, 1)
    with pytest.raises(pools.NotEnoughMemory):
        pools.check_memory(dataclasses.replace(case, capacity=fits + 16), CPU, 1)
