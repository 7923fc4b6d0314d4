"""`validate`: what contents may be, on the borders; its messages are tested in the planner."""

import pytest
import torch

from stream_attention.core import validate as validate_module
from stream_attention.core.cache import ContiguousKVCache, PagedKVCache
from stream_attention.core.describe import describe
from stream_attention.core.validate import validate

Q = torch.zeros(2, 4, 16)
NAN, INF = float("nan"), float("inf")


def paged(table, lens, pages=8):
    pool = torch.zeros(pages, 16, 2, 16)
    return PagedKVCache(
        key=pool,
        value=pool.clone(),
        page_table=torch.tensor(table, dtype=torch.int32),
        sequence_lengths=torch.tensor(lens, dtype=torch.int32),
    )


TABLE = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("lens", [[0, 0], [64, 64], [1, 63], [16, 17]])
def test_lengths_from_0_to_capacity_are_legal(lens):
    assert validate(describe(Q, paged(TABLE, lens))) == 1


@pytest.mark.parametrize("lens", [[-1, 0], [0, 65], [-(2**31), 2**31 - 1]])
def test_other_lengths_are_not(lens):
    with pytest.raises(ValueError, match="sequence_lengths"):
        validate(describe(Q, paged(TABLE, lens)))


@pytest.mark.parametrize("bad", [-1, 8, 2**30, -(2**31)])
@pytest.mark.parametrize(("length", "used"), [(0, 0), (1, 1), (16, 1), (17, 2), (64, 4)])
def test_exactly_the_entries_in_use_are_looked_at(bad, length, used):
    for column in range(4):
        table = [list(row) for row in TABLE]
        table[1][column] = bad
        described = describe(Q, paged(table, [64, length]))
        if column < used:
            with pytest.raises(ValueError, match=rf"page_table\[1, {column}\]={bad}: request 1"):
                validate(described)
        else:
            validate(described)


@pytest.mark.parametrize("per_head_lens", [False, True])
def test_lists_per_head_are_looked_at_per_head(per_head_lens):
    lens = [[17, 1], [0, 64]] if per_head_lens else [17, 64]
    table = [[[0, 1, -1, -1], [2, 3, -1, -1]], [[4, 5, 6, 7], [0, 1, 2, 3]]]
    assert validate(describe(Q, paged(table, lens))) == 1
    table[0][1][0] = 9
    with pytest.raises(ValueError, match=r"page_table\[0, 1, 0\]=9: request 0, KV head 1"):
        validate(describe(Q, paged(table, lens)))


def test_a_pool_without_pages_serves_empty_requests_only():
    assert validate(describe(Q, paged(TABLE, [0, 0], pages=0))) == 1
    with pytest.raises(ValueError, match="use a pool with at least one page"):
        validate(describe(Q, paged(TABLE, [1, 0], pages=0)))


def test_large_tables_are_checked_in_parts_with_the_same_result(monkeypatch):
    monkeypatch.setattr(validate_module, "_CHUNK_ENTRIES", 8)
    batch = 13
    table = torch.arange(batch * 4).view(batch, 4).tolist()
    lens = [64] * batch
    cache = paged(table, lens, pages=batch * 4)
    q = torch.zeros(batch, 4, 16)
    validate(describe(q, cache))
    for request in range(batch):
        cache.page_table[request, 2] = 999
        with pytest.raises(ValueError, match=rf"page_table\[{request}, 2\]=999: request {request}"):
            validate(describe(q, cache))
        cache.page_table[request, 2] = 0


def test_the_longest_request_is_returned():
    offsets = torch.tensor([0, 2, 7], dtype=torch.int32)
    assert validate(describe(torch.zeros(7, 4, 16), paged(TABLE, [3, 4]), offsets)) == 5
    empty = torch.tensor([0, 0, 0], dtype=torch.int32)
    assert validate(describe(torch.zeros(0, 4, 16), paged(TABLE, [3, 4]), empty)) == 0


def test_a_contiguous_cache_without_lengths_has_nothing_to_check():
    k = torch.full((2, 5, 2, 16), torch.nan)  # contents of K and V are the caller's
    assert validate(describe(Q, ContiguousKVCache(key=k, value=k.clone()))) == 1


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
def test_scales_are_finite_and_positive(name, value):
    pool = torch.zeros(8, 16, 2, 16).to(torch.float8_e4m3fn)
    cache = PagedKVCache(
        key=pool,
        value=pool,
        page_table=torch.tensor(TABLE, dtype=torch.int32),
        sequence_lengths=torch.zeros(2, dtype=torch.int32),
        **{name: torch.tensor([1.0, value])},
    )
    with pytest.raises(ValueError, match=rf"{name}\[1\]={value}: must be finite and > 0"):
        validate(describe(Q, cache))


