"""Caches: their views rebuild the dense form, and every wrong argument is named."""

import pytest
import torch

from stream_attention.core.cache import ContiguousKVCache, PagedKVCache
from stream_attention.core.testing.problems import Case, build

FP8 = torch.float8_e4m3fn


def dense_from_view(view, request, head):
    """The format by the shortest loop that rebuilds a head's dense K and V from a `KVView`."""
    count = view.capacity if view.kv_lens is None else int(view.kv_lens[request, head])
    rows = []
    for token in range(count):
        page, slot = request, token
        if view.page_table is not None:
            page = int(view.page_table[request, head, token // view.page_size])
            slot = token % view.page_size
        rows.append((view.key[page, slot, head], view.value[page, slot, head]))
    return rows


CASES = [
    Case(qo_lens=(1, 1), kv_lens=(20, 5), layout=layout, page_size=size, pool=pool)
    for layout in ("NHD", "HND")
    for size in (1, 3, 16)
    for pool in ("dense", "layer_axis", "interleaved")
] + [
    Case(kv_lens=((20, 3),)),
    Case(qo_lens=(1, 1), kv_lens=(4, 9), cache_kind="contiguous", layout="HND"),
    Case(kv_lens=(7,), cache_kind="contiguous", has_lengths=False, spare=0),
    Case(kv_lens=((7, 2),), cache_kind="contiguous"),
]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_view_rebuilds_the_dense_form_and_copies_nothing(case):
    cache = build(case).cache
    view = cache.view()
    assert view.key.untyped_storage().data_ptr() == cache.key.untyped_storage().data_ptr()
    for request in range(case.batch):
        for head in range(case.num_kv_heads):
            rows = dense_from_view(view, request, head)
            assert len(rows) == case.lens_of(request)[head]
            for key, value in rows:
                assert bool(key.isfinite().all()) and bool(value.isfinite().all())
    assert (view.num_kv_heads, view.head_dim_qk, view.head_dim_vo) == (2, 64, 64)
    assert view.batch == case.batch and view.capacity == cache.capacity


def test_shared_tables_and_lengths_have_head_stride_zero():
    view = build(Case()).cache.view()
    assert view.page_table.shape[1] == 2 and view.page_table.stride(1) == 0
    assert view.kv_lens.shape == (1, 2) and view.kv_lens.stride(1) == 0
    lists = build(Case(kv_lens=((3, 4),))).cache.view()
    assert lists.page_table.stride(1) > 0 and lists.kv_lens.stride(1) > 0


def test_properties_follow_the_layout():
    for layout in ("NHD", "HND"):
        cache = build(Case(kv_lens=(40,), layout=layout, page_size=8, spare=1)).cache
        assert (cache.page_size, cache.num_kv_heads, cache.max_pages) == (8, 2, 6)
        assert cache.capacity == 48 and cache.batch == 1 and not cache.per_head_lists
        assert cache.num_pages == 8


def test_scales_become_one_fp32_tensor_a_head():
    for kind, stride in (("tensor", 0), ("head", 1), ("number", 0)):
        view = build(Case(kv_dtype="float8_e4m3fn", kv_scales=kind)).cache.view()
        for scale in (view.key_scale, view.value_scale):
            assert scale.dtype == torch.float32 and scale.shape == (2,)
            assert scale.stride(0) == stride
    assert build(Case()).cache.view().key_scale is None


def _paged(**changes):
    fields = {
        "key": torch.zeros(6, 16, 2, 64, dtype=torch.bfloat16),
        "value": torch.zeros(6, 16, 2, 64, dtype=torch.bfloat16),
        "page_table": torch.zeros(3, 4, dtype=torch.int32),
        "sequence_lengths": torch.zeros(3, dtype=torch.int32),
    }
    return PagedKVCache(**{**fields, **changes})


def _flat(**changes):
    fields = {
        "key": torch.zeros(3, 16, 2, 64, dtype=torch.bfloat16),
        "value": torch.zeros(3, 16, 2, 64, dtype=torch.bfloat16),
    }
    return ContiguousKVCache(**{**fields, **changes})


def _zeros(*shape, dtype=torch.bfloat16, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


FP8_POOLS = {"key": _zeros(6, 16, 2, 64).to(FP8), "value": _zeros(6, 16, 2, 64).to(FP8)}
INT32 = {"dtype": torch.int32}
FAULTS = [
    (_paged, {"layout": "DNH"}, "layout='DNH': must be 'NHD' or 'HND'; use 'NHD'"),
    (_paged, {"key": [1]}, "key='list': must be a torch.Tensor"),
    (_paged, {"value": _zeros(6, 16, 64)}, "value.shape=(6, 16, 64): must have rank 4"),
    (_paged, {"key": _zeros(6, 16, 2, 64, dtype=torch.int8)}, "key.dtype=torch.int8: must be one"),
    (
        _paged,
        {"value": _zeros(6, 16, 2, 64, dtype=torch.float16)},
        "value.dtype=torch.float16: must equal key.dtype; use torch.bfloat16",
    ),
    (
        _paged,
        {"value": _zeros(6, 8, 2, 64)},
        "value.shape=(6, 8, 2, 64): must equal key.shape (6, 16, 2, 64) on all but the last axis",
    ),
    (_paged, {"value": _zeros(6, 16, 2, 64, device="meta")}, "value.device='meta'"),
    (
        _paged,
        {"key": _zeros(6, 16, 2, 128)[..., ::2]},
        "key.stride=(4096, 256, 128, 2): the last axis must be contiguous",
    ),
    (
        _paged,
        {"key": _zeros(6, 16, 2, 65)[..., :64]},
        "must be multiples of 16 bytes (8 elements); use key.contiguous()",
    ),
    (
        _paged,
        {"key": _zeros(6, 0, 2, 64), "value": _zeros(6, 0, 2, 64)},
        "page_size=0: must be an int >= 1; use 16",
    ),
    (_paged, {"page_table": [[0]]}, "page_table='list': must be an int32 tensor"),
    (_paged, {"page_table": _zeros(3, **INT32)}, "page_table.shape=(3,): must be [batch, max"),
    (
        _paged,
        {"page_table": _zeros(3, 5, 4, **INT32)},
        "page_table.shape=(3, 5, 4): axis 1 must be num_kv_heads = 2; use (3, 2, 4)",
    ),
    (
        _paged,
        {"page_table": _zeros(3, 4, dtype=torch.int64)},
        "page_table.dtype=torch.int64: must be torch.int32; use page_table.to(torch.int32)",
    ),
    (_paged, {"page_table": _zeros(3, 8, **INT32)[:, ::2]}, "page_table.stride=(8, 2)"),
    (
        _paged,
        {"sequence_lengths": _zeros(4, **INT32)},
        "sequence_lengths.shape=(4,): must be [3]; use (3,)",
    ),
    (
        _paged,
        {"sequence_lengths": _zeros(3, 2, **INT32)},
        "sequence_lengths.shape=(3, 2): must be [3]",
    ),
    (_paged, {"sequence_lengths": None}, "sequence_lengths='NoneType': must be [3] int32"),
    (
        _paged,
        {"sequence_lengths": _zeros(3, dtype=torch.int64)},
        "sequence_lengths.dtype=torch.int64: must be torch.int32",
    ),
    (
        _paged,
        {"sequence_lengths": _zeros(3, device="meta", **INT32)},
        "sequence_lengths.device='meta': must be the cache's device; use cpu",
    ),
    (_paged, {"key_scale": 1.0}, "key_scale=1.0: scales belong to float8_e4m3fn K/V only"),
    (
        _paged,
        {**FP8_POOLS, "key_scale": float("nan")},
        "key_scale=nan: must be a finite number > 0 or an fp32 tensor; use 1.0",
    ),
    (_paged, {**FP8_POOLS, "value_scale": True}, "value_scale=True: must be a finite number > 0"),
    (
        _paged,
        {**FP8_POOLS, "value_scale": torch.ones(3)},
        "value_scale.shape=(3,): must be [], [1] or [2]; use (2,)",
    ),
    (
        _paged,
        {**FP8_POOLS, "value_scale": torch.ones(2, dtype=torch.float64)},
        "value_scale.dtype=torch.float64: must be torch.float32; use value_scale.float()",
    ),
    (_paged, {**FP8_POOLS, "key_scale": torch.ones(2, device="meta")}, "key_scale.device='meta'"),
    (_paged, {**FP8_POOLS, "key_scale": 1e300}, "key_scale=1e+300: must be a finite number > 0"),
    (_paged, {**FP8_POOLS, "key_scale": 1e-300}, "key_scale=1e-300: must be a finite number > 0"),
    (_paged, {**FP8_POOLS, "value_scale": 10**400}, "value_scale=10000"),
    (_paged, {**FP8_POOLS, "key_scale": torch.ones(2).to_sparse()}, "key_scale.layout=torch.spar"),
    (_paged, {"key": _zeros(6, 16, 2, 64).to_sparse()}, "key.layout=torch.sparse_coo: must be"),
    (_paged, {"page_table": _zeros(3, 4, **INT32).to_sparse()}, "page_table.layout=torch.sparse"),
    (_paged, {"sequence_lengths": _zeros(3, **INT32).to_sparse()}, "sequence_lengths.layout=torch"),
    (_flat, {"sequence_lengths": _zeros(2, **INT32)}, "sequence_lengths.shape=(2,): must be [3]"),
    (_flat, {"sequence_lengths": [1, 2, 3]}, "sequence_lengths='list'"),
    (_flat, {"layout": "nhd"}, "layout='nhd': must be 'NHD' or 'HND'"),
    (_flat, {"key": _zeros(2, 16, 2, 64)}, "value.shape=(3, 16, 2, 64): must equal key.shape"),
]


@pytest.mark.parametrize(("make", "changes", "message"), FAULTS, ids=[f[2][:50] for f in FAULTS])
def test_wrong_arguments_are_named(make, changes, message):
    make()  # without the change it is right
    with pytest.raises(ValueError) as caught:
        make(**changes)
    assert message in str(caught.value)


def test_all_faults_of_a_cache_are_reported_at_once():
    with pytest.raises(ValueError, match="PagedKVCache: 2 faults"):
        _paged(page_table=_zeros(3, 4, dtype=torch.int64), sequence_lengths=_zeros(2, **INT32))


def test_legal_forms_are_accepted():
    _paged(page_table=_zeros(3, 2, 4, **INT32), sequence_lengths=_zeros(3, 2, **INT32))
    _paged(page_table=_zeros(3, 2, 4, **INT32))
    _paged(page_table=_zeros(0, 4, **INT32), sequence_lengths=_zeros(0, **INT32))
    _paged(page_table=_zeros(3, 0, **INT32))
    _paged(**FP8_POOLS, key_scale=2, value_scale=torch.tensor(0.5))
    _paged(**FP8_POOLS, key_scale=torch.ones(1), value_scale=torch.ones(2))
    _flat(sequence_lengths=_zeros(3, 2, **INT32))
    _flat(key=_zeros(3, 0, 2, 64), value=_zeros(3, 0, 2, 64))
    wide = _zeros(6, 3, 16, 2, 80)[:, 1, ..., :64]
    _paged(key=wide, value=wide)
    narrow = _zeros(6, 16, 2, 3)
    _paged(key=narrow, value=narrow)


def test_lazily_negated_views_are_refused_by_name() -> None:
    pool = torch._neg_view(torch.zeros(4, 16, 2, 64))
    with pytest.raises(
        ValueError, match=r"key\.is_neg\(\)=True: must not be a lazily negated view"
    ):
        ContiguousKVCache(key=pool, value=torch.zeros(4, 16, 2, 64))
