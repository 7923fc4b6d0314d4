"""Merge algebra of partial attention states `(out, lse)`.

`out` is the normalised output over one part of the keys and `lse` the natural log of the sum of
`exp(score)` over that part, so merging is exact, associative and commutative:

    lse = log(Σ_i exp(lse_i) [+ exp(sink)]),    out = Σ_i exp(lse_i - lse) · out_i.

A state with `lse = -inf` is empty: the identity, whatever its `out` holds. Merging only empty
states gives the empty state, out 0 and lse `-inf`, also with a sink (Milakov & Gimelshein 2018,
"Online normalizer calculation for softmax", §3; Dao et al. 2023, "Flash-Decoding").
"""

from __future__ import annotations

import math
from typing import Any

import torch

from stream_attention.core.cache_checks import (
    address_of,
    require_dense,
    require_memory,
    row_alignment,
)
from stream_attention.core.device import device_facts, without_autocast
from stream_attention.core.dtypes import OUT_DTYPES, dtype_name
from stream_attention.core.errors import Faults, shape_of
from stream_attention.core.problem import MAX_HEAD_DIM
from stream_attention.core.registry import MergeProblem, MergeRecord, default_registry
from stream_attention.core.sink_checks import require_fp32_sink


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`lse = log(exp(lse_a) + exp(lse_b))`, `out = Σ exp(lse_i - lse) · out_i`: two states as one.

    out_a, out_b: `[..., head_dim]` fp16, bf16 or fp32, equal shape, dtype and device; e.g.
        `[batch, num_qo_heads, head_dim]`. lse_a, lse_b: `[...]` fp32 natural log, `-inf` = empty.

    Returns new tensors: `out` in the dtype of `out_a` (fp32 arithmetic, one rounding) and `lse`
    fp32. Commutes bit for bit. Differentiable; on CUDA, where nothing requires grad, a kernel of an
    installed package may run. Never syncs. `ValueError` with every fault.
    """
    faults = Faults()
    _check_part(faults, "out_a", out_a, "lse_a", lse_a)
    _check_part(faults, "out_b", out_b, "lse_b", lse_b)
    if not faults:
        _check_same(faults, "out_b", out_b, "out_a", out_a)
    faults.raise_if_any("merge_states")
    record = _kernel((out_a, out_b), (lse_a, lse_b), 2, out_a.dtype, None)
    if record is not None:
        dim = out_a.shape[-1]
        outs = (out_a.view(-1, dim), out_b.view(-1, dim))
        lses = (lse_a.view(-1), lse_b.view(-1))
        return _launch(record, outs, lses, lse_a.shape, dim, out_a.dtype, None)
    with without_autocast(out_a.device):
        outs, lses = torch.stack((out_a, out_b)), torch.stack((lse_a, lse_b))
    return torch_merge(outs, lses)


def merge_many(
    outs: torch.Tensor,
    lses: torch.Tensor,
    attn_sink: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`lse = log(Σ exp(lse_i) + exp(sink))`, `out = Σ exp(lse_i - lse) · out_i` over axis 0.

    outs: `[num_states, ..., head_dim]` fp16, bf16 or fp32. lses: `[num_states, ...]` fp32 natural
        log. num_states may be 0, which gives empty states.
    attn_sink: `[num_heads]` fp32 logits, where the last axis of `lses` is `num_heads`; it joins the
        denominator once, whatever `num_states`, in rows that are not empty.
    out_dtype: of the result; default the dtype of `outs`.

    Returns `(out [..., head_dim] out_dtype, lse [...] fp32)`. Differentiable; dispatch and errors
    as in `merge_states`.
    """
    faults = Faults()
    _check_part(faults, "outs", outs, "lses", lses)
    if not faults:
        faults.require(
            outs.dim() >= 2,
            "outs.shape",
            shape_of(outs),
            "must be [num_states, ..., head_dim]",
            (1, *shape_of(outs)),
        )
        _check_sink(faults, attn_sink, lses)
    if out_dtype is not None:
        faults.require(
            isinstance(out_dtype, torch.dtype) and dtype_name(out_dtype) in OUT_DTYPES,
            "out_dtype",
            out_dtype,
            f"must be one of {', '.join(OUT_DTYPES)}",
            "torch.float32",
        )
    faults.raise_if_any("merge_many")
    dtype = outs.dtype if out_dtype is None else out_dtype
    count, dim = outs.shape[0], outs.shape[-1]
    record = _kernel((outs,), (lses,), count, dtype, attn_sink)
    if record is not None:
        rows = lses[0].numel()
        flat = outs.view(count, rows, dim)
        return _launch(record, flat, lses.view(count, rows), lses.shape[1:], dim, dtype, attn_sink)
    return torch_merge(outs, lses, attn_sink, dtype)


