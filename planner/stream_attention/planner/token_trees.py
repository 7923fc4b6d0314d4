"""Speculative token trees as data: `parents[i]` is the query token that token i continues.

`parents[0] = -1` is the root, and every parent comes before its children, so that a chain is
`(-1, 0, 1, …)`. A token sees the context before the tree, itself and its ancestors; the shortest
loop that rebuilds the mask is

    for child, parent in enumerate(parents):
        mask[child] = mask[parent] if parent >= 0 else False
        mask[child, child] = True
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stream_attention.core.ir import is_int

ROOT = -1


def is_tree(parents: Any) -> bool:
    """A tuple of ints with one root, at index 0, whose parents come before their children."""
    return (
        isinstance(parents, tuple)
        and len(parents) > 0
        and all(is_int(parent) for parent in parents)
        and parents[0] == ROOT
        and all(0 <= parent < child for child, parent in enumerate(parents) if child)
    )


def nearest_tree(parents: Any) -> tuple[int, ...]:
    """The tree that keeps every legal parent and hangs other tokens onto the token before them."""
    count = max(len(parents), 1)
    kept = [ROOT]
    for child in range(1, count):
        parent = parents[child]
        kept.append(parent if is_int(parent) and 0 <= parent < child else child - 1)
    return tuple(kept)


def is_chain(parents: Sequence[int]) -> bool:
    """Every token continues the one before it: the tree's mask is the causal one."""
    return all(parent == child - 1 for child, parent in enumerate(parents))


def depths(parents: Sequence[int]) -> tuple[int, ...]:
    """Tokens between each token and the root, 0 for the root: its position past the context."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent == ROOT else found[parent] + 1)
    return tuple(found)


def tree_of(branching: Sequence[int]) -> tuple[int, ...]:
    """The tree whose tokens at depth d have `branching[d]` children each, level by level.

    `(2, 2)` has 1 + 2 + 4 tokens. Raises `ValueError` unless all are ints >= 1.
    """
    if not all(is_int(children) and children >= 1 for children in branching):
        raise ValueError(f"branching={branching!r}: must be ints >= 1, one a level; use (2, 2)")
    parents, level = [ROOT], [0]
    for children in branching:
        below = []
        for parent in level:
            for _ in range(children):
                below.append(len(parents))
                parents.append(parent)
        level = below
    return tuple(parents)


def ancestor_mask(parents: Sequence[int]) -> torch.Tensor:
    """`[num_tokens, num_tokens]` bool, True where column j is row i or one of its ancestors."""
    count = len(parents)
    mask = torch.eye(count, dtype=torch.bool)
    for child, parent in enumerate(parents):
        if parent != ROOT:
            mask[child] |= mask[parent]
    return mask
