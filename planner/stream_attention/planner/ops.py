"""`torch.library` operators of the one-shot calls, so that `torch.compile` keeps one graph.

`stream_attn::attention` returns fresh results, `stream_attn::attention_out` writes the caller's.
Both take a cache as its tensors: a paged one has a `page_table`. The one-shot functions call them
while they are traced; there is no need to call them by hand. (`mode` is a name that torch's
functionalization keeps for itself, so it is `serving_mode` here.)
"""

from __future__ import annotations

from typing import Any

import torch

from stream_attention.core.cache import ContiguousKVCache, KVCache, PagedKVCache
from stream_attention.planner.modes import PolicyIdentity
from stream_attention.planner.serve import serve


@torch.library.custom_op("stream_attn::attention", mutates_args=())
def attention_op(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    page_table: torch.Tensor | None,
    sequence_lengths: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    qo_indptr: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    layout: str,
    key_scale_value: float | None,
    value_scale_value: float | None,
    max_qo_len: int | None,
    sm_scale: float | None,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    logits_soft_cap: float | None,
    return_lse: bool,
    batch_invariant: bool,
    validate: bool,
    serving_mode: str,
    policy_name: str | None,
    model_id: str | None,
    layer_id: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)` as fresh tensors; lse is empty (`[0]`) unless `return_lse`."""
    scales = (scale_of(key_scale, key_scale_value), scale_of(value_scale, value_scale_value))
    out, lse, _ = serve(
        q,
        cache_of(key, value, page_table, sequence_lengths, layout, scales),
        qo_indptr,
        mode=serving_mode,
        identity=PolicyIdentity(policy_name, model_id, layer_id),
        validate=validate,
        # A launch kept from a run inside a graph pool would hold memory of that pool.
        keep=False,
        max_qo_len=max_qo_len,
        sm_scale=sm_scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        logits_soft_cap=logits_soft_cap,
        attn_sink=attn_sink,
        return_lse=return_lse,
        batch_invariant=batch_invariant,
    )
    return out, q.new_empty((0,), dtype=torch.float32) if lse is None else lse


@attention_op.register_fake
def _attention_fake(
    q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return_lse = args[_RETURN_LSE]
    out = q.new_empty((*q.shape[:-1], value.shape[-1]))
    return out, q.new_empty(q.shape[:-1] if return_lse else (0,), dtype=torch.float32)


_RETURN_LSE = 15  # its place after q, key and value


@torch.library.custom_op("stream_attn::attention_out", mutates_args=("out", "lse"))
def attention_out_op(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    page_table: torch.Tensor | None,
    sequence_lengths: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    qo_indptr: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    layout: str,
    key_scale_value: float | None,
    value_scale_value: float | None,
    max_qo_len: int | None,
    sm_scale: float | None,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    logits_soft_cap: float | None,
    batch_invariant: bool,
    validate: bool,
    serving_mode: str,
    policy_name: str | None,
    model_id: str | None,
    layer_id: int | None,
) -> None:
    """Writes `out`, and `lse` unless it is `None`."""
    scales = (scale_of(key_scale, key_scale_value), scale_of(value_scale, value_scale_value))
    serve(
        q,
        cache_of(key, value, page_table, sequence_lengths, layout, scales),
        qo_indptr,
        mode=serving_mode,
        identity=PolicyIdentity(policy_name, model_id, layer_id),
        validate=validate,
        keep=False,
        max_qo_len=max_qo_len,
        sm_scale=sm_scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        logits_soft_cap=logits_soft_cap,
        attn_sink=attn_sink,
        return_lse=lse is not None,
        out=out,
        lse=lse,
        batch_invariant=batch_invariant,
    )


@attention_out_op.register_fake
def _attention_out_fake(*args: Any) -> None:
    return None


def scale_of(tensor: torch.Tensor | None, value: float | None) -> Any:
    """A scale as a cache takes it: a tensor, a number or `None`."""
    return value if tensor is None else tensor


def cache_of(
    key: torch.Tensor,
    value: torch.Tensor,
    page_table: torch.Tensor | None,
    sequence_lengths: Any,
    layout: str,
    scales: tuple[Any, ...],
) -> KVCache:
    """The cache that an operator's tensors mean; `ValueError` where a paged one lacks lengths."""
    common = {"layout": layout, "key_scale": scales[0], "value_scale": scales[1]}
    if page_table is None:
        return ContiguousKVCache(key=key, value=value, sequence_lengths=sequence_lengths, **common)
    return PagedKVCache(
        key=key, value=value, page_table=page_table, sequence_lengths=sequence_lengths, **common
    )
