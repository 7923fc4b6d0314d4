"""Models of a route's time, fitted to measured cells, and what a problem is to such a model.

A model is a sum of physical terms: launching, reading, multiplying, walking tiles, merging splits.
Coefficients are never negative, so a model stays a time wherever it is asked.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stream_attention.core.dtypes import dtype_bytes
from stream_attention.core.ir import Rule, check_rules, evaluable_repr, is_name, is_tuple_of
from stream_attention.core.problem import AttentionProblem
from stream_attention.planner.cells import Cell
from stream_attention.planner.evidence import ROLES
from stream_attention.planner.least_squares import non_negative

FEATURES = (
    "launch",
    "bytes",
    "flops",
    "head_tokens",
    "items",
    "rows",
    "item_rows",
    "log2_bytes",
    "log2_splits",
)
"""Terms of a model. launch: 1. bytes: of K, V, queries and results. flops: of both products, what a
mask leaves out not counted. head_tokens: KV tokens times KV heads, as tiles are walked. items:
requests times KV heads. rows: query tokens times heads. item_rows: query rows that share K and V.
log2_bytes, log2_splits: doublings of the work above 1 MiB, and of blocks an item above one, up to
`BLOCKS` in all: what deeper splits and merges add.
"""
PLACE = ("kv_bytes", "longest", "batch", "item_rows", "num_kv_heads", "page_size")
EXACT_PLACE = ("head_dim_qk", "head_dim_vo", "is_hnd")
"""Where a measurement is. Near another: within `NEAR_OCTAVES` in every feature of `PLACE`, equal in
those of `EXACT_PLACE`, in which no model can tell what lies between.
"""
NEAR_OCTAVES = 1.0
BLOCKS = 128
MIN_PLACES = 3
"""A model of fewer different measurements would say nothing of what lies between them."""


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Range:
    """`low <= feature <= high` over the problems of the cells that a model was fitted on."""

    feature: str
    low: float
    high: float

    __repr__ = evaluable_repr


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Point:
    """A measured cell (first 16 digits of its digest): its row, median, and its place.

    features: in the order of the model's `ranges`, as a plan of the cell's problem knows them: of
    ragged requests the capacity. ratio: the median over the model's time there, which estimates
    nearby are corrected by.
    """

    cell: str
    row: str
    us: float
    features: tuple[float, ...]
    ratio: float = 1.0

    __repr__ = evaluable_repr


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class RouteModel:
    """`us = Σ coefficient · feature` of one route, over the problems of one family.

    error_p50, error_max: relative, at points that the fit left out one place at a time; `None`
    where none could be left out. ranges: what was measured, of `PLACE` and `EXACT_PLACE`.
    """

    route: str
    role: str
    family: str
    features: tuple[str, ...]
    coefficients: tuple[float, ...]
    ranges: tuple[Range, ...]
    points: tuple[Point, ...]
    error_p50: float | None = None
    error_max: float | None = None

    def __post_init__(self) -> None:
        check_rules(self, _MODEL_RULES)

    __repr__ = evaluable_repr

    def us(self, features: Mapping[str, float]) -> float:
        """The time at `features`, as `features_of` gives them."""
        terms = zip(self.features, self.coefficients, strict=True)
        return math.fsum(coefficient * features[name] for name, coefficient in terms)


@dataclass(frozen=True, slots=True)
class Measured:
    """A correct measurement of one route: its cell, the row's id, and the median."""

    cell: Cell
    row: str
    us: float


def features_of(problem: AttentionProblem) -> dict[str, float]:
    """What is known before a run: the lengths are the capacities."""
    q_len = problem.max_qo_len
    return _features(
        problem,
        tokens=problem.batch * problem.kv_tokens_seen,
        pairs=problem.total_qo_len * _seen_by_a_query(problem, q_len, problem.kv_capacity),
        longest=problem.kv_tokens_seen,
    )


def features_of_cell(cell: Cell) -> dict[str, float]:
    """The same, of the lengths that were measured."""
    problem = cell.problem
    lengths = list(zip(cell.qo_lens, cell.kv_lens, strict=True))
    window = math.inf if problem.window_left is None else problem.window_left
    seen = [min(tokens, window + queries) for queries, tokens in lengths]
    return _features(
        problem,
        tokens=sum(seen),
        pairs=sum(
            queries * _seen_by_a_query(problem, queries, tokens) for queries, tokens in lengths
        ),
        longest=max(seen, default=0),
    )


