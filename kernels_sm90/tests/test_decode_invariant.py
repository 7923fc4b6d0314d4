"""Batch-invariant decode without a GPU: the cuts at nodes, the fold, and the order of all sums.

Requests are parted by the library's own arithmetic; what the kernel does with it (the fold of a
block's spans, the hand-over, the tree over lanes) is done here with names in place of states, so
that the sums of an answer are a term. That term must be the same whatever the batch and the blocks.
"""

import bisect
import ctypes
import dataclasses
import functools
import itertools
import random
from typing import NamedTuple

import pytest

from stream_attention.core.problem import AttentionProblem
from stream_attention.core.testing.native_library import require
from stream_attention.kernels_sm90 import decode
from stream_attention.kernels_sm90.library import LIBRARY

MOST_SPANS = 64
MOST_LEVELS = 6
MOST_NODES = 9
BLOCKS = (1, 2, 3, 7, 16, 42, 63, 64, 127, 128)
HUGE = (1 << 31) - 1


class Nodes(NamedTuple):
    """`StreamAttentionDecodeNodes`."""

    span: int
    level: int
    tiles: int
    count: int
    sharers: int


@pytest.fixture(name="library", scope="module")
def library_fixture():
    require(LIBRARY)
    return decode.functions()


class Parted:
    """A batch of requests of `counts` tiles, parted among `blocks` by the library."""

    def __init__(self, library, counts, blocks):
        self.library, self.counts, self.blocks = library, counts, blocks
        self.starts = [0, *itertools.accumulate(counts)]
        self.total = self.starts[-1]

    def where(self, request):
        return self.total, self.blocks, self.starts[request], self.counts[request]

    def nodes(self, request):
        found = (ctypes.c_int32 * 5)()
        self.library.stream_attention_decode_nodes(*self.where(request), ctypes.addressof(found))
        return Nodes(*found)

    def node(self, request, node):
        """(block, its number among the sharers, the place in its memory) of a node."""
        found = (ctypes.c_int32 * 3)()
        at = [ctypes.addressof(found) + 4 * i for i in range(3)]
        self.library.stream_attention_decode_node(*self.where(request), node, *at)
        return tuple(found)

    def edge(self, block):
        """Where the range of a block begins, as the kernel moves it."""
        cut = self.library.stream_attention_decode_begin(self.total, self.blocks, block)
        if cut == self.total:
            return cut
        request = bisect.bisect_right(self.starts, cut) - 1
        return self.library.stream_attention_decode_node_begin(*self.where(request), block)


def join(left, right):
    return (left, right)


