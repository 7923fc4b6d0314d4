"""Triton kernels of the device top-k for rows longer than a block: see `top_k_kernels`.

Scratch of a row, from the first launch to the second: `stats` int32 [NUM_STATS, num_chunks], what
each chunk counted; `bracket` int32 [2], keys `lo <= hi`; `keys` and `between` int32 [num_chunks ·
CHUNK], all keys by position, 0 outside the window, and each chunk's keys in (lo, hi), packed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stream_attention.flows.kernel_parts import await_previous
from stream_attention.flows.top_k_kernels import (
    MOST,
    _bisect,
    _clear,
    _count_in_memory,
    _load_keys,
    _mass_budget,
    _place,
    _row,
    _store_keys,
    _to_keys,
    _weights,
    _wide,
)

NUM_STATS = 7  # above hi, at hi, between, at lo, NaN; by mass: largest key, mass relative to it
LARGEST = tl.constexpr(0xFF800000)  # the key of +inf
# Deviations of a sample count that a bracket allows for, either way: 4.5 fail once in 10**5 rows.
DEVIATIONS = tl.constexpr(4.5)


@triton.jit
def _sample(
    score_ptr, aux_ptr, row, score_row, first, size,
    SAMPLE: tl.constexpr, SAMPLE_LOG2: tl.constexpr, SCORE: tl.constexpr,
):  # fmt: skip
    """Keys of `SAMPLE` positions of the window, one at a hashed place of each equal part of it."""
    part = tl.arange(0, SAMPLE).to(tl.uint32)
    within = (part * 2654435761) >> 16
    at = ((part.to(tl.int64) << 16) + within.to(tl.int64)) * size >> (16 + SAMPLE_LOG2)
    positions = first + at.to(tl.int32)
    live = positions >= 0
    return _to_keys(SCORE(score_ptr, aux_ptr, row, score_row, positions, live), live)


@triton.jit
def _near(keys, lo, hi, rank, slack):
    """A key that `rank ± slack` of `keys` reach, or the nearest there is; lo <= it <= hi."""
    while lo < hi:
        middle = lo + ((hi - lo) >> 1) + 1
        extra = tl.sum((keys >= middle).to(tl.int32), 0).to(tl.float32) - rank
        close = tl.abs(extra) <= slack
        up = extra > 0
        lo = tl.where(up | close, middle, lo)
        hi = tl.where(close, middle, tl.where(up, hi, middle - 1))
    return lo


@triton.jit
def _bracket(sample, k, size, SAMPLE: tl.constexpr, TWO_SIDED: tl.constexpr):
    """(lo, hi): keys that the row's k-th key most likely lies between; 0 and MOST are no bound."""
    share = k.to(tl.float32) / size.to(tl.float32)
    rank = share * SAMPLE
    spread = DEVIATIONS * tl.sqrt(rank * (1.0 - share)) + 4.0
    least, most = tl.min(sample, 0), tl.max(sample, 0)
    lo, hi = tl.full((), 0, tl.uint32), tl.full((), MOST, tl.uint32)
    if TWO_SIDED:
        if rank - spread >= 1.0:
            hi = _near(sample, least, most, rank - spread, spread * 0.25)
    if rank + spread <= SAMPLE:
        lo = _near(sample, least, tl.minimum(hi, most), rank + spread, spread * 0.25)
    return lo, hi


