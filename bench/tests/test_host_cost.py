"""Host cost is measured on the engine itself, over a backend that does nothing."""

import json

from absl import flags

from stream_attention.bench import host_cost
from stream_attention.bench.timing import Timing


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


def test_import_time_is_of_a_fresh_process():
    found = host_cost.measure_import("stream_attention", "PagedKVCache", samples=1)
    assert found.n == 1 and 10 < found.p50_us < 30e6


def test_the_program_prints_a_table_and_writes_samples(tmp_path, capsys):
    values = flags.FlagValues()
    host_cost.define_flags(values)
    path = tmp_path / "host.json"
    rest = values(["host_cost", "--repeats=20", "--samples=2", "--imports=1", f"--json={path}"])
    status = host_cost.main(rest, values)
    data = json.loads(path.read_text())
    assert data["schema"] == host_cost.SCHEMA and len(data["costs"]) == 6
    assert status == int(not all(cost["met"] for cost in data["costs"]))
    assert all(cost["timing"]["samples_us"] for cost in data["costs"])
    assert "plan.run()" in capsys.readouterr().out
