"""Whole-sequence calls: `prefill` by any legal route, `train` by the differentiable ones."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch

from stream_attention.core.backend_plan import AttentionBackendPlan, Rejection
from stream_attention.core.cache_checks import require_dense, require_memory
from stream_attention.core.call_checks import check_grad
from stream_attention.core.describe import Described, describe
from stream_attention.core.device import device_facts
from stream_attention.core.errors import Faults, UnsupportedProblem, check_both, shape_of
from stream_attention.core.problem import PROBLEM_RULES, AttentionProblem
from stream_attention.core.registry import Registry, default_registry
from stream_attention.core.validate import validate as validate_contents
from stream_attention.planner.dispatch import info_of, unsupported
from stream_attention.planner.modes import PolicyIdentity, decide_with
from stream_attention.planner.ranking import Candidate, Ranking, rank
from stream_attention.planner.reasons import slower, why_chosen
from stream_attention.planner.serve import Served, capturing, serve

_OWN_RESULT = "out is given, and this route returns a tensor of its own; use out=None"
_DROPOUT = next(rule for rule in PROBLEM_RULES if rule.parameter == "dropout_p")


def run_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None,
    mode: str,
    identity: PolicyIdentity,
    validate: bool = True,
    return_info: bool = True,
    registry: Registry | None = None,
    **options: Any,
) -> Served:
    """`(out, lse or None, info)` by the best legal route, whether it writes or returns its result.

    A route that returns a tensor of its own is rejected where `out` is given: filling it would be a
    copy that nobody asked for.
    """
    registry = default_registry() if registry is None else registry
    check = validate is True and not capturing(q)
    flags = {"validate": validate, "return_info": return_info}
    decision, problem = decide_with(
        mode, identity, lambda: prefill_problem(q, k, v, attn_mask, check, flags=flags, **options)
    )
    device = device_facts(q.device)
    ranking = rank(problem, device, registry, forms=forms_of(problem))
    for place, candidate in enumerate(ranking.candidates):
        try:
            if candidate.record.build is not None and problem.mask is None:
                return serve(
                    q,
                    k,
                    v_cache=v,
                    mode=mode,
                    identity=identity,
                    validate=False,  # it was done above
                    registry=registry,
                    phase="prefill",
                    ranking=ranking,
                    pick=place,
                    **options,
                )
            if options.get("out") is not None:
                raise UnsupportedProblem(_OWN_RESULT)
            with torch.no_grad():
                return _apply(
                    problem, (q, k, v), ranking, candidate, decision.reason, attn_mask, options
                )
        except UnsupportedProblem as error:
            ranking = _refuse(ranking, candidate, error)
    raise unsupported(problem, device, list(ranking.rejections))


def run_train(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    generator: torch.Generator | None,
    mode: str,
    identity: PolicyIdentity,
    return_info: bool = True,
    registry: Registry | None = None,
    **options: Any,
) -> Served:
    """`(out, lse or None, info)` by the best differentiable route."""
    registry = default_registry() if registry is None else registry
    flags = {"return_info": return_info}
    decision, problem = decide_with(
        mode,
        identity,
        lambda: train_problem(q, k, v, attn_mask, dropout_p, generator, flags=flags, **options),
    )
    device = device_facts(q.device)
    ranking = rank(problem, device, registry, forms=forms_of(problem))
    for candidate in ranking.candidates:
        try:
            return _apply(
                problem,
                (q, k, v),
                ranking,
                candidate,
                decision.reason,
                attn_mask,
                options,
                generator,
            )
        except UnsupportedProblem as error:
            ranking = _refuse(ranking, candidate, error)
    raise unsupported(problem, device, list(ranking.rejections))


def prefill_problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    validate: bool,
    **options: Any,
) -> AttentionProblem:
    """The checked problem of a prefill call; `validate` looks at contents too, which syncs."""
    faults = Faults()
    fit = _check_sequences(faults, q, k, v)
    if isinstance(attn_mask, torch.Tensor):
        check_grad(faults, "attn_mask", attn_mask, "a serving call returns no gradient")
    _check_mask(faults, attn_mask, (q, k) if fit else None)
    described = _described(faults, fit, q, k, v, options)
    if validate:
        validate_contents(described, attn_mask)
    return dataclasses.replace(described.problem, phase="prefill", mask=_mask_kind(attn_mask))


def train_problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    generator: torch.Generator | None,
    **options: Any,
) -> AttentionProblem:
    """The checked problem of a train call; contents are not looked at, so nothing syncs."""
    faults = Faults()
    fit = _check_sequences(faults, q, k, v)
    _check_mask(faults, attn_mask, (q, k) if fit else None)
    _check_dropout(faults, dropout_p)
    _check_generator(faults, generator, q)
    with torch.no_grad():  # gradients are what this call is for
        described = _described(faults, fit, q, k, v, options)
    return dataclasses.replace(
        described.problem,
        phase="train",
        differentiable=True,
        dropout_p=dropout_p,
        mask=_mask_kind(attn_mask),
    )


def forms_of(problem: AttentionProblem) -> tuple[str, ...]:
    """How a whole-sequence problem may be served: launches are bound to q, K and V alone, so a mask
    or a gradient can only come from a route that is applied.
    """
    if problem.mask is not None or problem.differentiable:
        return ("apply",)
    return ("build", "apply")


def _apply(
    problem: AttentionProblem,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ranking: Ranking,
    chosen: Candidate,
    mode_reason: str,
    attn_mask: torch.Tensor | None,
    options: dict[str, Any],
    generator: torch.Generator | None = None,
) -> Served:
    record = chosen.record
    assert record.apply is not None
    # A caller's autocast would round the products and the result of inputs in fp32.
    with torch.autocast(qkv[0].device.type, enabled=False):
        out, lse = record.apply(
            problem,
            *qkv,
            attn_sink=options.get("attn_sink"),
            attn_mask=attn_mask,
            generator=generator,
        )
    place = ranking.candidates.index(chosen)  # those before it refused when they were tried
    why = why_chosen(chosen, ranking, place)
    plan = AttentionBackendPlan(
        route=record.route,
        backend=record.backend,
        arch=device_facts(qkv[0].device).arch,
        estimate_us=chosen.estimate_us,
        estimated_by=chosen.estimated_by,
        evidence=chosen.rows,
        reason=f"{mode_reason}; {why}",
        rejections=(*ranking.rejections, *slower(ranking.candidates[place + 1 :], chosen)),
    )
    return out, (lse if problem.return_lse else None), info_of(plan, "exact")


def _refuse(ranking: Ranking, candidate: Candidate, error: UnsupportedProblem) -> Ranking:
    """`ranking` with `candidate`'s late refusal on record."""
    late = Rejection(candidate.record.route, (str(error) or "refused to build",))
    return dataclasses.replace(ranking, rejections=(*ranking.rejections, late))