@triton.jit(do_not_specialize=["capacity", "topk", "numerator", "max_budget", "bos", "eos"])
def bracket_chunks(
    score_ptr, aux_ptr, lengths_ptr, budgets_ptr, keys_ptr, between_ptr, stats_ptr, bracket_ptr,
    score_stride_b, score_stride_h, lengths_stride, budgets_stride_b, budgets_stride_h,
    capacity, topk, numerator, denominator, max_budget, bos, eos, scale_log2,
    CHUNK: tl.constexpr, TILE: tl.constexpr, SAMPLE: tl.constexpr, SAMPLE_LOG2: tl.constexpr,
    CANDIDATES: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr, VEC: tl.constexpr,
    SCORE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Bracket a row's k-th key and count a chunk by it: program (request, head, chunk)."""
    await_previous(DEPENDENT)
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = request * tl.num_programs(1) + head
    chunk, num_chunks = tl.program_id(2), tl.num_programs(2)
    _, _, first, last, k, _ = _row(
        lengths_ptr, budgets_ptr, request, head, lengths_stride, budgets_stride_b,
        budgets_stride_h, capacity, topk, numerator, denominator, max_budget, bos, eos, PAGE, KIND,
    )  # fmt: skip
    stats = stats_ptr + row * (7 * num_chunks) + chunk
    begin = chunk * CHUNK
    if begin >= last:
        for field in tl.static_range(7):
            tl.store(stats + field * num_chunks, 0)
        return
    score_row = request * score_stride_b + head * score_stride_h
    size = last - first
    lo, hi = tl.full((), 0, tl.uint32), tl.full((), MOST, tl.uint32)
    k = tl.minimum(k, size)
    if (size > CANDIDATES) & (k < size) & (k > 0):
        sample = _sample(
            score_ptr, aux_ptr, row, score_row, first, size, SAMPLE, SAMPLE_LOG2, SCORE
        )
        lo, hi = _bracket(sample, k, size, SAMPLE, KIND != 3)
    if chunk == 0:
        _store_keys(bracket_ptr + row * 2, lo, None)
        _store_keys(bracket_ptr + row * 2 + 1, hi, None)

    tile = tl.arange(0, TILE)
    keys_row = keys_ptr + row * num_chunks * CHUNK
    packed = between_ptr + row * num_chunks * CHUNK + begin
    above, at_hi, between, at_lo, nan = 0, 0, 0, 0, 0
    largest, mass = tl.full((), 0, tl.uint32), tl.zeros((), tl.float32)
    for start in range(0, CHUNK, TILE):
        positions = begin + start + tile
        inside = (positions >= first) & (positions < last)
        asked = _wide(positions, first, last, VEC)
        scores = SCORE(score_ptr, aux_ptr, row, score_row, positions, asked)
        keys = _to_keys(scores, inside)
        _store_keys(keys_row + positions, keys, None)
        # Two counts a reduction: each is at most TILE <= 8192.
        upper = (keys > hi).to(tl.int32) + ((keys == hi).to(tl.int32) << 15)
        low = (keys == lo) & (keys > 0) & (lo < hi)
        lower = low.to(tl.int32) + ((keys == 1).to(tl.int32) << 15)
        upper, lower = tl.sum(upper, 0), tl.sum(lower, 0)
        above += upper & 0x7FFF
        at_hi += upper >> 15
        at_lo += lower & 0x7FFF
        nan += lower >> 15
        strictly = (keys > lo) & (keys < hi)
        slots = tl.cumsum(strictly.to(tl.int32), 0)
        _store_keys(packed + between + slots - 1, keys, strictly)
        between += tl.max(slots, 0)
        if KIND == 3:
            larger = tl.maximum(largest, tl.max(keys, 0))
            mass = mass * _weights(largest, larger, scale_log2)
            mass += tl.sum(_weights(keys, larger, scale_log2), 0)
            largest = larger
    tl.store(stats, above)
    tl.store(stats + num_chunks, at_hi)
    tl.store(stats + 2 * num_chunks, between)
    tl.store(stats + 3 * num_chunks, at_lo)
    tl.store(stats + 4 * num_chunks, nan)
    if KIND == 3:
        _store_keys(stats + 5 * num_chunks, largest, None)
        tl.store(stats + 6 * num_chunks, mass.to(tl.int32, bitcast=True))


@triton.jit
def _candidates(between_row, between, num, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
                CHUNKS_LOG2: tl.constexpr, CANDIDATES: tl.constexpr):  # fmt: skip
    """The row's first `CANDIDATES` keys between lo and hi, chunk after chunk; 0 beyond the last."""
    ends = tl.cumsum(between, 0)
    lane = tl.arange(0, CANDIDATES)
    chunk = lane * 0
    for level in tl.static_range(CHUNKS_LOG2):  # the number of chunks that end at or before lane
        step = CHUNKS >> (level + 1)
        passed = tl.gather(ends, chunk + step - 1, 0) <= lane
        chunk += tl.where(passed, step, 0)
    starts = tl.gather(ends - between, chunk, 0)
    offsets = chunk.to(tl.int64) * CHUNK + (lane - starts)
    return _load_keys(between_row + offsets, lane < num)


@triton.jit
def _mass_of_long(
    keys, keys_row, stats, num_chunks, live_chunks, num_between, num_at_lo, lo, size,
    mass, scale_log2, least, most,
    CHUNK: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """k of a budget by mass: from the candidates where they hold the `most` best, or memory."""
    chunks = tl.arange(0, CHUNKS)
    live = chunks < num_chunks
    largest_of = _load_keys(stats + 5 * num_chunks + chunks, live)
    bits = tl.load(stats + 6 * num_chunks + chunks, mask=live, other=0)
    largest = tl.max(largest_of, 0)
    shares = bits.to(tl.float32, bitcast=True) * _weights(largest_of, largest, scale_log2)
    total = tl.sum(tl.where(live, shares, 0.0), 0)
    k = num_between * 0
    if (num_between <= CANDIDATES) & (num_between + num_at_lo >= tl.minimum(most, size)):
        k, _, _, _ = _mass_budget(
            keys, keys_row, 0, 0, tl.minimum(lo + 1, largest), largest, total, mass, scale_log2,
            0, most, 0,
        )  # fmt: skip
        # Where they do not reach it, ties at lo follow.
        missing = mass * total - tl.sum(_weights(keys, largest, scale_log2), 0)
        weight = _weights(lo, largest, scale_log2)
        ties = tl.ceil(missing / tl.where(weight > 0, weight, 1.0))
        ties = tl.minimum(ties, num_at_lo.to(tl.float32)).to(tl.int32)
        k = tl.where((missing > 0) & (num_at_lo > 0), num_between + ties, k)
    else:
        k, _, _, _ = _mass_budget(
            keys, keys_row, live_chunks, CHUNK, tl.full((), 1, tl.uint32), largest, total, mass,
            scale_log2, 0, most, TILE,
        )  # fmt: skip
    return tl.minimum(tl.maximum(k, least), most)


@triton.jit
def _threshold_of_long(
    keys, keys_row, between_row, stats, num_chunks, live_chunks, chunk,
    above_of, at_hi_of, between_of, at_lo_of, lo, hi, k,
    CHUNK: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """(threshold, keys above it, of them before `chunk`, ties before `chunk`) of 1 <= k < size."""
    before = tl.arange(0, CHUNKS) < chunk
    sizes = stats + 2 * num_chunks
    to_hi = tl.sum(above_of, 0)
    to_between = to_hi + tl.sum(at_hi_of, 0)
    num_between = tl.sum(between_of, 0)
    to_lo = to_between + num_between
    to_end = to_lo + tl.sum(at_lo_of, 0)
    # Where k ends among the keys at hi, or at lo, there is nothing to search.
    is_hi = k <= to_between
    threshold, above = tl.where(is_hi, hi, lo), tl.where(is_hi, to_hi, to_lo)
    nearer = tl.where(is_hi, above_of, above_of + at_hi_of + between_of)
    base_above = tl.sum(tl.where(before, nearer, 0), 0)
    base_ties = tl.sum(tl.where(before, tl.where(is_hi, at_hi_of, at_lo_of), 0), 0)
    if (k > to_between) & (k <= to_lo):
        base_above = tl.sum(tl.where(before, above_of + at_hi_of, 0), 0)
        if num_between <= CANDIDATES:
            threshold, above = _bisect(
                keys, keys_row, None, 0, 0, lo + 1, tl.max(keys, 0), to_between, to_between, k, 0
            )
            lane = tl.arange(0, CANDIDATES)
            mine = lane < tl.sum(tl.where(before, between_of, 0), 0)
            base_above += tl.sum((mine & (keys > threshold)).to(tl.int32), 0)
            base_ties = tl.sum((mine & (keys == threshold)).to(tl.int32), 0)
        else:
            threshold, above = _bisect(
                keys, between_row, sizes, live_chunks, CHUNK, lo + 1,
                tl.minimum(hi - 1, LARGEST).to(tl.uint32), to_between, to_between, k, TILE,
            )  # fmt: skip
            passed = _count_in_memory(
                between_row, sizes, chunk, CHUNK, threshold + 1, lo, 0.0, TILE, False
            )
            through = _count_in_memory(
                between_row, sizes, chunk, CHUNK, threshold, lo, 0.0, TILE, False
            )
            base_above += passed
            base_ties = through - passed
    elif (k <= to_hi) | (k > to_end):  # the sample was unlucky
        low = k > to_hi
        threshold, above = _bisect(
            keys, keys_row, None, live_chunks, CHUNK, tl.where(low, 1, hi + 1).to(tl.uint32),
            tl.where(low, lo - 1, LARGEST).to(tl.uint32), 0, tl.where(low, to_end, 0), k, TILE,
        )  # fmt: skip
        base_above = _count_in_memory(
            keys_row, None, chunk, CHUNK, threshold + 1, lo, 0.0, TILE, False
        )
        through = _count_in_memory(keys_row, None, chunk, CHUNK, threshold, lo, 0.0, TILE, False)
        base_ties = through - base_above
    return threshold, above, base_above, base_ties


@triton.jit
def _counts_of(stats, chunks, num_chunks):
    """Keys of each chunk above hi, at hi, between, and at lo."""
    live = chunks < num_chunks
    above_of = tl.load(stats + chunks, mask=live, other=0)
    at_hi_of = tl.load(stats + num_chunks + chunks, mask=live, other=0)
    between_of = tl.load(stats + 2 * num_chunks + chunks, mask=live, other=0)
    at_lo_of = tl.load(stats + 3 * num_chunks + chunks, mask=live, other=0)
    return above_of, at_hi_of, between_of, at_lo_of


@triton.jit(do_not_specialize=["capacity", "topk", "numerator", "max_budget", "bos", "eos"])
def place_chunks(
    score_ptr, aux_ptr, table_ptr, lengths_ptr, budgets_ptr, out_ptr, out_lengths_ptr, nan_ptr,
    keys_ptr, between_ptr, stats_ptr, bracket_ptr,
    score_stride_b, score_stride_h, table_stride_b, table_stride_h, lengths_stride,
    budgets_stride_b, budgets_stride_h, capacity, topk, numerator, denominator, max_budget,
    bos, eos, least, mass, scale_log2, width,
    CHUNK: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_LOG2: tl.constexpr,
    CANDIDATES: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr,
    VEC: tl.constexpr, SCORE: tl.constexpr, SAVE: tl.constexpr, HAS_SAVE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Find a row's k-th key and write a chunk's selected pages: program (request, head, chunk)."""
    await_previous(DEPENDENT)
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = request * tl.num_programs(1) + head
    chunk, num_chunks = tl.program_id(2), tl.num_programs(2)
    length, n, first, last, k, whole = _row(
        lengths_ptr, budgets_ptr, request, head, lengths_stride, budgets_stride_b,
        budgets_stride_h, capacity, topk, numerator, denominator, max_budget, bos, eos, PAGE, KIND,
    )  # fmt: skip
    stats = stats_ptr + row * (7 * num_chunks)
    begin, size = chunk * CHUNK, last - first
    keys_row = keys_ptr + row * num_chunks * CHUNK
    chunks = tl.arange(0, CHUNKS)
    if nan_ptr is not None:
        nan_of = tl.load(stats + 4 * num_chunks + chunks, mask=chunks < num_chunks, other=0)
        tl.store(nan_ptr + row, tl.sum(nan_of, 0), mask=chunk == 0)
    threshold, above = tl.full((), 0, tl.uint32), size
    base_above, base_ties = tl.minimum(tl.maximum(begin, first), last) - first, 0
    # A chunk beyond the row has to know how many pages there are, and no more.
    if ((size > 0) & ((whole == 0) & (begin < n))) | (KIND == 3):
        above_of, at_hi_of, between_of, at_lo_of = _counts_of(stats, chunks, num_chunks)
        lo = _load_keys(bracket_ptr + row * 2, size > 0)
        hi = _load_keys(bracket_ptr + row * 2 + 1, size > 0)
        live_chunks = (last + CHUNK - 1) // CHUNK
        between_row = between_ptr + row * num_chunks * CHUNK
        num_between = tl.sum(between_of, 0)
        keys = _candidates(
            between_row, between_of, num_between, CHUNK, CHUNKS, CHUNKS_LOG2, CANDIDATES
        )
        if KIND == 3:
            k = _mass_of_long(
                keys, keys_row, stats, num_chunks, live_chunks, num_between, tl.sum(at_lo_of, 0),
                lo, size, mass, scale_log2, least, max_budget, CHUNK, TILE, CHUNKS, CANDIDATES,
            )  # fmt: skip
            whole = n - k - bos <= eos
        if (whole == 0) & (k > 0):
            threshold, above, base_above, base_ties = _threshold_of_long(
                keys, keys_row, between_row, stats, num_chunks, live_chunks, chunk, above_of,
                at_hi_of, between_of, at_lo_of, lo, hi, k, CHUNK, TILE, CHUNKS, CANDIDATES,
            )  # fmt: skip
    selected = tl.where(whole, size, k)
    none = selected == 0
    threshold = tl.where(none, MOST, threshold).to(tl.uint32)
    above, base_above = tl.where(none, 0, above), tl.where(none, 0, base_above)
    count = first + selected + (n - last)
    score_row = request * score_stride_b + head * score_stride_h
    table_row = table_ptr + request * table_stride_b + head * table_stride_h
    out_row = out_ptr + row * width
    for start in range(begin, tl.minimum(begin + CHUNK, n), TILE):
        positions = start + tl.arange(0, TILE)
        inside = (positions >= first) & (positions < last)
        # The first launch wrote whole chunks, 0 outside the window, as far as the window goes.
        own = _load_keys(keys_row + positions, (positions >= 0) & (begin < last))
        if HAS_SAVE:
            asked = _wide(positions, first, last, VEC)
            scores = SCORE(score_ptr, aux_ptr, row, score_row, positions, asked)
            SAVE(score_ptr, aux_ptr, row, score_row, positions, scores, inside)
        _place(
            own, positions, threshold, selected - above, base_above, base_ties, n, first, last,
            count, length, table_row, out_row, out_lengths_ptr + row, None, PAGE,
        )  # fmt: skip
        if CHUNK > TILE:
            equal = (own == threshold).to(tl.int32) << 15
            both = tl.sum((own > threshold).to(tl.int32) + equal, 0)
            base_above += both & 0x7FFF
            base_ties += both >> 15
    tl.store(out_lengths_ptr + row, 0, mask=(n == 0) & (chunk == 0))
    share = (width - count + num_chunks - 1) // num_chunks
    _clear(out_row, count + chunk * share, tl.minimum(count + (chunk + 1) * share, width), TILE)
