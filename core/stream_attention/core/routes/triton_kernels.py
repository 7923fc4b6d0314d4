"""Triton kernels of the portable route: split-KV attention for every phase.

One kernel serves decode, verify, append, prefill and ragged mixes. A query tile packs
`qo_len · group` rows of one request and one KV head, so a K/V tile is loaded once for its group;
the KV tiles that those rows can see are cut into splits on the device, from the lengths, so a
captured graph follows lengths that change in place. Online softmax: Milakov & Gimelshein 2018;
split-KV with a merge of partial states: Flash-Decoding (Dao et al. 2023).

Positions: query i of a request sits at `kv_len - qo_len + i`. Scores are kept in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tanh(x):
    """tanh(x) to fp32 accuracy: a series near 0, where 1 - 2 / (e^2x + 1) cancels."""
    x2 = x * x
    series = x * (1.0 + x2 * (-1.0 / 3.0 + x2 * (2.0 / 15.0 + x2 * (-17.0 / 315.0))))
    far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.125, series, far)


@triton.jit
def _e4m3_to_half(bits):
    """fp8 e4m3fn, as uint8 bits, to fp16, exactly: same mantissa, exponent bias 7 → 15, NaN kept.

    Shifts instead of a cast because compute capability 8.0 has no fp8 conversion.
    """
    wide = bits.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    value = half.to(tl.float16, bitcast=True) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def _load_kv(ptr, rows, columns, row_mask, head_dim, FP8: tl.constexpr, PADDED: tl.constexpr,
             MASKED: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """A [tokens, head_dim] tile; slots that are not to be read become zeros."""
    pointers = ptr + rows[:, None] + columns[None, :]
    if MASKED and PADDED:
        tile = tl.load(pointers, mask=row_mask[:, None] & (columns < head_dim)[None, :], other=0)
    elif MASKED:
        tile = tl.load(pointers, mask=row_mask[:, None], other=0)
    elif PADDED:
        tile = tl.load(pointers, mask=(columns < head_dim)[None, :], other=0)
    else:
        tile = tl.load(pointers)
    if FP8:
        tile = _e4m3_to_half(tile).to(DTYPE)
    return tile


@triton.jit
def _attend_tiles(
    acc, row_max, row_sum, q, tile_lo, tile_hi,
    k_ptr, v_ptr, table_ptr, kv_len, first_visible, last_visible, score_scale, wide_scale,
    cap_log2, soft_cap, k_page_stride, k_token_stride, v_page_stride, v_token_stride,
    head_dim_qk, head_dim_vo,
    BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_VO: tl.constexpr,
    PAGE: tl.constexpr, PAGED: tl.constexpr, FP8: tl.constexpr, HAS_CAP: tl.constexpr,
    PAD_QK: tl.constexpr, PAD_VO: tl.constexpr, MASKED: tl.constexpr, DTYPE: tl.constexpr,
    DOT_FP32: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Fold KV tiles tile_lo … tile_hi - 1 into (acc, row_max, row_sum).

    `score_scale` holds sm_scale, the key scale and, without a cap, log2(e). `MASKED=False` promises
    that every row sees every token of these tiles. `WIDE`: `score_scale` and `wide_scale` hold the
    first two, the smaller one first, and nothing else.
    """
    dim_qk = tl.arange(0, BLOCK_QK)
    dim_vo = tl.arange(0, BLOCK_VO)
    for tile in range(tile_lo, tile_hi):
        tokens = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        in_range = tokens < kv_len
        if PAGED:
            if MASKED:
                pages = tl.load(table_ptr + tokens // PAGE, mask=in_range, other=0).to(tl.int64)
            else:
                pages = tl.load(table_ptr + tokens // PAGE).to(tl.int64)
            slots = (tokens % PAGE).to(tl.int64)
            k_rows = pages * k_page_stride + slots * k_token_stride
            v_rows = pages * v_page_stride + slots * v_token_stride
        else:
            k_rows = tokens.to(tl.int64) * k_token_stride
            v_rows = tokens.to(tl.int64) * v_token_stride
        k = _load_kv(k_ptr, k_rows, dim_qk, in_range, head_dim_qk, FP8, PAD_QK, MASKED, DTYPE)
        if DOT_FP32:  # exact where the tensor cores' bf16 path is not available (interpreter)
            s = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee")
        else:
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
        s = s * score_scale
        if WIDE:
            s = s * wide_scale
            if HAS_CAP:
                s = _tanh(s / soft_cap) * soft_cap
            s = s * LOG2E
        elif HAS_CAP:
            s = _tanh(s) * cap_log2
        if MASKED:
            seen = (tokens[None, :] >= first_visible[:, None]) & (
                tokens[None, :] < last_visible[:, None]
            )
            s = tl.where(seen, s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(s - safe_max[:, None])
        alpha = tl.exp2(row_max - safe_max)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = _load_kv(v_ptr, v_rows, dim_vo, in_range, head_dim_vo, FP8, PAD_VO, MASKED, DTYPE)
        if DOT_FP32:
            acc += tl.dot(p, v.to(tl.float32), input_precision="ieee")
        else:
            acc = tl.dot(p.to(DTYPE), v, acc, input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(
    do_not_specialize=[
        "batch", "uniform_qo_len", "capacity", "group", "slots", "min_tiles", "max_splits",
        "lens_stride_b", "lens_stride_h",
    ]
)  # fmt: skip
def schedule_splits(
    kv_lens_ptr, qo_indptr_ptr, ends_ptr, split_tiles_ptr,
    batch, uniform_qo_len, capacity, group, slots, min_tiles, max_splits,
    lens_stride_b, lens_stride_h,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIFORM: tl.constexpr, HAS_LENS: tl.constexpr,
    BLOCK_B: tl.constexpr,
):  # fmt: skip
    """KV tiles a split for each KV head, and where each request's work items end, from the lengths.

    32 split sizes are weighed, from 1/4 to 2 × an equal share of all tiles: sizes below a share cut
    the work into waves, which evens out ragged lengths; sizes above it avoid a last wave that is
    mostly empty. The cost of a size is its waves times (tiles a split + 4 for starting one).
    """
    head = tl.program_id(0).to(tl.int64)
    total = tl.zeros((), dtype=tl.int64)
    for start in range(0, batch, BLOCK_B):
        tiles, units = _request_size(
            start + tl.arange(0, BLOCK_B), batch, head, uniform_qo_len, capacity, kv_lens_ptr,
            lens_stride_b, lens_stride_h, qo_indptr_ptr, group, BLOCK_M, BLOCK_N, UNIFORM, HAS_LENS,
        )  # fmt: skip
        total += tl.sum(tiles.to(tl.int64) * units, 0)
    size = tl.arange(0, 32)
    sixteenths = (16 + size % 16).to(tl.int64)
    shares = tl.where(size < 16, 16, 64).to(tl.int64) * slots
    per_split = tl.maximum((total * sixteenths + shares - 1) // shares, min_tiles).to(tl.int32)
    items = tl.zeros((32,), dtype=tl.int64)
    for start in range(0, batch, BLOCK_B):
        tiles, units = _request_size(
            start + tl.arange(0, BLOCK_B), batch, head, uniform_qo_len, capacity, kv_lens_ptr,
            lens_stride_b, lens_stride_h, qo_indptr_ptr, group, BLOCK_M, BLOCK_N, UNIFORM, HAS_LENS,
        )  # fmt: skip
        work = units[:, None] * _num_splits(tiles[:, None], per_split[None, :], max_splits)
        items += tl.sum(work.to(tl.int64), 0)
    cost = (items + slots - 1) // slots * (per_split + 4)
    best = tl.max(tl.where(cost == tl.min(cost, 0), per_split, 0), 0)
    tl.store(split_tiles_ptr + head, best)

    base = tl.zeros((), dtype=tl.int32)
    for start in range(0, batch, BLOCK_B):
        requests = start + tl.arange(0, BLOCK_B)
        tiles, units = _request_size(
            requests, batch, head, uniform_qo_len, capacity, kv_lens_ptr, lens_stride_b,
            lens_stride_h, qo_indptr_ptr, group, BLOCK_M, BLOCK_N, UNIFORM, HAS_LENS,
        )  # fmt: skip
        work = units * _num_splits(tiles, best, max_splits)
        through = base + tl.cumsum(work, 0)
        tl.store(ends_ptr + head * batch + requests, through, mask=requests < batch)
        base += tl.sum(work, 0)


@triton.jit
def _find_item(item, head, batch, ends_ptr, BLOCK_B: tl.constexpr):
    """The request that work item `item` belongs to (`batch` when past the last), and its unit."""
    request = tl.zeros((), dtype=tl.int32)
    before = tl.zeros((), dtype=tl.int32)
    for start in range(0, batch, BLOCK_B):
        requests = start + tl.arange(0, BLOCK_B)
        live = requests < batch
        through = tl.load(ends_ptr + head * batch + requests, mask=live, other=0)
        passed = live & (through <= item)
        request += tl.sum(passed.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(passed, through, 0), 0))
    return request, item - before


@triton.jit
def _num_splits(tiles, per_split, max_splits):
    """Splits of a request with `tiles` KV tiles: at least one, so that empty rows are written."""
    return tl.minimum(tl.maximum((tiles + per_split - 1) // per_split, 1), max_splits)


@triton.jit
def _request_size(
    requests, batch, head, uniform_qo_len, capacity, kv_lens_ptr, lens_stride_b, lens_stride_h,
    qo_indptr_ptr, group,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIFORM: tl.constexpr, HAS_LENS: tl.constexpr,
):  # fmt: skip
    """KV tiles and query tiles of a block of requests; lanes past the batch give 0 and 0."""
    live = requests < batch
    if HAS_LENS:
        offsets = requests.to(tl.int64) * lens_stride_b + head * lens_stride_h
        lens = tl.load(kv_lens_ptr + offsets, mask=live, other=0)
        lens = tl.minimum(tl.maximum(lens, 0), capacity)
    else:
        lens = tl.where(live, capacity, 0)
    if UNIFORM:
        qo_lens = tl.where(live, uniform_qo_len, 0)
    else:
        starts = tl.load(qo_indptr_ptr + requests, mask=live, other=0)
        qo_lens = tl.load(qo_indptr_ptr + requests + 1, mask=live, other=0) - starts
    return (lens + BLOCK_N - 1) // BLOCK_N, (qo_lens * group + BLOCK_M - 1) // BLOCK_M


@triton.jit
def fixed_splits(
    kv_len, qo_len, group, window_left, chunk_tiles, slots,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr,
):  # fmt: skip
    """First KV tile that a request sees, tiles a split, and splits: of its own lengths alone.

    `chunk_tiles` tiles a split, or more where query tiles times splits would exceed `slots`.
    """
    first = tl.zeros((), dtype=tl.int32)
    if HAS_LEFT:
        begin = (kv_len - qo_len).to(tl.int64) - window_left
        first = (tl.maximum(begin, 0) // BLOCK_N).to(tl.int32)
    units = (qo_len * group + BLOCK_M - 1) // BLOCK_M
    most = tl.maximum(slots // tl.maximum(units, 1), 1)
    tiles = tl.maximum((kv_len + BLOCK_N - 1) // BLOCK_N - first, 0)
    per_split = tl.maximum((tiles + most - 1) // most, chunk_tiles)
    return first, per_split, tl.maximum((tiles + per_split - 1) // per_split, 1)


@triton.jit
def request_lengths(
    request, head, uniform_qo_len, capacity, kv_lens_ptr, lens_stride_b, lens_stride_h,
    qo_indptr_ptr, UNIFORM: tl.constexpr, HAS_LENS: tl.constexpr,
):  # fmt: skip
    """First query row of a request (64 bits), its number of queries, and its KV tokens."""
    if UNIFORM:
        qo_len = uniform_qo_len
        q_start = request.to(tl.int64) * uniform_qo_len
    else:
        q_start = tl.load(qo_indptr_ptr + request).to(tl.int64)
        qo_len = tl.load(qo_indptr_ptr + request + 1) - q_start.to(tl.int32)
    if HAS_LENS:
        kv_len = tl.load(kv_lens_ptr + request.to(tl.int64) * lens_stride_b + head * lens_stride_h)
        kv_len = tl.minimum(tl.maximum(kv_len, 0), capacity)
    else:
        kv_len = capacity
    return q_start, qo_len, kv_len


@triton.jit
def _with_sink(acc, row_max, row_sum, sink, empty):
    """The state with `sink` (base 2) added to the denominator; empty rows stay empty."""
    with_sink = tl.maximum(row_max, sink)
    with_sink = tl.where(empty, 0.0, with_sink)
    rescale = tl.where(empty, 0.0, tl.exp2(row_max - with_sink))
    row_sum = row_sum * rescale + tl.where(empty, 0.0, tl.exp2(sink - with_sink))
    acc = acc * rescale[:, None]
    row_max = tl.where(empty, row_max, with_sink)
    return acc, row_max, row_sum


@triton.jit
def _find_request(slot, batch, group, qo_indptr_ptr, BLOCK_M: tl.constexpr):
    """The request that owns query-tile slot `slot`, and its first slot.

    Request b owns slots from `qo_indptr[b] * group // BLOCK_M + b`; that leaves room for every
    one of its tiles, because floor(x + y) - floor(x) + 1 >= ceil(y). Binary search for the last
    request whose first slot is not past `slot`.
    """
    low = tl.zeros((), dtype=tl.int32)
    high = tl.zeros((), dtype=tl.int32) + batch - 1
    while low < high:
        middle = (low + high + 1) // 2
        first = (tl.load(qo_indptr_ptr + middle).to(tl.int64) * group) // BLOCK_M + middle
        go_up = first <= slot
        low = tl.where(go_up, middle, low)
        high = tl.where(go_up, high, middle - 1)
    first = (tl.load(qo_indptr_ptr + low).to(tl.int64) * group) // BLOCK_M + low
    return low, (slot - first).to(tl.int32)


@triton.jit(
    do_not_specialize=[
        "batch", "total_q", "uniform_qo_len", "capacity", "min_tiles", "max_splits", "chunk_tiles",
        "table_stride_b", "table_stride_h", "lens_stride_b",
        "lens_stride_h", "window_left", "window_right", "num_kv_heads", "group",
        "out_split_stride", "lse_split_stride", "slots", "slot_axis", "slot_rows",
    ]
)  # fmt: skip
def attention_split(
    q_ptr, k_ptr, v_ptr, table_ptr, kv_lens_ptr, qo_indptr_ptr, k_scale_ptr, v_scale_ptr, sink_ptr,
    ends_ptr, split_tiles_ptr, out_ptr, lse_ptr, part_out_ptr, part_lse_ptr,
    batch, total_q, uniform_qo_len, capacity, num_kv_heads, group, head_dim_qk, head_dim_vo,
    sm_scale, soft_cap, window_left, window_right,
    min_tiles, max_splits, chunk_tiles, slots, slot_axis, slot_rows,
    q_token_stride, q_head_stride, k_page_stride, k_token_stride, k_head_stride,
    v_page_stride, v_token_stride, v_head_stride, table_stride_b, table_stride_h,
    lens_stride_b, lens_stride_h, k_scale_stride, v_scale_stride,
    out_token_stride, out_head_stride, out_split_stride,
    lse_token_stride, lse_head_stride, lse_split_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_VO: tl.constexpr,
    PAGE: tl.constexpr, PAGED: tl.constexpr, FP8: tl.constexpr, HAS_LENS: tl.constexpr,
    HAS_SCALE: tl.constexpr, UNIFORM: tl.constexpr, SCHEDULE: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINK: tl.constexpr,
    STORE_LSE: tl.constexpr, PAD_QK: tl.constexpr, PAD_VO: tl.constexpr, DOT_FP32: tl.constexpr,
    BLOCK_B: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One query tile × one split of its KV range → a partial state, or the answer.

    Longer than 80 lines because its steps share some forty values: a helper would take them all.

    SCHEDULE "direct": one split, out and lse are final. "scan" and "even" write partial states to
    `[max_splits, total_q, heads, head_dim]`: "scan" takes its item from `schedule_splits`; "even"
    cuts each row into up to `max_splits` equal parts, with the split on grid axis 1. So does
    "fixed", by `fixed_splits`, whoever else is in the batch: a request of one split is final, the
    states of others lie in `[batch, num_kv_heads, slot_axis, slot_rows, head_dim]`, slot `unit *
    splits + split` (`part_out_ptr`, `part_lse_ptr`; `None` elsewhere).
    """
    item = tl.program_id(0) // num_kv_heads
    head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    split = tl.program_id(1)
    if SCHEDULE == "scan":
        request, unit = _find_item(item, head, batch, ends_ptr, BLOCK_B)
        if request >= batch:
            return
    elif UNIFORM:
        units = (uniform_qo_len * group + BLOCK_M - 1) // BLOCK_M
        request = item // units
        unit = item % units
    else:
        request, unit = _find_request(item, batch, group, qo_indptr_ptr, BLOCK_M)

    q_start, qo_len, kv_len = request_lengths(
        request, head, uniform_qo_len, capacity, kv_lens_ptr, lens_stride_b, lens_stride_h,
        qo_indptr_ptr, UNIFORM, HAS_LENS,
    )  # fmt: skip

    splits = max_splits
    kv_tiles = (kv_len + BLOCK_N - 1) // BLOCK_N
    if SCHEDULE == "scan":
        splits = _num_splits(kv_tiles, tl.load(split_tiles_ptr + head), max_splits)
        split = unit % splits
        unit = unit // splits
    elif SCHEDULE == "even":
        splits = _num_splits(kv_tiles, min_tiles, max_splits)
    elif SCHEDULE == "fixed":
        first_tile, per_split, splits = fixed_splits(
            kv_len, qo_len, group, window_left, chunk_tiles, slots, BLOCK_M, BLOCK_N, HAS_LEFT
        )
        if split >= splits:
            return

    # Rows of the tile: row r is query token r // group, query head r % group of this KV head.
    rows = unit * BLOCK_M + tl.arange(0, BLOCK_M)
    row_live = rows < qo_len * group
    token = rows // group
    q_head = head * group + rows % group
    if unit * BLOCK_M >= qo_len * group:
        return
    position = kv_len - qo_len + token
    first_token = (unit * BLOCK_M) // group
    last_token = tl.minimum((unit * BLOCK_M + BLOCK_M - 1) // group, qo_len - 1)

    # What each row sees: [first_visible, last_visible); what any and what every row sees.
    last_visible = tl.zeros((BLOCK_M,), dtype=tl.int32) + kv_len
    any_end = kv_len
    every_end = kv_len
    if CAUSAL:
        last_visible = tl.minimum(last_visible, position + 1)
        any_end = tl.minimum(any_end, kv_len - qo_len + last_token + 1)
        every_end = tl.minimum(every_end, kv_len - qo_len + first_token + 1)
    elif HAS_RIGHT:  # in 64 bits: the window may be as large as an int32
        reach = position.to(tl.int64) + window_right + 1
        last_visible = tl.minimum(last_visible, reach).to(tl.int32)
        shift = (kv_len - qo_len).to(tl.int64) + window_right + 1
        any_end = tl.minimum(any_end, shift + last_token).to(tl.int32)
        every_end = tl.minimum(every_end, shift + first_token).to(tl.int32)
    first_visible = tl.zeros((BLOCK_M,), dtype=tl.int32)
    any_begin = tl.zeros((), dtype=tl.int32)
    if HAS_LEFT:
        reach = position.to(tl.int64) - window_left
        first_visible = tl.maximum(first_visible, reach).to(tl.int32)
        begin = (kv_len - qo_len + first_token).to(tl.int64) - window_left
        any_begin = tl.maximum(any_begin, begin).to(tl.int32)
    any_end = tl.maximum(any_end, 0)
    last_visible = tl.where(row_live, last_visible, 0)

    range_lo = any_begin // BLOCK_N
    range_hi = (any_end + BLOCK_N - 1) // BLOCK_N
    if SCHEDULE == "scan" or SCHEDULE == "even":
        this = tl.minimum(split, splits)  # past the last split: an empty range
        count = tl.maximum(range_hi - range_lo, 0).to(tl.int64)
        after = tl.minimum(split + 1, splits)
        tile_lo = range_lo + ((count * this) // splits).to(tl.int32)
        tile_hi = range_lo + ((count * after) // splits).to(tl.int32)
    elif SCHEDULE == "fixed":
        tile_lo = tl.maximum(range_lo, first_tile + split * per_split)
        tile_hi = tl.minimum(range_hi, first_tile + (split + 1) * per_split)
    else:
        tile_lo = range_lo
        tile_hi = range_hi

    q_row = (q_start + token) * q_token_stride + q_head * q_head_stride
    dim_qk = tl.arange(0, BLOCK_QK)
    dim_vo = tl.arange(0, BLOCK_VO)
    q_mask = row_live[:, None] & (dim_qk < head_dim_qk)[None, :]
    q = tl.load(q_ptr + q_row[:, None] + dim_qk[None, :], mask=q_mask, other=0.0)

    score_scale = sm_scale
    wide_scale = 1.0
    cap_log2 = soft_cap * LOG2E
    if WIDE:
        if HAS_SCALE:
            key_scale = tl.load(k_scale_ptr + head * k_scale_stride)
            smaller = tl.abs(sm_scale) < key_scale
            score_scale = tl.where(smaller, sm_scale, key_scale)
            wide_scale = tl.where(smaller, key_scale, sm_scale)
    elif HAS_SCALE:
        score_scale = score_scale * tl.load(k_scale_ptr + head * k_scale_stride)
    if WIDE:
        pass
    elif HAS_CAP:
        score_scale = score_scale / soft_cap
    else:
        score_scale = score_scale * LOG2E

    k_base = k_ptr + head * k_head_stride
    v_base = v_ptr + head * v_head_stride
    table = table_ptr
    if PAGED:
        table = table_ptr + request.to(tl.int64) * table_stride_b + head * table_stride_h
    else:
        k_base += request.to(tl.int64) * k_page_stride
        v_base += request.to(tl.int64) * v_page_stride

    acc = tl.zeros((BLOCK_M, BLOCK_VO), dtype=tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    if HAS_LEFT:  # the mask runs at both ends of the range
        interior_hi = tile_lo
    else:
        interior_hi = tl.minimum(tl.maximum(every_end // BLOCK_N, tile_lo), tile_hi)
        acc, row_max, row_sum = _attend_tiles(
            acc, row_max, row_sum, q, tile_lo, interior_hi,
            k_base, v_base, table, kv_len, first_visible, last_visible, score_scale, wide_scale,
            cap_log2, soft_cap, k_page_stride, k_token_stride, v_page_stride, v_token_stride,
            head_dim_qk, head_dim_vo,
            BLOCK_N, BLOCK_QK, BLOCK_VO, PAGE, PAGED, FP8, HAS_CAP, PAD_QK, PAD_VO, False, DTYPE,
            DOT_FP32, WIDE,
        )  # fmt: skip
    acc, row_max, row_sum = _attend_tiles(
        acc, row_max, row_sum, q, interior_hi, tile_hi,
        k_base, v_base, table, kv_len, first_visible, last_visible, score_scale, wide_scale,
        cap_log2, soft_cap, k_page_stride, k_token_stride, v_page_stride, v_token_stride,
        head_dim_qk, head_dim_vo,
        BLOCK_N, BLOCK_QK, BLOCK_VO, PAGE, PAGED, FP8, HAS_CAP, PAD_QK, PAD_VO, True, DTYPE,
        DOT_FP32, WIDE,
    )  # fmt: skip

    # Empty by visibility, not by row_max: a row that sees only NaN must answer NaN.
    seen_end = tl.minimum(last_visible, tile_hi * BLOCK_N)
    empty = seen_end <= tl.maximum(first_visible, tile_lo * BLOCK_N)
    if HAS_SINK and SCHEDULE == "direct":
        sink = tl.load(sink_ptr + q_head, mask=row_live, other=float("-inf")) * LOG2E
        acc, row_max, row_sum = _with_sink(acc, row_max, row_sum, sink, empty)
    if HAS_SINK and SCHEDULE == "fixed":
        if splits == 1:
            sink = tl.load(sink_ptr + q_head, mask=row_live, other=float("-inf")) * LOG2E
            acc, row_max, row_sum = _with_sink(acc, row_max, row_sum, sink, empty)
    denominator = tl.where(empty, 1.0, row_sum)
    value_scale = 1.0
    if HAS_SCALE:
        value_scale = tl.load(v_scale_ptr + head * v_scale_stride)
    acc = acc * (value_scale / denominator)[:, None]
    acc = tl.where(empty[:, None], 0.0, acc)
    lse = tl.where(empty, float("-inf"), (row_max + tl.log2(denominator)) * LN2)

    row_index = q_start + token
    out_row = row_index * out_token_stride + q_head * out_head_stride
    lse_row = row_index * lse_token_stride + q_head * lse_head_stride
    out_mask = row_live[:, None] & (dim_vo < head_dim_vo)[None, :]
    if SCHEDULE == "direct":
        out = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_row[:, None] + dim_vo[None, :], out, mask=out_mask)
        if STORE_LSE:
            tl.store(lse_ptr + lse_row, lse, mask=row_live)
    elif SCHEDULE == "fixed":
        if splits == 1:
            out = acc.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_row[:, None] + dim_vo[None, :], out, mask=out_mask)
            if STORE_LSE:
                tl.store(lse_ptr + lse_row, lse, mask=row_live)
        else:
            lane = tl.arange(0, BLOCK_M)
            slot = (request.to(tl.int64) * num_kv_heads + head) * slot_axis + unit * splits + split
            part_row = slot * slot_rows + lane
            held = row_live & (lane < slot_rows)
            tl.store(
                part_out_ptr + (part_row * head_dim_vo)[:, None] + dim_vo[None, :],
                acc,
                mask=out_mask & (held & ~empty)[:, None],
            )
            tl.store(part_lse_ptr + part_row, lse, mask=held)
    else:
        # An empty state leaves its output unwritten: the merge never reads it.
        part = split.to(tl.int64)
        tl.store(
            out_ptr + part * out_split_stride + out_row[:, None] + dim_vo[None, :],
            acc,
            mask=out_mask & (~empty)[:, None],
        )
        tl.store(lse_ptr + part * lse_split_stride + lse_row, lse, mask=row_live)
        if SCHEDULE == "scan":
            if split == splits - 1:  # splits that this request does not use are empty states
                unused_row = lse_row + splits.to(tl.int64) * lse_split_stride
                for _ in range(splits, max_splits):
                    tl.store(
                        lse_ptr + unused_row,
                        tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32),
                        mask=row_live,
                    )
                    unused_row += lse_split_stride
