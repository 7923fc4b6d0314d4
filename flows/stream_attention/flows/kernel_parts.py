"""What generated kernels call: rounding to storage, reductions that keep a NaN.

fp8 e4m3fn travels as uint8 bits, because compute capability 8.0 has no instruction for it, so that
every device stores and reads the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_previous(DEPENDENT: tl.constexpr):
    """The first thing that a kernel does: let the next launch be set up while this one runs, and
    wait until the one before has ended (programmatic dependent launch, compute capability 9.0).
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def e4m3_to_float(bits):
    """e4m3fn bits, uint8, as float32, exactly: via fp16, whose exponent bias is 8 larger."""
    wide = bits.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def float_to_e4m3(x):
    """float32 as e4m3fn bits, uint8, to the nearest, ties to even; ±448 beyond, NaN stays NaN."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    # 20 of float32's 23 mantissa bits go, half of the last one that stays rounds them; a carry
    # into the exponent is right. The bias goes from 127 to 7.
    word = size.to(tl.int32, bitcast=True)
    normal = ((word + 0x7FFFF + ((word >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, which is the last place of a float32 in [2^14, 2^15).
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    return (sign | tl.where(x != x, 0x7F, code)).to(tl.uint8)


@triton.jit
def float_to_bfloat16(x):
    """float32 as bfloat16, to the nearest, ties to even. Triton's own interpreter truncates."""
    word = x.to(tl.int32, bitcast=True)
    high = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, high).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def column_max(x, AXIS: tl.constexpr):
    """max of `x` [rows, cols] along an axis, which stays as 1; NaN where one is."""
    nan = tl.max((x != x).to(tl.int32), AXIS, keep_dims=True)
    return tl.where(nan > 0, float("nan"), tl.max(x, AXIS, keep_dims=True))


@triton.jit
def column_min(x, AXIS: tl.constexpr):
    """min of `x` [rows, cols] along an axis, which stays as 1; NaN where one is."""
    nan = tl.max((x != x).to(tl.int32), AXIS, keep_dims=True)
    return tl.where(nan > 0, float("nan"), tl.min(x, AXIS, keep_dims=True))


@triton.jit
def column_sum(x, AXIS: tl.constexpr):
    """Σ of `x` [rows, cols] along an axis, which stays as 1."""
    return tl.sum(x, AXIS, keep_dims=True)


@triton.jit
def larger(x, y):
    """max(x, y) of each element; NaN where one is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(x, y):
    """min(x, y) of each element; NaN where one is."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def as_stored(x, DTYPE: tl.constexpr):
    """A value as its storage has it; `DTYPE` tl.uint8 is e4m3fn. From float32 rounded once."""
    if x.dtype == DTYPE:
        stored = x
    elif DTYPE == tl.uint8:
        stored = float_to_e4m3(x.to(tl.float32))
    elif DTYPE == tl.bfloat16:
        stored = float_to_bfloat16(x.to(tl.float32))
    else:
        stored = x.to(tl.float32).to(DTYPE)
    return stored


@triton.jit
def as_float(x):
    """What a storage has, as float32, exactly; uint8 is e4m3fn."""
    if x.dtype == tl.uint8:
        value = e4m3_to_float(x)
    else:
        value = x.to(tl.float32)
    return value


@triton.jit
def store_tokens(new_ptr, new_stride, first_token, page_ptr, slot_stride, begin, count, scale,
                 PAGE_LANES: tl.constexpr, DIM: tl.constexpr, DIM_LANES: tl.constexpr,
                 READ: tl.constexpr):  # fmt: skip
    """Store new tokens into the slots `[begin, count)` of a page of one KV head.

    new_ptr: row `first_token` goes to slot `begin`. Returns with `READ` the page as stored, float32
    [PAGE_LANES, DIM_LANES], 0 beyond `count` and `DIM`; without, what was stored.
    """
    slots, dims = tl.arange(0, PAGE_LANES), tl.arange(0, DIM_LANES)
    inside = (dims < DIM)[None, :]
    is_new = ((slots >= begin) & (slots < count))[:, None] & inside
    rows = (slots - begin + first_token).to(tl.int64) * new_stride
    new = tl.load(new_ptr + rows[:, None] + dims[None, :], mask=is_new, other=0)
    dtype: tl.constexpr = page_ptr.dtype.element_ty
    if dtype == tl.uint8:
        new = tl.div_rn(new.to(tl.float32), scale)
    stored = as_stored(new, dtype)
    at = page_ptr + (slots.to(tl.int64) * slot_stride)[:, None] + dims[None, :]
    tl.store(at, stored, mask=is_new)
    page = stored
    if READ:
        old = tl.load(at, mask=(slots < begin)[:, None] & inside, other=0)
        page = as_float(tl.where(is_new, stored, old))
        if dtype == tl.uint8:
            page = page * scale
    return page


@triton.jit
def repeat_last(blocks, last, LANES: tl.constexpr):
    """[LANES, cols] with the row `last` in place of all that come after it."""
    rows = tl.arange(0, LANES)[:, None]
    kept = column_sum(tl.where(rows == last, blocks, 0.0), 0)
    return tl.where(rows > last, kept, blocks)
