"""The schedule that every block computes from the lengths: exhaustive on the CPU.

Every tile of every request belongs to exactly one block, shares are equal to one tile, a request's
parts are the blocks between the owners of its ends, and a block has at most two partial states.
"""

import ctypes
import itertools
import random

import pytest

from stream_attention.core.testing.native_library import require
from stream_attention.kernels_sm90 import decode
from stream_attention.kernels_sm90.library import LIBRARY


@pytest.fixture(name="library", scope="module")
def library_fixture():
    require(LIBRARY)
    return decode.functions()


def tiles(library, kv_len, qo_len=1, window=-1, size=128):
    first, count = ctypes.c_int32(), ctypes.c_int32()
    library.stream_attention_decode_tiles(
        kv_len, qo_len, window, size, ctypes.addressof(first), ctypes.addressof(count)
    )
    return first.value, count.value


def test_cuts_partition_the_tiles_into_equal_shares(library):
    begin, owner = library.stream_attention_decode_begin, library.stream_attention_decode_owner
    for total, blocks in itertools.product(range(1, 70), range(1, 40)):
        edges = [begin(total, blocks, block) for block in range(blocks + 1)]
        assert edges[0] == 0 and edges[-1] == total and edges == sorted(edges)
        shares = [b - a for a, b in itertools.pairwise(edges)]
        used = min(total, blocks)
        assert max(shares[:used]) - min(shares[:used]) <= 1 and min(shares[:used]) >= 1
        assert not any(shares[used:])
        for tile in range(total):
            block = owner(total, blocks, tile)
            assert edges[block] <= tile < edges[block + 1]


