"""Page tables: shared prefixes share whole pages, and no other page is anybody else's."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_attention.planner.page_tables import NO_PAGE, ORDERS, PageLayout
from stream_attention.planner.workloads import WorkloadBatch, WorkloadRequest

PAGE = 4


@st.composite
def paged_batches(draw):
    prefix_pages = {group: draw(st.integers(1, 3)) for group in (0, 1)}
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        group = draw(st.sampled_from([None, 0, 1]))
        tokens = 0 if group is None else prefix_pages[group] * PAGE
        kv_len = tokens + draw(st.integers(0, 11))
        rows.append(WorkloadRequest(kv_len=kv_len, prefix_group=group, prefix_len=tokens))
    layout = PageLayout(draw(st.sampled_from(ORDERS)), draw(st.integers(0, 3)))
    return WorkloadBatch(requests=tuple(rows), page_size=PAGE, page_layout=layout)


@settings(max_examples=100, deadline=None)
@given(paged_batches(), st.integers(0, 3))
def test_pages_are_shared_in_the_prefix_and_nowhere_else(batch, seed):
    table, total = batch.page_table(seed)
    assert table.shape == (batch.batch, batch.max_pages)
    held = {}
    for row, request in zip(table.tolist(), batch.requests, strict=True):
        used = -(-request.kv_len // PAGE)
        assert all(0 <= page < total for page in row[:used])
        assert set(row[used:]) <= {NO_PAGE}
        assert len(set(row[:used])) == used
        for column, page in enumerate(row[:used]):
            shared = column < request.prefix_len // PAGE
            owner = ("group", request.prefix_group, column) if shared else object()
            assert held.setdefault(page, owner) == owner, "a page of two requests"
    distinct = batch.num_distinct_kv_tokens
    assert len(held) >= distinct / PAGE
    assert total == len(held) + batch.page_layout.spare_pages
    assert batch.page_table(seed)[0].tolist() == table.tolist()


def test_members_of_a_group_hold_the_same_ids():
    member = WorkloadRequest(kv_len=11, prefix_group=9, prefix_len=8)
    batch = WorkloadBatch(requests=(member, WorkloadRequest(kv_len=4), member), page_size=PAGE)
    table, total = batch.page_table(1)
    assert table[0, :2].tolist() == table[2, :2].tolist()
    assert table[0, 2] != table[2, 2] and total == 5


def test_orders_are_what_they_say():
    rows = tuple(WorkloadRequest(kv_len=n) for n in (8, 12))
    ids = {}
    for order in ORDERS:
        layout = PageLayout(order, spare_pages=40)
        batch = WorkloadBatch(requests=rows, page_size=PAGE, page_layout=layout)
        table, total = batch.page_table(0)
        assert total == 45
        ids[order] = [page for page in itertools.chain(*table.tolist()) if page != NO_PAGE]
        other = batch.page_table(1)[0].tolist() == table.tolist()
        assert other == (order != "shuffled"), "a seed moves pages that are shuffled, and no others"
    assert ids["sequential"] == [0, 1, 2, 3, 4]
    assert ids["interleaved"] == [0, 2, 1, 3, 4]
    assert max(ids["shuffled"]) > 4, "spare pages lie anywhere"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"order": "random"}, "order='random': must be one of shuffled, sequential, interleaved"),
        ({"spare_pages": -1}, "spare_pages=-1: must be an int >= 0; use 0"),
        ({"spare_pages": 1.0}, "spare_pages=1.0: must be an int >= 0"),
    ],
)
def test_a_bad_layout_names_its_fault(fields, message):
    with pytest.raises(ValueError, match=message):
        PageLayout(**fields)
