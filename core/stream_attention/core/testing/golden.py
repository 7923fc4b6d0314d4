"""A problem's right answer with the error that a correct kernel of its dtype makes.

`golden` runs the oracle once in fp64, once with the roundings of the dtype, and once as an error
model; `Golden.check` compares a result by `testing.tolerance`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from stream_attention.core import oracle
from stream_attention.core.device import without_autocast
from stream_attention.core.oracle_args import OracleCall, prepare
from stream_attention.core.testing.tolerance import (
    assert_close,
    assert_lse_close,
    unit_roundoff,
)


@dataclass(frozen=True, slots=True, eq=False)
class Golden:
    """The answer, the same-dtype reference, and the expected size of its roundings.

    out, lse: fp64, in q's shape. reference_out, reference_lse: fp32 arithmetic with rounded weights
    and output. out_noise, lse_noise: fp64 standard size of the inner roundings; 0 for empty rows.
    """

    out: torch.Tensor
    lse: torch.Tensor
    reference_out: torch.Tensor
    reference_lse: torch.Tensor
    out_noise: torch.Tensor
    lse_noise: torch.Tensor
    dtype: torch.dtype

    def check(self, out: torch.Tensor, lse: torch.Tensor | None = None, label: str = "") -> None:
        """Raise `AssertionError` unless `out` (and `lse`) are right; q's shape or packed."""
        if out.dtype != self.dtype:
            raise AssertionError(f"{label}out: dtype {out.dtype}, want {self.dtype}")
        assert_close(
            out,
            self.out.reshape(out.shape) if out.numel() == self.out.numel() else self.out,
            self.dtype,
            reference=self.reference_out.reshape(out.shape),
            noise=self.out_noise.reshape(out.shape),
            label=f"{label}out",
        )
        if lse is not None:
            assert_lse_close(
                lse,
                self.lse.reshape(lse.shape),
                reference=self.reference_lse.reshape(lse.shape),
                noise=self.lse_noise.reshape(lse.shape),
                label=f"{label}lse",
            )


def golden(
    q: torch.Tensor,
    cache: Any,
    qo_indptr: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> Golden:
    """The `Golden` of `oracle.attention(q, cache, qo_indptr, **options)`.

    out_dtype: of the result that will be checked; default q's dtype.
    `options` are the oracle's, without `return_lse`. About four times the oracle's work.
    """
    options.pop("return_lse", None)
    call = prepare(q, cache, qo_indptr, **options)
    out, lse = oracle.attention(q, cache, qo_indptr, **options, return_lse=True)
    dtype = q.dtype if out_dtype is None else out_dtype
    total, heads = call.q.shape[:2]
    shape = (total, heads, call.out_shape[-1])
    device = q.device
    result = Golden(
        out=out,
        lse=lse,
        reference_out=torch.zeros(shape, dtype=dtype, device=device),
        reference_lse=torch.full(shape[:2], -math.inf, device=device),
        out_noise=torch.zeros(shape, dtype=torch.float64, device=device),
        lse_noise=torch.zeros(shape[:2], dtype=torch.float64, device=device),
        dtype=dtype,
    )
    with without_autocast(device):
        for block in oracle.blocks(call):
            for chunk in oracle.query_chunks(block):
                _reference(call, block, chunk, result)
                _noise(call, block, chunk, result)
    return result


def _reference(call: OracleCall, block: oracle.Block, chunk: slice, result: Golden) -> None:
    """The block in fp32 with weights rounded to the dtype: what a plain kernel computes."""
    live, scores, visible = oracle.masked_scores(call, block, chunk, torch.float32)
    if not live.numel():
        return
    largest = scores.amax(-1)
    sink = oracle.sink_of_rows(call, block, live)
    if sink is not None:
        sink = sink.float()
        largest = torch.maximum(largest, sink)
    weights = torch.exp(scores - largest.unsqueeze(-1))
    denominator = weights.sum(-1)
    if sink is not None:
        denominator = denominator + torch.exp(sink - largest)
    rounded = weights.to(block.q.dtype).float()
    out = oracle.weighted_values(block, rounded, visible) / denominator.unsqueeze(-1)
    row, head = oracle.rows_of(block, chunk, live)
    result.reference_out[row, head] = out.to(result.dtype)
    result.reference_lse[row, head] = largest + torch.log(denominator)


def _noise(call: OracleCall, block: oracle.Block, chunk: slice, result: Golden) -> None:
    """The error model. Token j's weight is off by a relative `delta_j`, independent over j:

    one rounding of the weight to the dtype; in fp32, the rounding of the score (its size, and the
    size of the terms that its dot product sums), of `exp2` and its argument, and of the cap.
    out: `sqrt(Σ (p_j · v_j · delta_j)²)` and the denominator's own error; lse: `sqrt(Σ (p_j ·
    delta_j)²)` in fp32 only, for the denominator sums weights that are not rounded.
    """
    live, scores, visible = oracle.masked_scores(call, block, chunk)
    if not live.numel():
        return
    weights, norm = oracle.softmax(scores, oracle.sink_of_rows(call, block, live))
    unit = unit_roundoff(torch.float32)
    dim = block.q.shape[-1]
    rows = block.q[chunk].double().abs().reshape(-1, dim)[live]
    terms = rows @ (block.key.double().abs() * block.key_scale).T * abs(call.sm_scale)
    size = torch.where(visible, terms + scores.abs(), 0.0)
    largest = torch.where(visible, scores, -math.inf).amax(-1, keepdim=True).abs()
    # 2 roundings of an exp2 argument and 4 of a hardware exp2 (2 ulp); a capped score is off by 4
    # roundings of the cap (tanh near 1 is at best that good).
    # Sums of kv_len fp32 terms one by one walk by √kv_len roundings of their partial sums.
    single = unit * (4 + 2 * (size + largest) + math.sqrt(block.key.shape[0]))
    if call.logits_soft_cap is not None:
        single = single + 4 * unit * call.logits_soft_cap
    in_lse = (weights * single).square().sum(-1).sqrt()
    in_lse = in_lse + unit * (1 + norm.abs() + math.sqrt(block.key.shape[0]))
    delta = single + unit_roundoff(block.q.dtype)
    spread = (weights * delta).square()
    values = oracle.weighted_values(
        _squared_values(block), torch.where(visible, spread, 0.0), visible
    )
    row, head = oracle.rows_of(block, chunk, live)
    out = (
        values.sqrt()
        + in_lse.unsqueeze(-1) * result.out.reshape(result.out_noise.shape)[row, head].abs()
    )
    result.out_noise[row, head] = out.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    result.lse_noise[row, head] = in_lse.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _squared_values(block: oracle.Block) -> oracle.Block:
    """The block with `(value_scale · V)²` as its values."""
    squared = (block.value.double() * block.value_scale).square()
    return oracle.Block(
        rows=block.rows,
        heads=block.heads,
        q=block.q,
        key=block.key,
        value=squared,
        key_scale=block.key_scale,
        value_scale=1.0,
        mask=block.mask,
    )
