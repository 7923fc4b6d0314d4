"""A cache whose tensors got other metadata after it was made is checked again by every call."""

import copy
import dataclasses
import pickle

import pytest
import torch

from stream_attention import ContiguousKVCache, PagedKVCache, reference
from stream_attention.core import cache as cache_module
from stream_attention.core import cache_checks
from stream_attention.core.describe import describe

FP8 = torch.float8_e4m3fn


def paged(dtype=torch.float32):
    scale = torch.ones(2) if dtype == FP8 else None
    return PagedKVCache(
        key=torch.randn(8, 16, 2, 16).to(dtype),
        value=torch.randn(8, 16, 2, 16).to(dtype),
        page_table=torch.arange(8, dtype=torch.int32).view(2, 4),
        sequence_lengths=torch.tensor([33, 20], dtype=torch.int32),
        key_scale=scale,
        value_scale=scale,
    )


def contiguous(dtype=torch.float32):
    return ContiguousKVCache(
        key=torch.randn(2, 40, 2, 16).to(dtype),
        value=torch.randn(2, 40, 2, 16).to(dtype),
        sequence_lengths=torch.tensor([33, 20], dtype=torch.int32),
        key_scale=torch.ones(2) if dtype == FP8 else None,
    )


def put(name, make):
    """A change of what the tensor `name` is, in place."""

    def change(cache):
        tensor = getattr(cache, name)
        tensor.data = make(tensor)

    return change


def repickled(cache):
    return pickle.loads(pickle.dumps(cache))


BOTH = {
    "key of another dtype": (put("key", lambda t: t.double()), "key.dtype=torch.float64: must"),
    "value of another dtype": (put("value", lambda t: t.half()), "value.dtype=torch.float16: must"),
    "strided rows": (
        put("key", lambda t: torch.cat((t, t), -1)[..., ::2]),
        "the last axis must be contiguous",
    ),
    "rows off their alignment": (
        put("value", lambda t: torch.zeros(*t.shape[:3], 17)[..., :16]),
        "must be multiples of 16 bytes",
    ),
    "fewer pages of values": (lambda c: c.value.resize_(1, 16, 2, 16), "must equal key.shape"),
    "key of rank 3": (put("key", lambda t: t[0]), "key.shape=.*: must have rank 4"),
    "no heads": (put("sequence_lengths", lambda t: t.view(1, 1, 2)), r"sequence_lengths\.shape="),
    "int64 lengths": (
        put("sequence_lengths", lambda t: t.long()),
        "sequence_lengths.dtype=torch.int64: must be torch.int32",
    ),
    "lengths of floats": (
        put("sequence_lengths", lambda t: t.float()),
        "sequence_lengths.dtype=torch.float32: must be torch.int32",
    ),
    "fewer lengths": (
        lambda c: c.sequence_lengths.resize_(1),
        r"sequence_lengths\.shape=\(1,\): must be \[2\]",
    ),
}
PAGED = {
    "int64 table": (put("page_table", lambda t: t.long()), "page_table.dtype=torch.int64: must be"),
    "fewer rows of the table": (
        lambda c: c.page_table.resize_(1, 4),
        r"sequence_lengths\.shape=\(2,\): must be \[1\]",
    ),
    "a table of rank 1": (put("page_table", lambda t: t.view(-1)), "page_table.shape="),
    "strided columns": (
        put("page_table", lambda t: t.t().contiguous().t()),
        "page_table.stride=.*: the last axis must be contiguous",
    ),
}
CASES = [
    *((make, name) for make in (paged, contiguous) for name in BOTH),
    *((paged, name) for name in PAGED),
]


@pytest.mark.parametrize(("make", "name"), CASES)
@pytest.mark.parametrize("call", [describe, reference.attention])
def test_changed_metadata_are_refused_by_name(make, name, call):
    change, words = (BOTH | PAGED)[name]
    cache = make()
    change(cache)
    with pytest.raises(ValueError, match=words):
        call(torch.randn(2, 4, 16), cache)


