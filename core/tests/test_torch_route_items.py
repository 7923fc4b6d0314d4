"""Work items of the torch route: every visible (row, token) pair exactly once, nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_attention.core.routes.torch_items import (
    Visibility,
    build_items,
    chunks,
    pad_tokens,
    split_items,
)

LENGTHS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=5)
BOUND = st.none() | st.integers(0, 4)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 4), BOUND, BOUND)
def test_items_cover_what_rows_see_exactly_once(lengths, rows_per_item, left, right):
    qo_len = np.array([m for m, _ in lengths], dtype=np.int64)
    kv_len = np.array([n for _, n in lengths], dtype=np.int64)
    start = np.cumsum(qo_len) - qo_len
    sight = Visibility(left, right)
    items, any_empty = build_items(kv_len, start, qo_len, rows_per_item, sight)
    covered = {}
    for i in range(len(items)):
        assert 0 < items.rows[i] <= rows_per_item
        assert 0 <= items.lo[i] < items.hi[i] <= kv_len[items.unit[i]]
        first_seen, last_seen = [], []
        for j in range(items.rows[i]):
            row, position = int(items.row[i] + j), int(items.position[i] + j)
            assert row not in covered
            covered[row] = (int(items.unit[i]), position)
            low = 0 if left is None else max(0, position - left)
            high = int(kv_len[items.unit[i]]) - 1
            high = high if right is None else min(high, position + right)
            if low <= high:
                first_seen.append(low)
                last_seen.append(high)
        assert items.lo[i] == min(first_seen)  # tiles outside the window are not in the range
        assert items.hi[i] == max(last_seen) + 1
    missing = set(range(int(qo_len.sum()))) - set(covered)
    for unit, (m, n) in enumerate(lengths):
        for i in range(m):
            row, position = int(start[unit] + i), n - m + i
            if row in covered:
                assert covered[row] == (unit, position)
            else:
                assert n == 0 or (right is not None and position + right < 0)
    assert any_empty or not missing


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 20), st.integers(1, 20))
def test_chunks_tile_the_range_and_end_at_pages(lo, span, page_size, chunk_tokens):
    parts = list(chunks(lo, lo + span, page_size, chunk_tokens))
    tokens = [t for a, b in parts for t in range(a, b)]
    assert tokens == list(range(lo, lo + span))
    for a, b in parts:
        assert b - a <= chunk_tokens
        if page_size >= chunk_tokens:
            assert a // page_size == (b - 1) // page_size
        elif b != lo + span:
            assert b % page_size == 0


def test_padding_is_a_power_of_two_and_at_most_doubles():
    span = np.arange(1, 300)
    width = pad_tokens(span)
    assert (width >= span).all() and (width <= np.maximum(8, 2 * span - 1)).all()
    assert ((width & (width - 1)) == 0).all()


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(0, 12), st.integers(1, 200))
def test_groups_and_lone_items_partition_the_items(lengths, group_tokens, group_elements):
    qo_len = np.array([m for m, _ in lengths], dtype=np.int64)
    kv_len = np.array([n for _, n in lengths], dtype=np.int64)
    start = np.cumsum(qo_len) - qo_len
    items, _ = build_items(kv_len, start, qo_len, 3, Visibility(None, 0))
    alone, groups = split_items(items, group_tokens, group_elements, 2, 4)
    seen = sorted([*alone.tolist(), *(i for _, index in groups for i in index.tolist())])
    assert seen == list(range(len(items)))
    for tokens, index in groups:
        span = items.hi[index] - items.lo[index]
        assert len(index) > 1 and (span <= min(tokens, group_tokens)).all()
        assert len(set(items.rows[index].tolist())) == 1
        assert len(index) * tokens * 4 <= group_elements


@pytest.mark.parametrize(
    ("causal", "window_right", "right"), [(True, None, 0), (True, 0, 0), (False, 3, 3)]
)
def test_causal_bounds_the_right_side_at_the_row(causal, window_right, right):
    assert Visibility.of(causal, 5, window_right) == Visibility(5, right)
    assert Visibility.of(False, None, None).bounded is False
