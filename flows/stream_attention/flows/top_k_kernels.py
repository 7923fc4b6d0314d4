"""Triton kernels of the device top-k: see `top_k`, which launches them.

Scores become uint32 keys of the same order, so that every step compares integers and answers have
the same bits everywhere. A row's k-th key is found by bisection: count the keys at or above a
middle, halve the range, stop as soon as a count is k. A count is one reduction of a block, about
20 of which are needed for random scores, and none for equal ones; where a digit at a time is
counted by histograms (radix select, Alabi et al. 2012, "Fast k-selection algorithms for graphics
processing units") a pass costs Triton about five of them. Ascending order comes from prefix sums.

A row of up to a block of pages is one program, its keys in registers throughout (`select_rows`).
A longer one is cut into chunks, a program each, in two launches:

* `bracket_chunks` takes a stratified sample of the row, which puts the k-th key between two sample
  keys (Floyd & Rivest 1975, "Expected time bounds for selection"), and counts a chunk's keys above,
  at, between and at the lower one; those between are packed into scratch.
* `place_chunks` finds the k-th key among those between, in registers, and writes a chunk's pages
  where the counts of the chunks before it say. Counts prove the bracket: where the sample was
  unlucky, or too many keys lie between, it bisects over memory. Every program of a row repeats the
  search, so that programs need not wait for each other.

Where scores come from is a parameter: `SCORE` is a device function that a code generator replaces.

    @triton.jit
    def score(score_ptr, aux_ptr, row, row_offset, positions, live): ...

It returns fp32 scores of `positions` (int32) of `row` (= request · num_kv_heads + head, int64)
where `live`, which may be up to 3 positions more than the window at either end, inside the row's
memory, whose scores have no effect; `row_offset` is that row's first element of `score_ptr`;
`aux_ptr` is what the launch was given (a softmax finish keeps a row's largest logit and sum there).
It must be a pure function of memory: a position may be asked for more than once, by several
programs, until `SAVE` runs.

    @triton.jit
    def save(score_ptr, aux_ptr, row, row_offset, positions, scores, live): ...

It is called with every window position exactly once, by the last kernel, when no other program
asks for that position's score any more: the place to write a state back.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stream_attention.flows.kernel_parts import await_previous

MOST = tl.constexpr(0xFFFFFFFF)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_score(score_ptr, aux_ptr, row, row_offset, positions, live):
    """The default `SCORE`: what is in memory."""
    return tl.load(score_ptr + row_offset + positions, mask=live, other=0.0)


@triton.jit
def save_nothing(score_ptr, aux_ptr, row, row_offset, positions, scores, live):
    """The default `SAVE`."""


@triton.jit
def _to_keys(scores, live):
    """uint32 in the order of fp32: 0 where not live, NaN 1, -inf 0x7FFFFF, both zeros 1 << 31."""
    bits = scores.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    negative = (bits != size) & (size != 0)
    keys = tl.where(negative, bits ^ 0xFFFFFFFF, size | 0x80000000)
    keys = tl.where(size > 0x7F800000, 1, keys)
    return tl.where(live, keys, 0).to(tl.uint32)


@triton.jit
def _to_scores(keys):
    """The fp32 score of a key; of 0 and 1, any NaN."""
    bits = tl.where(keys >= 0x80000000, keys & 0x7FFFFFFF, keys ^ 0xFFFFFFFF)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _weights(keys, largest, scale_log2):
    """exp(mass_scale · (score − largest)), 1 where equal, 0 of NaN and of lanes that hold none."""
    raised = tl.exp2((_to_scores(keys) - _to_scores(largest)) * scale_log2)
    return tl.where(keys <= 1, 0.0, tl.where(keys == largest, 1.0, raised))


@triton.jit
def _wide(positions, first, last, VEC: tl.constexpr):
    """[first, last), rounded out to whole vectors of `VEC`, so that they are loaded as such."""
    return (positions >= first // VEC * VEC) & (positions < (last + VEC - 1) // VEC * VEC)


@triton.jit
def _load_keys(ptr, live):
    return tl.load(ptr, mask=live, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _store_keys(ptr, keys, mask):
    tl.store(ptr, keys.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def _row(
    lengths_ptr, budgets_ptr, request, head, lengths_stride, budgets_stride_b, budgets_stride_h,
    capacity, topk, numerator, denominator, max_budget, bos, eos,
    PAGE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """(length, n, first, last, k, whole) of a row: tokens, pages, window, budget, all of them.

    `KIND` 3, a budget by mass: k is the most that it can be.
    """
    length = tl.load(lengths_ptr + request * lengths_stride)
    length = tl.minimum(tl.maximum(length, 0), capacity)
    n = tl.where(length > 0, (length - 1) // PAGE + 1, 0)
    first = tl.minimum(n, bos)
    last = tl.maximum(first, n - eos)
    k = n * 0 + topk
    if KIND == 1:
        share = n.to(tl.int64) * numerator // denominator
        k = tl.maximum(k, share.to(tl.int32))
    elif KIND == 2:
        given = tl.load(budgets_ptr + request * budgets_stride_b + head * budgets_stride_h)
        k = tl.minimum(tl.maximum(given, 0), max_budget).to(tl.int32)
    elif KIND == 3:
        k = n * 0 + max_budget
    k = tl.minimum(k, n)
    whole = n - k - bos <= eos
    return length, n, first, last, k, whole


@triton.jit
def _count_in_memory(
    keys_ptr, sizes_ptr, num_chunks, chunk_size, middle, largest, scale_log2,
    TILE: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """Keys >= middle of the first `num_chunks` chunks (`MASS`: what they weigh).

    sizes_ptr: how many of each chunk, `None`: all.
    """
    count = tl.zeros((), tl.float32 if MASS else tl.int32)
    for chunk in range(num_chunks):
        size = chunk_size
        if sizes_ptr is not None:
            size = tl.load(sizes_ptr + chunk)
        base = keys_ptr + (chunk + tl.zeros((), tl.int64)) * chunk_size
        for start in range(0, size, TILE):
            at = start + tl.arange(0, TILE)
            keys = _load_keys(base + at, at < size)
            if MASS:
                weights = _weights(keys, largest, scale_log2)
                count += tl.sum(tl.where(keys >= middle, weights, 0.0), 0)
            else:
                count += tl.sum((keys >= middle).to(tl.int32), 0)
    return count


@triton.jit
def _bisect(
    keys, keys_ptr, sizes_ptr, num_chunks, chunk_size, lo, hi, beyond, above, k,
    TILE: tl.constexpr,
):  # fmt: skip
    """(threshold, keys above it): `k − above` ties at the threshold complete the k best.

    The k-th key is in [lo, hi], and `above` keys are beyond hi. `TILE` 0: of `keys`; else of those
    in memory. `beyond`: keys above hi that are not among these.
    """
    while lo < hi:
        middle = lo + ((hi - lo) >> 1) + 1
        if TILE == 0:
            count = beyond + tl.sum((keys >= middle).to(tl.int32), 0)
        else:
            count = beyond + _count_in_memory(
                keys_ptr, sizes_ptr, num_chunks, chunk_size, middle, middle, 0.0, TILE, False
            )
        up = count > k
        lo = tl.where(up, middle, tl.where(count == k, middle - 1, lo))
        hi = tl.where(up, hi, middle - 1)
        above = tl.where(up, above, count)
    return lo, above


@triton.jit
def _mass_budget(
    keys, keys_ptr, num_chunks, chunk_size, lo, largest, total, mass, scale_log2, least, most,
    TILE: tl.constexpr,
):  # fmt: skip
    """(k, threshold, keys above it, keys at or above it) of a budget by mass.

    Keys below `lo` are out of the question. k − above ties at the threshold are taken, unless k is
    bounded by `least` and `most`.

    The sum over keys >= middle has a fixed order and grows as the middle falls, so the bisection is
    that of a monotone function.
    """
    target = mass * total
    hi, above_mass = largest, total * 0.0
    weights = tl.zeros_like(keys).to(tl.float32)
    if TILE == 0:
        weights = _weights(keys, largest, scale_log2)
    while lo < hi:
        middle = lo + ((hi - lo) >> 1) + 1
        if TILE == 0:
            reached = tl.sum(tl.where(keys >= middle, weights, 0.0), 0)
        else:
            reached = _count_in_memory(
                keys_ptr, None, num_chunks, chunk_size, middle, largest, scale_log2, TILE, True
            )
        up = reached >= target
        lo = tl.where(up, middle, lo)
        hi = tl.where(up, hi, middle - 1)
        above_mass = tl.where(up, above_mass, reached)
    above, through = 0, 0
    if TILE == 0:
        above = tl.sum((keys > lo).to(tl.int32), 0)
        through = tl.sum((keys >= lo).to(tl.int32), 0)
    else:
        through = _count_in_memory(keys_ptr, None, num_chunks, chunk_size, lo, lo, 0.0, TILE, False)
        above = _count_in_memory(
            keys_ptr, None, num_chunks, chunk_size, lo + 1, lo, 0.0, TILE, False
        )
    weight = _weights(lo, largest, scale_log2)
    ties = tl.ceil((target - above_mass) / tl.where(weight > 0, weight, 1.0))
    ties = tl.minimum(tl.maximum(ties, 1.0), (through - above).to(tl.float32)).to(tl.int32)
    k = tl.where(total > 0, above + tl.minimum(ties, through - above), 0)
    k = tl.minimum(tl.maximum(k, least), most)
    return k, lo, above, through


@triton.jit
def _place(
    keys, positions, threshold, ties, base_above, base_ties, n, first, last, count, length,
    table_ptr, out_ptr, out_length_ptr, pages,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Write the selected pages of a tile where they go, and the length, from the last page's lane.

    base_above, base_ties: keys above and at the threshold in the tiles before. count: pages of the
    row's selection. pages: ids of the tile, or `None` to load those selected.
    """
    above, equal = keys > threshold, keys == threshold
    both = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    ties_before = base_ties + (both >> 16) - equal.to(tl.int32)
    inside = (positions >= first) & (positions < last)
    taken = inside & (above | (equal & (ties_before < ties)))
    slots = first + base_above + (both & 0xFFFF) - above.to(tl.int32)
    slots += tl.minimum(ties_before, ties)
    slots = tl.where(positions < first, positions, slots)
    slots = tl.where(positions >= last, count - (n - positions), slots)
    taken = (taken | (inside == 0)) & (positions < n)
    if pages is None:
        pages = tl.load(table_ptr + positions, mask=taken, other=0)
    tl.store(out_ptr + slots, pages, mask=taken)
    # Every page is full, save that the last one of the request holds the rest of its tokens.
    slack = tl.where(taken, PAGE - 1 - (length - 1) % PAGE, 0)
    tokens = count * PAGE - slack
    tl.store(out_length_ptr + positions * 0, tokens, mask=positions == n - 1)


