"""Host cost: what Python adds to a launch, to a plan and to an import.

    ./bazelw run //bench:host_cost
    ./bazelw run //bench:host_cost -- --json=host.json

The backend does nothing, so what is timed is the engine alone: `plan.run()`, `plan()` with and
without validation, and the import in a fresh process over `import torch`; where that takes long it
has fewer samples, and says so. These rows need no GPU.
Where the route `sm90_decode` can run, its `plan.run()` is timed too, over requests without tokens,
as a whole and in its two parts; elsewhere the row says why it is missing. What choosing a route
costs is timed over the phase database inside the wheel, on a problem that was measured.

Exit status: 0; 1 when a bar is not met; 2 for bad flags; 4 when the file of --json could not be
written, 5 when the report could not be printed; 130 when interrupted.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from absl import app, flags
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stream_attention.bench import flag_types, report
from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.choice import measure_choice
from stream_attention.bench.imports import measure_import
from stream_attention.bench.lengths import uniform
from stream_attention.bench.machine import Environment, environment
from stream_attention.bench.output import UNWRITTEN, output_path, write_fault, write_text
from stream_attention.bench.pools import build_pool
from stream_attention.bench.routes import problem_of
from stream_attention.bench.screen import UNPRINTED, Screen, Unprintable, say, say_interrupted
from stream_attention.bench.timing import Timing, measure_host
from stream_attention.core.backend_plan import AttentionBackendPlan
from stream_attention.core.describe import describe
from stream_attention.core.device import device_facts
from stream_attention.core.launch import BoundTensors
from stream_attention.core.registry import AttentionRecord, Registry, default_registry
from stream_attention.core.tile_plan import AttentionTilePlan
from stream_attention.planner.phase_db import PhaseDatabase
from stream_attention.planner.watch import tensor_guards

FLAGS = flags.FLAGS
SCHEMA = "stream_attention.bench.host_cost/3"
NOOP_ROUTE = "noop"
NATIVE_ROUTE = "sm90_decode"
NATIVE_RUN = f"plan.run() of {NATIVE_ROUTE}, no tokens"
NATIVE_LAUNCH = "… its launch alone"
NATIVE_CHECKS = "… its staleness check alone"
CHOICE = "choosing a route by evidence"

# The project's bars, in microseconds.
RUN_BAR_US = 8.0
PLAN_BAR_US = 500.0
IMPORT_BAR_US = 300_000.0
NATIVE_RUN_BAR_US = 3.0
CHOICE_BAR_US = 50.0

SLOW_CHECK = "plan.run() compares shapes and strides in Python: this torch has no guard that does"

# Launches between two syncs: with a thousand in its queue a launch waits for the GPU.
LAUNCHES_A_SAMPLE = 200
CHOICES_A_SAMPLE = 100


@dataclass(frozen=True, slots=True)
class Cost:
    """One measured cost. bar_us: what it must not exceed, `None` = reported only.

    timing: `None` where it could not be measured; `missing` then says why, and is "" elsewhere.
    note: what else the row says of its samples.
    """

    name: str
    timing: Timing | None
    bar_us: float | None = None
    missing: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if (self.timing is None) != bool(self.missing):
            raise ValueError(
                f"missing={self.missing!r}: must be given where there is no timing, and only there"
            )

    @property
    def met(self) -> bool | None:
        """The median is within the bar; `None` where nothing was measured."""
        if self.timing is None:
            return None
        return self.bar_us is None or self.timing.p50_us <= self.bar_us


class NoopLaunch:
    """A launch that does nothing; the cost of calling it is part of every number."""

    def __init__(self, backend_plan: AttentionBackendPlan) -> None:
        self.backend_plan = backend_plan

    def run(self) -> None:
        """Do nothing."""

    def rebind(self, bound: BoundTensors) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""


def noop_registry() -> Registry:
    """A registry whose cheapest route, legal for everything, does nothing."""

    def build(problem: Any, tile_plan: Any, device: Any, bound: BoundTensors) -> NoopLaunch:
        return NoopLaunch(AttentionBackendPlan(route=NOOP_ROUTE, backend="none", arch=device.arch))

    registry = Registry()
    registry.register_attention(
        AttentionRecord(
            route=NOOP_ROUTE,
            backend="none",
            package="stream-attention-bench",
            rules=(),
            estimate_us=lambda problem, device: 0.0,
            build=build,
            native=True,
        )
    )
    return registry


def measure_costs(*, repeats: int = 2000, samples: int = 25) -> tuple[Cost, ...]:
    """`plan.run()`, `plan()` and the floor of a Python call, on a decode step of 8 requests."""
    from stream_attention import StreamAttnEngine

    case = AttentionCase(batch=8, lengths=uniform(64), num_qo_heads=8, num_kv_heads=2, head_dim=64)
    pool = build_pool(case, torch.device("cpu"), seed=0)
    engine = StreamAttnEngine(registry=noop_registry(), phase_db=())
    plan = engine.plan(pool.q, pool.cache, mode="exact_native")
    _, info = plan.run()
    assert info.route == NOOP_ROUTE, info
    launch = NoopLaunch(AttentionBackendPlan(route=NOOP_ROUTE, backend="none", arch="cpu"))
    few = max(1, repeats // 50)

    def replan(**options: Any) -> Timing:
        return measure_host(
            lambda: engine.plan(pool.q, pool.cache, mode="exact_native", **options),
            repeats=few,
            samples=samples,
        )

    return (
        Cost("empty Python call", measure_host(launch.run, repeats=repeats, samples=samples)),
        Cost(
            "plan.run()",
            measure_host(plan.run, repeats=repeats, samples=samples),
            RUN_BAR_US,
        ),
        Cost("engine.plan(), warm", replan(), PLAN_BAR_US),
        Cost("engine.plan(validate=False), warm", replan(validate=False), PLAN_BAR_US),
    )


def native_costs(
    *,
    samples: int = 25,
    device: torch.device | None = None,
    registry: Registry | None = None,
) -> tuple[Cost, ...]:
    """`plan.run()` of the native decode route, its launch without the plan, the plan without it.

    Eight requests without tokens: the launch itself, with next to no work behind it. Wall clock of
    the host over `LAUNCHES_A_SAMPLE` calls, the device idle before each sample. One row with the
    reason where the route cannot run. device: `None` = the CUDA device of this process.
    """
    from stream_attention import StreamAttnEngine

    case = AttentionCase(
        batch=8, lengths=uniform(0), num_qo_heads=8, num_kv_heads=2, head_dim=64, dtype="bfloat16"
    )
    registry = default_registry() if registry is None else registry
    if device is None:
        if not torch.cuda.is_available():
            reason = "no CUDA device is available to torch here"
            return (Cost(NATIVE_RUN, None, NATIVE_RUN_BAR_US, reason),)
        device = torch.device("cuda", torch.cuda.current_device())
    records = {record.route: record for record in registry.attention_records()}
    reasons = _native_reasons(case, device, registry, records.get(NATIVE_ROUTE))
    if reasons:
        return (Cost(NATIVE_RUN, None, NATIVE_RUN_BAR_US, "; ".join(reasons)),)
    record = records[NATIVE_ROUTE]
    pool = build_pool(case, device, seed=0)
    plan, checks = (
        StreamAttnEngine(registry=holding, phase_db=()).plan(
            pool.q, pool.cache, mode="exact_native"
        )
        for holding in (_only(record), noop_registry())
    )
    assert (plan.route, checks.route) == (NATIVE_ROUTE, NOOP_ROUTE), (plan, checks)
    plan.run()
    call = describe(pool.q, pool.cache)
    assert record.build is not None
    tiles = AttentionTilePlan.for_problem(call.problem)
    launch = record.build(call.problem, tiles, device_facts(device), call.bound)
    wait = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else None

    def timed(run: Callable[[], Any]) -> Timing:
        return measure_host(run, repeats=LAUNCHES_A_SAMPLE, samples=samples, before_sample=wait)

    return (
        Cost(NATIVE_RUN, timed(plan.run), NATIVE_RUN_BAR_US),
        Cost(NATIVE_LAUNCH, timed(launch.run)),
        Cost(NATIVE_CHECKS, timed(checks.run)),
    )


def _native_reasons(
    case: AttentionCase, device: torch.device, registry: Registry, record: AttentionRecord | None
) -> tuple[str, ...]:
    """Why the route cannot serve `case` on `device`; empty when it can."""
    if record is not None:
        return record.reasons(problem_of(case), device_facts(device))
    gone = [f"{r.route}: {'; '.join(r.reasons)}" for r in registry.missing()]
    return (f"no route {NATIVE_ROUTE} is registered", *gone)


def _only(record: AttentionRecord) -> Registry:
    """A registry that ranks `record` first, whatever its cost model says."""
    registry = Registry()
    if record.route in {known.route for known in registry.attention_records()}:
        registry.unregister(record.route)
    registry.register_attention(
        dataclasses.replace(record, estimate_us=lambda problem, device: 0.0)
    )
    return registry


def choice_cost(*, samples: int = 25, database: PhaseDatabase | None = None) -> Cost:
    """Ranking the routes of a measured problem; `database` as in `measure_choice`."""
    found = measure_choice(repeats=CHOICES_A_SAMPLE, samples=samples, database=database)
    return Cost(CHOICE, found.timing, CHOICE_BAR_US, missing=found.missing, note=found.note)


def import_costs(samples: int) -> tuple[Cost, ...]:
    """The facade alone, and with the engine behind it."""
    found = measure_import("stream_attention", "StreamAttnEngine", samples=samples)
    rows = (
        ("import stream_attention, over torch", found.alone, IMPORT_BAR_US),
        ("… and StreamAttnEngine", found.with_name, IMPORT_BAR_US),
    )
    return tuple(
        Cost(name, None, bar_us, missing=found.note)
        if timing is None
        else Cost(name, timing, bar_us, note=found.note)
        for name, timing, bar_us in rows
    )


def to_json(costs: Sequence[Cost]) -> dict[str, Any]:
    """Plain data with raw samples."""
    return {
        "schema": SCHEMA,
        "environment": dataclasses.asdict(environment(torch.device("cpu"))),
        "gpu_environment": dataclasses.asdict(gpu) if (gpu := gpu_environment()) else None,
        "costs": [_plain(cost) for cost in costs],
    }


def _plain(cost: Cost) -> dict[str, Any]:
    timing = cost.timing
    return {
        "name": cost.name,
        "bar_us": cost.bar_us,
        "met": cost.met,
        "missing": cost.missing,
        "note": cost.note,
        "p50_us": timing and timing.p50_us,
        "best_us": timing and min(timing.samples_us),
        "timing": timing and dataclasses.asdict(timing),
    }


def gpu_environment() -> Environment | None:
    """Facts of the CUDA device that native launches go to, or `None` without one."""
    if not torch.cuda.is_available():
        return None
    return environment(torch.device("cuda", torch.cuda.current_device()))


def cost_table(costs: Sequence[Cost]) -> Table:
    """One row a cost."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("host cost", no_wrap=True)
    for heading in ("p50", "p20", "p80", "best", "bar"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("outcome", min_width=len("not met"))  # a note wraps, numbers never do
    for cost in costs:
        timing = cost.timing
        bar = "" if cost.bar_us is None else f"≤ {report.format_us(cost.bar_us)}"
        if timing is None:
            table.add_row(cost.name, "", "", "", "", bar, "missing")
            continue
        shown = (timing.p50_us, timing.p20_us, timing.p80_us, min(timing.samples_us))
        outcome = "" if cost.bar_us is None else ("met" if cost.met else "not met")
        outcome = "; ".join(filter(None, (outcome, cost.note)))
        table.add_row(cost.name, *(report.format_us(us) for us in shown), bar, outcome)
    return table


def main(argv: Sequence[str], values: flags.FlagValues = FLAGS) -> int:
    """Measure, print, write; 1 when a bar is not met."""
    try:
        return _main(argv, values)
    except Unprintable:
        return UNPRINTED
    except KeyboardInterrupt:
        return say_interrupted("host_cost")


def _main(argv: Sequence[str], values: flags.FlagValues) -> int:
    try:
        flag_types.refuse_arguments(argv)
        path = output_path(values.json)
    except ValueError as error:
        say(f"host_cost: {error}")
        return 2
    screen = Screen("host_cost", report.make_console(), kept=path is not None)
    screen.show(_print_header)
    costs = (
        *measure_costs(repeats=values.repeats, samples=values.samples),
        *native_costs(samples=values.samples),
        choice_cost(samples=values.samples),
        *import_costs(values.imports),
    )
    written = path
    if path is not None:
        try:
            write_text(path, json.dumps(to_json(costs), indent=1) + "\n")
        except OSError as error:
            say(f"host_cost: {write_fault(path, error)}")
            written = None
    screen.show(_print_costs, costs, written)
    status = int(any(cost.met is False for cost in costs))
    unwritten = UNWRITTEN if written != path else 0
    return status or unwritten or (UNPRINTED if screen.error else 0)


def _print_header(console: Console) -> None:
    report.print_header(console, environment(torch.device("cpu")))
    if (gpu := gpu_environment()) is not None:
        for line in gpu.lines()[:2]:
            console.print(Text(line), soft_wrap=True)


def _print_costs(console: Console, costs: Sequence[Cost], written: Path | None) -> None:
    """The table, what is missing in it, and the file that it is in too."""
    console.print(cost_table(costs))
    if tensor_guards() is None:
        console.print(f"  {SLOW_CHECK}", soft_wrap=True)
    for cost in costs:
        if cost.missing:
            console.print(Text(f"  {cost.name}: missing: {cost.missing}"), soft_wrap=True)
    if written is not None:
        console.print(f"raw samples: {written}", soft_wrap=True)


def define_flags(values: flags.FlagValues) -> None:
    """Register this binary's flags in `values`."""
    define = flag_types.FlagDefiner(values)
    define.count("repeats", 2000, "Calls a sample.", low=1, nearest=2000)
    define.count("samples", 25, "Samples a cost.", low=1, nearest=25)
    define.count(
        "imports",
        5,
        "Fresh processes for the imports, less where they take long.",
        low=1,
        nearest=5,
    )
    define.text("json", None, "Write raw samples and environment to this file.")


if __name__ == "__main__":
    define_flags(FLAGS)
    app.run(main, flags_parser=flag_types.parse_flags)
