"""Which route serves a problem: legality from the records, order from their cost models."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stream_attention.core.backend_plan import AttentionBackendPlan, Rejection
from stream_attention.core.device import DeviceFacts
from stream_attention.core.errors import UnsupportedProblem
from stream_attention.core.info import AttentionInfo
from stream_attention.core.launch import BoundTensors, Launch
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import AttentionRecord, Registry
from stream_attention.core.tile_plan import AttentionTilePlan

ORDER_TOKENS = 8192
"""KV tokens of the request whose estimate orders the routes of a batch-invariant problem."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A record that may serve the problem, with its estimate, and the one it is ordered by.

    order_us: another than `estimate_us` only where the problem is batch-invariant.
    capturable: on CUDA, whether a graph can hold its runs; elsewhere `True`.
    """

    record: AttentionRecord
    estimate_us: float
    order_us: float
    capturable: bool = True


@dataclass(frozen=True, slots=True)
class Ranking:
    """Legal candidates, best first, and every other record with all its reasons."""

    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]


def rank(
    problem: AttentionProblem,
    device: DeviceFacts,
    registry: Registry,
    *,
    forms: tuple[str, ...] = ("build",),
) -> Ranking:
    """Order the records that can serve `problem` in one of `forms` (`"build"`, `"apply"`).

    Order: on CUDA what a graph can hold before what it cannot, as a plan's `run` is capture-safe;
    then estimate, native before portable, and order of registration; so the same registry gives
    the same choice. Missing kernel packages are among the rejections. Routes differ in bits, so a
    batch-invariant problem is ordered by the estimate of `one_query`: whoever else is in the batch
    does not count.
    """
    ordered = one_query(problem) if problem.batch_invariant else problem
    legal: list[tuple[tuple[bool, float, bool, int], Candidate]] = []
    rejections = list(registry.missing())
    for index, record in enumerate(registry.attention_records()):
        reasons, estimate, order_us = _judge(record, problem, ordered, device)
        if all(getattr(record, form) is None for form in forms):
            reasons = (_form_reason(record, forms), *reasons)
        if device.type == "meta":
            reasons = ("device='meta': tensors there hold no data; use a real device", *reasons)
        if reasons:
            rejections.append(Rejection(record.route, reasons))
            continue
        capturable = device.type != "cuda" or record.graph_safe
        order = order_us if math.isfinite(order_us) else math.inf
        place = (not capturable, order, not record.native, index)
        legal.append((place, Candidate(record, estimate, order_us, capturable)))
    legal.sort(key=lambda entry: entry[0])
    return Ranking(tuple(entry[1] for entry in legal), tuple(rejections))


def one_query(problem: AttentionProblem) -> AttentionProblem:
    """The problem with a single request, of a single query over `ORDER_TOKENS` tokens.

    The capacity too is the batch's: the longest request sets the width of the page table.
    """
    return dataclasses.replace(
        problem, batch=1, total_qo_len=1, max_qo_len=1, kv_capacity=ORDER_TOKENS
    )


def _judge(
    record: AttentionRecord,
    problem: AttentionProblem,
    ordered: AttentionProblem,
    device: DeviceFacts,
) -> tuple[tuple[str, ...], float, float]:
    """Reasons of a record, its estimate and what it is ordered by, the estimate of `ordered`.

    One that is broken is rejected and does not harm others.
    """
    try:
        reasons = tuple(reason or "gave no reason" for reason in record.reasons(problem, device))
        if reasons:
            return reasons, 0.0, 0.0
        estimate = float(record.estimate_us(problem, device))
        same = ordered is problem
        return (), estimate, estimate if same else float(record.estimate_us(ordered, device))
    except Exception as error:
        return (f"its record is broken: {type(error).__name__}: {error}",), 0.0, 0.0


def _form_reason(record: AttentionRecord, forms: tuple[str, ...]) -> str:
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
    """A bounded, thread-safe memory of `rank`: problem, device and registry state to ranking.

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
    ) -> Ranking:
        registry.attention_records()  # discovery first: it moves the version
        key = (problem, device, ById(registry), registry.version, forms)
        found = self._known.pop(key, None)
        if found is None:
            found = rank(problem, device, registry, forms=forms)
        self._known[key] = found
        surplus = len(self._known) - self._capacity
        if surplus > 0:
            for oldest in list(self._known)[:surplus]:
                self._known.pop(oldest, None)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """A launch that is ready to run, with the plan and the info that describe it."""

    launch: Launch
    backend_plan: AttentionBackendPlan
    info: AttentionInfo


class NothingToRun:
    """The launch of a call without query rows: legal, and there is nothing to write."""

    __slots__ = ("backend_plan",)

    def __init__(self, backend_plan: AttentionBackendPlan) -> None:
        self.backend_plan = backend_plan

    def run(self) -> None:
        """Does nothing."""

    def rebind(self, bound: BoundTensors) -> None:
        """Does nothing."""

    def unbind(self) -> None:
        """Does nothing."""

    def reset(self) -> None:
        """Does nothing."""


