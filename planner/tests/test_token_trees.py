"""Speculative trees: which parents make one, and what its tokens see."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_attention.planner.token_trees import (
    ancestor_mask,
    depths,
    is_chain,
    is_tree,
    nearest_tree,
    tree_of,
)


@st.composite
def trees(draw):
    count = draw(st.integers(1, 12))
    return (-1, *(draw(st.integers(0, child - 1)) for child in range(1, count)))


@given(trees())
def test_a_row_sees_itself_and_what_it_continues(parents):
    mask = ancestor_mask(parents)
    for token in range(len(parents)):
        seen, place = set(), token
        while place != -1:
            seen.add(place)
            place = parents[place]
        assert set(mask[token].nonzero().flatten().tolist()) == seen
        assert depths(parents)[token] == len(seen) - 1


@given(trees())
def test_a_chain_is_the_causal_mask_and_nothing_else_is(parents):
    causal = torch.ones(len(parents), len(parents), dtype=torch.bool).tril()
    assert torch.equal(ancestor_mask(parents), causal) == is_chain(parents)


@given(st.lists(st.integers(-3, 12), max_size=12).map(tuple))
def test_the_nearest_tree_is_a_tree_and_a_tree_is_its_own(parents):
    nearest = nearest_tree(parents)
    assert is_tree(nearest) and len(nearest) == max(len(parents), 1)
    assert (nearest == parents) == is_tree(parents)


@pytest.mark.parametrize(
    "parents", [(), (0,), (-1, 1), (-1, -1), (-1, 0, 3), (-1, True), [-1, 0], (-1, 0.0), None]
)
def test_what_is_no_tree(parents):
    assert not is_tree(parents)


def test_a_branching_gives_its_tree_level_by_level():
    assert tree_of(()) == (-1,)
    assert tree_of((1, 1)) == (-1, 0, 1)
    assert tree_of((2, 2)) == (-1, 0, 0, 1, 1, 2, 2)
    with pytest.raises(ValueError, match="ints >= 1, one a level"):
        tree_of((2, 0))