def _described(faults: Faults, fit: bool, q: Any, k: Any, v: Any, options: Any) -> Described:
    """The described call; one `ValueError` with `faults` and those that `describe` finds.

    fit: `describe` can look at the sequences. Else it looks at the options that need none.
    """
    if not fit:
        q = k = v = torch.empty(1, 1, 1, 1, dtype=torch.float32, device="meta")
        options = {**options, "attn_sink": None, "out": None}
    return check_both(
        lambda: faults.raise_if_any("attention"),
        lambda: describe(q, k, v_cache=v, allocate=False, **options),
    )


def _check_sequences(faults: Faults, q: Any, k: Any, v: Any) -> bool:
    fit = True
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        fit &= (
            faults.require(
                isinstance(tensor, torch.Tensor),
                name,
                type(tensor).__name__,
                "must be a torch.Tensor",
            )
            and require_dense(faults, name, tensor)
            and faults.require(
                tensor.dim() == 4,
                f"{name}.shape",
                shape_of(tensor),
                "must be [batch, seq, heads, head_dim]",
                f"{name}.unsqueeze(0)" if tensor.dim() == 3 else "rank 4",
            )
        )
    return fit


def _mask_kind(mask: torch.Tensor | None) -> str | None:
    if mask is None:
        return None
    return "bool" if mask.dtype == torch.bool else "additive"


def _check_mask(
    faults: Faults, mask: Any, sequences: tuple[torch.Tensor, torch.Tensor] | None
) -> None:
    """Kind of a caller's mask; beside `(q, k)` its dtype, device and shape too."""
    if mask is None:
        return
    if not faults.require(
        isinstance(mask, torch.Tensor), "attn_mask", type(mask).__name__, "must be a torch.Tensor"
    ) or not (
        require_dense(faults, "attn_mask", mask) and require_memory(faults, "attn_mask", mask)
    ):
        return
    if sequences is None:
        return
    q, k = sequences
    faults.require(
        mask.dtype in (torch.bool, torch.float32, q.dtype),
        "attn_mask.dtype",
        mask.dtype,
        "must be torch.bool (True = seen), torch.float32 or q's dtype (added to the scores)",
        "torch.bool",
    )
    faults.require(
        mask.device == q.device,
        "attn_mask.device",
        str(mask.device),
        "must be q's device",
        str(q.device),
    )
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    padded = (1,) * (4 - mask.dim()) + shape_of(mask)
    faults.require(
        mask.dim() <= 4 and all(m in (1, n) for m, n in zip(padded, full, strict=False)),
        "attn_mask.shape",
        shape_of(mask),
        "must broadcast to [batch, num_qo_heads, qo_len, kv_len]",
        full,
    )


def _check_dropout(faults: Faults, dropout_p: Any) -> None:
    asked = SimpleNamespace(dropout_p=dropout_p, differentiable=True)
    faults.require(_DROPOUT.holds(asked), "dropout_p", dropout_p, _DROPOUT.text, "0.0")


def _check_generator(faults: Faults, generator: Any, q: Any) -> None:
    if generator is None:
        return
    place = str(q.device) if isinstance(q, torch.Tensor) else "cpu"
    if faults.require(
        isinstance(generator, torch.Generator),
        "generator",
        type(generator).__name__,
        "must be None or a torch.Generator on q's device",
        f"torch.Generator({place!r})",
    ) and isinstance(q, torch.Tensor):
        faults.require(
            generator.device.type == q.device.type,
            "generator.device",
            str(generator.device),
            "must be q's device",
            place,
        )