def build(
    problem: AttentionProblem,
    tile_plan: AttentionTilePlan,
    device: DeviceFacts,
    bound: BoundTensors,
    ranking: Ranking,
    mode_reason: str,
    pick: int | None = None,
) -> Built:
    """Build the best candidate; one that refuses with `UnsupportedProblem` becomes a rejection.

    pick: try this candidate alone. Raises `UnsupportedProblem` with every candidate and every
    reason when none is left.
    """
    refused = list(ranking.rejections)
    for place, candidate in enumerate(ranking.candidates):
        if pick not in (None, place):
            continue
        record = candidate.record
        try:
            if problem.total_qo_len == 0:
                launch: Launch = NothingToRun(
                    AttentionBackendPlan(
                        route=record.route, backend=record.backend, arch=device.arch
                    )
                )
            else:
                assert record.build is not None
                launch = record.build(problem, tile_plan, device, bound)
                if not (hasattr(launch, "run") and hasattr(launch, "backend_plan")):
                    raise UnsupportedProblem(f"build gave a {type(launch).__name__}, not a Launch")
        except UnsupportedProblem as error:
            refused.append(Rejection(record.route, (str(error) or "refused to build",)))
            continue
        rejections = (*refused, *slower(ranking.candidates[place + 1 :], candidate))
        late = len(refused) - len(ranking.rejections)
        reason = f"{mode_reason}; {why_chosen(candidate, ranking.candidates, late)}"
        plan = dataclasses.replace(
            launch.backend_plan,
            reason=reason,
            rejections=rejections,
            estimate_us=candidate.estimate_us,
        )
        return Built(launch, plan, info_of(plan, tile_plan.guarantee))
    raise unsupported(problem, device, refused)


def slower(rest: tuple[Candidate, ...], chosen: Candidate) -> tuple[Rejection, ...]:
    """Legal candidates that lost, with the comparison that they lost by."""
    return tuple(Rejection(other.record.route, (_why_lost(other, chosen),)) for other in rest)


def _why_lost(other: Candidate, chosen: Candidate) -> str:
    times = f"{other.order_us:.1f} us against {_ordered_by(chosen)} of {chosen.record.route}"
    if chosen.capturable and not other.capturable:
        return f"legal, but cannot be captured in a CUDA graph (estimated at {times})"
    return f"legal, but estimated at {times}"


def _ordered_by(candidate: Candidate) -> str:
    alone = candidate.order_us != candidate.estimate_us
    return f"{candidate.order_us:.1f} us" + (
        f", for one query over {ORDER_TOKENS} tokens" if alone else ""
    )


def why_chosen(chosen: Candidate, candidates: tuple[Candidate, ...], refused: int) -> str:
    """The reason in words: how many routes were legal and by what the choice was made."""
    peers = candidates
    if any(other.order_us < chosen.order_us for other in candidates if not other.capturable):
        peers = tuple(other for other in candidates if other.capturable)
    held = " that a CUDA graph can hold" if peers is not candidates else ""
    text = f"{chosen.record.route} is the only legal route{held}"
    if len(peers) > 1:
        text = (
            f"{chosen.record.route} has the lowest estimate ({_ordered_by(chosen)}) "
            f"of {len(peers)} legal routes{held}"
        )
    if refused:
        text += f" once {refused} refused to build"
    return f"{text} (by cost model: no measured evidence is installed)"


@contextlib.contextmanager
def home_of(q: Any) -> Iterator[None]:
    """Where launches are built and results made: on q's device, outside of inference mode.

    Launches go to the current device, and tensors made under inference mode could not be written
    outside of it later.
    """
    with contextlib.ExitStack() as stack:
        gradients = torch.is_grad_enabled()  # leaving inference mode would switch them on
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(gradients))
        if isinstance(q, torch.Tensor) and q.is_cuda:
            stack.enter_context(torch.cuda.device(q.device))
        yield


def info_of(plan: AttentionBackendPlan, guarantee: str) -> AttentionInfo:
    """What a run of `plan` reports."""
    return AttentionInfo(
        backend_used=plan.backend,
        route=plan.route,
        guarantee=guarantee,
        reason=plan.reason,
        fallback_reasons=tuple(str(rejection) for rejection in plan.rejections),
        arch=plan.arch,
        splits=plan.splits,
        workspace_bytes=plan.workspace_bytes,
    )


def unsupported(
    problem: AttentionProblem, device: DeviceFacts, rejections: list[Rejection]
) -> UnsupportedProblem:
    """The error that lists every candidate with every reason."""
    lines = [f"no route serves this problem on {device.arch}: {problem!r}"]
    for rejection in rejections:
        lines.extend(f"{rejection.route}: {reason}" for reason in rejection.reasons)
    return UnsupportedProblem("\n  ".join(lines))
