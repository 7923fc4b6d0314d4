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
    fit,
    terms_of,
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


def models_of(judged: Iterable[Judged], *, with_errors: bool = True) -> tuple[RouteModel, ...]:
    """A model a route and family, of the calibration cells alone."""
    groups = _measured(each for each in judged if not each.decision.hold_out)
    return _fitted(groups, with_errors)


def _fitted(
    groups: Mapping[_Group, Sequence[Measured]], with_errors: bool
) -> tuple[RouteModel, ...]:
    found = (
        fit(route, role, measured, with_errors=with_errors)
        for (_, role, route), measured in sorted(groups.items())
    )
    return tuple(model for model in found if model is not None)


def regrets(
    judged: Sequence[Judged], models: Sequence[RouteModel]
) -> tuple[RegretSummary, RegretSummary]:
    """What choosing by `models` costs: among our routes, and among all that compete.

    Everywhere as dispatch chooses: a cell that lies outside of what the models were measured on is
    counted as such, and has no regret.
    """
    index, groups = ModelIndex(models), _measured(judged)
    known = [_inside(index, each) for each in judged]
    # By models that never saw the cell.
    alone = [_inside(ModelIndex(_without(groups, each)), each) for each in judged]

    def of(is_asked: Callable[[Judged], bool], found: list[Estimates], with_peers: bool) -> Regret:
        pairs = [each for each in zip(judged, found, strict=True) if is_asked(each[0])]
        return _regret(pairs, with_peers)

    own, among_all = (
        RegretSummary(
            calibration=of(lambda each: not each.decision.hold_out, known, with_peers),
            hold_out=of(lambda each: each.decision.hold_out, known, with_peers),
            leave_one_out=of(lambda each: True, alone, with_peers),
        )
        for with_peers in (False, True)
    )
    return own, among_all


def _inside(index: ModelIndex, each: Judged) -> Estimates:
    estimates = index.lookup(each.decision.cell.problem)
    return {found.route: found.us for found in estimates if found.inside}


def _regret(judged: Iterable[tuple[Judged, Estimates]], with_peers: bool) -> Regret:
    ratios: list[tuple[float, float, str]] = []
    num_outside = 0
    for each, estimates in judged:
        pool = each.pool(with_peers)
        if len(pool) < 2:  # nothing to choose
            continue
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


_Group = tuple[str, str, str]
"""Family, role and route."""


def _measured(judged: Iterable[Judged]) -> dict[_Group, list[Measured]]:
    """Correct measurements by family, role and route, peers that are not eligible too."""
    groups: dict[_Group, list[Measured]] = {}
    for each in judged:
        cell = each.decision.cell
        for candidate in each.decision.candidates:
            if candidate.outcome == "ok":
                key = (family_of(cell.problem), candidate.role, candidate.route)
                groups.setdefault(key, []).append(Measured(cell, candidate.row, candidate.us))
    return groups


def _without(groups: Mapping[_Group, Sequence[Measured]], judged: Judged) -> tuple[RouteModel, ...]:
    """Models of the cell's family and of the routes that competed on it, by all measurements but
    those of the cell and of others that equal it in every term, which would tell its own time.
    """
    cell = judged.decision.cell
    family, place = family_of(cell.problem), terms_of(cell)
    routes = {each.route for each in judged.pool(with_peers=True)}
    left = {
        group: [each for each in measured if terms_of(each.cell) != place]
        for group, measured in groups.items()
        if group[0] == family and group[2] in routes
    }
    return _fitted({group: each for group, each in left.items() if each}, with_errors=False)
