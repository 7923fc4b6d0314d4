"""The order of routes on devices that are not here: what a graph can hold first, then the cost."""

import dataclasses
import itertools

import pytest
import torch

from stream_attention.core.device import DeviceFacts
from stream_attention.core.errors import UnsupportedProblem
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import AttentionRecord, CapabilityRule, default_registry
from stream_attention.core.testing.checks import find_record
from stream_attention.planner.engine import StreamAttnEngine
from stream_attention.planner.ranking import rank
from stream_attention.planner.reasons import slower, why_chosen
from stream_attention.planner.testing import FakeRoute, registry_of

DEVICES = {
    "H200": DeviceFacts("cuda", "H200", 0, (9, 0), 132, 50 << 20),
    "A100": DeviceFacts("cuda", "A100", 0, (8, 0), 108, 40 << 20),
}
PEAK_FP32_PER_US = {"H200": 67e6, "A100": 19.5e6}
CPU = DeviceFacts("cpu", num_sms=4)


def problem_of(batch=1, qo_len=1, capacity=8192, heads=(8, 1), dim=128, **changes):
    kv_heads, group = heads
    fields = {"batch": batch, "total_qo_len": batch * qo_len, "max_qo_len": qo_len}
    fields |= {"num_qo_heads": kv_heads * group, "num_kv_heads": kv_heads, "phase": "append"}
    fields |= dict.fromkeys(("head_dim_qk", "head_dim_vo"), dim)
    fields |= dict.fromkeys(("q_dtype", "kv_dtype", "out_dtype"), "bfloat16")
    return AttentionProblem(**{**fields, "kv_capacity": capacity, "sm_scale": 0.1, **changes})


def grid():
    """Decode to prefill, short to long, few heads to many."""
    axes = ((1, 4, 64), (1, 16, 512, 8192, 65536), (512, 8192, 65536, 131072))
    heads, windows = ((1, 1), (1, 64), (8, 8), (8, 16), (8, 128)), (None, 127, 4096)
    for batch, qo_len, capacity in itertools.product(*axes):
        if qo_len > capacity:
            continue
        for pair, dim, window, flag in itertools.product(
            heads, (64, 128, 512), windows, (False, True)
        ):
            yield problem_of(
                batch, qo_len, capacity, pair, dim, window_left=window, batch_invariant=flag
            )


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_no_shape_on_cuda_gets_a_route_that_a_graph_cannot_hold(name):
    registry = default_registry()
    for problem in grid():
        ranking = rank(problem, DEVICES[name], registry)
        safe = [candidate.record.graph_safe for candidate in ranking.candidates]
        assert safe[0] and safe == sorted(safe, reverse=True), problem


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_the_torch_estimate_counts_what_fp32_products_take(name):
    torch_us = find_record("torch").estimate_us
    triton_us = find_record("triton").estimate_us
    for problem in grid():
        if problem.window_left is not None:
            continue
        shown = problem.total_qo_len * (problem.kv_capacity - problem.max_qo_len / 2)
        flops = 4.0 * shown * problem.num_qo_heads * problem.head_dim_qk
        estimate = torch_us(problem, DEVICES[name])
        assert estimate >= flops / PEAK_FP32_PER_US[name], problem
        assert estimate > triton_us(problem, DEVICES[name]), problem


def test_the_torch_estimate_counts_the_launches_of_many_items():
    estimate = find_record("torch").estimate_us
    times = [
        estimate(problem_of(batch, 1, 4096, (8, 1), 64), DEVICES["H200"]) for batch in (1, 8, 64)
    ]
    assert times[1] - times[0] > 7 * 20 * 5  # one item a request, of 20 launches or more
    assert times[2] - times[1] > 56 * 20 * 5
    grouped = estimate(problem_of(64, 1, 128, (8, 1), 64), DEVICES["H200"])
    assert grouped < estimate(
        problem_of(64, 1, 128, (8, 1), 64, batch_invariant=True), DEVICES["H200"]
    )