def _seen_by_a_query(problem: AttentionProblem, queries: int, tokens: int) -> float:
    """KV tokens that one of `queries` queries sees on average of `tokens`."""
    seen = tokens - (queries - 1) / 2 if problem.causal and queries > 1 else float(tokens)
    if problem.window_left is not None:
        seen = min(seen, problem.window_left + 1 + (problem.window_right or 0))
    return max(seen, 0.0)


def _features(
    problem: AttentionProblem, tokens: float, pairs: float, longest: float
) -> dict[str, float]:
    head_dims = problem.head_dim_qk + problem.head_dim_vo
    rows = problem.total_qo_len * problem.num_qo_heads
    items = max(problem.batch * problem.num_kv_heads, 1)
    kv_bytes = tokens * problem.kv_token_bytes
    query_bytes = problem.head_dim_qk * dtype_bytes(problem.q_dtype)
    out_bytes = problem.head_dim_vo * dtype_bytes(problem.out_dtype)
    total_bytes = kv_bytes + rows * (query_bytes + out_bytes)
    return {
        "launch": 1.0,
        "bytes": float(total_bytes),
        "flops": 2.0 * pairs * problem.num_qo_heads * head_dims,
        "head_tokens": float(tokens * problem.num_kv_heads),
        "items": float(items),
        "rows": float(rows),
        "item_rows": float(problem.max_qo_len * problem.gqa_group_size),
        "log2_bytes": math.log2(1 + total_bytes / 2**20),
        "log2_splits": math.log2(max(BLOCKS / items, 1.0)),
        "kv_bytes": float(kv_bytes),
        "longest": float(longest),
        "batch": float(problem.batch),
        "num_kv_heads": float(problem.num_kv_heads),
        "page_size": 1.0 if problem.cache_kind == "contiguous" else float(problem.page_size),
        "head_dim_qk": float(problem.head_dim_qk),
        "head_dim_vo": float(problem.head_dim_vo),
        "is_hnd": float(problem.layout == "HND"),
    }


def family_of(problem: AttentionProblem) -> str:
    """What must agree exactly for times to be of one model: another phase, dtype, mask or promise
    is another kernel, or other work in it. Sizes are features; scale and LSE cost nothing to see.
    """
    # One query that stands at the end sees all, causal or not.
    mask = "causal" if problem.causal or problem.max_qo_len <= 1 else "full"
    name = (
        f"{problem.phase} q={problem.q_dtype} kv={problem.kv_dtype} out={problem.out_dtype} "
        f"{problem.cache_kind} {mask} {problem.guarantee}"
    )
    # By `if`, not from a table: a family is asked for by every plan.
    if problem.uniform:
        name += " uniform"
    if problem.has_window:
        name += " window"
    if problem.logits_soft_cap is not None:
        name += " soft_cap"
    if problem.has_sink:
        name += " sink"
    if problem.kv_scales is not None:
        name += f" scales={problem.kv_scales}"
    if problem.mask is not None:
        name += f" mask={problem.mask}"
    if problem.per_head_lists:
        name += " per_head_lists"
    if problem.batch_invariant:
        name += " batch_invariant"
    if problem.dropout_p > 0:
        name += " dropout"
    if problem.differentiable:
        name += " differentiable"
    return name


def fit(
    route: str, role: str, measured: Iterable[Measured], *, with_errors: bool = True
) -> RouteModel | None:
    """The model of `route` with the least relative squares, coefficients >= 0.

    All of one family, a cell once, in any order. `None` where fewer than `MIN_PLACES` differ, and
    where the least squares say that something which was measured takes no time.
    It is fitted to the lengths that were measured, and asked what a plan knows: its ranges and its
    points are of that. with_errors: `False` leaves them out, which need as many fits as points.
    """
    ordered = sorted(measured, key=lambda each: (each.cell.digest, each.row))
    families = {family_of(each.cell.problem) for each in ordered}
    features = [features_of_cell(each.cell) for each in ordered]
    if len({_terms(each) for each in features}) < MIN_PLACES:
        return None
    (family,) = families
    coefficients = _solve(features, [each.us for each in ordered])
    planned = [features_of(each.cell.problem) for each in ordered]
    modelled = [_time(coefficients, _terms(place)) for place in planned]
    if not all(0 < us < math.inf for us in modelled):
        return None
    without = left_out(ordered, features) if with_errors else []
    errors = [
        abs(us / each.us - 1)
        for us, each in zip(without, ordered, strict=with_errors)
        if us is not None
    ]
    names = PLACE + EXACT_PLACE
    return RouteModel(
        route=route,
        role=role,
        family=family,
        features=FEATURES,
        coefficients=coefficients,
        ranges=tuple(
            Range(
                feature=name,
                low=min(each[name] for each in planned),
                high=max(each[name] for each in planned),
            )
            for name in names
        ),
        points=tuple(
            Point(
                cell=each.cell.digest[:16],
                row=each.row,
                us=each.us,
                features=tuple(place[name] for name in names),
                ratio=each.us / us,
            )
            for each, place, us in zip(ordered, planned, modelled, strict=True)
        ),
        error_p50=statistics.median(errors) if errors else None,
        error_max=max(errors) if errors else None,
    )


