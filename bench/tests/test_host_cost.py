"""Host cost is measured on the engine itself, over a backend that does nothing."""

import io
import itertools
import json
import re
import subprocess
import time

import pytest
import torch
from absl import flags
from rich.console import Console

from stream_attention.bench import choice, host_cost, imports, report
from stream_attention.bench.timing import Timing
from stream_attention.core.backend_plan import AttentionBackendPlan, Rejection
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import AttentionRecord, CapabilityRule
from stream_attention.planner.testing import database_of


def test_costs_name_what_they_measure_and_run_costs_more_than_nothing():
    costs = {cost.name: cost for cost in host_cost.measure_costs(repeats=50, samples=3)}
    run, empty = costs["plan.run()"], costs["empty Python call"]
    assert run.timing.method == "host" and run.timing.n == 3
    assert empty.timing.p50_us < run.timing.p50_us < costs["engine.plan(), warm"].timing.p50_us
    assert run.bar_us == 8.0 and costs["engine.plan(), warm"].bar_us == 500.0


def test_a_bar_is_met_by_the_median():
    timing = Timing((1.0, 2.0, 90.0), "host")
    assert host_cost.Cost("a", timing, 2.0).met and not host_cost.Cost("a", timing, 1.9).met
    assert host_cost.Cost("a", timing).met


def test_a_cost_is_measured_or_says_why_not():
    missing = host_cost.Cost("a", None, 3.0, "no GPU")
    assert missing.met is None
    for timing, reason in ((None, ""), (Timing((1.0,), "host"), "no GPU")):
        with pytest.raises(ValueError, match="must be given where there is no timing"):
            host_cost.Cost("a", timing, 3.0, reason)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_the_native_row_is_missing_without_a_gpu_and_says_so():
    (cost,) = host_cost.native_costs(samples=1)
    assert cost.name == "plan.run() of sm90_decode, no tokens" and cost.bar_us == 3.0
    assert cost.timing is None and "no CUDA device" in cost.missing


def native_record(rules=()):
    def build(problem, tile_plan, device, bound):
        plan = AttentionBackendPlan(route="sm90_decode", backend="none", arch=device.arch)
        return host_cost.NoopLaunch(plan)

    return AttentionRecord(
        route="sm90_decode",
        backend="none",
        package="test",
        rules=rules,
        estimate_us=lambda problem, device: 1e9,
        build=build,
        native=True,
    )


class Records:
    """Stands in for a registry: what it holds and what is missing."""

    def __init__(self, *records):
        self.attention_records = lambda: records
        self.missing = lambda: (Rejection("kernels_sm90", ("is not installed",)),)


def test_the_native_row_names_the_package_that_is_not_there():
    (cost,) = host_cost.native_costs(samples=1, device=torch.device("cpu"), registry=Records())
    assert cost.timing is None and cost.met is None
    assert cost.missing == ("no route sm90_decode is registered; kernels_sm90: is not installed")


def test_the_native_row_gives_the_reasons_of_the_route():
    rule = CapabilityRule("device", lambda problem, device: f"device={device.type}: no; use yes")
    registry = Records(native_record((rule,)))
    (cost,) = host_cost.native_costs(samples=1, device=torch.device("cpu"), registry=registry)
    assert cost.missing == "device=cpu: no; use yes"


def test_the_native_row_times_that_route_whatever_its_estimate():
    registry = Records(native_record())
    costs = host_cost.native_costs(samples=3, device=torch.device("cpu"), registry=registry)
    run, launch, checks = costs
    assert run.bar_us == 3.0 and run.timing.n == 3
    assert run.timing.calls_per_sample == host_cost.LAUNCHES_A_SAMPLE == 200
    assert launch.bar_us is checks.bar_us is None
    assert launch.timing.p50_us < checks.timing.p50_us
    assert launch.timing.p50_us < run.timing.p50_us


def measured_problems():
    """29, of decode steps with and without `batch_invariant`."""
    common = dict.fromkeys(("q_dtype", "kv_dtype", "out_dtype"), "bfloat16")
    common |= dict.fromkeys(("head_dim_qk", "head_dim_vo"), 128)
    shapes = list(itertools.product((1, 8, 64), (1024, 4096, 16384, 65536), (2, 8), (False, True)))
    return [
        AttentionProblem(
            **common,
            batch=batch,
            total_qo_len=batch,
            max_qo_len=1,
            kv_capacity=capacity,
            num_qo_heads=4 * heads,
            num_kv_heads=heads,
            sm_scale=0.1,
            batch_invariant=invariant,
        )
        for batch, capacity, heads, invariant in shapes[:29]
    ]


def test_choosing_a_route_by_evidence_costs_at_most_50_us():
    times = {
        route: lambda problem, each=each: each * (5 + problem.batch * problem.kv_capacity / 999)
        for route, each in (("sm90_decode", 1.0), ("triton", 1.3), ("torch", 20.0))
    }
    database = database_of(measured_problems(), times, native=["sm90_decode"])
    cost = host_cost.choice_cost(samples=25, database=database)
    assert (cost.name, cost.bar_us) == ("choosing a route by evidence", 50.0)
    assert cost.note == "29 cells, 6 models"
    print(f"choosing a route: {min(cost.timing.samples_us):.1f} us at best")
    assert min(cost.timing.samples_us) <= cost.bar_us  # the least: other processes run here too


