"""Differentiable routes over whole sequences: torch SDPA, and plain torch where SDPA has no word.

Three records, so that `info` says what ran:

- `torch_sdpa`: one `scaled_dot_product_attention` call; grouped heads go in as they are.
- `torch_sdpa_gqa_expanded`: the same with K and V repeated to the query heads first, for the calls
  whose fused CUDA kernels take no grouped heads.
- `torch_math`: `sdpa_math`, for the cap, the lse, a dropout generator and batch invariance.

What SDPA leaves to its caller is done here: causal alignment is bottom-right, rows that see nothing
give 0 and no gradient, and the sink is one more key whose logit is the sink and whose value is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from stream_attention.core.device import DeviceFacts
from stream_attention.core.dtypes import dtype_bytes
from stream_attention.core.errors import UnsupportedProblem
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import AttentionRecord, CapabilityRule
from stream_attention.core.routes.sdpa_masks import (
    both,
    empty_like_output,
    empty_prefix,
    full_rank,
    rows_of_mask,
    seen,
    split_mask,
)
from stream_attention.core.routes.sdpa_math import apply_math

if TYPE_CHECKING:
    from stream_attention.core.registry import Registry

PACKAGE = "stream-attention-core"
FLASH_HEAD_DIM = 256
# Ranking only: fused CPU SDPA, plain torch, and a CUDA device, in FLOPs or bytes a microsecond.
CPU_FLOPS_PER_US = 50_000.0  # a thread
CPU_BYTES_PER_US = 6_000.0  # a thread
CUDA_FLOPS_PER_US = 2e8
CUDA_BYTES_PER_US = 1e6


def apply_sdpa(
    problem: AttentionProblem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_sink: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    expand: bool = False,
) -> tuple[torch.Tensor, None]:
    """`(out, None)` through one SDPA call, differentiable in q, k, v, the sink and the mask.

    q: `[batch, qo_len, num_qo_heads, head_dim_qk]`. k, v: `[batch, kv_len, num_kv_heads, dim]`.
    attn_sink: `[num_qo_heads]`. attn_mask: `[B|1, Hq|1, Sq, Sk]` bool (True = seen) or additive.
    expand: repeat K and V to the query heads first (a copy of `gqa_group_size` times their bytes).
    out: `[batch, qo_len, num_qo_heads, head_dim_vo]` in q's dtype. Never syncs. A key that a row
    does not see must hold finite values (SDPA multiplies it by 0). Raises `UnsupportedProblem` when
    dropout is asked with a generator of the caller's: SDPA draws from the default one.
    """
    if generator is not None and problem.dropout_p > 0:
        raise UnsupportedProblem(
            "generator=given: SDPA draws dropout from the default one; use None, or torch_math"
        )
    qo_len, kv_len = q.shape[1], k.shape[1]
    skip = empty_prefix(problem, qo_len, kv_len)
    if skip == qo_len or q.shape[0] == 0:
        return empty_like_output(q, v.shape[3], k, v, attn_sink, attn_mask), None
    rows = (skip, qo_len)
    is_causal, visible = _visibility(problem, rows, qo_len, kv_len, attn_mask, q.device)
    bias = None
    if attn_mask is not None:
        own = rows_of_mask(full_rank(attn_mask), skip, qo_len, 2)
        allowed, bias = split_mask(own)
        visible = both(visible, allowed)
    mask_dtype = _mask_dtype(q, bias)
    queries = q[:, skip:].transpose(1, 2)
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    scale = problem.sm_scale
    if scale < 0:  # fused kernels take the largest score before they scale it
        queries, scale = -queries, -scale
    elif scale == 0:  # and mask with -inf before: 0 * -inf is NaN
        queries, scale = queries * 0.0, 1.0
    mask, live = visible, None
    if attn_sink is not None:
        keys, values = functional.pad(keys, (0, 0, 0, 1)), functional.pad(values, (0, 0, 0, 1))
        shape = (q.shape[2], qo_len - skip, kv_len)
        mask = _sink_column(attn_sink.to(mask_dtype), visible, bias, shape, is_causal)
        is_causal = False
    elif attn_mask is not None:
        assert visible is not None
        live = visible.any(-1, keepdim=True)  # rows that a caller's mask leaves nothing to see
        mask = visible | ~live
        if bias is not None:
            mask = torch.where(mask, bias.to(mask_dtype), float("-inf"))
        mask = mask.expand(*mask.shape[:2], qo_len - skip, kv_len)
    grouped = k.shape[2] != q.shape[2]
    if grouped and expand:
        keys, values = (x.repeat_interleave(problem.gqa_group_size, 1) for x in (keys, values))
    out = functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        dropout_p=problem.dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=grouped and not expand,
    )
    if live is not None:
        out = torch.where(live, out, 0.0)
    out = out.transpose(1, 2)
    return (functional.pad(out, (0, 0, 0, 0, skip, 0)) if skip else out), None


def apply_sdpa_expanded(
    problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options
) -> tuple[torch.Tensor, None]:
    """`apply_sdpa` with K and V repeated to the query heads."""
    return apply_sdpa(problem, q, k, v, expand=True, **options)


def _visibility(
    problem: AttentionProblem,
    rows: tuple[int, int],
    qo_len: int,
    kv_len: int,
    attn_mask: torch.Tensor | None,
    device: torch.device,
) -> tuple[bool, torch.Tensor | None]:
    """`(is_causal, visible)`: SDPA's own causal mask where it is the whole mask, else a tensor."""
    count, shift = rows[1] - rows[0], kv_len - qo_len
    plain = attn_mask is None and not problem.has_window
    if plain and problem.causal and count == kv_len and count > 1:
        return True, None
    return False, seen(problem, rows, (0, kv_len), shift, device)


