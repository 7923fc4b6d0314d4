"""Models of the measured routes, and what choosing by them costs on cells they have not seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from stream_attention.planner.cell_requests import CellRequest
from stream_attention.planner.cost_model import (
    Measured,
    RouteModel,
    family_of,
    features_of,
    fit,
    left_out,
)
from stream_attention.planner.evidence import ROLES
from stream_attention.planner.model_index import ModelIndex
from stream_attention.planner.phase_compiler import competing
from stream_attention.planner.phase_db import (
    CandidateOutcome,
    CellDecision,
    Regret,
    RegretSummary,
)

Estimates = Mapping[str, float]
"""Microseconds by route, of the routes that a model speaks for."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A decision with its request: what competes, and how much it weighs."""

    request: CellRequest
    decision: CellDecision

    def pool(self, with_peers: bool) -> list[CandidateOutcome]:
        """Correct candidates that a choice is made among."""
        ours, peers = competing(self.request, self.decision.candidates)
        return [*ours, *peers] if with_peers else ours


def models_of(judged: Iterable[Judged]) -> tuple[RouteModel, ...]:
    """A model a route and family, of the calibration cells alone."""
    groups = _measured(each for each in judged if not each.decision.hold_out)
    found = (fit(route, role, measured) for (_, role, route), measured in sorted(groups.items()))
    return tuple(model for model in found if model is not None)


def regrets(
    judged: Sequence[Judged], models: Sequence[RouteModel], with_peers: bool
) -> RegretSummary:
    """What choosing by `models` costs, among our routes or among all that compete."""
    index = ModelIndex(models)

    def inside(each: Judged) -> Estimates:
        estimates = index.lookup(each.decision.cell.problem)
        return {found.route: found.us for found in estimates if found.inside}

    without = _without_each(judged)

    def alone(each: Judged) -> Estimates:
        return without.get(each.decision.cell.digest, {})

    calibration = [each for each in judged if not each.decision.hold_out]
    hold_out = [each for each in judged if each.decision.hold_out]
    return RegretSummary(
        calibration=_regret(calibration, inside, with_peers),
        hold_out=_regret(hold_out, inside, with_peers),
        leave_one_out=_regret(judged, alone, with_peers),
    )


def _regret(
    judged: Iterable[Judged], estimates_of: Callable[[Judged], Estimates], with_peers: bool
) -> Regret:
    ratios: list[tuple[float, float, str]] = []
    num_outside = 0
    for each in judged:
        pool = each.pool(with_peers)
        if len(pool) < 2:  # nothing to choose
            continue
        estimates = estimates_of(each)
        known = [candidate for candidate in pool if candidate.route in estimates]
        if not known:
            num_outside += 1
            continue
        taken = min(known, key=lambda c: (estimates[c.route], ROLES.index(c.role), c.route))
        ratio = taken.us / min(candidate.us for candidate in pool)
        ratios.append((ratio, each.request.weight, each.request.name))
    if not ratios:
        return Regret(num_outside=num_outside)
    total = math.fsum(weight for _, weight, _ in ratios)
    mean = math.fsum(weight * math.log(ratio) for ratio, weight, _ in ratios) / total
    worst, _, name = min(ratios, key=lambda each: (-each[0], each[2]))
    return Regret(
        num_cells=len(ratios),
        num_outside=num_outside,
        geometric_mean=math.exp(mean) - 1,
        worst=worst - 1,
        worst_cell=name,
    )


def _measured(judged: Iterable[Judged]) -> dict[tuple[str, str, str], list[Measured]]:
    """Correct measurements by family, role and route, peers that are not eligible too."""
    groups: dict[tuple[str, str, str], list[Measured]] = {}
    for each in judged:
        cell = each.decision.cell
        for candidate in each.decision.candidates:
            if candidate.outcome == "ok":
                key = (family_of(cell.problem), candidate.role, candidate.route)
                groups.setdefault(key, []).append(Measured(cell, candidate.row, candidate.us))
    return groups


def _without_each(judged: Iterable[Judged]) -> dict[str, dict[str, float]]:
    """By cell, the routes' times at the cell's problem, by models that never saw the cell."""
    found: dict[str, dict[str, float]] = {}
    for (_, _, route), measured in _measured(judged).items():
        ordered = sorted(measured, key=lambda each: (each.cell.digest, each.row))
        asked = [features_of(each.cell.problem) for each in ordered]
        for each, us in zip(ordered, left_out(ordered, asked), strict=True):
            if us is not None:
                found.setdefault(each.cell.digest, {})[route] = us
    return found
