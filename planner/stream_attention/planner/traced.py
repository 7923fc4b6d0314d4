"""`decode` and `attention` inside a function that `torch.compile` traces: one operator call each.

Imported only while something is traced: marking a function as constant for the compiler loads the
compiler, which takes longer than everything else here.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch

from stream_attention.core.backend_plan import Rejection
from stream_attention.core.cache import CACHE_CLASSES, ContiguousKVCache, KVCache, PagedKVCache
from stream_attention.core.describe import describe, phase_of
from stream_attention.core.device import DeviceFacts, device_facts
from stream_attention.core.errors import Faults, UnsupportedProblem
from stream_attention.core.info import AT_RUN_TIME, AttentionInfo
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import default_registry
from stream_attention.core.tile_plan import AttentionTilePlan
from stream_attention.planner.dispatch import unsupported
from stream_attention.planner.modes import PolicyIdentity, canonical_mode, decide
from stream_attention.planner.ops import attention_op, attention_out_op, cache_of
from stream_attention.planner.reasons import slower, state_of, why_chosen
from stream_attention.planner.serve import RANKINGS
from stream_attention.planner.traced_checks import (
    bounded,
    check_cache_kinds,
    check_gradients,
    check_identity,
    check_kinds,
    settled,
)


def call_traced(
    q: torch.Tensor,
    cache: KVCache | torch.Tensor,
    qo_indptr: torch.Tensor | None,
    *,
    v_cache: torch.Tensor | None,
    mode: str,
    names: tuple[str | None, str | None, int | None],
    validate: bool,
    return_info: bool,
    max_qo_len: int | None,
    sm_scale: float | None,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    logits_soft_cap: float | None,
    attn_sink: torch.Tensor | None,
    return_lse: bool,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    batch_invariant: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, AttentionInfo | None]:
    """One operator call in a traced function; `info` is decided from metadata while tracing.

    With `return_info` the traced function is specialized on shapes and numbers (the route depends
    on them); without, sizes and ints may stay symbolic.
    """
    _check_call(
        (q, cache, v_cache, qo_indptr, attn_sink, out, lse),
        numbers={"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap},
        counts={
            "max_qo_len": max_qo_len,
            "window_left": window_left,
            "window_right": window_right,
            "layer_id": names[2],
        },
        flags={
            "causal": causal,
            "return_lse": return_lse,
            "batch_invariant": batch_invariant,
            "validate": validate,
            "return_info": return_info,
        },
        mode=mode,
        names=names,
    )
    window_left, window_right = bounded(window_left), bounded(window_right)
    if isinstance(cache, torch.Tensor):
        cache = ContiguousKVCache(key=cache, value=v_cache)
    table = cache.page_table if isinstance(cache, PagedKVCache) else None
    tensors = (q, cache.key, cache.value, table, cache.sequence_lengths)
    scales = (cache.key_scale, cache.value_scale)
    scale_tensors = [scale if isinstance(scale, torch.Tensor) else None for scale in scales]
    scale_values = [None if isinstance(scale, torch.Tensor) else scale for scale in scales]
    info = None
    if return_info:
        names = (names[0], names[1], settled(names[2]))
        scale_values = [settled(scale) for scale in scale_values]
        max_qo_len, sm_scale = settled(max_qo_len), settled(sm_scale)
        window_left, window_right = settled(window_left), settled(window_right)
        logits_soft_cap = settled(logits_soft_cap)
        info = _traced_info(
            tuple(None if t is None else (sizes_of(t), t.dtype, strides_of(t)) for t in tensors),
            tuple(None if t is None else sizes_of(t) for t in scale_tensors),
            tuple(scale_values),
            q.device,
            cache.layout,
            None if qo_indptr is None else sizes_of(qo_indptr),
            attn_sink is not None,
            None if out is None else out.dtype,
            mode,
            names,
            max_qo_len,
            (sm_scale, causal, window_left, window_right, logits_soft_cap),
            (return_lse, batch_invariant, validate),
        )
    common = (qo_indptr, attn_sink, cache.layout, *scale_values, max_qo_len, sm_scale, causal,
              window_left, window_right, logits_soft_cap)  # fmt: skip
    flags = (batch_invariant, validate, mode, *names)
    return *_run((*tensors, *scale_tensors), common, flags, return_lse, out, lse), info


def _run(
    tensors: tuple[torch.Tensor | None, ...],
    common: tuple[Any, ...],
    flags: tuple[Any, ...],
    return_lse: bool,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The operator that makes its outputs, or the one that writes the caller's."""
    if out is None and lse is None:
        out, got = attention_op(*tensors, *common, return_lse, *flags)
        return out, (got if return_lse else None)
    q, value = tensors[0], tensors[2]
    assert q is not None
    assert value is not None
    if out is None:
        out = q.new_empty((*q.shape[:-1], value.shape[-1]))
    if lse is None and return_lse:
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    attention_out_op(out, lse, *tensors, *common, *flags)
    return out, lse