def torch_merge(
    outs: torch.Tensor,
    lses: torch.Tensor,
    attn_sink: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_many` in plain torch on any device, unchecked: fp32 arithmetic (fp64 stays fp64)."""
    with without_autocast(outs.device):
        return _torch_merge(outs, lses, attn_sink, out_dtype)


def _torch_merge(
    outs: torch.Tensor,
    lses: torch.Tensor,
    attn_sink: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = outs.dtype if out_dtype is None else out_dtype
    if not outs.shape[0]:
        empty = torch.full(lses.shape[1:], -math.inf, dtype=lses.dtype, device=lses.device)
        return torch.zeros(outs.shape[1:], dtype=dtype, device=outs.device), empty
    logs = lses if lses.dtype == torch.float64 else lses.float()
    # `largest` only keeps exp in range; the result does not depend on it, so neither do gradients.
    largest = logs.detach().amax(0)
    is_empty = largest == -math.inf
    if attn_sink is not None:
        largest = torch.maximum(largest, attn_sink.detach())
    largest = torch.where(is_empty | (largest == -math.inf), 0.0, largest)
    weights = torch.exp(logs - largest)  # 0 for an empty state
    total = weights.sum(0)
    if attn_sink is not None:
        total = total + torch.exp(attn_sink - largest)
    total = torch.where(is_empty, 1.0, total)
    # An empty state's `out` may hold NaN, and 0 · NaN is NaN: it is replaced, not multiplied.
    values = torch.where((lses == -math.inf).unsqueeze(-1), 0.0, outs.to(logs.dtype))
    out = ((weights / total).unsqueeze(-1) * values).sum(0)
    lse = torch.where(is_empty, -math.inf, largest + torch.log(total))
    return out.to(dtype), lse


def _require_memory(faults: Faults, name: str, tensor: torch.Tensor) -> bool:
    """As elsewhere; a tracer cannot ask."""
    return torch.compiler.is_compiling() or require_memory(faults, name, tensor)


def _check_part(faults: Faults, out_name: str, out: Any, lse_name: str, lse: Any) -> None:
    dense = True
    for name, value in ((out_name, out), (lse_name, lse)):
        if not isinstance(value, torch.Tensor):
            faults.add(name, type(value).__name__, "must be a torch.Tensor")
        elif require_dense(faults, name, value) and _require_memory(faults, name, value):
            continue
        dense = False
    if not dense:
        return
    faults.require(
        dtype_name(out.dtype) in OUT_DTYPES,
        f"{out_name}.dtype",
        out.dtype,
        f"must be one of {', '.join(OUT_DTYPES)}",
        "torch.float32",
    )
    faults.require(
        lse.dtype == torch.float32,
        f"{lse_name}.dtype",
        lse.dtype,
        "must be torch.float32 (natural log)",
        f"{lse_name}.float()",
    )
    if faults.require(
        out.dim() >= 1 and out.shape[-1] >= 1,
        f"{out_name}.shape",
        shape_of(out),
        "must be [..., head_dim] with head_dim >= 1",
    ):
        faults.require(
            lse.shape == out.shape[:-1],
            f"{lse_name}.shape",
            shape_of(lse),
            f"must be {out_name}.shape without head_dim",
            shape_of(out)[:-1],
        )
    faults.require(
        lse.device == out.device,
        f"{lse_name}.device",
        str(lse.device),
        f"must be the device of {out_name}",
        str(out.device),
    )


def _check_same(
    faults: Faults, name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor
) -> None:
    faults.require(
        tensor.shape == other.shape,
        f"{name}.shape",
        shape_of(tensor),
        f"must equal {other_name}.shape",
        shape_of(other),
    )
    faults.require(
        tensor.dtype == other.dtype,
        f"{name}.dtype",
        tensor.dtype,
        f"must equal {other_name}.dtype",
        other.dtype,
    )
    faults.require(
        tensor.device == other.device,
        f"{name}.device",
        str(tensor.device),
        f"must be the device of {other_name}",
        str(other.device),
    )


def _check_sink(faults: Faults, sink: Any, lses: torch.Tensor) -> None:
    if require_fp32_sink(
        faults,
        sink,
        kind="must be a torch.float32 tensor [num_heads]",
        shape=shape_of(lses)[-1:] if lses.dim() >= 2 else (),
        axes="must be [num_heads], the last axis of lses [num_states, ..., num_heads]",
        device=lses.device,
        place="must be the device of lses",
    ):
        _require_memory(faults, "attn_sink", sink)


def _kernel(
    outs: tuple[torch.Tensor, ...],
    lses: tuple[torch.Tensor, ...],
    num_states: int,
    out_dtype: torch.dtype,
    sink: torch.Tensor | None,
) -> MergeRecord | None:
    """The first registered kernel that serves this merge, or `None`: then torch does it.

    Kernels take no gradient, are opaque to `torch.compile`, and see rows as `[rows, head_dim]`
    views, so tensors that cannot be viewed so, whose rows are not aligned, or that stand for others
    in a transform of `torch.func`, stay with torch too.
    """
    parts = outs[0]
    tensors = outs + lses if sink is None else (*outs, *lses, sink)
    if torch.compiler.is_compiling() or parts.device.type != "cuda":
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    if num_states < 1 or parts.shape[-1] > MAX_HEAD_DIM or not parts.numel():
        return None
    unit = row_alignment(parts)
    if not all(tensor.is_contiguous() for tensor in tensors):
        return None
    if any(address_of(tensor) is None for tensor in tensors):
        return None
    if any(out.data_ptr() % unit for out in outs):
        return None
    problem = MergeProblem(
        num_states=num_states,
        head_dim=parts.shape[-1],
        part_dtype=dtype_name(parts.dtype),
        out_dtype=dtype_name(out_dtype),
        has_sink=sink is not None,
    )
    facts = device_facts(parts.device)
    for record in default_registry().merge_records():
        if not record.reasons(problem, facts):
            return record
    return None


def _launch(
    record: MergeRecord,
    outs: Any,
    lses: Any,
    shape: torch.Size,
    dim: int,
    dtype: torch.dtype,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel once into new tensors."""
    device = lses[0].device
    out = torch.empty(*shape, dim, dtype=dtype, device=device)
    lse = torch.empty(shape, dtype=torch.float32, device=device)
    record.build(outs, lses, out.view(-1, dim), lse.view(-1), sink).run()
    return out, lse


__all__ = ["merge_many", "merge_states", "torch_merge"]
