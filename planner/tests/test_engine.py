"""Engine and plans: choice, reasons, explain, modes, ownership of memory."""

import contextlib
import copy
import dataclasses
import itertools
import re

import pytest
import torch

from stream_attention import (
    ContiguousKVCache,
    PagedKVCache,
    StreamAttnEngine,
    UnsupportedProblem,
)
from stream_attention.core.registry import AttentionRecord, CapabilityRule, default_registry
from stream_attention.core.testing.golden import golden
from stream_attention.planner.testing import FakeRoute, registry_of, write_batch


def paged(batch=2, pages=4, heads=2, dim=16, lens=None):
    count = batch * pages
    pool = torch.randn(2, count, 16, heads, dim)
    return PagedKVCache(
        key=pool[0],
        value=pool[1],
        page_table=torch.arange(count, dtype=torch.int32).view(batch, pages),
        sequence_lengths=torch.tensor(lens or [33] * batch, dtype=torch.int32),
    )


def queries(batch=2, heads=4, dim=16, **options):
    return torch.randn(batch, heads, dim, **options)


def engine_of(*routes, **identity):
    return StreamAttnEngine(registry=registry_of(*routes), **identity)


def test_plan_runs_and_follows_contents_that_change_in_place():
    q, cache = queries(), paged()
    plan = StreamAttnEngine().plan(q, cache)
    out, info = plan.run()
    golden(q, cache).check(out)
    q.normal_()
    cache.key.normal_()
    cache.sequence_lengths.copy_(torch.tensor([64, 0], dtype=torch.int32))
    cache.page_table[0] = torch.tensor([7, 1, 0, 5], dtype=torch.int32)
    again, _ = plan.run()
    assert again is out
    golden(q, cache).check(out)
    assert not out[1].any()
    assert info.route == plan.route


def test_lse_comes_between_out_and_info():
    q, cache = queries(), paged(lens=[33, 0])
    out, lse, info = StreamAttnEngine().plan(q, cache, return_lse=True).run()
    golden(q, cache).check(out, lse)
    assert lse.shape == q.shape[:-1]
    assert lse.dtype == torch.float32
    assert info.guarantee == "exact"


@pytest.mark.parametrize("shape", [(2, 4, 16), (2, 1, 4, 16), (2, 3, 4, 16)])
def test_result_has_the_shape_of_q(shape):
    q, cache = torch.randn(shape), paged()
    out, _ = StreamAttnEngine().plan(q, cache).run()
    assert out.shape == shape
    golden(q, cache).check(out)


def test_two_tensors_are_a_contiguous_cache():
    q, k, v = queries(), torch.randn(2, 20, 2, 16), torch.randn(2, 20, 2, 8)
    plan = StreamAttnEngine().plan(q, k, v)
    assert plan.tile_plan.kind == "exact_contiguous"
    out, _ = plan.run()
    assert out.shape == (2, 4, 8)
    golden(q, ContiguousKVCache(key=k, value=v)).check(out)


def test_ragged_plan_is_made_for_the_longest_request_it_finds():
    q, cache = torch.randn(7, 4, 16), paged(batch=3, lens=[33, 20, 64])
    offsets = torch.tensor([0, 1, 6, 7], dtype=torch.int32)
    engine = StreamAttnEngine()
    plan = engine.plan_attention(q, cache, offsets)
    assert (plan.problem.max_qo_len, plan.problem.phase) == (5, "mixed")
    golden(q, cache, offsets).check(plan.run()[0])
    assert engine.plan_attention(q, cache, offsets, validate=False).problem.max_qo_len == 7
    assert engine.plan_attention(q, cache, offsets, max_qo_len=6).problem.max_qo_len == 6


@pytest.mark.parametrize(
    ("qo_len", "pages", "phase"),
    [(1, 4, "decode"), (2, 4, "verify"), (16, 4, "verify"), (17, 4, "append"), (64, 4, "prefill")],
)
def test_phase_of_a_uniform_call(qo_len, pages, phase):
    plan = StreamAttnEngine().plan(torch.randn(2, qo_len, 4, 16), paged(pages=pages))
    assert plan.problem.phase == phase


def test_the_lowest_estimate_wins_and_the_loser_keeps_its_reason():
    slow, fast = FakeRoute("slow", estimate_us=9.0), FakeRoute("fast", estimate_us=2.0)
    plan = engine_of(slow, fast).plan(queries(), paged())
    assert plan.route == "fast"
    assert plan.backend_plan.estimate_us == 2.0
    assert "lowest estimate (2.0 us) of 2 legal routes" in plan.reason
    (rejection,) = plan.backend_plan.rejections
    assert str(rejection) == "slow: legal, but estimated at 9.0 us against 2.0 us of fast"
    assert plan.info.fallback_reasons == (str(rejection),)


