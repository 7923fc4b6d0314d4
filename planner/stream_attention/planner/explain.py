"""A plan in words: the printable chain problem, tile plan, backend plan, launches, rejections."""

from __future__ import annotations

from stream_attention.core.backend_plan import AttentionBackendPlan, LaunchSpec
from stream_attention.core.info import AttentionInfo
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.tile_plan import AttentionTilePlan

_LABEL_WIDTH = 12


def explain(
    problem: AttentionProblem,
    tile_plan: AttentionTilePlan,
    backend_plan: AttentionBackendPlan,
    info: AttentionInfo,
) -> str:
    """One line a fact; every rejected candidate with every reason, one reason a line."""
    rows = [
        ("route", f"{backend_plan.route} ({backend_plan.backend}, {backend_plan.arch})"),
        ("reason", backend_plan.reason),
        ("guarantee", info.guarantee),
        ("estimate", _microseconds(backend_plan.estimate_us)),
        ("workspace", f"{backend_plan.workspace_bytes} bytes"),
        ("splits", _splits(backend_plan)),
        ("problem", repr(problem)),
        ("tile plan", repr(tile_plan)),
    ]
    rows.extend(("launch", _launch(spec)) for spec in backend_plan.launches)
    if not backend_plan.launches:
        rows.append(("launch", "none"))
    for rejection in backend_plan.rejections:
        label = "rejected"
        for reason in rejection.reasons:
            rows.append((label, f"{rejection.route}: {reason}"))
            label = ""
    if not backend_plan.rejections:
        rows.append(("rejected", "none"))
    return "\n".join(f"{label:<{_LABEL_WIDTH}}{text}" for label, text in rows)


def _microseconds(estimate: float | None) -> str:
    return "none" if estimate is None else f"{estimate:.1f} us"


def _splits(plan: AttentionBackendPlan) -> str:
    if plan.split_tokens:
        return f"{plan.splits} of {plan.split_tokens} tokens"
    return f"{plan.splits}"


def _launch(spec: LaunchSpec) -> str:
    parts = [f"{spec.kernel} grid={spec.grid}"]
    if spec.threads:
        parts.append(f"threads={spec.threads}")
    if spec.shared_bytes:
        parts.append(f"shared={spec.shared_bytes} bytes")
    return " ".join(parts)