def test_a_sink_may_be_minus_infinity_but_no_nan():
    sink = torch.tensor([0.0, float("-inf"), 1e30, -1e30])
    assert validate(describe(Q, paged(TABLE, [3, 4]), attn_sink=sink)) == 1
    sink[2] = float("nan")
    with pytest.raises(ValueError, match=r"attn_sink\[2\]=nan"):
        validate(describe(Q, paged(TABLE, [3, 4]), attn_sink=sink))


def sequences(qo_len, kv_len, **options):
    q, k = torch.zeros(2, qo_len, 4, 16), torch.zeros(2, kv_len, 2, 16)
    return describe(q, k, v_cache=k, **options)


def test_what_a_mask_adds_is_below_infinity_where_a_row_sees_it():
    mask = torch.zeros(2, 1, 3, 6)
    mask[1, 0, 2, 3], mask[0, 0, 1, 4], mask[0, 0, 0, 0] = NAN, INF, -INF
    mask[0, 0, 0, 5] = NAN  # which a causal row does not see
    sink = torch.tensor([0.0, NAN, 0.0, 0.0])
    with pytest.raises(ValueError) as caught:
        validate(sequences(3, 6, attn_sink=sink), mask)
    rule = "must be a finite number, or -inf for not seen; use float('-inf')"
    assert str(caught.value).split("\n  ") == [
        "attention: 3 faults",
        "attn_sink[1]=nan: query head 1: must be a finite logit, or -inf for no sink; "
        "use float('-inf')",
        f"attn_mask[0, 0, 1, 4]=inf: {rule}",
        f"attn_mask[1, 0, 2, 3]=nan: {rule}",
    ]
    with pytest.raises(ValueError, match=r"attn_mask='15 faults': the first 8 are listed"):
        validate(sequences(3, 6), torch.full((3, 6), NAN))


def test_a_mask_may_hold_anything_where_no_row_sees_it():
    hidden = torch.zeros(3, 6)
    hidden[0, 4:], hidden[1, 5] = NAN, INF
    assert validate(sequences(3, 6), hidden) == 3
    with pytest.raises(ValueError, match=r"attn_mask\[0, 4\]=nan"):
        validate(sequences(3, 6, causal=False), hidden)
    assert validate(sequences(3, 6, causal=False), hidden.bool()) == 3


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"causal": False, "window_left": 1}])
@pytest.mark.parametrize("shape", [(), (1,), (2, 4, 3, 1)])
@pytest.mark.parametrize(("qo_len", "kv_len"), [(3, 0), (1, 0), (0, 5), (0, 0)])
def test_without_keys_or_queries_no_row_sees_a_mask(qo_len, kv_len, shape, options):
    shape = tuple(qo_len if extent == 3 else extent for extent in shape)
    described = sequences(qo_len, kv_len, **options)
    assert validate(described, torch.full(shape, NAN)) == qo_len


def test_nothing_is_read_on_the_meta_device():
    cache = paged(TABLE, [0, 0])
    fields = ("key", "value", "page_table", "sequence_lengths")
    meta = PagedKVCache(**{name: getattr(cache, name).to("meta") for name in fields})
    assert validate(describe(Q.to("meta"), meta)) == 1


def test_everything_is_fetched_in_one_transfer(monkeypatch):
    fetched = []
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "cpu", "numpy"):
        original = getattr(torch.Tensor, name)

        def counting(tensor, *args, original=original, name=name):
            fetched.append(name)
            return original(tensor, *args)

        monkeypatch.setattr(torch.Tensor, name, counting)
    pool = torch.zeros(8, 16, 2, 16).to(torch.float8_e4m3fn)
    cache = PagedKVCache(
        key=pool,
        value=pool,
        page_table=torch.tensor(TABLE, dtype=torch.int32),
        sequence_lengths=torch.tensor([3, 64], dtype=torch.int32),
        key_scale=torch.ones(2),
        value_scale=torch.ones(1),
    )
    offsets = torch.tensor([0, 2, 7], dtype=torch.int32)
    described = describe(torch.zeros(7, 4, 16), cache, offsets, attn_sink=torch.zeros(4))
    assert fetched == []
    assert validate(described) == 5
    # What is fetched: lengths, page ids, two scales, a sink, offsets, the most queries.
    assert fetched == ["cpu", *["item"] * 7]
    described = sequences(3, 6, attn_sink=torch.zeros(4))
    fetched.clear()
    assert validate(described, torch.zeros(3, 6)) == 3
    assert fetched == ["cpu", "item", "item"]
    hidden = torch.zeros(3, 6)
    hidden[0, 4:] = NAN  # which no row sees: looking costs what naming does, once
    fetched.clear()
    assert validate(described, hidden) == 3
    assert fetched == ["cpu", "item", "item", "tolist"]