@functools.cache
def tree(begin, spans, size):
    """The sums of spans [begin, begin + size) of `spans`: a node without a right half is its left.

    A span is its number; `size` is a power of two.
    """
    if size == 1:
        return begin
    left = tree(begin, spans, size // 2)
    if begin + size // 2 >= spans:
        return left
    return join(left, tree(begin + size // 2, spans, size // 2))


def fold(spans, levels, last):
    """What leaves a block's binary counter: (span, term) of each node of `levels`."""
    stack = {}
    for span in spans:
        term, stopped = span, False
        for level in range(levels):
            if span >> level & 1:
                term = join(stack[level], term)
            elif span != last:
                stack[level], stopped = term, True
                break
        if not stopped:
            yield span, term


def tree_of(terms):
    """The sums of one, two, three or four neighbours."""
    if len(terms) == 1:
        return terms[0]
    half = 2 if len(terms) > 2 else 1
    return join(tree_of(terms[:half]), tree_of(terms[half:]))


def over_lanes(terms):
    """A reader's sums of a request's nodes: of up to four a lane, then of lanes."""
    each = 4 if len(terms) > 32 else 2 if len(terms) > 16 else 1
    terms = [tree_of(terms[i : i + each]) for i in range(0, len(terms), each)]
    held, lanes, step = len(terms), list(terms) + [None] * (32 - len(terms)), 1
    while step < 32:
        others = lanes[step:] + [None] * step
        lanes = [
            join(mine, other) if lane + step < held else mine
            for lane, (mine, other) in enumerate(zip(lanes, others, strict=True))
        ]
        step *= 2
    return lanes[0]


def work(parted):
    """The blocks' work: the term of every request's answer; the rules of the ranges on the way."""
    edges = [parted.edge(block) for block in range(parted.blocks + 1)]
    assert edges[0] == 0 and edges[-1] == parted.total and edges == sorted(edges)
    memory, answers = {}, {}
    sharers = {request: [] for request in range(len(parted.counts))}
    for block in range(parted.blocks):
        low, high = edges[block], edges[block + 1]
        first = bisect.bisect_right(parted.starts, low) - 1
        for request in range(first, len(parted.counts)):
            start, count = parted.starts[request], parted.counts[request]
            a, b = max(low, start) - start, min(high, start + count) - start
            if a >= b:
                break
            nodes = parted.nodes(request)
            # Spans and nodes are never divided.
            assert a % nodes.tiles == 0 and (b == count or b % nodes.tiles == 0)
            sharers[request].append(block)
            whole, last = nodes.sharers == 1, (count - 1) // nodes.span
            assert whole == (b - a == count)
            levels = MOST_LEVELS if whole else nodes.level
            spans = range(a // nodes.span, -(-b // nodes.span))
            for span, term in fold(spans, levels, last):
                if whole:
                    assert span == last and request not in answers
                    answers[request] = term
                    continue
                node = span >> levels
                owner, sharer, place = parted.node(request, node)
                assert owner == block and sharer == len(sharers[request]) - 1
                assert 0 <= place < MOST_NODES and (block, place) not in memory
                memory[block, place] = (request, node, term)
    for request, blocks in sharers.items():
        nodes = parted.nodes(request)
        assert len(blocks) == nodes.sharers
        if nodes.sharers == 1:
            continue
        assert len(blocks) <= nodes.count <= MOST_SPANS
        terms = []
        for node in range(nodes.count):
            owner, sharer, place = parted.node(request, node)
            assert blocks[sharer] == owner  # so that slices go to the blocks that wait for them
            of_request, of_node, term = memory.pop((owner, place))
            assert (of_request, of_node) == (request, node)
            terms.append(term)
        answers[request] = over_lanes(terms)
    assert not memory and len(answers) == len(parted.counts)
    return answers


def check(library, counts, blocks):
    answers = work(Parted(library, counts, blocks))
    for request, count in enumerate(counts):
        spans = -(-count // max(8, -(-count // MOST_SPANS)))
        assert answers[request] == tree(0, spans, 1 << MOST_LEVELS), (request, count)


def test_the_sums_of_one_request_are_the_same_over_any_number_of_blocks(library):
    counts = [*range(1, 600), 639, 576, 577, 640, 1000, 1023, 1024, 1025, 4097]
    for count, blocks in itertools.product(counts, BLOCKS):
        check(library, [count], blocks)


def test_the_sums_of_a_request_are_the_same_in_any_batch(library):
    rng = random.Random(0)
    for _ in range(1500):
        most = rng.choice((1, 9, 40, 300, 5000))
        counts = [rng.randint(1, most) for _ in range(rng.randint(1, 20))]
        if rng.random() < 0.5:
            counts[rng.randrange(len(counts))] = rng.choice((64, 65, 512, 513, 560, 9000, 70_000))
        check(library, counts, rng.choice(BLOCKS))


def test_the_sums_of_a_request_are_the_same_at_any_place_behind_others(library):
    for ahead, blocks in itertools.product(range(1, 200, 3), (3, 16, 64)):
        check(library, [ahead, 77, 5], blocks)


def test_a_tree_has_each_span_once_in_order():
    def leaves(term):
        return [term] if isinstance(term, int) else [*leaves(term[0]), *leaves(term[1])]

    for spans in range(1, MOST_SPANS + 1):
        assert leaves(tree(0, spans, MOST_SPANS)) == list(range(spans))
    assert tree(0, 3, MOST_SPANS) == ((0, 1), 2)
    assert tree(0, 5, MOST_SPANS) == (((0, 1), (2, 3)), 4)
    assert over_lanes(list(range(33))) == tree(0, 33, MOST_SPANS)


def expected_nodes(parted, request):
    """Span, level, tiles and number of nodes of a request, as the design says."""
    count, before = parted.counts[request], parted.starts[request]
    share, span = max(1, parted.total // parted.blocks), max(8, -(-count // MOST_SPANS))
    even = parted.total % parted.blocks == 0

    def fits(tiles):
        cuts_are_there = even and share % tiles == 0 and before % tiles == 0
        return tiles <= share // 4 or cuts_are_there

    level = max((k for k in range(MOST_LEVELS + 1) if fits(span << k)), default=0)
    return span, level, span << level, -(-count // (span << level))


def test_nodes_have_at_most_a_quarter_of_a_share_or_lie_between_the_equal_cuts(library):
    rng = random.Random(1)
    larger = 0
    for trial in range(20_000):
        counts = [int(2 ** rng.uniform(0, 22)) for _ in range(rng.randint(1, 4))]
        if trial % 2:
            counts = [8 << rng.randint(0, 7) for _ in counts]
        parted = Parted(library, counts, rng.choice(BLOCKS))
        for request in range(len(counts)):
            found = parted.nodes(request)
            assert found[:4] == expected_nodes(parted, request)
            larger += found.level > 0 and found.tiles > parted.total // parted.blocks // 4
    assert larger > 100


def test_ranges_grow_by_less_than_a_node(library):
    rng = random.Random(2)
    for _ in range(1000):
        most = rng.choice((20, 200, 4000))
        counts = [rng.randint(1, most) for _ in range(rng.randint(1, 30))]
        parted = Parted(library, counts, rng.choice(BLOCKS))
        share = -(-parted.total // parted.blocks)
        edges = [parted.edge(block) for block in range(parted.blocks + 1)]
        largest = max(parted.nodes(request).tiles for request in range(len(counts)))
        assert max(b - a for a, b in itertools.pairwise(edges)) < share + largest


@pytest.mark.parametrize(
    "counts", [(HUGE,), (1 << 30, (1 << 30) - 1), (1, HUGE - 1), (HUGE - 9, 9)]
)
def test_nodes_of_huge_requests_do_not_overflow(library, counts):
    for blocks in (1, 5, 127, 128):
        parted = Parted(library, list(counts), blocks)
        for request in range(len(counts)):
            assert parted.nodes(request)[:4] == expected_nodes(parted, request)
        check(library, list(counts), blocks)


def problem(**changes):
    fields = {"batch": 2, "total_qo_len": 2, "max_qo_len": 1, "kv_capacity": 1 << 20}
    fields |= {"num_qo_heads": 16, "num_kv_heads": 2, "sm_scale": 0.1}
    fields |= {"head_dim_qk": 128, "head_dim_vo": 128, "batch_invariant": True}
    fields |= dict.fromkeys(("q_dtype", "kv_dtype", "out_dtype"), "bfloat16")
    return AttentionProblem(**{**fields, **changes})


@pytest.mark.parametrize(
    ("capacity", "levels"),
    [(0, 0), (1, 0), (1024, 0), (1025, 1), (2048, 1), (2049, 2), (32_768, 5), (32_769, 6)],
)
@pytest.mark.parametrize(("heads", "blocks"), [(2, 64), (128, 1)])
def test_scratch_is_what_blocks_hand_out_and_the_levels_of_the_fold_above_the_lowest(
    library, capacity, levels, heads, blocks
):
    # The route refuses a capacity of 0, the library does not.
    params = decode.shape_params(problem(num_kv_heads=heads, num_qo_heads=8 * heads))
    params.capacity = capacity
    form = decode.DecodeGeometry()
    assert library.stream_attention_decode_geometry(params, 132, form) == 0
    assert (form.rows, form.tile_tokens, form.blocks_per_head) == (8, 128, blocks)
    vectors = form.rows * 128 // 4
    nodes = MOST_NODES if blocks > 1 else 0
    # The lowest level lies in shared memory.
    assert form.scratch_floats == 6 * form.grid * vectors * (nodes + max(levels - 1, 0))


def test_every_problem_has_an_instance_of_its_rows_and_17_to_24_rows_take_32(library):
    for dim, kv, rows in itertools.product(
        decode.HEAD_DIMS, ("bfloat16", "float8_e4m3fn"), range(1, 65)
    ):
        asked = problem(
            num_kv_heads=1, num_qo_heads=rows, head_dim_qk=dim, head_dim_vo=dim, kv_dtype=kv
        )
        form = decode.geometry(asked, 132)
        plain = decode.geometry(dataclasses.replace(asked, batch_invariant=False), 132)
        assert form.rows == (32 if plain.rows == 24 else plain.rows)
        assert form.row_groups == -(-rows // form.rows)
        if dim == 128 and kv == "bfloat16" and rows > 8:  # multiplied by warpgroups
            assert (plain.rows, plain.tile_tokens, form.tile_tokens) == (form.rows, 64, 128)
            continue
        same = ("tile_tokens", "threads", "slots")
        assert all(getattr(form, name) == getattr(plain, name) for name in same)


def test_the_tile_that_spans_are_counted_in_depends_on_neither_batch_nor_capacity(library):
    for dim, rows in itertools.product(decode.HEAD_DIMS, (1, 8, 16, 20, 64)):
        tiles = {
            decode.geometry(
                problem(
                    batch=batch, total_qo_len=batch, kv_capacity=capacity, head_dim_qk=dim,
                    head_dim_vo=dim, num_kv_heads=1, num_qo_heads=rows,
                ),
                num_sms,
            ).tile_tokens
            for batch, capacity, num_sms in ((1, 64, 132), (300, 1 << 20, 132), (33, 4096, 78))
        }  # fmt: skip
        assert len(tiles) == 1