def test_no_batch_changes_the_route_of_a_batch_invariant_request():
    """One route is the cheaper of one request, the other of many; their bits differ."""
    few, many = FakeRoute("few").record(), FakeRoute("many").record()
    few = dataclasses.replace(few, estimate_us=lambda p, d: 1.0 + 10.0 * p.total_qo_len)
    many = dataclasses.replace(many, estimate_us=lambda p, d: 30.0 + p.batch)
    chosen = {}
    for invariant, batch, qo_len in itertools.product((False, True), (1, 2, 8), (1, 3)):
        plan = engine_of(few, many).plan(
            torch.randn(batch, qo_len, 4, 16), paged(batch), batch_invariant=invariant
        )
        chosen.setdefault(invariant, set()).add(plan.route)
        estimate = 1.0 + 10.0 * batch * qo_len if plan.route == "few" else 30.0 + batch
        assert plan.backend_plan.estimate_us == estimate
        if invariant and batch > 1:
            assert "(11.0 us, for one query over 8192 tokens)" in plan.reason
    assert chosen == {False: {"few", "many"}, True: {"few"}}


def test_native_wins_at_equal_cost_and_ties_are_deterministic():
    routes = [FakeRoute("first"), FakeRoute("second"), FakeRoute("own", native=True)]
    assert engine_of(*routes).plan(queries(), paged()).route == "own"
    assert {engine_of(*routes[:2]).plan(queries(), paged()).route for _ in range(5)} == {"first"}


def test_an_estimate_that_is_no_number_ranks_last():
    routes = [FakeRoute("nan", estimate_us=float("nan")), FakeRoute("dear", estimate_us=1e9)]
    assert engine_of(*routes).plan(queries(), paged()).route == "dear"


def test_a_route_that_refuses_to_build_is_recorded_and_the_next_one_serves():
    late = FakeRoute("late", estimate_us=0.1, failure=UnsupportedProblem("no memory descriptors"))
    plan = engine_of(late, FakeRoute("next")).plan(queries(), paged())
    assert plan.route == "next"
    assert "once 1 refused to build" in plan.reason
    assert "late: no memory descriptors" in plan.info.fallback_reasons


def test_a_route_that_breaks_while_it_builds_is_not_hidden():
    broken = FakeRoute("broken", estimate_us=0.1, failure=RuntimeError("launch table is empty"))
    with pytest.raises(RuntimeError, match="launch table is empty"):
        engine_of(broken, FakeRoute("next")).plan(queries(), paged())


def test_no_route_raises_with_every_candidate_and_every_reason():
    routes = [
        FakeRoute("one", refusal="head_dim=16: takes 64; use 64"),
        FakeRoute("two", failure=UnsupportedProblem("late refusal")),
    ]
    with pytest.raises(UnsupportedProblem) as caught:
        engine_of(*routes).plan(queries(), paged())
    text = str(caught.value)
    assert "one: head_dim=16: takes 64; use 64" in text
    assert "two: late refusal" in text
    assert "AttentionProblem(batch=2" in text
    assert isinstance(caught.value, NotImplementedError)


def test_a_route_without_plans_is_a_rejection_with_its_reason():
    only_apply = AttentionRecord("grad", "torch", "tests", (), lambda p, d: 0.0, apply=print)
    plan = engine_of(only_apply, FakeRoute("next")).plan(queries(), paged())
    assert plan.route == "next"
    assert plan.info.fallback_reasons[0].startswith("grad: writes no plan: it is differentiable")


def test_tensors_on_meta_have_no_route():
    q = torch.empty(2, 4, 16, device="meta")
    k = torch.empty(2, 8, 2, 16, device="meta")
    with pytest.raises(UnsupportedProblem, match="device='meta': tensors there hold no data"):
        engine_of(FakeRoute()).plan(q, k, k)


def test_missing_kernel_packages_are_reasons():
    registry = registry_of(FakeRoute())
    reason = "package stream-attention-kernels-sm90 is not installed"
    registry._known = dataclasses.replace(registry._known, missing={"kernels_sm90": reason})
    plan = StreamAttnEngine(registry=registry).plan(queries(), paged())
    text = "kernels_sm90: package stream-attention-kernels-sm90 is not installed"
    assert text in plan.explain()
    assert text in plan.info.fallback_reasons