def _sink_column(
    attn_sink: torch.Tensor,
    visible: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: tuple[int, int, int],
    is_causal: bool,
) -> torch.Tensor:
    """Additive mask `[B|1, Hq, n, kv_len + 1]` whose last column is the sink's logit.

    shape: `(Hq, n, kv_len)`. The dtype is that of `attn_sink`.
    """
    heads, count, kv_len = shape
    if is_causal:
        visible = torch.ones(count, kv_len, dtype=torch.bool, device=attn_sink.device).tril()
    if bias is None:
        head = attn_sink.new_zeros(1, 1, count, kv_len)
    else:
        head = bias.to(attn_sink.dtype)
    if visible is not None:
        head = torch.where(visible, head, float("-inf"))
    head = head.expand(head.shape[0], heads, count, kv_len)
    tail = attn_sink.view(1, -1, 1, 1).expand(head.shape[0], -1, count, 1)
    return torch.cat([head, tail], -1)


def _mask_dtype(q: torch.Tensor, bias: torch.Tensor | None) -> torch.dtype:
    """Dtype of additive masks: fp32 on a CPU; on CUDA kernels take q's dtype and nothing else."""
    if q.device.type != "cuda":
        return torch.promote_types(q.dtype, torch.float32)
    if bias is not None and bias.dtype != q.dtype:
        raise UnsupportedProblem(
            f"attn_mask.dtype={bias.dtype}: SDPA on CUDA would round it to {q.dtype}; use "
            f"{q.dtype}, or torch_math"
        )
    return q.dtype


def _rule(
    name: str, broken: Callable[[AttentionProblem, DeviceFacts], bool], text: str
) -> CapabilityRule:
    """A rule that shows the value of the problem's field `name` before `text`."""

    def reason(problem: AttentionProblem, device: DeviceFacts) -> str | None:
        if not broken(problem, device):
            return None
        return f"{name}={getattr(problem, name)!r}: {text}"

    return CapabilityRule(name, reason)


_COMMON = (
    _rule(
        "phase",
        lambda p, d: p.phase not in ("prefill", "train"),
        "serves whole sequences only; use stream_attention.prefill or train",
    ),
    _rule(
        "cache_kind",
        lambda p, d: p.cache_kind != "contiguous",
        "takes contiguous k and v; use a contiguous cache or the torch route",
    ),
    _rule("layout", lambda p, d: p.layout != "NHD", "takes [batch, seq, heads, dim]; use 'NHD'"),
    _rule(
        "kv_dtype",
        lambda p, d: p.kv_dtype == "float8_e4m3fn",
        "takes no fp8 K/V; use q's dtype",
    ),
    _rule(
        "per_head_lists",
        lambda p, d: p.per_head_lists,
        "takes one length for all heads; use the torch route",
    ),
    _rule(
        "total_qo_len",
        lambda p, d: not p.uniform,
        "takes the same number of queries for each request; use batch * max_qo_len",
    ),
)
_SDPA = (
    *_COMMON,
    _rule(
        "logits_soft_cap",
        lambda p, d: p.logits_soft_cap is not None,
        "SDPA has no cap; use None, or torch_math",
    ),
    _rule("return_lse", lambda p, d: p.return_lse, "SDPA returns no lse; use torch_math"),
    _rule(
        "out_dtype",
        lambda p, d: p.out_dtype != p.q_dtype,
        "SDPA writes q's dtype; use q_dtype",
    ),
    _rule(
        "has_sink",
        lambda p, d: p.has_sink and d.type == "cuda" and p.q_dtype != "float32",
        "SDPA on CUDA would round the sink to q's dtype; use torch_math",
    ),
    _rule(
        "batch_invariant",
        lambda p, d: p.batch_invariant,
        "SDPA does not promise it; use torch_math",
    ),
)


