"""The info of a compiled call names the route that runs, or says that it is not known yet."""

import dataclasses
import itertools

import pytest
import torch

import stream_attention as stream_attn
from stream_attention import ContiguousKVCache, UnsupportedProblem
from stream_attention.core.info import AT_RUN_TIME
from stream_attention.core.registry import CapabilityRule, default_registry
from stream_attention.planner.testing import FakeRoute, write_batch


def _uniform_only(problem, device):
    return None if problem.uniform else "qo_indptr: every request must have as many queries"


def _refusal(problem, bound):
    if problem.batch_invariant and bound.qo_indptr is not None:
        return "qo_indptr with batch_invariant=True: not served"
    if bound.kv.key.stride(1) != 32:
        return f"key.stride()={bound.kv.key.stride()}: not served"
    return None


@pytest.fixture(autouse=True)
def native():
    """A route like a decode kernel's: quick, for uniform calls, and picky when it is built."""
    route = FakeRoute("uniform", estimate_us=1e-3, native=True, body=write_batch)

    def build(problem, tile_plan, device, bound):
        reason = _refusal(problem, bound)
        if reason is not None:
            raise UnsupportedProblem(reason)
        return route.build(problem, tile_plan, device, bound)

    record = dataclasses.replace(
        route.record(),
        rules=(CapabilityRule("uniform", _uniform_only),),
        build=build,
        refuses=_refusal,
    )
    default_registry().register_attention(record)
    yield route
    default_registry().unregister("uniform")


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="eager")


def packed(counts, stride=32):
    offsets = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    pools = [torch.randn(len(counts), 9, stride)[..., :32].unflatten(-1, (2, 16)) for _ in "kv"]
    return torch.randn(sum(counts), 4, 16), ContiguousKVCache(key=pools[0], value=pools[1]), offsets


CALLS = {
    "one each": ((1, 1, 1), {}),
    "one each, told": ((1, 1, 1), {"max_qo_len": 1}),
    "one each, batch-invariant": ((1, 1, 1), {"max_qo_len": 1, "batch_invariant": True}),
    "one each, not validated": ((1, 1, 1), {"validate": False}),
    "uneven": ((3, 0, 1), {}),
    "uneven, told": ((3, 0, 1), {"max_qo_len": 3}),
    "one request": ((5,), {}),
    "one request, batch-invariant": ((5,), {"batch_invariant": True}),
    "no queries": ((0, 0), {}),
}
UNKNOWN = ("one each", "uneven")


@pytest.mark.parametrize("name", CALLS)
def test_packed_calls_report_the_route_that_runs_or_none(name):
    counts, options = CALLS[name]

    def run(q, cache, offsets):
        return stream_attn.attention(q, cache, offsets, return_info=True, **options)

    arguments = packed(counts)
    (got, info), (want, ran) = compiled(run)(*arguments), run(*arguments)
    assert torch.equal(got, want)
    if name in UNKNOWN:
        assert (info.route, info.backend_used) == (AT_RUN_TIME, AT_RUN_TIME)
    else:
        assert (info.route, info.backend_used) == (ran.route, ran.backend_used)
        assert info.fallback_reasons == ran.fallback_reasons
    assert (info.guarantee, info.arch) == (ran.guarantee, ran.arch)


def test_info_without_a_route_has_every_candidate_and_says_how_to_get_one():
    def run(q, cache, offsets):
        return stream_attn.attention(q, cache, offsets, return_info=True)

    _, info = compiled(run)(*packed((1, 1, 2)))
    for part in ("found in qo_indptr", "max_qo_len=2 and 4", "give max_qo_len"):
        assert part in info.reason
    assert "uniform: qo_indptr: every request must have as many queries" in info.fallback_reasons
    assert any(line.startswith("torch: legal, estimated at") for line in info.fallback_reasons)
    _, info = compiled(run)(*packed((1, 1, 1)))
    uniform = [line for line in info.fallback_reasons if line.startswith("uniform")]
    assert uniform == [
        "uniform: legal, estimated at 0.0 us (with max_qo_len=1)",
        "uniform: qo_indptr: every request must have as many queries (with max_qo_len=3)",
    ]
    every = {line.split(":")[0] for line in info.fallback_reasons}
    known = default_registry()
    assert every >= {record.route for record in known.attention_records()}
    assert every >= {rejection.route for rejection in known.missing()}


@pytest.mark.parametrize("stride", [32, 48])
def test_refusals_of_a_build_are_known_while_tracing(stride):
    _, cache, _ = packed((1, 1), stride)
    q = torch.randn(2, 4, 16)
    (got, info), (want, ran) = compiled(stream_attn.decode)(q, cache), stream_attn.decode(q, cache)
    assert torch.equal(got, want)
    assert (info.route, info.fallback_reasons) == (ran.route, ran.fallback_reasons)
    assert (info.route == "uniform") == (stride == 32)
    if stride == 48:
        assert "once 1 refused to build" in info.reason
