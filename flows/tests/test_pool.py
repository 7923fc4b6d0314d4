"""A pool's memory, its bytes, and its allocator."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_attention.flows import load_flow
from stream_attention.flows.page_allocator import PageAllocator
from stream_attention.flows.pool import FlowPool, PoolExhausted

FP8 = torch.float8_e4m3fn


def quest_pool(**changes):
    given = {"num_pages": 6, "page_size": 4, "num_kv_heads": 2, "head_dim": 16, **changes}
    return FlowPool(load_flow("gqa_quest_sparse_attention"), **given)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_memory_is_as_documented_and_the_engine_reads_it(layout):
    pool = quest_pool(layout=layout)
    assert pool.key.shape == ((6, 4, 2, 16) if layout == "NHD" else (6, 2, 4, 16))
    assert {name: tuple(f.shape) for name, f in pool.fields.items()} == {
        "k": (6, 2, 4, 16),
        "v": (6, 2, 4, 16),
        "M": (6, 2, 1, 16),
        "m": (6, 2, 1, 16),
    }
    for name, owner in (("k", pool.key), ("v", pool.value)):
        assert pool.fields[name].data_ptr() == owner.data_ptr()
    pool.key[1].normal_()
    view = pool.key if layout == "NHD" else pool.key.transpose(1, 2)
    assert torch.equal(pool.fields["k"][1], view[1].transpose(0, 1))
    table, lengths = torch.zeros((3, 2), dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    cache = pool.cache(table, lengths)
    assert (cache.page_size, cache.num_kv_heads, cache.num_pages, cache.batch) == (4, 2, 6, 3)
    assert cache.key is pool.key and cache.page_table is table and cache.layout == layout
    lists = pool.cache(table[:, None].expand(3, 2, 2).contiguous(), lengths[:, None].repeat(1, 2))
    assert lists.per_head_lists


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, FP8])
@pytest.mark.parametrize("fields_dtype", [None, torch.float32])
@pytest.mark.parametrize(
    ("name", "page_size"), [("running_average_block", 16), ("h2o_token_sparse_attention", 1)]
)
def test_bytes_are_those_of_the_tensors(dtype, fields_dtype, name, page_size):
    flow = load_flow(name)
    pool = FlowPool(flow, 5, page_size, 3, 80, dtype, fields_dtype=fields_dtype)
    held = sum(t.numel() * t.element_size() for t in pool.fields.values())
    assert pool.total_bytes == held == 5 * pool.bytes_per_page
    sizes = (flow, page_size, 3, 80, dtype, fields_dtype)
    assert FlowPool.pages_for(held, *sizes) == 5
    assert FlowPool.pages_for(held - 1, *sizes) == 4
    with pytest.raises(ValueError, match=f"num_bytes=3: a page of flow {name} takes"):
        FlowPool.pages_for(3, *sizes)
    assert f"{pool.bytes_per_page} bytes a page, {held} bytes" in repr(pool)


def test_summaries_of_an_fp8_pool_are_bf16_for_they_have_no_scale():
    assert quest_pool(dtype=FP8).fields["M"].dtype == torch.bfloat16
    assert quest_pool(dtype=FP8, fields_dtype=FP8).fields["M"].dtype == FP8
    assert quest_pool(dtype=torch.float16).fields["M"].dtype == torch.float16


def test_states_are_fp32_and_start_at_init():
    pool = FlowPool(load_flow("h2o_token_sparse_attention"), 4, 1, 2, 16)
    assert pool.fields["hh"].dtype == torch.float32 and (pool.fields["hh"] == 0).all()


@pytest.mark.parametrize(
    ("scale", "wanted"),
    [
        (None, [1.0, 1.0]),
        (0.5, [0.5, 0.5]),
        (torch.tensor(0.5), [0.5, 0.5]),
        (torch.tensor([2.0]), [2.0, 2.0]),
        (torch.tensor([0.5, 0.25]), [0.5, 0.25]),
    ],
)
def test_scales_are_one_a_head(scale, wanted):
    pool = quest_pool(dtype=FP8, k_scale=scale)
    assert pool.value_scale.tolist() == [1.0, 1.0]
    assert pool.key_scale.tolist() == wanted and pool.key_scale.dtype == torch.float32
    table, lengths = torch.zeros((1, 2), dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    assert pool.cache(table, lengths).key_scale is pool.key_scale


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_pages": 0}, r"FlowPool: num_pages=0: must be an int >= 1; use 1"),
        ({"num_kv_heads": True}, r"num_kv_heads=True: must be an int >= 1; use 1"),
        ({"page_size": 0}, r"page_size=0: must be >= 1; use 16"),
        ({"dtype": torch.int8}, r"dtype=torch.int8: must be one of bfloat16, .*; use torch.bf"),
        ({"dtype": "bf16"}, r"dtype='bf16': must be one of bfloat16"),
        ({"layout": "HDN"}, r"layout='HDN': must be 'NHD' or 'HND'; use 'NHD'"),
        ({"fields_dtype": torch.float64}, r"fields_dtype=torch.float64: must be None or one of"),
        ({"k_scale": 0.5}, r"k_scale=0.5: scales belong to float8_e4m3fn K/V only; use None"),
        ({"dtype": FP8, "v_scale": -1}, r"v_scale=-1: must be a finite number > 0 or"),
        ({"dtype": FP8, "k_scale": torch.ones(3)}, r"k_scale.shape=\(3,\): must be \[\], \[1\]"),
    ],
)
def test_pools_that_are_not_legal_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        quest_pool(**changes)


def test_a_flow_with_state_refuses_prefix_sharing():
    flow = load_flow("running_average_block")
    match = r"prefix_sharing=True: flow running_average_block has state \(r\), which .*; use prefi"
    with pytest.raises(ValueError, match=match):
        FlowPool(flow, 4, 16, 2, 16, prefix_sharing=True)
    pool = FlowPool(flow, 4, 16, 2, 16)
    pages = pool.allocate(1)
    with pytest.raises(ValueError, match=r"share: .*prefix_sharing=False; use pages of their own"):
        pool.share(pages)
    with pytest.raises(ValueError, match=r"share: .*; use FlowPool\(..., prefix_sharing=True\)"):
        quest_pool().share(pages)
    assert pool.references(pages[0]) == 1


def test_shared_pages_are_free_when_the_last_request_lets_go():
    pool = quest_pool(prefix_sharing=True)
    pages = pool.allocate(3)
    assert pool.share(pages[:2]) == pages[:2]
    assert pool.release(pages) == [2] and pool.num_used == 2
    assert pool.release(torch.tensor(pages[:2])) == [0, 1] and pool.num_free == 6


def test_the_lowest_free_page_is_next():
    pool = quest_pool()
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.release([2, 0])
    assert pool.allocate(3) == [0, 2, 4]
    pool.release([4, 1, 3])
    assert pool.allocate(4) == [1, 3, 4, 5]
    assert pool.allocate(0) == []


def test_exhaustion_changes_nothing():
    pool = quest_pool()
    pool.allocate(4)
    with pytest.raises(PoolExhausted, match=r"n=3: only 2 of 6 pages are free; .*use n <= 2"):
        pool.allocate(3)
    assert pool.num_used == 4 and pool.allocate(2) == [4, 5]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda p: p.release([0, 5]), r"pages=5: is released more often than .* \(0 references\)"),
        (lambda p: p.release([0, 0]), r"pages=0: is released more often .* \(1 references\)"),
        (lambda p: p.release([0, 6]), r"pages=6: must be in \[0, 6\)"),
        (lambda p: p.release([-1]), r"pages=-1: must be in \[0, 6\)"),
        (lambda p: p.release(["a"]), r"pages='a': must be page ids, ints; use \[0, 1\]"),
        (lambda p: p.retain([0, 3]), r"pages=3: is free, and what nobody holds cannot be retained"),
        (lambda p: p.allocate(-1), r"n=-1: must be an int >= 0; use 1"),
        (lambda p: p.allocate(1.0), r"n=1.0: must be an int >= 0; use 1"),
    ],
)
def test_wrong_calls_are_refused_and_change_nothing(call, match):
    pool = quest_pool()
    pool.allocate(2)
    with pytest.raises(ValueError, match=match):
        call(pool)
    assert pool.num_used == 2 and [pool.references(page) for page in range(3)] == [1, 1, 0]


PAGES = 7
_ids = st.lists(st.integers(-1, PAGES), max_size=5)
_steps = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(0, 4)),
        st.tuples(st.sampled_from(["retain", "release"]), _ids),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(_steps)
def test_any_calls_agree_with_a_list_of_counts(steps):
    """The model: one count a page; the lowest zeros are next; a call that fails changes nothing."""
    allocator, counts = PageAllocator(PAGES), [0] * PAGES
    for what, argument in steps:
        model = list(counts)
        if what == "allocate":
            free = [page for page in range(PAGES) if not counts[page]]
            legal, want = argument <= len(free), free[:argument]
            for page in want:
                model[page] = 1
        else:
            legal = all(0 <= page < PAGES and counts[page] for page in argument)
            for page in argument if legal else ():
                model[page] += 1 if what == "retain" else -1
            legal = legal and min(model) >= 0
            want = sorted(argument)
            if what == "release":
                want = [page for page in range(PAGES) if counts[page] and not model[page]]
        if legal:
            assert sorted(getattr(allocator, what)(argument)) == want
            counts = model
        else:
            with pytest.raises((ValueError, PoolExhausted)):
                getattr(allocator, what)(argument)
        assert [allocator.references(page) for page in range(PAGES)] == counts
        assert allocator.num_free == counts.count(0)


def test_threads_never_hold_the_same_page():
    allocator, owners, wrong = PageAllocator(16), [None] * 16, []

    def work(me):
        for turn in range(300):
            try:
                pages = allocator.allocate(1 + turn % 5)
            except PoolExhausted:
                continue
            for page in pages:
                if owners[page] is not None:
                    wrong.append(page)
                owners[page] = me
            allocator.retain(pages)
            allocator.release(pages)
            for page in pages:
                owners[page] = None
            allocator.release(pages)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong and allocator.num_free == 16
