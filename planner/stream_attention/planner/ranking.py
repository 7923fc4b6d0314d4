"""The order of the routes that may serve a problem: legality, then evidence, then cost models."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

from stream_attention.core.backend_plan import Rejection
from stream_attention.core.device import DeviceFacts
from stream_attention.core.errors import shown
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import AttentionRecord, Registry
from stream_attention.planner.databases import NOTHING, SHIPPED, Databases, Found

ORDER_TOKENS = 8192
"""KV tokens of the request whose estimate orders the routes of a batch-invariant problem."""

BY_EVIDENCE = "evidence"
BY_COST_MODEL = "cost model"


class Candidate(NamedTuple):
    """A record that may serve the problem, with its estimate, and the one it is ordered by.

    order_us: another than `estimate_us` only where the problem is batch-invariant.
    capturable: on CUDA, whether a graph can hold its runs; elsewhere `True`.
    measured: ordered by evidence; `rows` are the ids of the rows nearest to the problem. Else by
    the record's cost model, and `why` says why not by evidence.
    estimated_by: whose estimate `estimate_us` is, `BY_EVIDENCE` or `BY_COST_MODEL`.

    A tuple, as one is made for each route of each plan.
    """

    record: AttentionRecord
    estimate_us: float
    order_us: float
    capturable: bool = True
    measured: bool = False
    rows: tuple[str, ...] = ()
    why: str = ""
    estimated_by: str = BY_COST_MODEL


@dataclass(frozen=True, slots=True)
class Ranking:
    """Legal candidates, best first, and every other record with all its reasons.

    device: that it is for. found: what the phase databases say of the problem on it.
    """

    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    device: DeviceFacts
    found: Found = NOTHING


_PROBLEM_FIELDS = tuple(field.name for field in dataclasses.fields(AttentionProblem))
_ONE_QUERY = {"batch": 1, "total_qo_len": 1, "max_qo_len": 1, "kv_capacity": ORDER_TOKENS}


def rank(
    problem: AttentionProblem,
    device: DeviceFacts,
    registry: Registry,
    *,
    forms: tuple[str, ...] = ("build",),
    databases: Databases = SHIPPED,
) -> Ranking:
    """Order the records that can serve `problem` in one of `forms` (`"build"`, `"apply"`).

    Order: on CUDA what a graph can hold before what it cannot, as a plan's `run` is capture-safe;
    then what was measured near the problem before what was not; then estimate, by evidence or by
    the cost model, native before portable, and order of registration; so the same registry and
    databases give the same choice. A record without such a form is not asked for its other reasons.
    Missing kernel packages are among the rejections. Routes differ
    in bits, so a batch-invariant problem is ordered by what is known of `one_query`: whoever else
    is in the batch does not count.
    """
    ordered = one_query(problem) if problem.batch_invariant else problem
    legal: list[AttentionRecord] = []
    rejections = list(registry.missing())
    for record in registry.attention_records():
        for form in forms:
            if getattr(record, form) is not None:
                break
        else:  # whatever its rules say, it cannot serve the call
            rejections.append(_rejected(record.route, (_form_reason(forms),)))
            continue
        reasons = _reasons(record, problem, device)
        if device.type == "meta":
            reasons = ("device='meta': tensors there hold no data; use a real device", *reasons)
        if reasons:
            rejections.append(_rejected(record.route, reasons))
        else:
            legal.append(record)
    found = NOTHING
    if legal:
        found = databases.consult(ordered, device, [record.route for record in legal])
    placed: list[tuple[tuple[bool, bool, float, bool, int], Candidate]] = []
    for index, record in enumerate(legal):
        try:
            candidate = _candidate(record, problem, ordered, device, found)
        except Exception as error:
            rejections.append(_rejected(record.route, (_broken(error),)))
            continue
        order = candidate.order_us if math.isfinite(candidate.order_us) else math.inf
        place = (
            not candidate.capturable,
            not candidate.measured,
            order,
            not record.native,
            index,
        )
        placed.append((place, candidate))
    placed.sort(key=_place)
    return Ranking(tuple([each[1] for each in placed]), tuple(rejections), device, found)


_place = operator.itemgetter(0)
# A process meets few of them, again and again, and each is checked when it is made.
_rejected = functools.lru_cache(maxsize=256)(Rejection)


def _candidate(
    record: AttentionRecord,
    problem: AttentionProblem,
    ordered: AttentionProblem,
    device: DeviceFacts,
    found: Found,
) -> Candidate:
    """The record with its estimates: by evidence where there is one, `ordered` being what it is of.

    Whatever the cost model raises goes to the caller.
    """
    capturable = device.type != "cuda" or record.graph_safe
    alone, near = ordered is not problem, found.inside(record.route)
    if near is not None and not alone:
        return Candidate(record, near.us, near.us, capturable, True, near.rows, "", BY_EVIDENCE)
    estimate_us = float(record.estimate_us(problem, device))
    if near is not None:
        return Candidate(record, estimate_us, near.us, capturable, True, near.rows)
    order_us = float(record.estimate_us(ordered, device)) if alone else estimate_us
    why = found.why_not(record.route)
    return Candidate(record, estimate_us, order_us, capturable, why=why)


def one_query(problem: AttentionProblem) -> AttentionProblem:
    """The problem with a single request, of a single query over `ORDER_TOKENS` tokens.

    The capacity too is the batch's: the longest request sets the width of the page table. So is
    the phase, which says how many queries the requests have; training alone is a phase by itself.
    """
    asked = object.__new__(AttentionProblem)  # checking it anew would take as long as all the rest
    for name in _PROBLEM_FIELDS:
        object.__setattr__(asked, name, _ONE_QUERY.get(name, getattr(problem, name)))
    if problem.phase != "train":
        object.__setattr__(asked, "phase", "decode")
    return asked


def _reasons(
    record: AttentionRecord, problem: AttentionProblem, device: DeviceFacts
) -> tuple[str, ...]:
    """Reasons of a record. One that is broken is rejected and does not harm others."""
    try:
        return tuple([_said(reason) for reason in record.reasons(problem, device)])
    except Exception as error:
        return (_broken(error),)


def _said(reason: Any) -> str:
    if not isinstance(reason, str):
        raise TypeError(f"a rule gave {shown(reason)} as its reason: must be a string, or None")
    return str(reason) or "gave no reason"


def _broken(error: Exception) -> str:
    try:
        text = str(error)
    except Exception:
        text = "it has no text"
    return f"its record is broken: {type(error).__name__}: {text}"


def _form_reason(forms: tuple[str, ...]) -> str:
    if "build" in forms:
        return "writes no plan: it is differentiable only; use stream_attention.train or prefill"
    return "has no differentiable form; use stream_attention.attention"


@dataclass(frozen=True, slots=True, eq=False)
class ById:
    """A hashable handle of an object: equal for the same object, which it keeps, so that the id of
    one that is gone cannot be taken for another's.
    """

    held: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


class Rankings:
    """A bounded, thread-safe memory of `rank`: problem, device, registry state and databases to
    ranking.

    Without a lock, as `PlanCache` is: what two threads or a handler do at once is ranked twice.
    """

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._known: dict[tuple, Ranking] = {}  # least recently used first

    def rank(
        self,
        problem: AttentionProblem,
        device: DeviceFacts,
        registry: Registry,
        forms: tuple[str, ...] = ("build",),
        databases: Databases = SHIPPED,
    ) -> Ranking:
        registry.attention_records()  # discovery first: it moves the version
        key = (problem, device, ById(registry), registry.version, forms, ById(databases))
        found = self._known.pop(key, None)
        if found is None:
            found = rank(problem, device, registry, forms=forms, databases=databases)
        self._known[key] = found
        surplus = len(self._known) - self._capacity
        if surplus > 0:
            for oldest in list(self._known)[:surplus]:
                self._known.pop(oldest, None)
        return found