@triton.jit
def _clear(out_ptr, begin, end, BLOCK: tl.constexpr):
    """Zeros in [begin, end)."""
    zeros = tl.zeros((BLOCK,), tl.int32)
    for start in range(begin, end, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + slots, zeros, mask=slots < end)


@triton.jit(do_not_specialize=["capacity", "topk", "numerator", "max_budget", "bos", "eos"])
def select_rows(
    score_ptr, aux_ptr, table_ptr, lengths_ptr, budgets_ptr, out_ptr, out_lengths_ptr, nan_ptr,
    score_stride_b, score_stride_h, table_stride_b, table_stride_h, lengths_stride,
    budgets_stride_b, budgets_stride_h, capacity, topk, numerator, denominator, max_budget,
    bos, eos, least, mass, scale_log2, width,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr,
    VEC: tl.constexpr, SCORE: tl.constexpr, SAVE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A row of at most `BLOCK` pages, a program: request `program_id(0)`, head `program_id(1)`.

    `KIND`: 0 a count, 1 or a ratio, 2 per row, 3 by mass. `GROUPS`: a row with k <= GROUPS starts
    from the smallest of the maxima of so many groups, which k keys reach; about ten counts fewer.
    """
    await_previous(DEPENDENT)
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = request * tl.num_programs(1) + head
    length, n, first, last, k, whole = _row(
        lengths_ptr, budgets_ptr, request, head, lengths_stride, budgets_stride_b,
        budgets_stride_h, capacity, topk, numerator, denominator, max_budget, bos, eos, PAGE, KIND,
    )  # fmt: skip
    positions = tl.arange(0, BLOCK)
    inside = (positions >= first) & (positions < last)
    score_row = request * score_stride_b + head * score_stride_h
    asked = _wide(positions, first, last, VEC)
    scores = SCORE(score_ptr, aux_ptr, row, score_row, positions, asked)
    table_row = table_ptr + request * table_stride_b + head * table_stride_h
    # Asked for before the search, so that it hides the time they take.
    pages = tl.load(table_row + positions, mask=_wide(positions, 0, n, VEC), other=0)
    SAVE(score_ptr, aux_ptr, row, score_row, positions, scores, inside)
    keys = _to_keys(scores, inside)
    if nan_ptr is not None:
        tl.store(nan_ptr + row, tl.sum((keys == 1).to(tl.int32), 0))

    maxima = tl.max(tl.reshape(keys, (BLOCK // GROUPS, GROUPS)), 0)
    largest = tl.max(maxima, 0)
    one = tl.full((), 1, tl.uint32)
    lo, hi, above = one, largest, 0
    if KIND == 3:
        total = tl.sum(_weights(keys, largest, scale_log2), 0)
        k, at, above_it, through = _mass_budget(
            keys, None, 0, 0, one, largest, total, mass, scale_log2, least, max_budget, 0
        )
        whole = n - k - bos <= eos
        lo = tl.where(k > through, one, tl.where(k < above_it, at + 1, at))
        hi = tl.where(k > through, at - 1, tl.where(k < above_it, largest, at))
        above = tl.where(k > through, through, tl.where(k < above_it, 0, above_it))
    else:
        lo = tl.where(k <= GROUPS, tl.maximum(tl.min(maxima, 0), one), one)
    selected = tl.where(whole, last - first, k)
    lo = tl.where(whole, 0, tl.where(k == 0, largest, lo)).to(tl.uint32)
    hi = tl.where(whole, 0, tl.where(k == 0, largest, hi)).to(tl.uint32)
    above = tl.where(whole, selected, tl.where(k == 0, 0, above))
    threshold, above = _bisect(keys, None, None, 0, 0, lo, hi, 0, above, selected, 0)

    count = first + selected + (n - last)
    out_row = out_ptr + row * width
    _place(
        keys, positions, threshold, selected - above, 0, 0, n, first, last, count, length,
        table_row, out_row, out_lengths_ptr + row, pages, PAGE,
    )  # fmt: skip
    tl.store(out_lengths_ptr + row, 0, mask=n == 0)
    _clear(out_row, count, width, BLOCK)
