"""Our own contenders: every registered attention route, forced, and the engine's own choice.

A route is built straight from its capability record on described tensors, which is what the engine
does after choosing; `engine` goes through `StreamAttnEngine.plan_attention`: what a user gets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stream_attention.bench.cases import FP8, AttentionCase
from stream_attention.bench.contenders import Contender, Facts, Work, distribution_versions
from stream_attention.bench.kernel_facts import kernel_facts
from stream_attention.bench.pools import Pool
from stream_attention.core.backend_plan import AttentionBackendPlan
from stream_attention.core.describe import Described, describe, phase_of
from stream_attention.core.device import device_facts
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import AttentionRecord, Registry, default_registry
from stream_attention.core.tile_plan import AttentionTilePlan
from stream_attention.core.version import __version__

ENGINE = "engine"


def problem_of(case: AttentionCase) -> AttentionProblem:
    """The problem that `describe_pool` and a validating plan find for a pool of this case."""
    capacity = case.max_tokens
    return AttentionProblem(
        phase=phase_of(case.num_rows, case.batch, case.max_q_len, capacity),
        batch=case.batch,
        total_qo_len=case.num_rows,
        max_qo_len=case.max_q_len,
        kv_capacity=capacity,
        num_qo_heads=case.num_qo_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim_qk=case.head_dim,
        head_dim_vo=case.head_dim,
        q_dtype=case.dtype,
        kv_dtype=case.stored_dtype,
        out_dtype=case.dtype,
        cache_kind=case.cache,
        layout=case.layout,
        page_size=capacity if case.contiguous else case.page_size,
        causal=case.causal,
        sm_scale=case.head_dim**-0.5,
        kv_scales="tensor" if case.stored_dtype == FP8 else None,
        batch_invariant=case.batch_invariant,
    )


def query_of(pool: Pool) -> torch.Tensor:
    """q as the public API takes it.

    `[batch, heads, dim]`, `[batch, q_len, heads, dim]`, or packed beside the pool's offsets.
    """
    case = pool.case
    if case.q_len == 1 or pool.qo_indptr is not None:
        return pool.q
    return pool.q.view(case.batch, case.q_len, case.num_qo_heads, case.head_dim)


def describe_pool(pool: Pool) -> Described:
    """The call that a pool is, with an output of its own."""
    case = pool.case
    return describe(
        query_of(pool),
        pool.cache,
        pool.qo_indptr,
        causal=case.causal,
        batch_invariant=case.batch_invariant,
        max_qo_len=None if pool.qo_indptr is None else case.max_q_len,
    )


def route_contenders(registry: Registry | None = None) -> tuple[Contender, ...]:
    """One contender a registered route that plans serving calls, then `engine`.

    Routes that are only differentiable (`record.build is None`) decode nothing and are left out.
    """
    registry = default_registry() if registry is None else registry
    routes = [_route(record) for record in registry.attention_records() if record.build]
    return (
        *routes,
        Contender(ENGINE, "route", _build_engine, _engine_supports, versions=_versions),
    )


def missing_packages(registry: Registry | None = None) -> dict[str, str]:
    """Kernel packages that brought no route, with the reason."""
    registry = default_registry() if registry is None else registry
    return {gone.route: "; ".join(gone.reasons) for gone in registry.missing()}


def _route(record: AttentionRecord) -> Contender:
    def supports(case: AttentionCase, device: torch.device) -> tuple[str, ...]:
        return record.reasons(problem_of(case), device_facts(device))

    def build(case: AttentionCase, pools: Sequence[Pool], device: torch.device) -> list[Work]:
        assert record.build is not None
        works = []
        for pool in pools:
            call = describe_pool(pool)
            assert call.problem == problem_of(case), (call.problem, problem_of(case))
            launch = record.build(
                call.problem,
                AttentionTilePlan.for_problem(call.problem),
                device_facts(device),
                call.bound,
            )
            works.append(Work(launch.run, call.bound.out, note=_note(launch.backend_plan)))
        return works

    def kernel(case: AttentionCase, device: torch.device) -> Facts:
        return kernel_facts(record, problem_of(case), device_facts(device))

    return Contender(
        record.route,
        "route",
        build,
        supports,
        record.graph_safe,
        versions=_versions,
        kernel=kernel,
    )


def _versions() -> dict[str, str]:
    return {"stream-attention": __version__, **distribution_versions("torch", "triton")}


def _note(plan: AttentionBackendPlan) -> str:
    return f"{plan.splits} splits" if plan.splits > 1 else ""


def _engine_supports(case: AttentionCase, device: torch.device) -> tuple[str, ...]:
    try:
        from stream_attention import StreamAttnEngine  # noqa: F401
    except ImportError as error:
        return (str(error),)
    return ()


def _build_engine(case: AttentionCase, pools: Sequence[Pool], device: torch.device) -> list[Work]:
    """`engine.plan_attention(...).run()`: the default route, and the engine's own host work."""
    from stream_attention import StreamAttnEngine

    engine = StreamAttnEngine()
    works = []
    for pool in pools:
        out = torch.empty_like(query_of(pool))
        plan = engine.plan_attention(
            query_of(pool),
            pool.cache,
            pool.qo_indptr,
            mode="exact_native",
            out=out,
            causal=case.causal,
            batch_invariant=case.batch_invariant,
        )
        assert plan.problem == problem_of(case), (plan.problem, problem_of(case))
        _, info = plan.run()
        works.append(Work(plan.run, out.view_as(pool.q), note=info.route, resolved=info.route))
    return works
