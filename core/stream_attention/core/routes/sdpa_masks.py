"""Masks of whole-sequence attention: the contract's visibility for `[batch, seq, heads, head_dim]`.

Every request has `qo_len` queries and `kv_len` keys, so which row is empty and which mask is needed
is known from shapes alone; only a caller's own mask is data.
"""

from __future__ import annotations

import torch

from stream_attention.core.problem import AttentionProblem

_NEG_INF = float("-inf")


def right_bound(problem: AttentionProblem) -> int | None:
    """Tokens to the right of its own position that a row sees; `None` = all."""
    return 0 if problem.causal else problem.window_right


def empty_prefix(problem: AttentionProblem, qo_len: int, kv_len: int) -> int:
    """Leading query rows that see nothing: their position is negative, too far to see token 0."""
    if kv_len == 0:
        return qo_len
    right = right_bound(problem)
    return 0 if right is None else min(qo_len, max(0, qo_len - kv_len - right))


def key_range(
    problem: AttentionProblem, first: int, last: int, qo_len: int, kv_len: int
) -> tuple[int, int]:
    """Tokens `[lo, hi)` that some row of `first … last` can see."""
    shift, right = kv_len - qo_len, right_bound(problem)
    hi = kv_len if right is None else min(kv_len, max(0, last + shift + right + 1))
    lo = 0 if problem.window_left is None else max(0, first + shift - problem.window_left)
    return min(lo, hi), hi


def seen(
    problem: AttentionProblem,
    rows: tuple[int, int],
    keys: tuple[int, int],
    shift: int,
    device: torch.device,
) -> torch.Tensor | None:
    """`[rows, keys]` bool, True where row i at position `i + shift` sees token j; `None` = all."""
    right, left = right_bound(problem), problem.window_left
    cut_right = right is not None and keys[1] - 1 > rows[0] + shift + right
    cut_left = left is not None and keys[0] < rows[1] - 1 + shift - left
    if not (cut_right or cut_left):
        return None
    position = torch.arange(rows[0], rows[1], device=device).unsqueeze(1) + shift
    token = torch.arange(keys[0], keys[1], device=device)
    visible = None
    if cut_right:
        visible = token <= position + right
    if cut_left:
        near = token >= position - left
        visible = near if visible is None else visible & near
    return visible


def full_rank(mask: torch.Tensor) -> torch.Tensor:
    """A caller's mask with leading axes of 1 up to `[B|1, Hq|1, Sq|1, Sk|1]`."""
    return mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask


def rows_of_mask(mask: torch.Tensor, begin: int, end: int, axis: int) -> torch.Tensor:
    """`mask` restricted to `begin … end - 1` of an axis, which may have size 1 (broadcast)."""
    return mask if mask.shape[axis] == 1 else mask.narrow(axis, begin, end - begin)


def split_mask(mask: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A mask as `(visible, bias)`: bool, and an additive part that is finite where visible."""
    if mask is None:
        return None, None
    if mask.dtype == torch.bool:
        return mask, None
    visible = mask != _NEG_INF
    return visible, torch.where(visible, mask, 0.0)


def both(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    """`a & b` where `None` sees everything."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def empty_like_output(
    q: torch.Tensor, head_dim_vo: int, *others: torch.Tensor | None
) -> torch.Tensor:
    """Zeros `[..., head_dim_vo]` that depend on `q` and `others` in the autograd graph, with zero
    gradients, as those of inputs that rows do not see are elsewhere.
    """
    zeros = q.narrow(-1, 0, 0).sum(-1, keepdim=True)
    for other in others:
        if other is not None and other.dtype.is_floating_point:
            none = other.unsqueeze(0) if other.dim() == 0 else other  # a view, nothing is copied
            zeros = zeros + none.narrow(-1, 0, 0).sum().to(q.dtype)
    return zeros.expand(*q.shape[:-1], head_dim_vo).contiguous()