def _check_call(
    arguments: tuple[Any, ...],
    *,
    numbers: dict[str, Any],
    counts: dict[str, Any],
    flags: dict[str, Any],
    mode: str,
    names: tuple[str | None, str | None, int | None],
) -> None:
    """Raise `ValueError` with every fault of a traced call's arguments that needs no shapes."""
    q, cache, v_cache, qo_indptr, attn_sink, out, lse = arguments
    if not torch.compiler.is_compiling():
        canonical_mode(mode)
        PolicyIdentity(*names)
    faults = Faults()
    outputs = {"out": out, "lse": lse}
    check_cache_kinds(faults, cache, v_cache)
    check_kinds(
        faults,
        tensors={"qo_indptr": qo_indptr, "attn_sink": attn_sink, **outputs},
        numbers={**numbers, **_scales(cache)},
        counts=counts,
        flags=flags,
        mode=mode,
        names={"policy_name": names[0], "model_id": names[1]},
    )
    if not isinstance(q, torch.Tensor):
        faults.add("q", type(q).__name__, "must be a torch.Tensor")
    if lse is not None and flags["return_lse"] is not True:
        faults.add("return_lse", flags["return_lse"], "lse is given", "return_lse=True")
    read = {"q": q, "attn_sink": attn_sink, **_pools(cache, v_cache)}
    check_gradients(faults, {**read, **outputs})
    check_identity(faults, out, lse, {**read, "qo_indptr": qo_indptr})
    faults.raise_if_any("attention")


def _scales(cache: Any) -> dict[str, Any]:
    """The scales of a cache that are no tensors."""
    if not isinstance(cache, CACHE_CLASSES):
        return {}
    scales = {"key_scale": cache.key_scale, "value_scale": cache.value_scale}
    return {n: scale for n, scale in scales.items() if not isinstance(scale, torch.Tensor)}


def _pools(cache: Any, v_cache: Any) -> dict[str, Any]:
    if isinstance(cache, CACHE_CLASSES):
        return {"key": cache.key, "value": cache.value}
    return {"key": cache, "value": v_cache}


def sizes_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape in plain ints. `index` guards a symbolic size: a route is chosen for one size."""
    return tuple([operator.index(size) for size in tensor.shape])


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides in plain ints."""
    return tuple([operator.index(stride) for stride in tensor.stride()])


@torch.compiler.assume_constant_result
def _traced_info(
    tensors: tuple[Any, ...],
    scale_shapes: tuple[Any, ...],
    scale_values: tuple[float | None, ...],
    device: torch.device,
    layout: str,
    indptr_shape: tuple[int, ...] | None,
    has_sink: bool,
    out_dtype: torch.dtype | None,
    mode: str,
    names: tuple[str | None, str | None, int | None],
    max_qo_len: int | None,
    masks: tuple[Any, ...],
    flags: tuple[bool, bool, bool],
) -> AttentionInfo:
    """What the compiled call will report: the route is ranked now, on tensors of the same shapes.

    A call that is at fault is traced all the same, and raises its own error when it runs: an error
    from here would reach the caller as one of the compiler's.
    """
    try:
        return _rank_traced(
            tensors,
            scale_shapes,
            scale_values,
            device,
            layout,
            indptr_shape,
            has_sink,
            out_dtype,
            mode,
            names,
            max_qo_len,
            masks,
            flags,
        )
    except (ValueError, UnsupportedProblem) as error:
        return AttentionInfo(
            backend_used="none", route="none", reason=str(error), arch=device_facts(device).arch
        )