def test_a_choice_that_no_evidence_makes_is_missing(monkeypatch):
    problems = measured_problems()
    few = database_of(problems[:2], {"torch": lambda problem: 1.0})  # too few for a model
    cost = host_cost.choice_cost(samples=1, database=few)
    assert cost.timing is None and "no cell of the phase database of sm_90 has" in cost.missing
    monkeypatch.setattr(choice, "shipped", lambda arch: None)
    cost = host_cost.choice_cost(samples=1)
    assert cost.met is None and cost.missing == "there is no phase database in the wheel"


def test_import_time_is_of_a_fresh_process():
    found = imports.measure_import("stream_attention", "PagedKVCache", samples=1)
    assert found.alone.n == found.with_name.n == 1 and found.note == ""
    assert 10 < found.alone.p50_us < found.with_name.p50_us < 30e6


@pytest.fixture
def slow_torch(tmp_path, monkeypatch):
    """What fresh processes import as torch: it takes two seconds. Counts them when called."""
    log = tmp_path / "starts"
    text = f"import time; open({str(log)!r}, 'a').write('start\\n'); time.sleep(2.0)\n"
    (tmp_path / "torch.py").write_text(text)
    (tmp_path / "light.py").write_text("name = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    return lambda: log.read_text().count("start")


@pytest.mark.parametrize(("max_seconds", "taken"), [(3.9, 1), (0.2, 0)])
def test_imports_that_take_long_are_fewer_and_say_so(slow_torch, max_seconds, taken):
    begin = time.monotonic()
    found = imports.measure_import("light", "name", samples=5, max_seconds=max_seconds)
    assert time.monotonic() - begin < max(max_seconds, 2.0)
    if taken:
        assert (found.alone.n, slow_torch()) == (1, 1)
        assert re.fullmatch("1 of 5 samples: a process takes [234] s", found.note)
    else:
        assert (found.alone, found.with_name) == (None, None)
        assert found.note == "a fresh process that imports torch takes more than 0.2 s"


def test_a_sample_of_all_imports_is_one_process(slow_torch, monkeypatch):
    monkeypatch.setattr(
        host_cost,
        "measure_import",
        lambda module, name, samples: imports.measure_import("light", "name", samples=samples),
    )
    rows = host_cost.import_costs(2)
    assert [row.timing.n for row in rows] == [2, 2] and slow_torch() == 2
    assert [row.note for row in rows] == ["", ""]


@pytest.mark.parametrize("seconds", [7, 15, 28, 46, 54])
def test_imports_begin_only_where_they_end_in_time(monkeypatch, seconds):
    now = [0.0]

    def run(command, timeout, **options):
        assert timeout >= seconds
        now[0] += seconds
        return subprocess.CompletedProcess(command, 0, "0.1 0.2\n")

    monkeypatch.setattr(imports.subprocess, "run", run)
    found = imports.measure_import("a", "b", samples=100, clock=lambda: now[0])
    assert found.alone.n == int(imports.MAX_SECONDS / seconds)
    # Beside the imports: the start of the program, as long as one of them, and what it measures.
    assert seconds + now[0] + 10 < 120


def test_a_row_says_that_its_samples_are_fewer():
    timing = Timing((1.0,), "host")
    costs = (
        host_cost.Cost("few", timing, 2.0, note="1 of 5 samples: a process takes 46 s"),
        host_cost.Cost("free", timing, note="1 of 5 samples: a process takes 46 s"),
    )
    console = Console(file=io.StringIO(), width=report.FULL_WIDTH)
    console.print(host_cost.cost_table(costs))
    lines = console.file.getvalue().splitlines()
    few, free = (line for line in lines if line.startswith("  f"))
    assert few.rstrip().endswith("met; 1 of 5 samples: a process takes 46 s")
    assert free.rstrip().endswith("  1 of 5 samples: a process takes 46 s") and "met" not in free
    noted = [cost["note"] for cost in host_cost.to_json(costs)["costs"]]
    assert noted == ["1 of 5 samples: a process takes 46 s"] * 2


def test_the_program_prints_a_table_and_writes_samples(tmp_path, capsys):
    values = flags.FlagValues()
    host_cost.define_flags(values)
    path = tmp_path / "host.json"
    rest = values(["host_cost", "--repeats=20", "--samples=2", "--imports=1", f"--json={path}"])
    status = host_cost.main(rest, values)
    data = json.loads(path.read_text())
    costs = {cost["name"]: cost for cost in data["costs"]}
    native, chosen = costs.pop(host_cost.NATIVE_RUN), costs.pop(host_cost.CHOICE)
    for part in (host_cost.NATIVE_LAUNCH, host_cost.NATIVE_CHECKS):
        assert (costs.pop(part, None) is None) == bool(native["missing"])
    assert data["schema"] == host_cost.SCHEMA and len(costs) == 6
    assert status == int(any(cost["met"] is False for cost in data["costs"]))
    assert all(cost["timing"]["samples_us"] for cost in costs.values())
    shown = capsys.readouterr().out
    assert "plan.run()" in shown
    assert (native["timing"] is None) == bool(native["missing"])
    assert native["missing"] in shown
    assert (chosen["timing"] is None) == bool(chosen["missing"]) and chosen["missing"] in shown
    assert host_cost.SLOW_CHECK not in shown


def test_the_program_says_when_forms_are_compared_in_python(monkeypatch, capsys):
    monkeypatch.setattr(host_cost, "tensor_guards", lambda: None)
    values = flags.FlagValues()
    host_cost.define_flags(values)
    host_cost.main(values(["host_cost", "--repeats=2", "--samples=1", "--imports=1"]), values)
    assert host_cost.SLOW_CHECK in capsys.readouterr().out
