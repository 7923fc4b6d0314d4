"""Byte and FLOP formulas against values worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_attention.core import formulas


def test_kv_bytes_of_a_bf16_decode_are_16_mib():
    # 4096 tokens · 8 heads · 2 · 128 · 2 bytes
    assert formulas.kv_bytes([4096], 8, 128, 2) == 16 * 2**20


def test_kv_bytes_add_over_requests_and_are_zero_without_tokens():
    assert formulas.kv_bytes([3, 0, 5], 2, 4, 4) == 8 * 2 * 2 * 4 * 4
    assert formulas.kv_bytes([0, 0], 2, 4, 4) == 0


def test_index_bytes_count_part_filled_pages_and_lengths():
    # pages 1 + 2 + 0, lengths 3, four bytes each
    assert formulas.index_bytes([16, 17, 0], 16) == 4 * (3 + 3)


def test_moved_bytes_are_kv_q_output_and_index():
    kv = 3 * 2 * 2 * 4 * 2
    q = 1 * 2 * 6 * 4 * 2  # one request, two queries, six heads, dim 4, bf16
    assert formulas.moved_bytes([3], 2, 6, 2, 4, 2, 2, 2) == kv + 2 * q + 4 * (2 + 1)
    # fp8 K and V, no page table
    assert formulas.moved_bytes([3], 2, 6, 2, 4, None, 2, 1) == kv // 2 + 2 * q + 4 * 1


def test_a_decode_row_sees_every_token():
    assert formulas.visible_pairs([7, 0, 2], 1) == 9


def test_verify_rows_see_a_triangle_and_never_less_than_nothing():
    assert formulas.visible_pairs([5], 3) == 3 + 4 + 5
    assert formulas.visible_pairs([1], 3) == 0 + 0 + 1
    assert formulas.visible_pairs([2**31], 2**20) == sum(range(2**31 - 2**20 + 1, 2**31 + 1))


def test_flops_count_two_products_of_multiply_and_add():
    assert formulas.attention_flops([4096], 1, 32, 128) == 4 * 4096 * 32 * 128


def test_a_window_shows_what_its_oldest_query_sees():
    assert formulas.window_tokens(20, 3, None) == 20
    assert formulas.window_tokens(20, 3, 4) == 7  # 13 .. 19
    assert formulas.window_tokens(5, 3, 4) == 5


def test_window_pairs_are_those_counted_one_by_one():
    for n in range(12):
        for q_len in range(1, 6):
            for left in range(8):
                positions = [n - q_len + i for i in range(q_len)]
                counted = sum(
                    1 for at in positions for token in range(n) if at - left <= token <= at
                )
                assert formulas.window_pairs([n, n], q_len, left) == 2 * counted
    assert formulas.window_pairs([7, 3], 2, None) == formulas.visible_pairs([7, 3], 2)


REQUESTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5)


@given(requests=REQUESTS, causal=st.booleans())
def test_pairs_are_those_that_a_mask_would_show(requests, causal):
    lens, queries = ([pair[i] for pair in requests] for i in (0, 1))
    pairs = sum(
        1
        for n, m in requests
        for row in range(m)
        for token in range(n)
        if not causal or token <= n - m + row
    )
    assert formulas.visible_pairs(lens, queries, causal) == pairs
    assert formulas.attention_flops(lens, queries, 6, 4, causal) == 4 * pairs * 6 * 4


@given(requests=REQUESTS, page_size=st.sampled_from([None, 1, 16]))
def test_moved_bytes_count_what_some_query_reads_once(requests, page_size):
    lens, queries = ([pair[i] for pair in requests] for i in (0, 1))
    moved = formulas.moved_bytes(lens, queries, 6, 2, 4, page_size, 2, 1)
    indices = len(lens) + len(lens) + 1
    values = 0
    for n, m in requests:
        values += 2 * m * 6 * 4 * 2
        if m:
            values += n * 2 * 2 * 4
            indices += 0 if page_size is None else len(range(0, n, page_size))
    assert moved == values + 4 * indices


def test_one_number_is_the_queries_of_every_request():
    lens = [7, 0, 30]
    for queries in (1, 5):
        many = [queries] * 3
        assert formulas.visible_pairs(lens, queries) == formulas.visible_pairs(lens, many)
        alone = formulas.moved_bytes(lens, queries, 6, 2, 4, 16, 2, 2)
        assert formulas.moved_bytes(lens, many, 6, 2, 4, 16, 2, 2) == alone + 4 * 4  # offsets
    with pytest.raises(ValueError, match="zip"):
        formulas.visible_pairs(lens, [1, 1])
