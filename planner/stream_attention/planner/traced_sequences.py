"""`prefill` and `train` inside a function that `torch.compile` traces.

What the planner decides from metadata is decided while tracing, on meta tensors of the same shapes,
and is a constant of the graph; the chosen route's own tensor code is traced into the graph. A call
at fault raises while it is traced, inside the compiler's own error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stream_attention.core.device import device_facts
from stream_attention.core.info import AttentionInfo
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import AttentionRecord, default_registry
from stream_attention.planner.differentiable import forms_of, prefill_problem, train_problem
from stream_attention.planner.dispatch import rank, slower, unsupported, why_chosen
from stream_attention.planner.modes import PolicyIdentity, decide
from stream_attention.planner.traced import call_traced, sizes_of

Names = tuple[str | None, str | None, int | None]
Traced = tuple[torch.Tensor, torch.Tensor | None, AttentionInfo]

# Decisions of traced calls, by the constant that names them in the graph: the compiler follows code
# and fields of an object only where it can say how the object is reached.
_APPLIED: dict[str, Callable[..., Any]] = {}
_PROBLEMS: dict[str, AttentionProblem] = {}


def prefill_traced(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    mode: str,
    names: Names,
    validate: bool,
    out: torch.Tensor | None,
    options: dict[str, Any],
) -> Traced:
    """A prefill call in a graph: one operator, or the tensor code of a route that is applied."""
    spec = _spec("prefill", q, k, v, attn_mask, 0.0, mode, names, out, options)
    if _writes(spec):
        result = call_traced(
            q,
            k,
            None,
            v_cache=v,
            mode=mode,
            names=names,
            validate=validate,
            return_info=False,
            max_qo_len=None,
            out=out,
            lse=None,
            **options,
        )
        return result[0], result[1], _info(spec)
    with torch.no_grad():
        return _applied(spec, q, k, v, attn_mask, None, options)


def train_traced(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    generator: torch.Generator | None,
    mode: str,
    names: Names,
    options: dict[str, Any],
) -> Traced:
    """A train call in a graph: the tensor code of a differentiable route."""
    spec = _spec("train", q, k, v, attn_mask, dropout_p, mode, names, None, options)
    return _applied(spec, q, k, v, attn_mask, generator, options)


def _applied(
    spec: tuple[Any, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    generator: torch.Generator | None,
    options: dict[str, Any],
) -> Traced:
    name = _name(spec)
    with torch.autocast(q.device.type, enabled=False):  # as in a call that is not traced
        out, lse = _APPLIED[name](
            _PROBLEMS[name],
            q,
            k,
            v,
            attn_sink=options["attn_sink"],
            attn_mask=attn_mask,
            generator=generator,
        )
    return out, (lse if options["return_lse"] else None), _info(spec)


def _spec(
    kind: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    mode: str,
    names: Names,
    out: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[Any, ...]:
    """Everything the decision depends on, as plain constants."""
    tensors = (q, k, v, attn_mask, options["attn_sink"], out)
    gradients = torch.is_grad_enabled()
    return (
        kind,
        tuple(
            None if t is None else (sizes_of(t), t.dtype, t.requires_grad and gradients)
            for t in tensors
        ),
        q.device,
        dropout_p,
        mode,
        names,
        tuple((name, value) for name, value in options.items() if name != "attn_sink"),
    )


@torch.compiler.assume_constant_result
def _name(spec: tuple[Any, ...]) -> str:
    """Decides, leaves route and problem in the tables, and returns their name there."""
    record, problem, _ = _decide(spec)
    assert record.apply is not None
    name = f"{record.route}: {problem!r}"
    _APPLIED[name], _PROBLEMS[name] = record.apply, problem
    return name


@torch.compiler.assume_constant_result
def _writes(spec: tuple[Any, ...]) -> bool:
    """Whether the chosen route writes into a given tensor, which an operator call does."""
    return _decide(spec)[0].build is not None


@torch.compiler.assume_constant_result
def _info(spec: tuple[Any, ...]) -> AttentionInfo:
    return _decide(spec)[2]


def _decide(spec: tuple[Any, ...]) -> tuple[AttentionRecord, AttentionProblem, AttentionInfo]:
    kind, tensors, device, dropout_p, mode, names, options = spec
    q, k, v, mask, sink, out = (
        None
        if t is None
        else torch.empty(t[0], dtype=t[1], device="meta", requires_grad=t[2] and kind == "prefill")
        for t in tensors
    )
    assert q is not None and k is not None and v is not None
    decision = decide(mode, PolicyIdentity(*names))
    keywords: dict[str, Any] = {"attn_sink": sink, **dict(options)}
    if kind == "train":
        problem = train_problem(q, k, v, mask, dropout_p, None, **keywords)
    else:
        problem = prefill_problem(q, k, v, mask, False, out=out, **keywords)
    facts = device_facts(device)
    forms = ("build",) if out is not None else forms_of(problem)
    ranking = rank(problem, facts, default_registry(), forms=forms)
    if not ranking.candidates:
        raise unsupported(problem, facts, list(ranking.rejections))
    chosen, *rest = ranking.candidates
    record = chosen.record
    lost = (*ranking.rejections, *slower(tuple(rest), chosen))
    info = AttentionInfo(
        backend_used=record.backend,
        route=record.route,
        reason=f"{decision.reason}; {why_chosen(chosen, ranking.candidates, 0)}; ranked while "
        "tracing",
        fallback_reasons=tuple(str(rejection) for rejection in lost),
        arch=facts.arch,
    )
    return record, problem, info
