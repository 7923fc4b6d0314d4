"""Builds the route that serves a problem: the best of a ranking that does not refuse."""

from __future__ import annotations

import contextlib
import dataclasses
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
from stream_attention.core.tile_plan import AttentionTilePlan
from stream_attention.planner.ranking import Ranking
from stream_attention.planner.reasons import slower, why_chosen


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """A launch that is ready to run, with the plan and the info that describe it, and the ranking
    that it was chosen by.
    """

    launch: Launch
    backend_plan: AttentionBackendPlan
    info: AttentionInfo
    ranking: Ranking


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
        reason = f"{mode_reason}; {why_chosen(candidate, ranking, late)}"
        plan = dataclasses.replace(
            launch.backend_plan,
            reason=reason,
            rejections=rejections,
            estimate_us=candidate.estimate_us,
            estimated_by=candidate.estimated_by,
            evidence=candidate.rows,
        )
        return Built(launch, plan, info_of(plan, tile_plan.guarantee), ranking)
    raise unsupported(problem, device, refused)


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
