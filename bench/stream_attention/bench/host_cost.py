"""Host cost: what Python adds to a launch, to a plan and to an import. Needs no GPU.

    ./bazelw run //bench:host_cost
    ./bazelw run //bench:host_cost -- --json=host.json

The backend does nothing, so what is timed is the engine alone: `plan.run()`, `plan()` with and
without validation, and the import in a fresh process over `import torch`. Exit status 1 when a bar
is not met.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from absl import app, flags
from rich import box
from rich.table import Table

from stream_attention.bench import flag_types, report
from stream_attention.bench.cases import DecodeCase
from stream_attention.bench.lengths import uniform
from stream_attention.bench.machine import environment
from stream_attention.bench.output import output_path, write_text
from stream_attention.bench.pools import build_pool
from stream_attention.bench.timing import Timing, measure_host
from stream_attention.core.backend_plan import AttentionBackendPlan
from stream_attention.core.launch import BoundTensors
from stream_attention.core.registry import AttentionRecord, Registry

FLAGS = flags.FLAGS
SCHEMA = "stream_attention.bench.host_cost/1"
NOOP_ROUTE = "noop"

# The project's bars, in microseconds.
RUN_BAR_US = 8.0
PLAN_BAR_US = 500.0
IMPORT_BAR_US = 300_000.0


@dataclass(frozen=True, slots=True)
class Cost:
    """One measured cost. bar_us: what it must not exceed, `None` = reported only."""

    name: str
    timing: Timing
    bar_us: float | None = None

    @property
    def met(self) -> bool:
        """The median is within the bar."""
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

    case = DecodeCase(batch=8, lengths=uniform(64), num_qo_heads=8, num_kv_heads=2, head_dim=64)
    pool = build_pool(case, torch.device("cpu"), seed=0)
    engine = StreamAttnEngine(registry=noop_registry())
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


def measure_import(module: str, name: str | None = None, *, samples: int = 5) -> Timing:
    """Microseconds that `import module` (and a lookup of `name` in it) takes over `import torch`.

    Each sample is a fresh process with this one's import path.
    """
    lookup = f"; {module}.{name}" if name else ""
    program = (
        "import time, torch; start = time.perf_counter(); "
        f"import {module}{lookup}; print(time.perf_counter() - start)"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    taken = []
    for _ in range(samples):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        taken.append(float(done.stdout.split()[-1]) * 1e6)
    return Timing(tuple(taken), "host")


def import_costs(samples: int) -> tuple[Cost, ...]:
    """The facade alone, and with the engine behind it."""
    facade = measure_import("stream_attention", samples=samples)
    engine = measure_import("stream_attention", "StreamAttnEngine", samples=samples)
    return (
        Cost("import stream_attention, over torch", facade, IMPORT_BAR_US),
        Cost("… and StreamAttnEngine", engine, IMPORT_BAR_US),
    )


def to_json(costs: Sequence[Cost]) -> dict[str, Any]:
    """Plain data with raw samples."""
    return {
        "schema": SCHEMA,
        "environment": dataclasses.asdict(environment(torch.device("cpu"))),
        "costs": [
            {
                "name": cost.name,
                "bar_us": cost.bar_us,
                "met": cost.met,
                "p50_us": cost.timing.p50_us,
                "best_us": min(cost.timing.samples_us),
                "timing": dataclasses.asdict(cost.timing),
            }
            for cost in costs
        ],
    }


def cost_table(costs: Sequence[Cost]) -> Table:
    """One row a cost."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("host cost", no_wrap=True)
    for heading in ("p50", "p20", "p80", "best", "bar"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    for cost in costs:
        timing = cost.timing
        shown = (timing.p50_us, timing.p20_us, timing.p80_us, min(timing.samples_us))
        bar = "" if cost.bar_us is None else f"≤ {report.format_us(cost.bar_us)}"
        outcome = "" if cost.bar_us is None else ("met" if cost.met else "not met")
        table.add_row(cost.name, *(report.format_us(us) for us in shown), bar, outcome)
    return table


def main(argv: Sequence[str], values: flags.FlagValues = FLAGS) -> int:
    """Measure, print, write; 1 when a bar is not met."""
    try:
        path = output_path(values.json)
    except ValueError as error:
        print(f"host_cost: {error}", file=sys.stderr)
        return 2
    console = report.make_console()
    report.print_header(console, environment(torch.device("cpu")))
    costs = (
        *measure_costs(repeats=values.repeats, samples=values.samples),
        *import_costs(values.imports),
    )
    console.print(cost_table(costs))
    if path is not None:
        write_text(path, json.dumps(to_json(costs), indent=1) + "\n")
        console.print(f"raw samples: {path}", soft_wrap=True)
    return int(not all(cost.met for cost in costs))


def define_flags(values: flags.FlagValues) -> None:
    """Register this binary's flags in `values`."""
    define = flag_types.FlagDefiner(values)
    define.count("repeats", 2000, "Calls a sample.", low=1, nearest=2000)
    define.count("samples", 25, "Samples a cost.", low=1, nearest=25)
    define.count("imports", 5, "Fresh processes an import.", low=1, nearest=5)
    define.text("json", None, "Write raw samples and environment to this file.")


if __name__ == "__main__":
    define_flags(FLAGS)
    app.run(main, flags_parser=flag_types.parse_flags)
