"""Statistics of measurements that need no model of their noise, and no random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from stream_attention.core.errors import Faults


def median_interval(samples: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """`(x[k], x[n + 1 - k])` of the n ordered samples, with the largest k that holds `level`.

    The exact interval of the median from order statistics: the number of independent samples below
    the median of any continuous distribution is binomial with p = 1/2, so the interval covers the
    median with probability `1 - 2 · P(Binomial(n, 1/2) < k)`, computed in exact fractions. It
    assumes no shape; it does assume that one sample says nothing of the next.

    samples: numbers >= 0, such as times or ratios of times, in any order. level: in 0..1, both
    excluded. Gives `(0.0, inf)` where even the smallest and the largest sample cover the median
    with less than `level`: fewer than 6 samples at 0.95. Raises `ValueError` with every fault.

    W. R. Thompson, "On confidence ranges for the median and other expectation distributions for
    populations of unknown distribution form", Annals of Mathematical Statistics 7 (1936).
    """
    faults = Faults()
    known = all(_is_number(x) and x >= 0 for x in samples)  # NaN is not
    faults.require(len(samples) > 0, "samples", samples, "needs at least one", "[1.0]")
    faults.require(known, "samples", samples, "must be numbers >= 0", "[1.0]")
    inside = _is_number(level) and 0 < level < 1
    faults.require(inside, "level", level, "must be a number in 0..1, both excluded", 0.95)
    faults.raise_if_any("median_interval")
    ordered = sorted(samples)
    rank = _largest_rank(len(ordered), level)
    if rank == 0:
        return 0.0, math.inf
    return ordered[rank - 1], ordered[-rank]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _largest_rank(num_samples: int, level: float) -> int:
    """The largest k with `2 · Σ_{i<k} C(n, i) <= (1 - level) · 2^n`; 0 where there is none."""
    most = (1 - Fraction(level)) * 2**num_samples / 2
    rank, below, term = 0, 0, 1  # term = C(n, rank)
    while rank < num_samples and below + term <= most:
        below += term
        rank += 1
        term = term * (num_samples - rank + 1) // rank
    return rank
