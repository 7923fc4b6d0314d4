"""The one-shot functions of the public API: `decode`, `attention`, `prefill`, `train`."""

from __future__ import annotations

from typing import Any

import torch

import stream_attention.planner.ops  # noqa: F401 (registers the operators)
from stream_attention.core.cache import KVCache
from stream_attention.planner.differentiable import run_prefill, run_train
from stream_attention.planner.modes import DEFAULT_MODE, PolicyIdentity
from stream_attention.planner.serve import serve


def decode(
    q: torch.Tensor,
    cache: KVCache | torch.Tensor,
    v_cache: torch.Tensor | None = None,
    *,
    mode: str = DEFAULT_MODE,
    policy_name: str | None = None,
    model_id: str | None = None,
    layer_id: int | None = None,
    sm_scale: float | None = None,
    causal: bool = True,
    window_left: int | None = None,
    window_right: int | None = None,
    logits_soft_cap: float | None = None,
    attn_sink: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    batch_invariant: bool = False,
    return_info: bool = True,
    validate: bool = True,
) -> Any:
    """Exact attention of each request's newest queries over its cache: `(out[, lse][, info])`.

    q: `[batch, 1, num_qo_heads, head_dim]` or `[batch, num_qo_heads, head_dim]`; with more queries
        a request, `[batch, qo_len, num_qo_heads, head_dim]`: the last one sits at the last token.
    cache: `PagedKVCache`, `ContiguousKVCache`, or keys `[batch, capacity, num_kv_heads, head_dim]`
        beside `v_cache`.
    out: written in place and returned when given; else fresh in q's dtype, shaped like q with the
        value's head_dim. lse: fp32 natural log, `q.shape[:-1]`; -inf (and out 0) where a query sees
        no token.
    validate: check lengths, page ids and scales, with one sync (skipped while a graph is captured).

    `ValueError` names every fault of the arguments, `UnsupportedProblem` every candidate's reasons.
    """
    result = _serve_or_trace(
        q,
        cache,
        None,
        return_info,
        (policy_name, model_id, layer_id),
        v_cache=v_cache,
        max_qo_len=None,
        mode=mode,
        validate=validate,
        sm_scale=sm_scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        logits_soft_cap=logits_soft_cap,
        attn_sink=attn_sink,
        return_lse=return_lse,
        out=out,
        lse=lse,
        batch_invariant=batch_invariant,
    )
    return _shown(result, return_info)


def attention(
    q: torch.Tensor,
    cache: KVCache | torch.Tensor,
    qo_indptr: torch.Tensor | None = None,
    *,
    v_cache: torch.Tensor | None = None,
    max_qo_len: int | None = None,
    mode: str = DEFAULT_MODE,
    policy_name: str | None = None,
    model_id: str | None = None,
    layer_id: int | None = None,
    sm_scale: float | None = None,
    causal: bool = True,
    window_left: int | None = None,
    window_right: int | None = None,
    logits_soft_cap: float | None = None,
    attn_sink: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    batch_invariant: bool = False,
    return_info: bool = False,
    validate: bool = True,
) -> Any:
    """Exact attention over any mix of prefill, append, verify and decode: `out[, lse][, info]`.

    q: packed `[total_q, num_qo_heads, head_dim]` beside `qo_indptr` `[batch + 1]` int32 (request b
        owns rows `qo_indptr[b] … qo_indptr[b + 1] - 1`), or a form that `decode` takes.
    max_qo_len: most queries of one request; found by validation, else `total_q` is assumed.
    The rest is as in `decode`. Under `torch.compile` the info is made while tracing: where the
    longest request decides the route and `max_qo_len` is not given, `info.route` says that it is
    decided at run time, and `info.fallback_reasons` has every candidate.
    """
    result = _serve_or_trace(
        q,
        cache,
        qo_indptr,
        return_info,
        (policy_name, model_id, layer_id),
        v_cache=v_cache,
        max_qo_len=max_qo_len,
        mode=mode,
        validate=validate,
        sm_scale=sm_scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        logits_soft_cap=logits_soft_cap,
        attn_sink=attn_sink,
        return_lse=return_lse,
        out=out,
        lse=lse,
        batch_invariant=batch_invariant,
    )
    return _shown(result, return_info)


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    mode: str = DEFAULT_MODE,
    policy_name: str | None = None,
    model_id: str | None = None,
    layer_id: int | None = None,
    sm_scale: float | None = None,
    causal: bool = True,
    window_left: int | None = None,
    window_right: int | None = None,
    logits_soft_cap: float | None = None,
    attn_sink: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    batch_invariant: bool = False,
    return_info: bool = False,
    validate: bool = True,
) -> Any:
    """Exact attention of whole sequences, without gradients: `out[, lse][, info]`.

    q: `[batch, qo_len, num_qo_heads, head_dim]`; k, v: `[batch, kv_len, num_kv_heads, head_dim]`,
        any group size, value head_dim free. Causal is aligned bottom-right.
    attn_mask: bool (True = seen) or additive float (-inf = not seen), broadcastable to
        `[batch, num_qo_heads, qo_len, kv_len]`, on top of the other masks.
    validate: check the sink and an additive mask by value, with a sync each (skipped while a graph
        is captured).
    """
    options: dict[str, Any] = {
        "sm_scale": sm_scale,
        "causal": causal,
        "window_left": window_left,
        "window_right": window_right,
        "logits_soft_cap": logits_soft_cap,
        "attn_sink": attn_sink,
        "return_lse": return_lse,
        "batch_invariant": batch_invariant,
    }
    names = (policy_name, model_id, layer_id)
    if torch.compiler.is_compiling():
        from stream_attention.planner.traced_sequences import prefill_traced

        flags = {"validate": validate, "return_info": return_info}
        result = prefill_traced(q, k, v, attn_mask, mode, names, flags, out, options)
        return _shown(result, return_info)
    result = run_prefill(
        q,
        k,
        v,
        attn_mask=attn_mask,
        mode=mode,
        identity=PolicyIdentity(*names),
        validate=validate,
        return_info=return_info,
        out=out,
        **options,
    )
    return _shown(result, return_info)