@pytest.mark.parametrize("total", [(1 << 31) - 1, 1 << 30, (1 << 31) - 128])
def test_cuts_of_huge_totals_do_not_overflow(library, total):
    for blocks in (1, 127, 128):
        edges = [library.stream_attention_decode_begin(total, blocks, b) for b in range(blocks + 1)]
        assert edges[0] == 0 and edges[-1] == total
        assert max(b - a for a, b in itertools.pairwise(edges)) <= total // blocks + 1
        for tile in (0, total // 3, total - 1):
            block = library.stream_attention_decode_owner(total, blocks, tile)
            assert edges[block] <= tile < edges[block + 1]


def test_division_by_multiplication_is_exact(library):
    divide = library.stream_attention_decode_divide
    rng = random.Random(1)
    divisors = [*range(1, 300), 4096, 65535, 65536, 65537, (1 << 30) - 1, 1 << 30, (1 << 31) - 1]
    for divisor in divisors:
        around = [k * divisor + d for k in (1, 2, 3, rng.randrange(1 << 16)) for d in (-1, 0, 1)]
        last = ((1 << 31) - 1) // divisor * divisor
        for n in (0, 1, *around, last - 1, last, (1 << 31) - 1, rng.randrange(1 << 31)):
            if 0 <= n < 1 << 31:
                assert divide(n, divisor) == n // divisor, (n, divisor)


def test_slices_cover_the_vectors_and_fit_their_regions(library):
    for vectors, parts in itertools.product(range(1, 1025), (2, 3, 5, 16, 42, 63, 64, 127, 128)):
        size = 1 << library.stream_attention_decode_slice_log2(vectors, parts)
        assert size * parts >= vectors  # every vector has a block that merges it
        assert size == 1 or size // 2 * parts < vectors
        assert size * parts <= 2 * (vectors + parts)  # items that a region holds


def test_tiles_cover_what_the_queries_can_see(library):
    for kv_len, qo_len, window, size in itertools.product(
        range(70), (1, 3), (-1, 0, 1, 7, 16, 100), (8, 16)
    ):
        first, count = tiles(library, kv_len, qo_len, window, size)
        assert count >= 1 and first >= 0
        oldest = 0 if window < 0 else max(0, kv_len - qo_len - window)
        seen = range(oldest, kv_len)
        held = range(first * size, (first + count) * size)
        assert all(token in held for token in seen)
        if seen:  # no tile that nobody sees, at either end
            assert first == oldest // size and first + count == -(-kv_len // size)


@pytest.mark.parametrize("kv_len", [(1 << 31) - 4097, 1 << 30])
def test_tiles_of_huge_lengths_do_not_overflow(library, kv_len):
    assert tiles(library, kv_len) == (0, -(-kv_len // 128))
    first, count = tiles(library, kv_len, 5, (1 << 31) - 1)
    assert (first, count) == (0, -(-kv_len // 128))
    first, count = tiles(library, kv_len, 1, 300)
    assert first == (kv_len - 301) // 128 and first + count == -(-kv_len // 128)


def walk(library, counts, blocks):
    """What the blocks do, as the kernel walks: (request, part, parts, slot) of each piece."""
    begin, owner = library.stream_attention_decode_begin, library.stream_attention_decode_owner
    total = sum(counts)
    starts = [0, *itertools.accumulate(counts)]
    pieces = {request: [] for request in range(len(counts))}
    for block in range(blocks):
        low, high = begin(total, blocks, block), begin(total, blocks, block + 1)
        slots = []
        for request, count in enumerate(counts):
            a, b = max(low, starts[request]), min(high, starts[request] + count)
            if a >= b:
                continue
            from_start, to_end = a == starts[request], b == starts[request] + count
            first = block if from_start else owner(total, blocks, starts[request])
            last = block if to_end else owner(total, blocks, starts[request] + count - 1)
            pieces[request].append((block - first, last - first + 1, b - a))
            if last > first:
                slots.append(from_start)
        assert len(slots) == len(set(slots)), "a block has one slot of each kind"
    return pieces


def test_every_request_is_merged_from_all_of_its_parts_once(library):
    rng = random.Random(0)
    for _ in range(300):
        counts = [rng.choice((1, 1, 2, 3, 40)) for _ in range(rng.randint(1, 20))]
        pieces = walk(library, counts, rng.choice((1, 2, 7, 16, 64)))
        for request, count in enumerate(counts):
            parts = pieces[request][0][1]
            assert [part for part, _, _ in pieces[request]] == list(range(parts))
            assert all(of == parts for _, of, _ in pieces[request])
            assert sum(share for _, _, share in pieces[request]) == count


def own_blocks(library, counts, blocks):
    """Blocks of each request, where every one can have its own at nearly the equal share."""
    first, last, step = ctypes.c_int32(), ctypes.c_int32(), ctypes.c_int32()
    library.stream_attention_decode_shares(
        sum(counts), blocks, *(ctypes.addressof(value) for value in (first, last, step))
    )
    assert first.value == -(-sum(counts) // blocks) and step.value >= 1
    for share in range(first.value, last.value + 1, step.value):
        own = [library.stream_attention_decode_blocks_for(count, share) for count in counts]
        if sum(own) <= blocks:
            return own, share
    return None, last.value


def test_blocks_of_a_request_partition_its_tiles(library):
    begin = library.stream_attention_decode_part_begin
    for count, parts in itertools.product(range(1, 80), range(1, 40)):
        if parts > count:
            continue
        edges = [begin(count, parts, part) for part in range(parts + 1)]
        assert edges[0] == 0 and edges[-1] == count
        shares = [b - a for a, b in itertools.pairwise(edges)]
        assert min(shares) >= 1 and max(shares) - min(shares) <= 1


def test_own_blocks_cost_at_most_a_sixteenth_and_a_tile(library):
    rng = random.Random(2)
    found = 0
    for _ in range(2000):
        counts = [rng.randint(1, rng.choice((2, 9, 600))) for _ in range(rng.randint(1, 32))]
        blocks = rng.randint(len(counts), 64)
        own, share = own_blocks(library, counts, blocks)
        equal = -(-sum(counts) // blocks)
        assert share <= equal + equal // 16 + 1
        if own is None:
            continue
        found += 1
        assert all(1 <= parts <= count for parts, count in zip(own, counts, strict=True))
        assert all(-(-count // parts) <= share for parts, count in zip(own, counts, strict=True))
    assert 200 < found < 2000  # both kinds occur


def test_equal_requests_have_blocks_of_their_own(library):
    assert own_blocks(library, [256] * 4, 64) == ([16] * 4, 16)
    assert own_blocks(library, [1, 1, 1], 16) == ([1, 1, 1], 1)
    assert own_blocks(library, [3, 8, 5, 4, 7, 3, 6, 4], 16)[0] is not None