def test_explain_tells_the_whole_chain():
    routes = [
        FakeRoute("fast", workspace_bytes=4096),
        FakeRoute("slow", estimate_us=9.0),
        FakeRoute("odd", refusal="page_size=16: takes 64; use 64"),
    ]
    plan = engine_of(*routes).plan(queries(), paged(), window_left=7)
    text = plan.explain()
    rows = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in text.splitlines()[:9])
    assert rows["route"] == "fast (none, cpu)"
    assert rows["estimate"] == "1.0 us, by cost model"
    assert rows["workspace"] == "4096 bytes"
    assert rows["guarantee"] == "exact"
    assert rows["problem"] == repr(plan.problem)
    assert rows["tile plan"] == repr(plan.tile_plan)
    assert "kind='sliding_window'" in rows["tile plan"]
    assert rows["launch"] == "fast_kernel grid=(2, 3, 4) threads=128 shared=1024 bytes"
    assert rows["reason"] == plan.reason
    assert "rejected    odd: page_size=16: takes 64; use 64" in text
    assert "slow: legal, but estimated at 9.0 us" in text


def test_reset_reaches_the_launch():
    route = FakeRoute()
    plan = engine_of(route).plan(queries(), paged())
    plan.reset()
    assert route.built[0].resets == 1


def test_plans_share_neither_outputs_nor_scratch():
    route = FakeRoute(body=write_batch, workspace_bytes=64)
    engine = engine_of(route)
    cache, first, second = paged(), queries(), queries()
    plans = [engine.plan(q, cache, return_lse=True) for q in (first, second)]
    results = [plan.run() for plan in plans]
    assert torch.equal(results[0][0][..., 0], first[..., 0])
    assert torch.equal(results[1][0][..., 0], second[..., 0])
    spans = [t.data_ptr() for result in results for t in result[:2]]
    spans += [launch.scratch.data_ptr() for launch in route.built]
    assert len(set(spans)) == 6
    assert plans[0].workspace_bytes == 64


def test_the_callers_out_is_written_and_returned():
    q, cache = queries(), paged()
    out = torch.full_like(q, torch.nan)
    got, _ = StreamAttnEngine().plan(q, cache, out=out).run()
    assert got.data_ptr() == out.data_ptr()
    golden(q, cache).check(out)


def test_a_plan_made_in_inference_mode_runs_outside_of_it():
    with torch.inference_mode():
        q, cache = queries(), paged()
        plan = StreamAttnEngine().plan(q, cache)
    out, _ = plan.run()
    golden(q, cache).check(out)


@pytest.mark.parametrize("engine", [StreamAttnEngine(), engine_of(FakeRoute())])
def test_a_call_without_requests_runs(engine):
    cache = paged(batch=0, lens=[])
    out, lse, info = engine.plan(queries(batch=0), cache, return_lse=True).run()
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)
    assert info.route


def test_a_call_without_query_tokens_runs():
    offsets = torch.zeros(3, dtype=torch.int32)
    out, _ = StreamAttnEngine().plan_attention(torch.empty(0, 4, 16), paged(), offsets).run()
    assert out.shape == (0, 4, 16)


@pytest.mark.parametrize("mode", ["exact_native", "dense"])
def test_exact_native_says_so(mode):
    plan = engine_of(FakeRoute()).plan(queries(), paged(), mode=mode)
    assert plan.reason.startswith("exact_native: every token is read; fake")
    assert plan.info.policy_id is None


@pytest.mark.parametrize(
    ("identity", "text"),
    [
        ({}, "model_id and layer_id not given, so no policy can match; exact"),
        ({"model_id": "m"}, "layer_id not given, so no policy can match; exact"),
        ({"policy_name": "p", "layer_id": 0}, "model_id not given, so no policy can match; exact"),
        (
            {"policy_name": "p", "model_id": "m", "layer_id": 8},
            "no policy cell is installed for (policy_name='p', model_id='m', layer_id=8); exact",
        ),
    ],
)
@pytest.mark.parametrize("mode", ["verified_auto", "auto"])
def test_verified_auto_is_exact_and_says_why(mode, identity, text):
    plan = engine_of(FakeRoute(), **identity).plan(queries(), paged(), mode=mode)
    assert plan.reason.startswith(f"verified_auto: {text}; fake")
    assert plan.info.guarantee == "exact"


