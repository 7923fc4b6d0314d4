"""Models ready to be asked at plan time: estimates of a problem, and whether it was measured there.

A problem is inside of a model's measured range where the family agrees, each feature of its place
is within the model's ranges, and a measured cell is near. An empty corner of the box is outside.

Inside, the model's time is corrected by what was measured nearby: times the mean of measured over
modelled time, each near cell weighted by the inverse square of its distance. So a cell that was
measured keeps its measured order, and a route that won at all neighbours is not overturned by what
the model is off by. D. Shepard, "A two-dimensional interpolation function for irregularly-spaced
data", Proceedings of the 1968 ACM National Conference.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from stream_attention.core.problem import AttentionProblem
from stream_attention.planner.cost_model import (
    EXACT_PLACE,
    NEAR_OCTAVES,
    PLACE,
    RouteModel,
    family_of,
    features_of,
)
from stream_attention.planner.evidence import ROLES

NUM_ROWS = 3
"""Rows that an estimate names."""
NEAR_PLACES = 8
"""Places that an estimate is corrected by, at most."""
CLOSEST = 1e-3
"""Square of the distance, in octaves, below which places are taken for one."""


class RouteEstimate(NamedTuple):
    """A route's time for a problem; a tuple, as one is made for each route of each plan.

    inside: among what was measured, else `why_outside` says.

    rows: ids of the measured rows near it, nearest first, `NUM_ROWS` at most; `()` when outside.
    """

    route: str
    role: str
    us: float
    inside: bool
    rows: tuple[str, ...] = ()
    why_outside: str = ""


class ModelIndex:
    """Models by family; of each family the measured places once, in order of their bytes."""

    def __init__(self, models: Sequence[RouteModel]) -> None:
        by_family: dict[str, list[RouteModel]] = {}
        for model in models:
            by_family.setdefault(model.family, []).append(model)
        self._families = {name: _Family(each) for name, each in by_family.items()}

    def lookup(
        self, problem: AttentionProblem, routes: Collection[str] | None = None
    ) -> tuple[RouteEstimate, ...]:
        """An estimate a model of the problem's family, fastest first, ties by role and name.

        routes: those to ask for; `None` = all.
        """
        family = self._families.get(family_of(problem))
        return family.estimates(features_of(problem), routes) if family is not None else ()


class _Family:
    """Models of one family, and their places: octaves of `PLACE`, by `EXACT_PLACE`."""

    __slots__ = ("_limits", "_models", "_near_exact", "_terms")

    def __init__(self, models: Sequence[RouteModel]) -> None:
        ordered = sorted(models, key=lambda m: (ROLES.index(m.role), m.route))
        limits = {_limits_of(model): None for model in ordered}
        self._limits = tuple(limits)
        # Models of routes that were measured on the same cells share their limits: checked once.
        self._models = [(model, list(limits).index(_limits_of(model))) for model in ordered]
        self._terms = {model.features for model in ordered}
        rows: dict[tuple[float, ...], _OfRoute] = {}
        for model in ordered:
            for point in sorted(model.points, key=lambda p: (p.cell, p.row)):
                of_route = rows.setdefault(point.features, {})
                of_route.setdefault(model.route, []).append((point.row, point.ratio))
        by_exact: dict[tuple[float, ...], list[_Place]] = {}
        for at, of_route in rows.items():
            octaves = tuple(map(_octaves, at[: len(PLACE)]))
            by_exact.setdefault(at[len(PLACE) :], []).append((octaves, of_route))
        self._near_exact = {exact: _Places(places) for exact, places in by_exact.items()}

    def estimates(
        self, features: Mapping[str, float], routes: Collection[str] | None
    ) -> tuple[RouteEstimate, ...]:
        place = tuple([features[name] for name in _PLACES])
        terms = {names: [features[name] for name in names] for names in self._terms}
        # Loops over `us(features)` and over ranges would take longer than all else.
        within = [
            all(map(operator.le, lows, place)) and all(map(operator.le, place, highs))
            for lows, highs in self._limits
        ]
        places = self._near_exact.get(place[len(PLACE) :])
        near = places.near(place[: len(PLACE)]) if places is not None else []
        found = []
        for model, limits in self._models:
            route = model.route
            if routes is not None and route not in routes:
                continue
            rows: tuple[str, ...] = ()
            us = sum(map(operator.mul, model.coefficients, terms[model.features]))
            if within[limits]:
                here = [
                    (weight, row, ratio)
                    for weight, each in near
                    if route in each
                    for row, ratio in each[route]
                ]
                rows = tuple([row for _, row, _ in here])
                why = "" if rows else _NOTHING_NEAR
                if here:
                    us *= sum([w * ratio for w, _, ratio in here]) / sum([w for w, _, _ in here])
            else:
                why = _why_outside(model, features)
            found.append(RouteEstimate(route, model.role, us, not why, rows[:NUM_ROWS], why))
        found.sort(key=_us)  # stable: ties stay in the order of the models
        return tuple(found)


_OfRoute = dict[str, list[tuple[str, float]]]
"""By route its rows at a place, each with its point's ratio."""
_Place = tuple[tuple[float, ...], _OfRoute]


class _Places:
    """Octaves of `PLACE` with rows by route: in groups that agree in all but the first two, which
    are where measurements differ most; each group in order of the first.
    """

    __slots__ = ("_groups",)

    def __init__(self, places: Sequence[_Place]) -> None:
        groups: dict[tuple[float, ...], list[_Place]] = {}
        for place in sorted(places, key=lambda each: each[0]):
            groups.setdefault(place[0][2:], []).append(place)
        self._groups = [
            (shared, [octaves[0] for octaves, _ in each], each) for shared, each in groups.items()
        ]

    def near(self, at: Sequence[float]) -> list[tuple[float, _OfRoute]]:
        """The `NEAR_PLACES` nearest places that are near, nearest first, with their weights."""
        octaves = [math.log2(max(value, 1.0)) for value in at]
        first, second = octaves[0], octaves[1]
        here = octaves[2:]
        near = []
        for shared, firsts, places in self._groups:
            distance = 0.0
            for one, other in zip(here, shared):  # noqa: B905, of one length
                apart = abs(one - other)
                if apart > NEAR_OCTAVES:
                    break
                distance += apart
            else:
                begin = bisect.bisect_left(firsts, first - NEAR_OCTAVES)
                end = bisect.bisect_right(firsts, first + NEAR_OCTAVES)
                for place, of_route in places[begin:end]:
                    apart = abs(second - place[1])
                    if apart <= NEAR_OCTAVES:
                        near.append((distance + apart + abs(first - place[0]), of_route))
        near.sort(key=operator.itemgetter(0))  # stable: ties stay in the order of the places
        return [((d * d + CLOSEST) ** -1, of_route) for d, of_route in near[:NEAR_PLACES]]


def _limits_of(model: RouteModel) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(each.low for each in model.ranges), tuple(each.high for each in model.ranges)


def _why_outside(model: RouteModel, features: Mapping[str, float]) -> str:
    """Every feature that is out of the model's ranges."""
    return "; ".join(
        f"{each.feature}={features[each.feature]:.0f}: measured {each.low:.0f} to {each.high:.0f}"
        for each in model.ranges
        if not each.low <= features[each.feature] <= each.high
    )


def _octaves(value: float) -> float:
    return math.log2(max(value, 1.0))


_PLACES = PLACE + EXACT_PLACE
_us = operator.attrgetter("us")
_NOTHING_NEAR = (
    f"within the measured ranges, but no measurement is within a factor of {2**NEAR_OCTAVES:.0f}"
)
