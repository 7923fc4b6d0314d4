"""Records without kernels and databases without measurements, for tests of planning, caching and
host cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from stream_attention.core.backend_plan import AttentionBackendPlan, LaunchSpec
from stream_attention.core.device import DeviceFacts
from stream_attention.core.launch import BoundTensors
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import AttentionRecord, CapabilityRule, Registry
from stream_attention.core.tile_plan import AttentionTilePlan
from stream_attention.planner.cells import Cell
from stream_attention.planner.cost_model import Measured, family_of, fit
from stream_attention.planner.evidence import Fingerprint
from stream_attention.planner.phase_db import CandidateOutcome, CellDecision, PhaseDatabase

Body = Callable[[BoundTensors], None]


def write_batch(bound: BoundTensors) -> None:
    """A body whose result tells whose tensors were read: out = the first element of each q row."""
    bound.out.copy_(bound.q[..., :1].expand_as(bound.out))
    if bound.lse is not None:
        bound.lse.copy_(bound.q[..., 0])


class FakeLaunch:
    """A launch that runs `body` on what it is bound to, and counts what happens to it."""

    def __init__(self, bound: BoundTensors, plan: AttentionBackendPlan, body: Body | None) -> None:
        self.bound = bound
        self.backend_plan = plan
        self.capacity = bound.kv.capacity
        self.runs = self.rebinds = self.resets = 0
        self.scratch = torch.zeros(plan.workspace_bytes, dtype=torch.uint8)
        self._body = body

    def run(self) -> None:
        """Run the body, if there is one."""
        if self._body is not None:
            self.runs += 1
            self._body(self.bound)

    def rebind(self, bound: BoundTensors) -> None:
        """Count, and use other tensors."""
        self.rebinds += 1
        self.bound = bound

    def unbind(self) -> None:
        """Forget the tensors."""
        del self.bound

    def reset(self) -> None:
        """Count."""
        self.resets += 1


@dataclasses.dataclass
class FakeRoute:
    """What a fake record is, and the launches it has built so far.

    refusal: reason its only rule gives, `None` = legal. body: what a run does, `None` = nothing.
    failure: raised by `build`.
    """

    name: str = "fake"
    estimate_us: float = 1.0
    native: bool = False
    refusal: str | None = None
    body: Body | None = None
    failure: Exception | None = None
    workspace_bytes: int = 0
    built: list[FakeLaunch] = dataclasses.field(default_factory=list)

    def build(
        self,
        problem: AttentionProblem,
        tile_plan: AttentionTilePlan,
        device: DeviceFacts,
        bound: BoundTensors,
    ) -> FakeLaunch:
        """A launch over `bound`, or the failure."""
        if self.failure is not None:
            raise self.failure
        plan = AttentionBackendPlan(
            route=self.name,
            backend="none",
            arch=device.arch,
            workspace_bytes=self.workspace_bytes,
            launches=(LaunchSpec(f"{self.name}_kernel", (2, 3, 4), 128, 1024),),
        )
        launch = FakeLaunch(bound, plan, self.body)
        self.built.append(launch)
        return launch

    def record(self) -> AttentionRecord:
        """The record to register."""
        rules = (CapabilityRule("refusal", lambda problem, device: self.refusal),)
        return AttentionRecord(
            route=self.name,
            backend="none",
            package="tests",
            rules=rules,
            estimate_us=lambda problem, device: self.estimate_us,
            build=self.build,
            native=self.native,
        )


def registry_of(*routes: Any) -> Registry:
    """A registry of these routes alone: nothing is discovered."""
    registry = Registry(discover=False)
    for route in routes:
        registry.register_attention(route.record() if isinstance(route, FakeRoute) else route)
    return registry


H200 = DeviceFacts("cuda", "NVIDIA H200", 0, (9, 0), 132, 50 << 20)
"""A device that is not here, for rankings alone."""

FINGERPRINT = Fingerprint(
    device="NVIDIA H200",
    arch="sm_90",
    num_sms=132,
    l2_bytes=50 << 20,
    driver="580.0",
    cuda="13.0",
    sm_clock_mhz=1980,
    memory_clock_mhz=3201,
    cpu="a CPU",
    python="3.11.0",
    torch="2.11.0",
    triton="3.6.0",
)


def filled_cell(problem: AttentionProblem) -> Cell:
    """The problem with every request as long as it may be."""
    assert problem.uniform
    return Cell(
        problem=problem,
        qo_lens=(problem.max_qo_len,) * problem.batch,
        kv_lens=(problem.kv_capacity,) * problem.batch,
    )


def database_of(
    problems: Iterable[AttentionProblem],
    times: Mapping[str, Callable[[AttentionProblem], float]],
    *,
    native: Iterable[str] = (),
    **changes: Any,
) -> PhaseDatabase:
    """A database whose routes took `times` microseconds on filled cells of `problems`.

    Fitted as measurements are. changes: of `FINGERPRINT`.
    """
    cells = [filled_cell(problem) for problem in problems]
    roles = {route: "native" if route in set(native) else "portable" for route in times}
    models = []
    for family in sorted({family_of(cell.problem) for cell in cells}):
        of_family = [cell for cell in cells if family_of(cell.problem) == family]
        for route, time in times.items():
            measured = [
                Measured(cell, f"{route}-{cell.digest[:4]}", time(cell.problem))
                for cell in of_family
            ]
            model = fit(route, roles[route], measured)
            models.extend([] if model is None else [model])
    environment = dataclasses.replace(FINGERPRINT, **changes)
    return PhaseDatabase(
        arch=environment.arch,
        environment=environment,
        cells=_decisions(cells, times, roles),
        models=tuple(models),
        commit="0123abc",
        compiled_at="2025-01-01T00:00:00+00:00",
    )


def _decisions(
    cells: Iterable[Cell],
    times: Mapping[str, Callable[[AttentionProblem], float]],
    roles: Mapping[str, str],
) -> tuple[CellDecision, ...]:
    decided = []
    for number, cell in enumerate(cells):
        best = min(times, key=lambda route: times[route](cell.problem))
        candidates = tuple(
            CandidateOutcome(
                route=route, role=roles[route], outcome="ok", p50_us=time(cell.problem)
            )
            for route, time in times.items()
        )
        decided.append(
            CellDecision(
                cell=cell,
                name=f"cell {number:03}",
                status=roles[best],
                chosen=best,
                own=best,
                reason="the fastest",
                candidates=candidates,
            )
        )
    return tuple(decided)
