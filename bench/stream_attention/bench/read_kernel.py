"""A streaming read in Triton: the fastest way we know to pull n bytes through a GPU once.

Imported on CUDA only. Each program adds up its share of an int32 array and stores one word, so that
no load can be dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

# (elements a step, programs an SM; 0 = one step a program), 8 warps each. Wide steps keep many
# 16-byte loads in flight; which shape wins changes with the size, so the curve takes the best.
LAUNCH_SHAPES = ((4096, 0), (8192, 0), (4096, 4), (8192, 2), (16384, 1), (16384, 2), (8192, 4))
NUM_WARPS = 8


@triton.jit
def _read_kernel(src, dst, count, BLOCK: tl.constexpr):
    """dst[program] = Σ of src over the program's strided share; `count` is a multiple of BLOCK."""
    program = tl.program_id(0).to(tl.int64)
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(program * BLOCK, count, stride):
        total += tl.load(src + start + offsets)
    tl.store(dst + program, tl.sum(total, 0))


def read_call(
    source: torch.Tensor, sink: torch.Tensor, shape: tuple[int, int], num_sms: int
) -> Callable[[], None]:
    """A call that reads all of `source` (int32, contiguous, a multiple of 16,384 elements).

    sink: int32, at least `source.numel() / 4096` elements; its content is meaningless.
    """
    block, per_sm = shape
    count = source.numel()
    steps = count // block
    programs = steps if per_sm == 0 else min(steps, per_sm * num_sms)

    def call() -> None:
        _read_kernel[(programs,)](source, sink, count, BLOCK=block, num_warps=NUM_WARPS)

    return call