def test_seed_only_raises_because_no_policy_is_installed():
    engine = engine_of(FakeRoute(), policy_name="p", model_id="m", layer_id=8)
    match = r"no policy cell is installed for \(policy_name='p', model_id='m', layer_id=8\)"
    with pytest.raises(UnsupportedProblem, match=match):
        engine.plan(queries(), paged(), mode="seed_only_native")


@pytest.mark.parametrize(
    ("mode", "nearest"), [("exact", "'exact_native'"), ("verified", "'verified_auto'"), (3, "'")]
)
def test_an_unknown_mode_names_the_nearest(mode, nearest):
    with pytest.raises(ValueError, match=f"mode={mode!r}: must be one of .*use {nearest}"):
        engine_of(FakeRoute()).plan(queries(), paged(), mode=mode)


def test_identities_are_checked():
    with pytest.raises(ValueError, match="3 faults") as caught:
        StreamAttnEngine(policy_name="", model_id=7, layer_id=-1)
    for name in ("policy_name=''", "model_id=7", "layer_id=-1: must be None or an int >= 0"):
        assert name in str(caught.value)


def test_page_lists_of_the_caller_are_a_schedule():
    cache = paged()
    lists = PagedKVCache(
        key=cache.key,
        value=cache.value,
        page_table=cache.page_table.unsqueeze(1).repeat(1, 2, 1),
        sequence_lengths=torch.tensor([[33, 5], [0, 64]], dtype=torch.int32),
    )
    q = queries()
    plan = StreamAttnEngine().plan(q, lists)
    assert (plan.tile_plan.kind, plan.info.guarantee) == ("selected", "schedule_exact")
    golden(q, lists).check(plan.run()[0])


def test_the_default_registry_is_used_when_none_is_given():
    assert StreamAttnEngine().registry is default_registry()


def test_a_wrong_registry_is_refused_when_the_engine_is_made():
    with pytest.raises(ValueError, match=r"registry='torch': must be None .* or a Registry"):
        StreamAttnEngine(registry="torch")


def test_a_module_that_holds_an_engine_can_be_copied():
    layer = torch.nn.Linear(1, 1)
    layer.engine = StreamAttnEngine(model_id="m", layer_id=3)
    copied = copy.deepcopy(layer).engine
    assert copied.identity == layer.engine.identity
    assert copied.plan(queries(), paged()).run()[0].isfinite().all()


@pytest.mark.parametrize("lens", [[33, 64], [33, 0], [0, 0]])
def test_a_plan_made_without_gradients_runs_with_them(lens):
    q, cache = queries(), paged(lens=lens)
    out = torch.zeros_like(q, requires_grad=True)
    with torch.no_grad():
        plan = StreamAttnEngine().plan(torch.nn.Parameter(q), cache, out=out)
    golden(q, cache).check(plan.run()[0].detach())


@pytest.mark.parametrize("given", [("out",), ("lse",), ("out", "lse")], ids=" and ".join)
def test_outputs_of_inference_mode_are_written_in_it(given):
    q, cache = queries(), paged()
    with torch.inference_mode():
        outputs = {"out": torch.empty_like(q), "lse": torch.empty(q.shape[:-1])}
    plan = StreamAttnEngine().plan(q, cache, return_lse=True, **{n: outputs[n] for n in given})
    for context in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        q.normal_()
        with context():
            out, lse, _ = plan.run()
        golden(q, cache).check(out, lse)
        assert not torch.is_inference_mode_enabled()
    assert (out.is_inference(), lse.is_inference()) == ("out" in given, "lse" in given)


def _raises(problem, device):
    raise KeyError("not in my table")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rules": (CapabilityRule("bad", _raises),)}, "its record is broken: KeyError"),
        ({"rules": (CapabilityRule("bad", lambda p, d: ""),)}, "gave no reason"),
        ({"estimate_us": _raises}, "its record is broken: KeyError"),
        ({"estimate_us": lambda p, d: None}, "its record is broken: TypeError"),
        ({"build": lambda *given: None}, "build gave a NoneType, not a Launch"),
    ],
    ids=["rule raises", "rule without words", "estimate raises", "no estimate", "no launch"],
)
def test_a_broken_record_is_a_rejection_and_harms_no_other(changes, words):
    broken = dataclasses.replace(FakeRoute("broken", estimate_us=0.1).record(), **changes)
    registry = registry_of(broken, FakeRoute("sound").record())
    plan = StreamAttnEngine(registry=registry).plan(queries(), paged())
    assert plan.route == "sound"
    assert any(line.startswith("broken: ") and words in line for line in plan.info.fallback_reasons)
