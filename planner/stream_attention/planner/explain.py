"""A plan in words or as JSON: the chain problem, tile plan, backend plan, launches; every candidate
with its estimate and what that rests on, and every rejection.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Sequence
from typing import Any

from stream_attention.core.backend_plan import AttentionBackendPlan, LaunchSpec
from stream_attention.core.errors import Faults
from stream_attention.core.info import AttentionInfo
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.tile_plan import AttentionTilePlan
from stream_attention.planner.ranking import ORDER_TOKENS, Candidate, Ranking
from stream_attention.planner.reasons import basis
from stream_attention.planner.software import differing

FORMATS = ("text", "json")
SCHEMA = "stream_attention.plan/1"

_LABEL_WIDTH = 12
_HEADINGS = ("route", "native", "estimate", "outcome", "basis")


def explain(
    problem: AttentionProblem,
    tile_plan: AttentionTilePlan,
    backend_plan: AttentionBackendPlan,
    info: AttentionInfo,
    ranking: Ranking,
    format: str = "text",
) -> str:
    """The plan as text for people, or as a JSON object whose key `schema` is `SCHEMA`.

    Both hold the same. Raises `ValueError` for another format.
    """
    if not (isinstance(format, str) and format in FORMATS):
        faults = Faults()
        close = difflib.get_close_matches(str(format), FORMATS, n=1, cutoff=0.0)
        faults.add("format", format, f"must be one of {', '.join(FORMATS)}", repr(close[0]))
        faults.raise_if_any("explain")
    schedules = _schedules(problem, backend_plan.route, ranking)
    plain = _plain(problem, tile_plan, backend_plan, info, ranking, schedules)
    if format == "json":
        return json.dumps(plain, indent=1, allow_nan=False)
    chain = (("problem", repr(problem)), ("tile plan", repr(tile_plan)))
    return _text(backend_plan, plain, (*chain, *(("schedule", repr(s)) for s in schedules)))


def _plain(
    problem: AttentionProblem,
    tile_plan: AttentionTilePlan,
    backend_plan: AttentionBackendPlan,
    info: AttentionInfo,
    ranking: Ranking,
    schedules: tuple[Any, ...],
) -> dict[str, Any]:
    """Everything that is said of a plan, as plain data."""
    plan = backend_plan
    return {
        "schema": SCHEMA,
        "route": plan.route,
        "backend": plan.backend,
        "arch": plan.arch,
        "reason": plan.reason,
        "guarantee": info.guarantee,
        "policy_id": info.policy_id,
        "estimate_us": _number(plan.estimate_us),
        "estimated_by": plan.estimated_by,
        "evidence": list(plan.evidence),
        "workspace_bytes": plan.workspace_bytes,
        "splits": plan.splits,
        "split_tokens": plan.split_tokens,
        "problem": dataclasses.asdict(problem),
        "tile_plan": dataclasses.asdict(tile_plan),
        "launches": [dataclasses.asdict(launch) for launch in plan.launches],
        "schedules": [dataclasses.asdict(each) for each in schedules],
        "candidates": _candidates(plan, ranking),
        "phase_database": _database(ranking),
        "rejected": [dataclasses.asdict(rejection) for rejection in plan.rejections],
    }


def _number(value: float | None) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if value is not None and math.isfinite(value) else None


def _candidates(plan: AttentionBackendPlan, ranking: Ranking) -> list[dict[str, Any]]:
    """Every legal route in the order of the ranking: those before the chosen one did not build."""
    found, outcome = [], "refused to build"
    for each in ranking.candidates:
        if each.record.route == plan.route:
            outcome = "chosen"
        found.append(_candidate(each, outcome, ranking))
        if outcome == "chosen":
            outcome = "not needed"
    return found


def _candidate(candidate: Candidate, outcome: str, ranking: Ranking) -> dict[str, Any]:
    return {
        "route": candidate.record.route,
        "backend": candidate.record.backend,
        "native": candidate.record.native,
        "capturable": candidate.capturable,
        "estimate_us": _number(candidate.estimate_us),
        "estimated_by": candidate.estimated_by,
        "order_us": _number(candidate.order_us),
        "outcome": outcome,
        "basis": basis(candidate, ranking),
        "evidence": list(candidate.rows),
    }


def _schedules(problem: AttentionProblem, route: str, ranking: Ranking) -> tuple[Any, ...]:
    """How the kernels of the chosen route work, where its record says so."""
    for candidate in ranking.candidates:
        schedules = getattr(candidate.record, "schedules", None)
        if candidate.record.route == route and schedules is not None:
            return tuple(schedules(problem, ranking.device))
    return ()


def _database(ranking: Ranking) -> dict[str, Any]:
    """The phase database that was asked, or why there was none."""
    database = ranking.found.database
    if database is None or database.environment is None:
        return {"used": False, "why": ranking.found.why}
    return {
        "used": any(candidate.measured for candidate in ranking.candidates),
        "why": ranking.found.why,
        "arch": database.arch,
        "device": database.environment.device,
        "num_cells": len(database.cells),
        "commit": database.commit,
        "compiled_at": database.compiled_at,
        "other_software": [
            {"name": name, "measured": measured, "here": here}
            for name, measured, here in differing(database.environment)
        ],
    }


def _text(
    plan: AttentionBackendPlan, plain: dict[str, Any], chain: Sequence[tuple[str, str]]
) -> str:
    """One line a fact; every rejected candidate with every reason, one reason a line."""
    by = f", by {plan.estimated_by}" if plan.estimated_by else ""
    rows = [
        ("route", f"{plan.route} ({plan.backend}, {plan.arch})"),
        ("reason", plan.reason),
        ("guarantee", plain["guarantee"]),
        ("estimate", _microseconds(plan.estimate_us) + by),
        ("workspace", f"{plan.workspace_bytes} bytes"),
        ("splits", _splits(plan)),
        *chain,
        *(("launch", _launch(spec)) for spec in plan.launches),
    ]
    if not plan.launches:
        rows.append(("launch", "none"))
    table = _aligned([_HEADINGS, *map(_cells, plain["candidates"])])
    rows.extend(zip(("candidates", *("" for _ in table[1:])), table, strict=True))
    facts = _facts(plain["phase_database"])
    rows.extend(zip(("evidence", *("" for _ in facts[1:])), facts, strict=True))
    for rejection in plan.rejections:
        label = "rejected"
        for reason in rejection.reasons:
            rows.append((label, f"{rejection.route}: {reason}"))
            label = ""
    if not plan.rejections:
        rows.append(("rejected", "none"))
    return "\n".join(f"{label:<{_LABEL_WIDTH}}{text}" for label, text in rows)


def _cells(candidate: dict[str, Any]) -> tuple[str, ...]:
    """A candidate as a line of the table."""
    estimate = _microseconds(candidate["estimate_us"])
    if candidate["order_us"] != candidate["estimate_us"]:
        alone = _microseconds(candidate["order_us"])
        estimate += f" ({alone} for one query over {ORDER_TOKENS} tokens)"
    outcome = candidate["outcome"] + ("" if candidate["capturable"] else ", no CUDA graph")
    native = "yes" if candidate["native"] else "no"
    return candidate["route"], native, estimate, outcome, candidate["basis"]


def _aligned(lines: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns as wide as their widest entry, the last one open."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _facts(database: dict[str, Any]) -> list[str]:
    """The phase database in words, then what is of another version here."""
    if "device" not in database:
        return [f"none: {database['why']}"]
    used = "used" if database["used"] else "asked, and none of it is near"
    lines = [
        f"{used}: {database['num_cells']} cells of {database['device']} ({database['arch']}), "
        f"commit {database['commit'] or 'unknown'}, compiled {database['compiled_at'] or 'never'}"
    ]
    if database["why"]:
        lines[0] = f"not used: {database['why']}"
    lines.extend(
        f"measured with {other['name']} {other['measured']}, here {other['here']}"
        for other in database["other_software"]
    )
    return lines


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
