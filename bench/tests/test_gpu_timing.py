"""On a GPU: graph and eager timing, the read curve, and a tiny run of the command."""

import json

import pytest
import torch
from absl import flags

from stream_attention.bench import floor, paged_decode, results, timing
from stream_attention.core.formulas import MIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize(
    ("graph", "method"), [(True, "cuda_graph_cold"), (False, "cuda_eager_cold")]
)
def test_every_pool_is_worked_on_by_the_timed_runs(device, graph, method):
    sources = [torch.full((1024,), float(i), device=device) for i in range(3)]
    outs = [torch.zeros_like(source) for source in sources]
    calls = [lambda s=s, o=o: o.copy_(s) for s, o in zip(sources, outs, strict=True)]

    def poison():
        for out in outs:
            out.fill_(float("nan"))

    found = timing.measure(calls, device=device, graph=graph, replays=6, before_samples=poison)
    assert found.method == method and found.n == 6 and min(found.samples_us) > 0
    assert all(torch.equal(s, o) for s, o in zip(sources, outs, strict=True))


def test_the_read_curve_is_physical(device):
    curve = floor.measure_read_curve([4 * MIB, 512 * MIB], device, replays=10)
    assert 0.5 < curve.floor_us(MIB) < 200
    assert curve.floor_us(512 * MIB) > 4 * curve.floor_us(32 * MIB)
    assert 50 < curve.best_gb_per_s < 20_000


@pytest.mark.parametrize("mode", [[], ["--eager"], ["--warm"]])
def test_a_tiny_run_has_correct_rows(tmp_path, mode):
    values = flags.FlagValues()
    paged_decode.define_flags(values)
    path = tmp_path / "run.json"
    arguments = ["--batch=3", "--lengths=300,17,64", "--replays=5", f"--json={path}", *mode]
    assert paged_decode.main(values(["paged_decode", *arguments]), values) == 0
    (case,) = results.from_json(json.loads(path.read_text())).cases
    rows = {row.contender: row for row in case.rows}
    for name in ("triton", "engine", "sdpa_gather"):
        assert rows[name].outcome == "ok", rows[name]
    # It reads lengths on the host, so only an eager run can time it.
    assert rows["torch"].outcome == ("ok" if mode == ["--eager"] else "unsupported"), rows["torch"]


@pytest.mark.parametrize(
    "form",
    [["--kv_dtype=fp8"], ["--cache=contiguous"], ["--capacity=65536"], ["--batch_invariant"]],
    ids=str,
)
def test_the_engine_serves_every_form_of_a_case_under_a_graph(tmp_path, form):
    values = flags.FlagValues()
    paged_decode.define_flags(values)
    path = tmp_path / "run.json"
    arguments = ["--batch=2", "--lengths=300,17", "--replays=5", f"--json={path}", *form]
    assert paged_decode.main(values(["paged_decode", *arguments]), values) == 0
    (case,) = results.from_json(json.loads(path.read_text())).cases
    rows = {row.contender: row for row in case.rows}
    assert rows["engine"].outcome == "ok", rows["engine"]
