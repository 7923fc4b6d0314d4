"""Triton kernels that merge the partial states of the portable route's splits."""

from __future__ import annotations

import triton
import triton.language as tl

from stream_attention.core.routes.triton_kernels import (
    LN2,
    LOG2E,
    fixed_splits,
    request_lengths,
)


@triton.jit
def _merge_row(
    out_parts_ptr, lse_parts_ptr, splits, out_split_stride, lse_split_stride, head, token,
    sink_ptr, out_ptr, lse_ptr, head_dim,
    out_token_stride, out_head_stride, lse_token_stride, lse_head_stride,
    BLOCK_S: tl.constexpr, BLOCK_VO: tl.constexpr, HAS_SINK: tl.constexpr, STORE_LSE: tl.constexpr,
):  # fmt: skip
    """out = Σ_s e^(lse_s - M) out_s / Z, Z = Σ_s e^(lse_s - M) + e^(sink - M); empty: 0, -inf.

    The parts' pointers are at the row's first state; states that follow leave no trace.
    """
    columns = tl.arange(0, BLOCK_VO)
    top = tl.full((), float("-inf"), dtype=tl.float32)
    num_live = tl.zeros((), dtype=tl.int32)  # counted apart: a NaN lse is live, but no maximum
    for start in range(0, splits, BLOCK_S):
        parts = start + tl.arange(0, BLOCK_S)
        offsets = parts.to(tl.int64) * lse_split_stride
        lse = tl.load(lse_parts_ptr + offsets, mask=parts < splits, other=float("-inf"))
        top = tl.maximum(top, tl.max(lse, 0))
        num_live += tl.sum((lse != float("-inf")).to(tl.int32), 0)
    empty = num_live == 0
    if HAS_SINK:
        sink = tl.load(sink_ptr + head)
        top = tl.where(empty, top, tl.maximum(top, sink))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((), dtype=tl.float32)
    acc = tl.zeros((BLOCK_VO,), dtype=tl.float32)
    for start in range(0, splits, BLOCK_S):
        parts = start + tl.arange(0, BLOCK_S)
        offsets = parts.to(tl.int64) * lse_split_stride
        lse = tl.load(lse_parts_ptr + offsets, mask=parts < splits, other=float("-inf"))
        weight = tl.exp2((lse - base) * LOG2E)
        rows = parts.to(tl.int64) * out_split_stride
        live = (lse != float("-inf"))[:, None] & (columns < head_dim)[None, :]
        part = tl.load(out_parts_ptr + rows[:, None] + columns[None, :], mask=live, other=0.0)
        acc += tl.sum(part * weight[:, None], 0)
        total += tl.sum(weight, 0)
    if HAS_SINK:
        total += tl.where(empty, 0.0, tl.exp2((sink - base) * LOG2E))
    total = tl.where(empty, 1.0, total)
    out = (acc / total).to(out_ptr.dtype.element_ty)
    out_row = token * out_token_stride + head * out_head_stride
    tl.store(out_ptr + out_row + columns, out, mask=columns < head_dim)
    if STORE_LSE:
        result = tl.where(empty, float("-inf"), base + tl.log2(total) * LN2)
        tl.store(lse_ptr + token * lse_token_stride + head * lse_head_stride, result)


@triton.jit(do_not_specialize=["splits", "num_heads", "out_split_stride", "lse_split_stride"])
def merge_splits(
    out_parts_ptr, lse_parts_ptr, sink_ptr, out_ptr, lse_ptr, splits, num_heads, head_dim,
    out_split_stride, out_row_stride, lse_split_stride,
    out_token_stride, out_head_stride, lse_token_stride, lse_head_stride,
    BLOCK_S: tl.constexpr, BLOCK_VO: tl.constexpr, HAS_SINK: tl.constexpr, STORE_LSE: tl.constexpr,
):  # fmt: skip
    """Merge the states of one row of `[splits, rows, head_dim]`."""
    row = tl.program_id(0)
    _merge_row(
        out_parts_ptr + row.to(tl.int64) * out_row_stride, lse_parts_ptr + row, splits,
        out_split_stride, lse_split_stride,
        (row % num_heads).to(tl.int64), (row // num_heads).to(tl.int64),
        sink_ptr, out_ptr, lse_ptr, head_dim,
        out_token_stride, out_head_stride, lse_token_stride, lse_head_stride,
        BLOCK_S, BLOCK_VO, HAS_SINK, STORE_LSE,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "uniform_qo_len", "capacity", "num_kv_heads", "group", "window_left", "chunk_tiles",
        "slots", "slot_axis", "slot_rows", "merge_rows", "lens_stride_b", "lens_stride_h",
    ]
)  # fmt: skip
def merge_slots(
    part_out_ptr, part_lse_ptr, kv_lens_ptr, qo_indptr_ptr, sink_ptr, out_ptr, lse_ptr,
    uniform_qo_len, capacity, num_kv_heads, group, head_dim, window_left,
    chunk_tiles, slots, slot_axis, slot_rows, merge_rows, lens_stride_b, lens_stride_h,
    out_token_stride, out_head_stride, lse_token_stride, lse_head_stride,
    BLOCK_S: tl.constexpr, BLOCK_VO: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    UNIFORM: tl.constexpr, HAS_LENS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_SINK: tl.constexpr,
    STORE_LSE: tl.constexpr,
):  # fmt: skip
    """Merge the states of one row that the "fixed" schedule split: see `attention_split`.

    A program is one of the first `merge_rows` rows of a request and KV head; it ends at once where
    the request has fewer, or a single split, whose answer is written.
    """
    row = tl.program_id(0) % merge_rows
    unit = tl.program_id(0) // merge_rows
    head = (unit % num_kv_heads).to(tl.int64)
    request = unit // num_kv_heads
    q_start, qo_len, kv_len = request_lengths(
        request, head, uniform_qo_len, capacity, kv_lens_ptr, lens_stride_b, lens_stride_h,
        qo_indptr_ptr, UNIFORM, HAS_LENS,
    )  # fmt: skip
    _, _, splits = fixed_splits(
        kv_len, qo_len, group, window_left, chunk_tiles, slots, BLOCK_M, BLOCK_N, HAS_LEFT
    )
    if (row >= qo_len * group) | (splits == 1):
        return
    slot = (request.to(tl.int64) * num_kv_heads + head) * slot_axis + row // BLOCK_M * splits
    part_row = slot * slot_rows + row % BLOCK_M
    _merge_row(
        part_out_ptr + part_row * head_dim, part_lse_ptr + part_row, splits,
        slot_rows * head_dim, slot_rows, head * group + row % group, q_start + row // group,
        sink_ptr, out_ptr, lse_ptr, head_dim,
        out_token_stride, out_head_stride, lse_token_stride, lse_head_stride,
        BLOCK_S, BLOCK_VO, HAS_SINK, STORE_LSE,
    )  # fmt: skip