def train(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    mode: str = DEFAULT_MODE,
    policy_name: str | None = None,
    model_id: str | None = None,
    layer_id: int | None = None,
    sm_scale: float | None = None,
    causal: bool = True,
    window_left: int | None = None,
    window_right: int | None = None,
    logits_soft_cap: float | None = None,
    attn_sink: torch.Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    return_info: bool = False,
) -> Any:
    """Differentiable exact attention: `out[, lse][, info]`, with gradients for q, k, v and sink.

    Shapes and `attn_mask` are as in `prefill`. dropout_p: probability in `[0, 1)` that a weight is
    dropped, the others scaled by `1 / (1 - dropout_p)`. generator: source of its randomness.

    Second derivatives exist where the route's do: `torch_math` has them (with `return_lse`, a cap
    or `batch_invariant`), the fused kernels of `torch_sdpa` have none. Under `torch.compile` every
    size decides the route: `mark_dynamic` on one raises torch's `ConstraintViolationError`; use
    `maybe_mark_dynamic`.
    """
    options: dict[str, Any] = {
        "sm_scale": sm_scale,
        "causal": causal,
        "window_left": window_left,
        "window_right": window_right,
        "logits_soft_cap": logits_soft_cap,
        "attn_sink": attn_sink,
        "return_lse": return_lse,
        "batch_invariant": batch_invariant,
    }
    names = (policy_name, model_id, layer_id)
    if torch.compiler.is_compiling():
        from stream_attention.planner.traced_sequences import train_traced

        flags = {"return_info": return_info}
        result = train_traced(q, k, v, attn_mask, dropout_p, generator, mode, names, flags, options)
        return _shown(result, return_info)
    result = run_train(
        q,
        k,
        v,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        generator=generator,
        mode=mode,
        identity=PolicyIdentity(*names),
        return_info=return_info,
        **options,
    )
    return _shown(result, return_info)


def _serve_or_trace(
    q: torch.Tensor,
    cache: KVCache | torch.Tensor,
    qo_indptr: torch.Tensor | None,
    return_info: bool,
    names: tuple[str | None, str | None, int | None],
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
    """The call itself, or one operator: in the graph of a function that is being traced, and for
    tensors that are more than memory (fake ones, subclasses), which the dispatcher knows about.
    """
    if torch.compiler.is_compiling() or _is_subclass(q):
        from stream_attention.planner.traced import call_traced

        return call_traced(q, cache, qo_indptr, names=names, return_info=return_info, **options)
    who = PolicyIdentity(*names)
    return serve(q, cache, qo_indptr, identity=who, return_info=return_info, **options)


def _is_subclass(q: Any) -> bool:
    return isinstance(q, torch.Tensor) and type(q) not in (torch.Tensor, torch.nn.Parameter)


def _shown(result: tuple[torch.Tensor, torch.Tensor | None, Any], return_info: bool) -> Any:
    """What the caller asked to see of `(out, lse, info)`."""
    out, lse, info = result
    shown = (out,) if lse is None else (out, lse)
    if return_info:
        return (*shown, info)
    return out if lse is None else shown