def left_out(
    measured: Sequence[Measured], asked: Sequence[Mapping[str, float]]
) -> list[float | None]:
    """For each measurement, the time at `asked` by a fit without it and its equals in every term,
    which would tell its own time; `None` where fewer than `MIN_PLACES` are left.
    """
    features = [features_of_cell(each.cell) for each in measured]
    terms = [_terms(each) for each in features]
    solved: dict[tuple[float, ...], tuple[float, ...] | None] = {}
    for place in terms:
        if place not in solved:
            kept = [index for index, other in enumerate(terms) if other != place]
            enough = len({terms[index] for index in kept}) >= MIN_PLACES
            solved[place] = (
                _solve([features[i] for i in kept], [measured[i].us for i in kept])
                if enough
                else None
            )
    found: list[float | None] = []
    for place, at in zip(terms, asked, strict=True):
        coefficients = solved[place]
        found.append(None if coefficients is None else _time(coefficients, _terms(at)))
    return found


def _time(coefficients: Sequence[float], terms: Sequence[float]) -> float:
    return math.fsum(c * x for c, x in zip(coefficients, terms, strict=True))


def terms_of(cell: Cell) -> tuple[float, ...]:
    """What a model is fitted to of a cell: cells that agree in it are one to every model."""
    return _terms(features_of_cell(cell))


def _terms(features: Mapping[str, float]) -> tuple[float, ...]:
    return tuple(features[name] for name in FEATURES)


def _solve(features: Sequence[Mapping[str, float]], times: Sequence[float]) -> tuple[float, ...]:
    """Coefficients c >= 0 that make `Σ (c·x / t - 1)²` least."""
    rows = [[x / us for x in _terms(each)] for each, us in zip(features, times, strict=True)]
    return tuple(non_negative(rows, [1.0] * len(rows)))


_MODEL_RULES = (
    Rule("route", "must be a non-empty string", lambda m: is_name(m.route)),
    Rule("role", f"must be one of {', '.join(ROLES)}", lambda m: m.role in ROLES),
    Rule("family", "must be a non-empty string", lambda m: is_name(m.family)),
    Rule(
        "features",
        f"must be of {', '.join(FEATURES)}",
        lambda m: is_tuple_of(m.features, str) and set(m.features) <= set(FEATURES),
    ),
    Rule(
        "coefficients",
        "must be finite numbers >= 0, one a feature, not all 0",
        lambda m: (
            len(m.coefficients) == len(m.features)
            and all(isinstance(c, float) and 0 <= c < math.inf for c in m.coefficients)
            and any(m.coefficients)
        ),
    ),
    Rule(
        "ranges",
        f"must be of {', '.join(PLACE + EXACT_PLACE)} in that order, low <= high",
        lambda m: (
            tuple(each.feature for each in m.ranges) == PLACE + EXACT_PLACE
            and all(each.low <= each.high for each in m.ranges)
        ),
    ),
    Rule(
        "points",
        "must be in the ranges, with a time > 0 and a ratio > 0",
        lambda m: (
            len(m.points) > 0
            and all(
                0 < point.us < math.inf
                and 0 < point.ratio < math.inf
                and len(point.features) == len(m.ranges)
                and all(r.low <= x <= r.high for r, x in zip(m.ranges, point.features, strict=True))
                for point in m.points
            )
        ),
        value=lambda m: f"{len(m.points)} points",
    ),
)