def _needs_mask(p: AttentionProblem) -> bool:
    """SDPA gets a mask tensor, which rules out the flash kernel on CUDA."""
    aligned = not p.causal or p.max_qo_len >= p.kv_capacity or p.max_qo_len == 1
    return p.mask is not None or p.has_sink or p.has_window or not aligned


def _fused_without_groups(p: AttentionProblem, device: DeviceFacts) -> bool:
    """Grouped heads would send a CUDA call to SDPA's unfused path."""
    flash = p.q_dtype != "float32" and max(p.head_dim_qk, p.head_dim_vo) <= FLASH_HEAD_DIM
    flash = flash and p.head_dim_qk == p.head_dim_vo and not _needs_mask(p)
    return device.type == "cuda" and p.gqa_group_size > 1 and not flash


_GROUPED = CapabilityRule(
    "num_kv_heads",
    lambda p, d: (
        f"num_kv_heads={p.num_kv_heads}: fused CUDA kernels take grouped heads only in fp16 or "
        f"bf16 without a mask tensor; use torch_sdpa_gqa_expanded"
        if _fused_without_groups(p, d)
        else None
    ),
)
_EXPANDED = CapabilityRule(
    "num_kv_heads",
    lambda p, d: (
        None
        if _fused_without_groups(p, d)
        else f"num_kv_heads={p.num_kv_heads}: nothing to expand for here; use torch_sdpa"
    ),
)


def _flops(p: AttentionProblem) -> float:
    """FLOPs of the forward pass, half of them where causal skips half of the tiles."""
    full = 2.0 * p.total_qo_len * p.kv_capacity * p.num_qo_heads * (p.head_dim_qk + p.head_dim_vo)
    return full / 2 if p.causal and not _needs_mask(p) and p.max_qo_len > 1 else full


def _time_us(device: DeviceFacts, flops: float, moved: float) -> float:
    if device.type == "cuda":
        return 20.0 + flops / CUDA_FLOPS_PER_US + moved / CUDA_BYTES_PER_US
    threads = max(1, device.num_sms)
    return 20.0 + flops / (CPU_FLOPS_PER_US * threads) + moved / (CPU_BYTES_PER_US * threads)


def estimate_sdpa_us(p: AttentionProblem, device: DeviceFacts) -> float:
    """Roofline guess: K and V once, the mask tensor where there is one."""
    moved = float(p.batch * p.kv_capacity * p.kv_token_bytes)
    if _needs_mask(p):
        moved += p.max_qo_len * p.kv_capacity * (p.num_qo_heads if p.has_sink else 1) * 4.0
    return _time_us(device, _flops(p), moved)


def estimate_expanded_us(p: AttentionProblem, device: DeviceFacts) -> float:
    """As `torch_sdpa`, with K and V written and read once more at the query heads' number."""
    copies = 2.0 * p.batch * p.kv_capacity * p.kv_token_bytes * p.gqa_group_size
    return estimate_sdpa_us(p, device) + _time_us(device, 0.0, copies)


def estimate_math_us(p: AttentionProblem, device: DeviceFacts) -> float:
    """Scores go through memory about four times in fp32; products run at half the fused rate."""
    scores = 4.0 * 4.0 * p.total_qo_len * p.kv_capacity * p.num_qo_heads
    kv = p.batch * p.kv_capacity * p.kv_token_bytes * (1 + 8 / dtype_bytes(p.kv_dtype))
    return 50.0 + _time_us(device, 2 * _flops(p), scores + kv)


def register(registry: Registry) -> None:
    """Add the three routes to `registry`."""
    for route, rules, estimate_us, apply in (
        ("torch_sdpa", (*_SDPA, _GROUPED), estimate_sdpa_us, apply_sdpa),
        (
            "torch_sdpa_gqa_expanded",
            (*_SDPA, _EXPANDED),
            estimate_expanded_us,
            apply_sdpa_expanded,
        ),
        ("torch_math", _COMMON, estimate_math_us, apply_math),
    ):
        registry.register_attention(
            AttentionRecord(
                route=route,
                backend=route,
                package=PACKAGE,
                rules=rules,
                estimate_us=estimate_us,
                apply=apply,
            )
        )
