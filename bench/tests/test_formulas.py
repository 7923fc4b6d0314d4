"""Byte and FLOP formulas against values worked out by hand."""

from stream_attention.bench import formulas


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