def routes_of(cheap_us=1.0, dear_us=50.0):
    cheap, dear = FakeRoute("cheap", cheap_us, native=True), FakeRoute("dear", dear_us)
    return registry_of(dataclasses.replace(cheap.record(), graph_safe=False), dear)


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_a_cheaper_route_that_a_graph_cannot_hold_comes_second_with_the_reason(name):
    ranking = rank(problem_of(), DEVICES[name], routes_of())
    assert [candidate.record.route for candidate in ranking.candidates] == ["dear", "cheap"]
    chosen, other = ranking.candidates
    (rejection,) = slower((other,), chosen)
    assert str(rejection) == (
        "cheap: legal, but cannot be captured in a CUDA graph "
        "(estimated at 1.0 us against 50.0 us of dear)"
    )
    why = why_chosen(chosen, ranking, 0)
    assert why.startswith("dear is the only legal route that a CUDA graph can hold (by")
    registry = routes_of()
    registry.register_attention(FakeRoute("dearer", 60.0).record())
    ranking = rank(problem_of(), DEVICES[name], registry)
    why = why_chosen(ranking.candidates[0], ranking, 0)
    assert "lowest estimate (50.0 us) of 2 legal routes that a CUDA graph can hold" in why


def test_where_no_graph_is_asked_for_the_cost_alone_decides():
    ranking = rank(problem_of(), CPU, routes_of())
    assert [candidate.record.route for candidate in ranking.candidates] == ["cheap", "dear"]
    (rejection,) = slower(ranking.candidates[1:], ranking.candidates[0])
    assert str(rejection) == "dear: legal, but estimated at 50.0 us against 1.0 us of cheap"
    assert "graph" not in why_chosen(ranking.candidates[0], ranking, 0)


def test_a_route_that_a_graph_cannot_hold_still_serves_alone():
    registry = routes_of()
    registry.unregister("dear")
    (only,) = rank(problem_of(), DEVICES["H200"], registry).candidates
    assert only.record.route == "cheap"


def test_no_capacity_changes_the_route_of_a_batch_invariant_request():
    """One route is the cheaper over few tokens, the other over many; their bits differ."""
    few, many = FakeRoute("few").record(), FakeRoute("many").record()
    few = dataclasses.replace(few, estimate_us=lambda p, d: 1.0 + p.kv_capacity / 16)
    many = dataclasses.replace(many, estimate_us=lambda p, d: 30.0 + p.kv_capacity / 1024)
    for device in (CPU, *DEVICES.values()):
        chosen = {}
        for flag, capacity in itertools.product((False, True), (64, 1024, 8192, 1 << 20)):
            problem = problem_of(capacity=capacity, batch_invariant=flag)
            first = rank(problem, device, registry_of(few, many)).candidates[0]
            chosen.setdefault(flag, set()).add(first.record.route)
            assert first.estimate_us == first.record.estimate_us(problem, device)
        assert chosen == {False: {"few", "many"}, True: {"many"}}


def test_a_call_that_no_route_serves_lists_every_candidate_with_every_reason():
    reasons = {"one": ("page_size=16: takes 64", "head_dim=16: takes 128"), "two": ("no device",)}
    records = [
        AttentionRecord(
            route=name,
            backend="none",
            package="tests",
            rules=tuple(
                CapabilityRule(f"rule {i}", lambda problem, device, text=text: text)
                for i, text in enumerate(texts)
            ),
            estimate_us=lambda problem, device: 1.0,
            build=print,
        )
        for name, texts in reasons.items()
    ]
    k = torch.zeros(2, 8, 2, 16)
    with pytest.raises(UnsupportedProblem) as caught:
        StreamAttnEngine(registry=registry_of(*records)).plan(torch.zeros(2, 4, 16), k, k)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    for name, texts in reasons.items():
        for text in texts:
            assert f"{name}: {text}" in lines


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def fails(problem, device):
    raise Speechless


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rules": lambda *_: ["a"]}, "TypeError: a rule gave ['a'] as its reason: must be a str"),
        ({"rules": lambda *_: 3}, "TypeError: a rule gave 3 as its reason: must be a string"),
        ({"rules": fails}, "Speechless: it has no text"),
        ({"estimate_us": fails}, "Speechless: it has no text"),
    ],
)
def test_whatever_a_broken_record_gives_it_harms_no_other(changes, reason):
    registry = registry_of(FakeRoute("good"))
    rule = changes.get("rules")
    registry.register_attention(
        AttentionRecord(
            *("bad", "test", "test", () if rule is None else (CapabilityRule("rule", rule),)),
            estimate_us=changes.get("estimate_us", lambda problem, device: 0.5),
            build=lambda *_: None,
        )
    )
    ranking = rank(problem_of(), CPU, registry)
    assert [each.record.route for each in ranking.candidates] == ["good"]
    (bad,) = [each for each in ranking.rejections if each.route == "bad"]
    assert bad.reasons[0].startswith(f"its record is broken: {reason}")