def _rank_traced(
    tensors: tuple[Any, ...],
    scale_shapes: tuple[Any, ...],
    scale_values: tuple[float | None, ...],
    device: torch.device,
    layout: str,
    indptr_shape: tuple[int, ...] | None,
    has_sink: bool,
    out_dtype: torch.dtype | None,
    mode: str,
    names: tuple[str | None, str | None, int | None],
    max_qo_len: int | None,
    masks: tuple[Any, ...],
    flags: tuple[bool, bool, bool],
) -> AttentionInfo:
    q, key, value, table, lens = (
        None if t is None else torch.empty_strided(t[0], t[2], dtype=t[1], device="meta")
        for t in tensors
    )
    assert q is not None and key is not None and value is not None
    scales = tuple(
        given if shape is None else torch.empty(shape, dtype=torch.float32, device="meta")
        for shape, given in zip(scale_shapes, scale_values, strict=True)
    )
    decision = decide(mode, PolicyIdentity(*names))
    sm_scale, causal, window_left, window_right, logits_soft_cap = masks
    return_lse, batch_invariant, validate = flags
    indptr = sink = out = None
    if indptr_shape is not None:
        indptr = torch.empty(indptr_shape, dtype=torch.int32, device="meta")
    if has_sink:
        sink = torch.empty(q.shape[-2], dtype=torch.float32, device="meta")
    if out_dtype is not None:
        out = torch.empty((*q.shape[:-1], value.shape[-1]), dtype=out_dtype, device="meta")
    described = describe(
        q,
        cache_of(key, value, table, lens, layout, scales),
        indptr,
        sm_scale=sm_scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        logits_soft_cap=logits_soft_cap,
        attn_sink=sink,
        return_lse=return_lse,
        out=out,
        batch_invariant=batch_invariant,
        max_qo_len=max_qo_len,
    )
    problem, facts = described.problem, device_facts(device)
    guarantee = AttentionTilePlan.for_problem(problem).guarantee
    # As in a call that is not traced: only one that validates looks for the longest request.
    one = problem.batch <= 1 or problem.total_qo_len == 0
    if indptr is not None and max_qo_len is None and validate and not one:
        return _info_at_run_time(problem, facts, decision.reason, guarantee)
    ranking = RANKINGS.rank(problem, facts, default_registry())
    refused = list(ranking.rejections)
    for place, chosen in enumerate(ranking.candidates):
        refuses = chosen.record.refuses if problem.total_qo_len else None
        reason = None if refuses is None else refuses(problem, described.bound)
        if reason is not None:
            refused.append(Rejection(chosen.record.route, (reason,)))
            continue
        why = why_chosen(chosen, ranking, place)
        lost = (*refused, *slower(ranking.candidates[place + 1 :], chosen))
        return AttentionInfo(
            backend_used=chosen.record.backend,
            route=chosen.record.route,
            guarantee=guarantee,
            reason=f"{decision.reason}; {why}; ranked while tracing: splits and workspace are "
            "chosen when the compiled call runs",
            fallback_reasons=tuple(map(str, lost)),
            arch=facts.arch,
        )
    raise unsupported(problem, facts, refused)


def _info_at_run_time(
    problem: AttentionProblem, facts: DeviceFacts, mode_reason: str, guarantee: str
) -> AttentionInfo:
    """Info without a route: the longest of several packed requests is known to the run alone.

    Names every candidate with its reasons for the fewest and for the most queries that the longest
    request may have.
    """
    total = problem.total_qo_len
    found: dict[str, list[int]] = {}
    ends = sorted({-(-total // problem.batch), total})
    for longest in ends:
        phase = phase_of(total, problem.batch, longest, problem.kv_capacity)
        asked = dataclasses.replace(problem, max_qo_len=longest, phase=phase)
        ranking = RANKINGS.rank(asked, facts, default_registry())
        for candidate in ranking.candidates:
            line = f"{candidate.record.route}: {state_of(candidate)}"
            found.setdefault(line, []).append(longest)
        for rejection in ranking.rejections:
            found.setdefault(str(rejection), []).append(longest)
    lines = [
        line if len(told) == len(ends) else f"{line} (with max_qo_len={told[0]})"
        for line, told in found.items()
    ]
    return AttentionInfo(
        backend_used=AT_RUN_TIME,
        route=AT_RUN_TIME,
        guarantee=guarantee,
        reason=f"{mode_reason}; the longest request decides the route, and is found in qo_indptr "
        f"when the compiled call runs; fallback_reasons ranks with max_qo_len={ends[0]} and "
        f"{ends[-1]}, between which it lies; give max_qo_len to have the route decided while "
        "tracing",
        fallback_reasons=tuple(lines),
        arch=facts.arch,
    )
