"""The one-shot path: describe, validate, take or build a launch, run it on fresh results."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from stream_attention.core.cache import KVCache
from stream_attention.core.describe import describe
from stream_attention.core.device import device_facts
from stream_attention.core.info import AttentionInfo
from stream_attention.core.registry import Registry, default_registry
from stream_attention.core.tile_plan import AttentionTilePlan
from stream_attention.planner.dispatch import build, home_of
from stream_attention.planner.engine import checked
from stream_attention.planner.modes import DEFAULT_MODE, PolicyIdentity, decide_with
from stream_attention.planner.plan import is_inference
from stream_attention.planner.plan_cache import PlanCache, plan_key
from stream_attention.planner.ranking import ById, Ranking, Rankings

Served = tuple[torch.Tensor, torch.Tensor | None, AttentionInfo]

PLANS = PlanCache()
RANKINGS = Rankings()
_NOBODY = PolicyIdentity()


def capturing(q: Any) -> bool:
    """Whether a CUDA graph is being captured on q's current stream."""
    return isinstance(q, torch.Tensor) and q.is_cuda and torch.cuda.is_current_stream_capturing()


def serve(
    q: torch.Tensor,
    cache: KVCache | torch.Tensor,
    qo_indptr: torch.Tensor | None = None,
    *,
    mode: str = DEFAULT_MODE,
    identity: PolicyIdentity = _NOBODY,
    validate: bool = True,
    return_info: bool = True,
    keep: bool = True,
    registry: Registry | None = None,
    plans: PlanCache = PLANS,
    phase: str | None = None,
    ranking: Ranking | None = None,
    pick: int | None = None,
    **options: Any,
) -> Served:
    """`(out, lse or None, info)` of one call; `options` are the keywords of `describe`.

    Launches are kept between calls in `plans` and rebound to the call's tensors; results are fresh
    tensors each time (or the caller's `out`, `lse`), and no tensor of the call is kept. While a
    CUDA graph is captured, and with `keep=False`, nothing is taken from `plans` or kept there:
    scratch then comes from, and goes back to, the allocator pool that is current. Contents are not
    validated during a capture, where nothing may sync. `return_info` is the caller's, and only
    checked. `phase`, `ranking` and `pick` are for a
    caller that has ranked the routes itself.
    """
    registry = default_registry() if registry is None else registry
    in_capture = capturing(q)
    with home_of(q):
        decision, described = decide_with(
            mode,
            identity,
            lambda: describe(
                q,
                cache,
                qo_indptr,
                flags={"validate": validate, "return_info": return_info},
                **options,
            ),
        )
        if validate and not in_capture:
            described = checked(described, options.get("max_qo_len"))
        if phase is not None:
            problem = dataclasses.replace(described.problem, phase=phase)
            described = dataclasses.replace(described, problem=problem)
        problem, bound = described.problem, described.bound
        device = device_facts(q.device)
        if ranking is None:
            ranking = RANKINGS.rank(problem, device, registry)
        key = plan = None
        keep = keep and not in_capture
        if keep:
            stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
            handle = ById(registry)
            key = plan_key(described, stream, handle, registry.version, decision.reason, pick)
            plan = plans.take(key)
        if plan is None:
            tile_plan = AttentionTilePlan.for_problem(problem)
            built = build(problem, tile_plan, device, bound, ranking, decision.reason, pick)
        else:
            built = plan
            built.launch.rebind(bound)
        # A launch that raises is not given back: its scratch may be half written.
        with torch.inference_mode(is_inference(bound.out) or is_inference(bound.lse)):
            built.launch.run()
        if keep and hasattr(built.launch, "unbind"):
            built.launch.unbind()
            plans.give(key, built)
    return described.result(), described.result_lse(), built.info
