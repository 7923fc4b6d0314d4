"""The torch route under batch invariance: no neighbour and no capacity changes a request's bits."""

import dataclasses

import pytest
import torch

from stream_attention.core.routes import torch_route
from stream_attention.core.testing.checks import find_record, launch
from stream_attention.core.testing.neighbours import FORMS, OPTIONS, check_neighbours
from stream_attention.core.testing.problems import Case, build

CHUNK = torch_route.INVARIANT_CHUNK_TOKENS
# Beside a request that fills one chunk, two, and more than any chunk; below and above a group.
LENGTHS = ((200, 257), (257, 2000), (CHUNK - 1, CHUNK + 1), (CHUNK + 17, 5000))


@pytest.fixture(scope="module")
def record():
    return find_record("torch", torch_route.register)


@pytest.mark.parametrize("lens", LENGTHS, ids=str)
@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_a_longer_neighbour_changes_no_bit(record, option, form, lens):
    for dtype in ("float32", "bfloat16"):
        fields = {"num_qo_heads": 16, "head_dim_qk": 20, **FORMS[form], **OPTIONS[option]}
        if "page_size" in fields or fields.get("kv_dtype"):
            fields["head_dim_qk"] = 32
        check_neighbours(record, Case(kv_lens=lens, dtype=dtype, **fields))


@pytest.mark.parametrize("lens", LENGTHS, ids=str)
def test_lists_per_kv_head_change_no_bit(record, lens):
    short, long = lens
    for form in FORMS.values():
        lists = ((short, short // 2), (long, 7))
        check_neighbours(record, Case(kv_lens=lists, dtype="float32", **form))


def test_many_heads_of_a_short_request_beside_a_long_one(record):
    """The rows of an item, not just its chunks, would follow the capacity here."""
    fields = {"num_qo_heads": 64, "num_kv_heads": 8, "head_dim_qk": 16, "dtype": "float32"}
    for long in (200, 2000, 5000):
        check_neighbours(record, Case(qo_lens=(40, 1), kv_lens=(257, long), **fields))


def test_chunks_and_rows_are_those_of_the_heads_alone(record):
    seen = set()
    for form in FORMS.values():
        for kv_lens in ((9, 9), (300, 5000)):
            for kind in ("paged", "contiguous"):
                case = Case(kv_lens=kv_lens, cache_kind=kind, **form)
                step, _ = launch(record, build(case), batch_invariant=True)
                seen.add((step._chunk_tokens, step._rows))
    assert len(seen) == 1


def test_tiles_lie_alike_in_memory_whatever_the_capacity(record):
    """Products may depend on strides and alignment, so a tile is always a dense copy."""
    for dtype in ("float32", "bfloat16"):
        for kind, layout in (("paged", "NHD"), ("contiguous", "NHD"), ("contiguous", "HND")):
            for tokens in (300, 5000):
                case = Case(kv_lens=(tokens,), cache_kind=kind, layout=layout, dtype=dtype, spare=0)
                step, described = launch(record, build(case), batch_invariant=True)
                pages = torch.zeros(1, dtype=torch.int64)
                count = min(9, described.bound.kv.page_size - 3)
                tile = step._key.tile(pages, 3, count, None)
                assert tile.is_contiguous() and tile.data_ptr() % 64 == 0


def test_a_request_among_many_gives_its_bits_alone(record):
    lens = (700, 1, 0, 64, 3000, 257, 16)
    case = Case(qo_lens=(5, 1, 2, 70, 1, 40, 3), kv_lens=lens, dtype="float32", sink=1.0)
    check_neighbours(record, case)
    check_neighbours(record, dataclasses.replace(case, cache_kind="contiguous", head_dim_qk=20))