@pytest.mark.parametrize("make", [paged, contiguous])
def test_a_changed_scale_is_refused_by_name(make):
    cache = make(FP8)
    cache.key_scale.data = torch.ones(2, dtype=torch.float64)
    for call in (describe, reference.attention):
        with pytest.raises(ValueError, match=r"key_scale\.dtype=torch\.float64: must be"):
            call(torch.randn(2, 4, 16), cache)


def test_faults_of_the_cache_come_beside_those_of_the_call():
    cache = paged()
    cache.page_table.data = cache.page_table.long()
    with pytest.raises(ValueError, match=r"page_table\.dtype") as caught:
        describe(torch.randn(2, 4, 16, dtype=torch.float64), cache, window_left=-1)
    for part in ("q.dtype=torch.float64", "window_left=-1"):
        assert part in str(caught.value)


def test_metadata_that_changed_back_are_right_again():
    cache, q = paged(), torch.randn(2, 4, 16)
    cache.sequence_lengths.data = cache.sequence_lengths.long()
    for _ in range(2):
        with pytest.raises(ValueError, match="int64"):
            describe(q, cache)
    cache.sequence_lengths.data = cache.sequence_lengths.int()
    describe(q, cache)


def test_a_legal_change_is_described_as_it_is_now():
    cache, q = paged(), torch.randn(2, 4, 16)
    cache.value.data = torch.randn(8, 16, 2, 8)
    cache.page_table.data = cache.page_table[:, :3].contiguous()
    problem = describe(q, cache).problem
    assert (problem.head_dim_vo, problem.kv_capacity) == (8, 48)


def test_what_has_not_changed_is_not_checked_again(monkeypatch):
    q, changed = torch.randn(2, 4, 16), paged()
    changed.value.data = torch.randn(8, 16, 2, 8)
    describe(q, changed)
    caches = (paged(), paged(FP8), contiguous(), contiguous(FP8), changed)
    monkeypatch.setattr(cache_module, "check_storage", lambda *given: pytest.fail("checked again"))
    for cache in caches:
        describe(q, cache)


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, dataclasses.replace, repickled])
def test_copies_are_checked_too(made):
    cache, q = made(paged()), torch.randn(2, 4, 16)
    describe(q, cache)
    cache.sequence_lengths.data = cache.sequence_lengths.long()
    with pytest.raises(ValueError, match="int64"):
        describe(q, cache)


@pytest.mark.parametrize("make", [paged, contiguous])
def test_the_list_of_tensors_holds_every_field_that_may_be_one(make):
    cache = make(FP8)
    held = {field.name: getattr(cache, field.name) for field in dataclasses.fields(cache)}
    held = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
    found = cache_checks.tensors_of(cache)
    assert found.keys() == held.keys() and all(found[name] is held[name] for name in held)
    assert set(dataclasses.asdict(cache)) - set(cache_checks.CACHE_TENSORS) == {"layout"}


def test_a_field_that_is_listed_is_looked_at_by_every_check(monkeypatch):
    names = (*cache_checks.CACHE_TENSORS, "bias")
    monkeypatch.setattr(cache_checks, "CACHE_TENSORS", names)
    monkeypatch.setattr(PagedKVCache, "bias", torch.ones(4), raising=False)
    cache, q = paged(), torch.randn(2, 4, 16)
    for call in (describe, reference.attention):
        call(q, cache)
    before = cache_checks.metadata_of(cache)
    PagedKVCache.bias.unsqueeze_(0)
    assert cache_checks.metadata_of(cache) != before
    PagedKVCache.bias.untyped_storage().resize_(0)
    for call in (describe, reference.attention):
        with pytest.raises(ValueError, match=r"bias\.untyped_storage\(\)\.nbytes\(\)=0: must hold"):
            call(q, cache)
