"""The reference selection: exact, deterministic, for any length and any scores."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_attention.flows.selection import select, top_k
from stream_attention.flows.testing.formulas import selected
from stream_attention.flows.window import Budget, Window, pages_of

SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 1.0, -2.5)


def one_row(scores, k, bos=0, eos=0, capacity=None):
    n = len(scores)
    padded = torch.full((1, capacity or max(n, 1)), math.nan, dtype=torch.float64)
    padded[0, :n] = torch.tensor(scores, dtype=torch.float64)
    return select(padded, torch.tensor([n]), torch.tensor([k]), Window(bos, eos))


def expected(scores, k, bos, eos):
    window = range(min(bos, len(scores)), max(min(bos, len(scores)), len(scores) - eos))
    return selected({at: scores[at] for at in window}, len(scores), k, bos, eos)


@settings(max_examples=300, deadline=None)
@given(
    scores=st.lists(st.sampled_from(SPECIAL) | st.floats(-3, 3), max_size=40),
    k=st.integers(0, 12),
    bos=st.integers(0, 4),
    eos=st.integers(0, 4),
)
def test_selection_is_that_of_sorting_pairs(scores, k, bos, eos):
    chosen = one_row(scores, k, bos, eos, capacity=len(scores) + 3)
    count = int(chosen.counts[0])
    assert chosen.positions[0, :count].tolist() == expected(scores, k, bos, eos)
    window = scores[min(bos, len(scores)) : max(min(bos, len(scores)), len(scores) - eos)]
    assert int(chosen.num_nan[0]) == sum(math.isnan(x) for x in window)


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 1000, 4095, 4096, 4097, 65_537, 131_072])
@pytest.mark.parametrize("kind", ["normal", "equal", "duplicates", "infinite", "nan"])
def test_top_k_is_set_exact_and_ascending_up_to_131072(n, kind):
    rng = torch.Generator().manual_seed(n)
    scores = torch.randn(n, generator=rng)
    if kind == "equal":
        scores[:] = 0.25
    elif kind == "duplicates":
        scores = torch.randint(0, 5, (n,), generator=rng).float()
    elif kind == "infinite":
        scores[torch.rand(n, generator=rng) < 0.7] = -math.inf
    elif kind == "nan":
        scores[torch.rand(n, generator=rng) < 0.7] = math.nan
    k = min(n, 1 + n // 7)
    got = top_k(scores, k).tolist()
    pairs = [
        (math.isnan(x), -x if not math.isnan(x) else 0.0, at)
        for at, x in enumerate(scores.tolist())
    ]
    assert got == sorted(at for *_, at in sorted(pairs)[:k])
    assert all(
        torch.equal(top_k(scores, k), torch.tensor(got)) for _ in range(25 if n < 5000 else 2)
    )


def test_ties_go_to_the_lowest_position():
    assert top_k(torch.tensor([1.0, 2.0, 2.0, 2.0, 1.0]), 2).tolist() == [1, 2]
    assert top_k(torch.tensor([0.0, -0.0, 0.0]), 2).tolist() == [0, 1]


def test_nan_ranks_below_minus_infinity_and_is_counted():
    scores = [math.nan, -math.inf, math.nan, 3.0, -math.inf]
    assert one_row(scores, 3).positions[0].tolist() == [1, 3, 4]
    assert one_row(scores, 4).positions[0].tolist() == [0, 1, 3, 4]
    assert int(one_row(scores, 3).num_nan[0]) == 2


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_short_row_is_read_whole_and_the_next_longer_one_is_not(extra):
    n = 5 + 2 + 3 + extra
    scores = [-float(at) for at in range(n)]
    got = one_row(scores, 5, bos=2, eos=3).positions[0].tolist()
    assert (got == list(range(n))) == (extra <= 0)
    assert got[-3:] == list(range(n - 3, n))


@pytest.mark.parametrize("n", range(6))
def test_rows_shorter_than_what_is_reserved_are_read_whole(n):
    chosen = one_row([1.0] * n, 0, bos=3, eos=3)
    assert chosen.positions[0].tolist() == list(range(n))
    assert chosen.counts.tolist() == [n]


def test_rows_of_any_shape_are_padded_with_minus_one():
    scores = torch.tensor([[[3.0, 1, 2, 9], [9, 9, 9, 9]]])
    chosen = select(scores, torch.tensor([[3, 0]]), torch.tensor([[2, 2]]), Window(0, 0))
    assert chosen.positions.tolist() == [[[0, 2], [-1, -1]]]
    assert chosen.counts.tolist() == [[2, 0]]
    pages = chosen.pages(torch.tensor([[[70, 80, 90, -1], [2**30] * 4]], dtype=torch.int32))
    assert pages.tolist() == [[[70, 90], [-1, -1]]]


def test_no_rows_select_nothing():
    chosen = select(torch.empty(0, 4), torch.empty(0).long(), torch.empty(0).long(), Window())
    assert chosen.positions.shape == (0, 0) and chosen.counts.shape == (0,)


def test_the_window_is_what_lies_between_the_reserved_pages():
    for n in range(12):
        first, last = (int(x) for x in Window(2, 3).bounds(torch.tensor(n)))
        want = [at for at in range(n) if 2 <= at < n - 3]
        assert list(range(first, last)) == want


def test_pages_are_counted_up():
    assert pages_of(torch.tensor([0, 1, 15, 16, 17]), 16).tolist() == [0, 1, 1, 1, 2]


def test_a_budget_is_the_larger_of_top_k_and_the_share():
    n = torch.tensor([[0, 10, 100, 1000]])
    assert Budget(topk=8, ratio=0.29).pages(n).tolist() == [[8, 8, 29, 290]]
    assert Budget(topk=0, ratio=0.1).pages(torch.tensor([[30, 70]])).tolist() == [[3, 7]]
    assert Budget(topk=7).pages(n).tolist() == [[7, 7, 7, 7]]


def test_a_share_of_the_most_pages_does_not_overflow():
    largest = torch.tensor([[2**31 - 1]])
    assert Budget(0, 1.0).pages(largest).item() == 2**31 - 1
    assert Budget(0, 0.999999).pages(largest).item() == (2**31 - 1) * 999_999 // 1_000_000


def test_a_budget_may_be_given_a_row():
    per_row = torch.tensor([4, -1], dtype=torch.int32)
    assert Budget(per_row=per_row).pages(torch.zeros(2, 3).long()).tolist() == [[4] * 3, [0] * 3]
    wide = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert Budget(per_row=wide).pages(torch.zeros(2, 3).long()).tolist() == wide.tolist()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Window(bos=-1), r"Window: bos=-1: must be an int >= 0; use 1"),
        (lambda: Window(eos=1.5), r"Window: eos=1.5: must be an int >= 0"),
        (lambda: Budget(topk=-1), r"Budget: topk=-1: must be an int >= 0; use 32"),
        (lambda: Budget(ratio=1.5), r"Budget: ratio=1.5: must be in \[0, 1\]"),
        (lambda: Budget(per_row=torch.ones(2)), r"per_row=.*: must be an int32 or int64 tensor"),
    ],
)
def test_settings_that_are_not_legal_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()
