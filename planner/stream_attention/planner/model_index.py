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
NEAR_PLACES = 4
"""Places of a route that its estimate is corrected by, at most."""
MOST_KNOWN = 1024
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
        self,
        problem: AttentionProblem,
        routes: Collection[str] | None = None,
        family_name: str | None = None,
    ) -> tuple[RouteEstimate, ...]:
        """An estimate a model of the problem's family, fastest first, ties by role and name.

        routes: those to ask for; `None` = all. family_name: `family_of(problem)` where it is known.
        """
        family = self._families.get(family_name or family_of(problem))
        return family.estimates(features_of(problem), routes) if family is not None else ()


class _Family:
    """Models of one family, and their places: octaves of `PLACE`, by `EXACT_PLACE`."""

    __slots__ = ("_limits", "_models", "_near_exact", "_terms")

    def __init__(self, models: Sequence[RouteModel]) -> None:
        ordered = sorted(models, key=lambda m: (ROLES.index(m.role), m.route))
        limits = {_limits_of(model): None for model in ordered}
        self._limits = tuple(limits)
        # Models of routes that were measured on the same cells share their limits: checked once.
        self._models = {
            model.route: (model, list(limits).index(_limits_of(model)), order)
            for order, model in enumerate(ordered)
        }
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
        for route in self._models if routes is None else routes:
            known = self._models.get(route)
            if known is None:
                continue
            model, limits, order = known
            rows: list[str] = []
            us = sum(map(operator.mul, model.coefficients, terms[model.features]))
            if within[limits]:
                total = weights = 0.0
                num_places = 0
                for distance, of_route in near:
                    if route not in of_route:  # others' measurements do not take its places
                        continue
                    weight = (distance * distance + CLOSEST) ** -1
                    for row, ratio in of_route[route]:
                        total += weight * ratio
                        weights += weight
                        rows.append(row)
                    num_places += 1
                    if num_places == NEAR_PLACES:
                        break
                why = "" if rows else _NOTHING_NEAR
                us *= total / weights if rows else 1.0
                if rows and not 0.0 < us < math.inf:
                    rows, why = [], f"its model says {us:g} us there, which is no time"
            else:
                why = _why_outside(model, features)
            named = tuple(rows[:NUM_ROWS])
            estimate = RouteEstimate(route, model.role, us, not why, named, why)
            found.append((us, order, estimate))  # ties stay in the order of the models
        found.sort()
        return tuple([estimate for _, _, estimate in found])


_OfRoute = dict[str, list[tuple[str, float]]]
"""By route its rows at a place, each with its point's ratio."""
_Place = tuple[tuple[float, ...], _OfRoute]


class _Places:
    """Octaves of `PLACE` with rows by route, in groups that agree in all but bytes and longest.

    A group is in order of its bytes.
    """

    __slots__ = ("_groups", "_known")

    def __init__(self, places: Sequence[_Place]) -> None:
        groups: dict[tuple[float, ...], list[_Place]] = {}
        for place in sorted(places, key=lambda each: each[0]):
            groups.setdefault(place[0][2:], []).append(place)
        self._groups = [
            (shared, [at[0] for at, _ in each], each) for shared, each in groups.items()
        ]
        self._known: dict[tuple[float, ...], list[_Group]] = {}

    def near(self, at: Sequence[float]) -> list[tuple[float, _OfRoute]]:
        """Every place that is near, nearest first, with its distance."""
        num_bytes, longest = _octaves(at[0]), _octaves(at[1])
        near = []
        for distance, firsts, places in self._near_groups(tuple(at[2:])):
            begin = bisect.bisect_left(firsts, num_bytes - NEAR_OCTAVES)
            end = bisect.bisect_right(firsts, num_bytes + NEAR_OCTAVES)
            for place, of_route in places[begin:end]:
                length = abs(longest - place[1])
                if length <= NEAR_OCTAVES:
                    near.append((distance + length + abs(num_bytes - place[0]), of_route))
        near.sort(key=operator.itemgetter(0))  # stable: ties stay in the order of the places
        return near

    def _near_groups(self, at: tuple[float, ...]) -> list[_Group]:
        """Groups that are near in what they share, with the distance in it.

        A process asks for few batches and shapes, many times: remembered, `MOST_KNOWN` of them.
        """
        known = self._known.get(at)
        if known is None:
            octaves = list(map(_octaves, at))
            known = []
            for shared, firsts, places in self._groups:
                apart = [abs(one - other) for one, other in zip(octaves, shared, strict=True)]
                if max(apart) <= NEAR_OCTAVES:
                    known.append((sum(apart), firsts, places))
            if len(self._known) >= MOST_KNOWN:
                self._known = {}
            self._known[at] = known
        return known


_Group = tuple[float, list[float], list[_Place]]
"""A distance, bytes of places in order, the places."""


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
_NOTHING_NEAR = (
    f"within the measured ranges, but no measurement is within a factor of {2**NEAR_OCTAVES:.0f}"
)
