"""Triton kernels of the op-by-op executor for what runs across a row's window: two launches an op.

The first leaves a share of each chunk of CHUNK pages, whatever the batch and the device, so that
sums are added in one order; the second combines them. Shares: `[rows, blocks of elements,
max_chunks, BLOCK]` float32. The rest is as in `op_by_op_kernels`.
"""

import triton
import triton.language as tl

from stream_attention.flows.op_by_op_kernels import reduced, tokens, window
from stream_attention.flows.score_runtime import (
    combined_mass,
    combined_max,
    combined_min,
    combined_sum,
)


@triton.jit
def chunk_of(
    x, row, length, start, last, max_pages, PADDING: tl.constexpr, ROW_TOKENS: tl.constexpr,
    COL_TOKENS: tl.constexpr, COLS: tl.constexpr, ELEMENTS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """(`[CHUNK, BLOCK]` values, where they are in a RAGGED buffer, which lanes are inside)."""
    lane, at = tl.arange(0, CHUNK)[:, None], tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (start + lane < last) & (at < ELEMENTS)
    present, held = inside, tokens(length, start + lane, PAGE_SIZE)
    if ROW_TOKENS:
        present = present & (at // COLS < held)
    if COL_TOKENS:
        present = present & (at % COLS < held)
    places = (row * max_pages + start) * ELEMENTS + lane * ELEMENTS + at
    value = tl.load(x + places, mask=present, other=0.0)
    return tl.where(present, value, PADDING), places, inside


@triton.jit
def window_partial_kernel(
    x, partial, mass, sequence_lengths, max_pages, max_chunks, length_request, length_head,
    OP: tl.constexpr, IDENTITY: tl.constexpr, SCALE: tl.constexpr, ROW_TOKENS: tl.constexpr,
    COL_TOKENS: tl.constexpr, COLS: tl.constexpr, ELEMENTS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, BOS: tl.constexpr, EOS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """A chunk's share of a reduction over the window; of a softmax its maximum and its mass."""
    row, _request, _head, length, first, last = window(
        sequence_lengths, length_request, length_head, HEADS, BOS, EOS, PAGE_SIZE
    )
    chunk = tl.program_id(0)
    start = first + chunk * CHUNK
    if start >= last:
        return
    value, _places, inside = chunk_of(
        x, row, length, start, last, max_pages, IDENTITY, ROW_TOKENS, COL_TOKENS, COLS, ELEMENTS,
        CHUNK, BLOCK, PAGE_SIZE,
    )  # fmt: skip
    block = row * tl.num_programs(2) + tl.program_id(2)
    at = (block * max_chunks + chunk) * BLOCK + tl.arange(0, BLOCK)
    if OP == "softmax":
        value = tl.where(inside, SCALE * value, IDENTITY)
        largest = reduced(value, "max", 0)
        tl.store(partial + at, largest)
        safe = tl.where(largest == float("-inf"), 0.0, largest)
        tl.store(mass + at, tl.sum(tl.exp(value - safe[None, :]), 0))
    elif OP == "l2norm":
        tl.store(partial + at, tl.sum(value * value, 0))
    else:
        tl.store(partial + at, reduced(value, OP, 0))


@triton.jit
def window_combine_kernel(
    out, partial, sequence_lengths, max_chunks, length_request, length_head,
    OP: tl.constexpr, ROW_TOKENS: tl.constexpr, COL_TOKENS: tl.constexpr, COLS: tl.constexpr,
    ELEMENTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, COMBINED: tl.constexpr,
    HEADS: tl.constexpr, BOS: tl.constexpr, EOS: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """A reduction over the window, of its chunks' shares: `[rows, r, c]`."""
    row, _request, _head, length, first, last = window(
        sequence_lengths, length_request, length_head, HEADS, BOS, EOS, PAGE_SIZE
    )
    shares = partial + (row * tl.num_programs(2) + tl.program_id(2)) * max_chunks * BLOCK
    num_chunks = tl.cdiv(last - first, CHUNK)
    if OP == "max":
        found = combined_max(shares, num_chunks, BLOCK, COMBINED)
    elif OP == "min":
        found = combined_min(shares, num_chunks, BLOCK, COMBINED)
    else:
        found = combined_sum(shares, num_chunks, BLOCK, COMBINED)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    if OP == "l2norm":
        found = tl.sqrt(found)
    elif OP == "mean":  # every page of a window is full, but the last one of the sequence
        tail, missing = length - (last - 1) * PAGE_SIZE, at < 0
        if ROW_TOKENS:
            missing = missing | (at // COLS >= tail)
        if COL_TOKENS:
            missing = missing | (at % COLS >= tail)
        found = found / tl.maximum(last - first - missing.to(tl.int32), 1).to(tl.float32)
    tl.store(out + row * ELEMENTS + at, found, mask=at < ELEMENTS)


@triton.jit
def window_finish_kernel(
    out, x, partial, mass, sequence_lengths, max_pages, max_chunks, length_request, length_head,
    OP: tl.constexpr, SCALE: tl.constexpr, ROW_TOKENS: tl.constexpr, COL_TOKENS: tl.constexpr,
    COLS: tl.constexpr, ELEMENTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    COMBINED: tl.constexpr, HEADS: tl.constexpr, BOS: tl.constexpr, EOS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """A softmax or normalisation over the window, of x and its chunks' shares."""
    row, _request, _head, length, first, last = window(
        sequence_lengths, length_request, length_head, HEADS, BOS, EOS, PAGE_SIZE
    )
    start = first + tl.program_id(0) * CHUNK
    if start >= last:
        return
    value, places, inside = chunk_of(
        x, row, length, start, last, max_pages, 0.0, ROW_TOKENS, COL_TOKENS, COLS, ELEMENTS,
        CHUNK, BLOCK, PAGE_SIZE,
    )  # fmt: skip
    shares = (row * tl.num_programs(2) + tl.program_id(2)) * max_chunks * BLOCK
    num_chunks = tl.cdiv(last - first, CHUNK)
    if OP == "softmax":
        largest = combined_max(partial + shares, num_chunks, BLOCK, COMBINED)
        largest = tl.where(largest == float("-inf"), 0.0, largest)  # all of them: no mass at all
        total = combined_mass(partial + shares, mass + shares, largest, num_chunks, BLOCK, COMBINED)
        total = tl.where(total == 0.0, 1.0, total)
        found = tl.exp(SCALE * value - largest[None, :]) / total[None, :]
    else:
        total = combined_sum(partial + shares, num_chunks, BLOCK, COMBINED)[None, :]
        found = tl.where(total == 0.0, 0.0, value / tl.where(total == 0.0, 1.0, total))
    tl.store(out + places, found, mask=inside)
