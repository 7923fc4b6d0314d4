"""Triton kernels of the op-by-op executor, one op each, from memory to memory.

A value is float32, row-major: `[rows, max_pages, r, c]` where it is RAGGED, of which a launch reads
and writes the pages of each row's window, and `[rows, r, c]` where it is BATCHED; q is read as it
is. The grid is (blocks of pages, rows, blocks of elements), and programs past the end of a row's
window leave at once. Lanes of tokens that an unfinished page does not have hold anything; kernels
that reduce over them put the reduction's identity there first.

`x_request, x_head, x_page, x_row, x_col` are strides of an operand in elements, `x_page` 0 of a
BATCHED one. X_PAGES, X_ROWS, X_COLS: the axes that it has, for it repeats along the others; X_FLAT:
it lies as the output does. PAGES: pages that a program takes. ELEMENTS: r · c of the output. HELD:
whose tokens an axis of length LENGTH or DEPTH has: "all" of them, those of its "page", or, of a
BATCHED value, those that the fullest page of the "row" has, which is its first.
"""

import os

import triton
import triton.language as tl

from stream_attention.flows.score_runtime import larger, smaller

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def window(
    sequence_lengths, length_request, length_head, HEADS: tl.constexpr, BOS: tl.constexpr,
    EOS: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """(row int64, request, head, length, first and last candidate position) of the program."""
    row = tl.program_id(1).to(tl.int64)
    request, head = row // HEADS, row % HEADS
    length = tl.load(sequence_lengths + request * length_request + head * length_head)
    num_pages = (length + PAGE_SIZE - 1) // PAGE_SIZE
    first = tl.minimum(num_pages, BOS)
    return row, request, head, length, first, tl.maximum(first, num_pages - EOS)


@triton.jit
def tokens(length, position, PAGE_SIZE: tl.constexpr):
    """Tokens of the pages at these positions."""
    return tl.minimum(tl.maximum(length - position * PAGE_SIZE, 0), PAGE_SIZE)


@triton.jit
def reduced(x, OP: tl.constexpr, AXIS: tl.constexpr):
    """A reduction of lanes that hold its identity where they are padded; a mean is its sum."""
    if OP == "max":
        if INTERPRETED:  # which takes a function of two numbers one number at a time
            found = tl.max(x, AXIS) + tl.sum(tl.where(x != x, x, 0.0), AXIS)
        else:
            found = tl.reduce(x, AXIS, larger)
    elif OP == "min":
        if INTERPRETED:
            found = tl.min(x, AXIS) + tl.sum(tl.where(x != x, x, 0.0), AXIS)
        else:
            found = tl.reduce(x, AXIS, smaller)
    elif OP == "l2norm":
        found = tl.sqrt(tl.sum(x * x, AXIS))
    else:
        found = tl.sum(x, AXIS)
    return found


@triton.jit
def gather_kernel(
    out, field, page_table, sequence_lengths, max_pages, table_request, table_head,
    length_request, length_head, field_page, field_head, field_row,
    ROW_TOKENS: tl.constexpr, COL_TOKENS: tl.constexpr, COLS: tl.constexpr,
    ELEMENTS: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    BOS: tl.constexpr, EOS: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """`out[row, position] = field[page_table[row, position], head]`, 0 where there is no token."""
    row, request, head, length, first, last = window(
        sequence_lengths, length_request, length_head, HEADS, BOS, EOS, PAGE_SIZE
    )
    start = first + tl.program_id(0) * PAGES
    if start >= last:
        return
    lane, at = tl.arange(0, PAGES), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = start + lane < last
    table = page_table + request * table_request + head * table_head + start
    page = tl.load(table + lane, mask=inside, other=0).to(tl.int64)
    kept = inside[:, None] & (at < ELEMENTS)[None, :]
    present, held = kept, tokens(length, start + lane, PAGE_SIZE)[:, None]
    if ROW_TOKENS:
        present = present & ((at // COLS)[None, :] < held)
    if COL_TOKENS:
        present = present & ((at % COLS)[None, :] < held)
    places = page[:, None] * field_page + (at // COLS * field_row + at % COLS)[None, :]
    value = tl.load(field + head * field_head + places, mask=present, other=0.0)
    base = out + (row * max_pages + start) * ELEMENTS
    tl.store(base + lane[:, None] * ELEMENTS + at[None, :], value.to(tl.float32), mask=kept)


@triton.jit
def save_kernel(
    x, field, page_table, sequence_lengths, max_pages, table_request, table_head,
    length_request, length_head, field_page, field_head, field_row,
    ROW_TOKENS: tl.constexpr, COL_TOKENS: tl.constexpr, COLS: tl.constexpr,
    ELEMENTS: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    BOS: tl.constexpr, EOS: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """`field[page_table[row, position], head] = x[row, position]`, 0 where there is no token."""
    row, request, head, length, first, last = window(
        sequence_lengths, length_request, length_head, HEADS, BOS, EOS, PAGE_SIZE
    )
    start = first + tl.program_id(0) * PAGES
    if start >= last:
        return
    lane, at = tl.arange(0, PAGES), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = start + lane < last
    table = page_table + request * table_request + head * table_head + start
    page = tl.load(table + lane, mask=inside, other=0).to(tl.int64)
    kept = inside[:, None] & (at < ELEMENTS)[None, :]
    present, held = kept, tokens(length, start + lane, PAGE_SIZE)[:, None]
    if ROW_TOKENS:
        present = present & ((at // COLS)[None, :] < held)
    if COL_TOKENS:
        present = present & ((at % COLS)[None, :] < held)
    base = x + (row * max_pages + start) * ELEMENTS
    value = tl.load(base + lane[:, None] * ELEMENTS + at[None, :], mask=present, other=0.0)
    places = page[:, None] * field_page + (at // COLS * field_row + at % COLS)[None, :]
    tl.store(field + head * field_head + places, value.to(field.dtype.element_ty), mask=kept)


@triton.jit
def offsets(
    at, page_stride, row_stride, col_stride, FLAT: tl.constexpr, HAS_PAGES: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_COLS: tl.constexpr, COLS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Where an operand has what belongs to elements `at` of an output."""
    if FLAT:
        place = at
    else:
        place = tl.zeros_like(at)
        if HAS_PAGES:
            place += at // ELEMENTS * page_stride
        if HAS_ROWS:
            place += at % ELEMENTS // COLS * row_stride
        if HAS_COLS:
            place += at % COLS * col_stride
    return place


@triton.jit
def applied(x, y, OP: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr):
    """An elementwise op; y is x where it takes one operand."""
    if OP == "add":
        found = ALPHA * x + BETA * y
    elif OP == "multiply":
        found = x * y
    elif OP == "maximum":
        found = larger(x, y)
    elif OP == "minimum":
        found = smaller(x, y)
    elif OP == "relu":
        found = tl.where((x >= ALPHA) | (x != x), x, BETA)
    elif OP == "sigmoid":
        found = 1.0 / (1.0 + tl.exp(BETA * x + ALPHA))
    elif OP == "silu":
        found = x / (1.0 + tl.exp(BETA * x + ALPHA))
    elif OP == "abs":
        found = tl.abs(BETA * x + ALPHA)
    elif OP == "exp":
        found = tl.exp(BETA * x + ALPHA)
    elif OP == "log":
        found = tl.log(BETA * x + ALPHA)
    else:
        tl.static_assert(OP == "transpose", "no elementwise op")
        found = x
    return found


@triton.jit
def elementwise_kernel(
    out, x, y, sequence_lengths, max_pages, length_request, length_head,
    x_request, x_head, x_page, x_row, x_col, y_request, y_head, y_page, y_row, y_col,
    OP: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, BINARY: tl.constexpr,
    X_FLAT: tl.constexpr, X_PAGES: tl.constexpr, X_ROWS: tl.constexpr, X_COLS: tl.constexpr,
    Y_FLAT: tl.constexpr, Y_PAGES: tl.constexpr, Y_ROWS: tl.constexpr, Y_COLS: tl.constexpr,
    RAGGED: tl.constexpr, COLS: tl.constexpr,
    ELEMENTS: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    BOS: tl.constexpr, EOS: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """`out = op(x, y)`, operands repeated along the axes that they lack."""
    row, request, head, _length, first, last = window(
        sequence_lengths, length_request, length_head, HEADS, BOS, EOS, PAGE_SIZE
    )
    start, count = first + tl.program_id(0) * PAGES, 1
    if RAGGED:
        if start >= last:
            return
        count = tl.minimum(last - start, PAGES)
        base = out + (row * max_pages + start) * ELEMENTS
    else:
        base = out + row * ELEMENTS
    x_base = x + request * x_request + head * x_head + start.to(tl.int64) * x_page
    y_base = y + request * y_request + head * y_head + start.to(tl.int64) * y_page
    for begin in range(0, PAGES * ELEMENTS, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < count * ELEMENTS
        places = offsets(at, x_page, x_row, x_col, X_FLAT, X_PAGES, X_ROWS, X_COLS, COLS, ELEMENTS)
        left = tl.load(x_base + places, mask=inside, other=0.0).to(tl.float32)
        right = left
        if BINARY:
            places = offsets(
                at, y_page, y_row, y_col, Y_FLAT, Y_PAGES, Y_ROWS, Y_COLS, COLS, ELEMENTS
            )
            right = tl.load(y_base + places, mask=inside, other=0.0).to(tl.float32)
        tl.store(base + at, applied(left, right, OP, ALPHA, BETA), mask=inside)


@triton.jit
def gemm_kernel(
    out, x, y, sequence_lengths, max_pages, length_request, length_head,
    x_request, x_head, x_page, x_row, y_request, y_head, y_page, y_row,
    RAGGED: tl.constexpr, X_PAGES: tl.constexpr, ROWS_X: tl.constexpr, ROWS_Y: tl.constexpr,
    DEPTH: tl.constexpr, HELD: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr, HEADS: tl.constexpr, BOS: tl.constexpr, EOS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """`out = y xᵀ`: rows of all pages' y at a time, against one row of x after another.

    A step is bound by the bytes of y, which is read once and held; float32 throughout, for which
    tensor cores have no product.
    """
    row, request, head, length, first, last = window(
        sequence_lengths, length_request, length_head, HEADS, BOS, EOS, PAGE_SIZE
    )
    start, count = first + tl.program_id(0) * PAGES, 1
    if RAGGED:
        if start >= last:
            return
        count = tl.minimum(last - start, PAGES)
        base = out + (row * max_pages + start) * (ROWS_X * ROWS_Y)
    else:
        base = out + row * (ROWS_X * ROWS_Y)
    x_base = x + request * x_request + head * x_head + start.to(tl.int64) * x_page
    y_base = y + request * y_request + head * y_head + start.to(tl.int64) * y_page
    depth = tl.arange(0, BLOCK_DEPTH)[None, :]
    for begin in range(0, PAGES * ROWS_Y, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside, page = at < count * ROWS_Y, at // ROWS_Y
        kept = inside[:, None] & (depth < DEPTH)
        if HELD == "page":
            kept = kept & (depth < tokens(length, start + page, PAGE_SIZE)[:, None])
        elif HELD == "row":
            kept = kept & (depth < tokens(length, first, PAGE_SIZE))
        places = page * y_page + at % ROWS_Y * y_row
        left = tl.load(y_base + places[:, None] + depth, mask=kept, other=0.0).to(tl.float32)
        for column in range(ROWS_X):
            if X_PAGES:
                places_x = (page * x_page + column * x_row)[:, None] + depth
                right = tl.load(x_base + places_x, mask=kept, other=0.0)
            else:
                right = tl.load(x_base + column * x_row + depth, mask=depth < DEPTH, other=0.0)
            product = left * right.to(tl.float32)
            if HELD != "all":
                product = tl.where(kept, product, 0.0)
            tl.store(base + at * ROWS_X + column, tl.sum(product, 1), mask=inside)


@triton.jit
def reduce_kernel(
    out, x, sequence_lengths, max_pages, length_request, length_head,
    x_request, x_head, x_page, x_row,
    OP: tl.constexpr, IDENTITY: tl.constexpr, DIM: tl.constexpr, OUTER: tl.constexpr,
    INNER: tl.constexpr, SIZE: tl.constexpr, LENGTH: tl.constexpr, HELD: tl.constexpr,
    REPEATS: tl.constexpr, RAGGED: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, BOS: tl.constexpr, EOS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Rows (DIM 1) or columns (DIM 2) of each page reduced: `out [OUTER, INNER]`.

    OUTER: blocks of SIZE rows where DIM is 1, else rows, of SIZE columns. INNER: columns, else 1.
    LENGTH: of the axis. REPEATS: a block without a token gives what the last one with some gives.
    """
    row, request, head, length, first, last = window(
        sequence_lengths, length_request, length_head, HEADS, BOS, EOS, PAGE_SIZE
    )
    start, count = first + tl.program_id(0) * PAGES, 1
    if RAGGED:
        if start >= last:
            return
        count = tl.minimum(last - start, PAGES)
        base = out + (row * max_pages + start) * (OUTER * INNER)
    else:
        base = out + row * (OUTER * INNER)
    x_base = x + request * x_request + head * x_head + start.to(tl.int64) * x_page
    lane = tl.arange(0, BLOCK_SIZE)[None, :]
    for begin in range(0, PAGES * OUTER * INNER, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside, page = at < count * OUTER * INNER, at // (OUTER * INNER)
        outer, inner = at // INNER % OUTER, at % INNER
        held = tl.full([BLOCK], LENGTH, tl.int32)
        if HELD == "page":
            held = tokens(length, start + page, PAGE_SIZE)
        elif HELD == "row":
            held = tl.zeros_like(held) + tokens(length, first, PAGE_SIZE)
        if REPEATS:
            outer = tl.minimum(outer, tl.maximum(tl.cdiv(held, SIZE) - 1, 0))
        if DIM == 1:
            held = tl.minimum(tl.maximum(held - outer * SIZE, 0), SIZE)
            places = ((outer * SIZE)[:, None] + lane) * x_row + inner[:, None]
        else:
            places = (outer * x_row)[:, None] + lane
        kept = inside[:, None] & (lane < held[:, None])
        value = tl.load(x_base + (page * x_page)[:, None] + places, mask=kept, other=0.0)
        value = tl.where(kept, value.to(tl.float32), IDENTITY)
        found = reduced(value, OP, 1)
        if OP == "mean":
            found = found / tl.maximum(held, 1).to(tl.float32)
        tl.store(base + at, found, mask=inside)
