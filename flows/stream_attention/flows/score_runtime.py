"""Device functions that generated score launches call."""

import triton
import triton.language as tl

from stream_attention.flows.kernel_parts import larger, smaller


@triton.jit
def combined_sum(partial, num_chunks, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Σ over chunks of `[num_chunks, SIZE]`: [SIZE], in an order that only BLOCK sets."""
    lanes = tl.arange(0, SIZE)
    total = tl.zeros([BLOCK, SIZE], tl.float32)
    for start in range(0, num_chunks, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        at = partial + chunk[:, None] * SIZE + lanes[None, :]
        total += tl.load(at, mask=(chunk < num_chunks)[:, None], other=0.0)
    return tl.sum(total, 0)


@triton.jit
def combined_max(partial, num_chunks, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The largest over chunks of `[num_chunks, SIZE]`: [SIZE], -inf over nothing."""
    lanes = tl.arange(0, SIZE)
    largest = tl.full([BLOCK, SIZE], float("-inf"), tl.float32)
    for start in range(0, num_chunks, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        at = partial + chunk[:, None] * SIZE + lanes[None, :]
        found = tl.load(at, mask=(chunk < num_chunks)[:, None], other=float("-inf"))
        largest = larger(largest, found)
    return tl.reduce(largest, 0, larger)


@triton.jit
def combined_min(partial, num_chunks, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest over chunks of `[num_chunks, SIZE]`: [SIZE], +inf over nothing."""
    lanes = tl.arange(0, SIZE)
    smallest = tl.full([BLOCK, SIZE], float("inf"), tl.float32)
    for start in range(0, num_chunks, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        at = partial + chunk[:, None] * SIZE + lanes[None, :]
        found = tl.load(at, mask=(chunk < num_chunks)[:, None], other=float("inf"))
        smallest = smaller(smallest, found)
    return tl.reduce(smallest, 0, smaller)


@triton.jit
def combined_mass(maxima, masses, largest, num_chunks, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """`Σ mass_i exp(max_i - largest)` over chunks: [SIZE], in an order that only BLOCK sets."""
    lanes = tl.arange(0, SIZE)
    total = tl.zeros([BLOCK, SIZE], tl.float32)
    for start in range(0, num_chunks, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        at, held = chunk[:, None] * SIZE + lanes[None, :], (chunk < num_chunks)[:, None]
        maximum = tl.load(maxima + at, mask=held, other=float("-inf"))
        total += tl.load(masses + at, mask=held, other=0.0) * tl.exp(maximum - largest[None, :])
    return tl.sum(total, 0)
