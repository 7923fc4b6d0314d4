"""The interval of the median: published ranks, exact coverage, order, and what is refused."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_attention.core.statistics import median_interval


# W. J. Conover, Practical Nonparametric Statistics: binomial ranks at 95 %.
@pytest.mark.parametrize(
    ("count", "rank"), [(6, 1), (8, 1), (9, 2), (12, 3), (20, 6), (25, 8), (50, 18), (100, 40)]
)
def test_ranks_at_95_percent_are_the_published_ones(count, rank):
    low, high = median_interval([float(i) for i in range(1, count + 1)])
    assert (low, high) == (rank, count + 1 - rank)


@pytest.mark.parametrize(("count", "level"), [(1, 0.5001), (5, 0.95), (7, 0.99)])
def test_too_few_samples_say_nothing(count, level):
    assert median_interval([3.0] * count, level) == (0.0, math.inf)


def test_two_samples_hold_half():
    assert median_interval([4.0, 3.0], 0.5) == (3.0, 4.0)


def coverage(count, rank):
    return 1 - Fraction(2 * sum(math.comb(count, i) for i in range(rank)), 2**count)


@given(st.integers(1, 120), st.floats(0.01, 0.999))
def test_the_interval_is_the_narrowest_of_its_kind_that_holds_the_level(count, level):
    low, high = median_interval([float(i) for i in range(1, count + 1)], level)
    if high == math.inf:
        assert low == 0 and coverage(count, 1) < Fraction(level)
        return
    rank = int(low)
    assert high == count + 1 - rank and coverage(count, rank) >= Fraction(level)
    assert coverage(count, rank + 1) < Fraction(level)


@given(st.lists(st.floats(0, 1e9), min_size=6, max_size=60), st.randoms())
def test_order_says_nothing_and_the_median_is_inside(samples, random):
    shuffled = list(samples)
    random.shuffle(shuffled)
    low, high = median_interval(samples)
    assert median_interval(shuffled) == (low, high)
    middle = sorted(samples)[len(samples) // 2]
    assert low <= middle <= high and low in samples and high in samples


@pytest.mark.parametrize(
    ("samples", "level", "message"),
    [
        ([], 0.95, r"samples=\[\]: needs at least one; use \[1.0\]"),
        ([1.0, math.nan], 0.95, r"samples=\[1.0, nan\]: must be numbers >= 0"),
        ([-1.0], 0.95, r"samples=\[-1.0\]: must be numbers >= 0"),
        (["1"], 0.95, r"must be numbers >= 0"),
        ([1.0], 1.0, r"level=1.0: must be a number in 0..1, both excluded; use 0.95"),
        ([1.0], True, r"level=True: must be a number"),
        ([True], 0.0, "2 faults"),
    ],
)
def test_what_has_no_interval_is_refused(samples, level, message):
    with pytest.raises(ValueError, match=message):
        median_interval(samples, level)
