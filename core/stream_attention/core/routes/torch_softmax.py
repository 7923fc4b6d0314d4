"""Online softmax of the torch route: scores, running state, and its one rounding at the end.

State of a row: the largest logit `m`, the sum `l` of `exp(s - m)` and the unnormalised output
`acc = sum exp(s - m) v`, all fp32 (Milakov and Gimelshein 2018; Dao et al. 2022, section 3.1).
A row that has seen nothing has `m = -inf`, `l = 0`, `acc = 0`.
"""

from __future__ import annotations

import torch

from stream_attention.core.routes.torch_items import Visibility

_NEG_INF = float("-inf")


def cap_(scores: torch.Tensor, soft_cap: float | None) -> torch.Tensor:
    """`cap * tanh(s / cap)` in place; nothing when `soft_cap` is `None`."""
    if soft_cap is None:
        return scores
    return scores.div_(soft_cap).tanh_().mul_(soft_cap)


def hidden(position: torch.Tensor, token: torch.Tensor, sight: Visibility) -> torch.Tensor | None:
    """True where a row at `position` does not see `token` (broadcast int64); `None` = sees all."""
    mask = None
    if sight.right is not None:
        mask = token > position + sight.right
    if sight.left is not None:
        left = token < position - sight.left
        mask = left if mask is None else mask | left
    return mask


def exponentiate_(scores: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """`exp(s - m)` in place; rows with `m = -inf` become zeros, not NaN."""
    return scores.sub_(finite_or_zero(largest).unsqueeze(-1)).exp_()


def finite_or_zero(largest: torch.Tensor) -> torch.Tensor:
    """`m` with `-inf` replaced by 0, so that `exp(-inf - m)` is 0."""
    return largest.masked_fill(largest == _NEG_INF, 0.0)


def add_weighted(
    acc: torch.Tensor | None, weights: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """`acc + weights · value`, where a token hidden from a row takes no part, whatever it holds.

    acc: `[n, rows, head_dim]`, overwritten, or `None` for 0. weights: `[n, rows, tokens]`, 0 where
    hidden. value: `[n, tokens, head_dim]`. mask: `[n, rows, tokens]` (broadcast) True where hidden,
    or `None` when every row sees every token. `0 · NaN` is NaN, so tokens that are not finite are
    added one by one.
    """
    if mask is None or torch.isfinite(value.sum()):
        return torch.bmm(weights, value) if acc is None else acc.baddbmm_(weights, value)
    finite = value.isfinite()
    acc = add_weighted(acc, weights, torch.where(finite, value, 0.0), None)
    wild = (~finite).any(-1).any(0)  # [tokens]
    for token in wild.nonzero().flatten().tolist():
        part = torch.where(finite[:, token], 0.0, value[:, token])  # the rest is added already
        part = weights[:, :, token].unsqueeze(-1) * part.unsqueeze(1)
        acc.add_(part.masked_fill_(mask[..., token].unsqueeze(-1), 0.0))
    return acc


def finish(
    acc: torch.Tensor,
    total: torch.Tensor,
    largest: torch.Tensor,
    sink: torch.Tensor | None,
    empty: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised output and natural-log lse of final states; `acc` is overwritten.

    acc: `[..., head_dim]` fp32; total, largest: `[...]` fp32. sink: logits that broadcast to
    `[...]`, counted here and nowhere else. empty: rows that see nothing (broadcast), which give 0
    and -inf even with a sink.
    """
    if sink is not None:
        both = torch.maximum(largest, sink)
        weight = torch.exp(largest - both)
        total = total * weight + torch.exp(sink - both)
        acc.mul_(weight.unsqueeze(-1))
        largest = both
    acc.div_(total.unsqueeze(-1))
    lse = largest + torch.log(total)
    if empty is not None:
        acc.masked_fill_(empty.unsqueeze(-1), 0.0)
        lse = lse.masked_fill(empty, _NEG_INF)
    return acc, lse
