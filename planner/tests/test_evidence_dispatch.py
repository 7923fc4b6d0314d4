"""Dispatch follows evidence where there is some, and says why where there is none."""

import dataclasses
import itertools
import threading

import pytest
import torch

import stream_attention as stream_attn
from stream_attention import StreamAttnEngine, UnsupportedProblem
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import default_registry
from stream_attention.planner import databases as databases_module
from stream_attention.planner import differentiable, serve, traced, traced_sequences
from stream_attention.planner import engine as engine_module
from stream_attention.planner.databases import SHIPPED, Databases
from stream_attention.planner.phase_db import PhaseDatabase
from stream_attention.planner.ranking import Rankings, one_query, rank
from stream_attention.planner.reasons import slower, why_chosen
from stream_attention.planner.testing import (
    H200,
    FakeRoute,
    database_of,
    registry_of,
    write_batch,
)

H100 = dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3")
SLICE = dataclasses.replace(H200, num_sms=60)


def problem_of(batch=8, capacity=4096, qo_len=1, **changes):
    fields = {"batch": batch, "total_qo_len": batch * qo_len, "max_qo_len": qo_len}
    fields |= {"kv_capacity": capacity, "num_qo_heads": 16, "num_kv_heads": 4, "sm_scale": 0.1}
    fields |= dict.fromkeys(("head_dim_qk", "head_dim_vo"), 64)
    fields |= dict.fromkeys(("q_dtype", "kv_dtype", "out_dtype"), "float32")
    return AttentionProblem(**{**fields, **changes})


def grid(**changes):
    shapes = itertools.product((1, 8, 32), (1024, 4096, 16384))
    return [problem_of(batch, capacity, **changes) for batch, capacity in shapes]


def by_bytes(start_us, bytes_per_us):
    def time(problem):
        return (
            start_us + problem.batch * problem.kv_capacity * problem.kv_token_bytes / bytes_per_us
        )

    return time


TIMES = {"ours": by_bytes(3.0, 4e6), "portable": by_bytes(6.0, 3e6)}


def measured(times=TIMES, problems=None, **changes):
    return database_of(problems or grid(), times, native=["ours"], **changes)


def routes(**estimates):
    """Records whose cost models say the contrary of `TIMES`."""
    us = {"ours": 900.0, "portable": 2.0, **estimates}
    made = {name: FakeRoute(name, us[name], native=name == "ours") for name in us}
    return registry_of(*made.values())


def ranked(problem, *own, device=H200, registry=None, shipped=False):
    databases = Databases(own, with_shipped=shipped)
    return rank(problem, device, registry or routes(), databases=databases)


def names(ranking):
    return [candidate.record.route for candidate in ranking.candidates]


def why(ranking, place=0):
    return why_chosen(ranking.candidates[place], ranking, place)


def lost(ranking):
    return [str(each) for each in slower(ranking.candidates[1:], ranking.candidates[0])]


@pytest.fixture
def ship(monkeypatch):
    """Puts databases into the wheel, as far as dispatch can tell."""
    given = {}

    def put(*found):
        given.update({each.arch: each for each in found})
        SHIPPED._of_device.clear()

    monkeypatch.setattr(databases_module, "shipped", given.get)
    SHIPPED._of_device.clear()
    yield put
    SHIPPED._of_device.clear()


@pytest.mark.parametrize("batch", [1, 5, 32])
def test_inside_measured_ranges_evidence_decides_against_every_cost_model(batch):
    problem = problem_of(batch)
    ranking = ranked(problem, measured())
    assert names(ranking) == ["ours", "portable"]
    first, second = ranking.candidates
    assert first.measured and first.estimated_by == "evidence"
    assert first.estimate_us == first.order_us == pytest.approx(TIMES["ours"](problem), rel=0.02)
    assert second.estimate_us == pytest.approx(TIMES["portable"](problem), rel=0.02)
    assert first.rows and all(row.startswith("ours-") for row in first.rows)
    assert "ours has the lowest estimate" in why(ranking)
    assert f"2 legal routes (by evidence of NVIDIA H200, rows {first.rows[0]}" in why(ranking)
    (text,) = lost(ranking)
    assert text.startswith("portable: legal, but estimated at") and "both by evidence" in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"capacity": 1 << 20}, "longest=1048576: measured 1024 to 16384"),
        ({"batch": 64}, "batch=64: measured 1 to 32"),
        ({"head_dim_qk": 128}, "head_dim_qk=128: measured 64 to 64"),
        ({"window_left": 7}, "no problem of this family was measured: decode q=float32"),
        ({"qo_len": 4, "phase": "verify"}, "no problem of this family was measured: verify"),
    ],
)
def test_outside_of_them_cost_models_decide_and_the_reason_says_what_is_outside(changes, said):
    ranking = ranked(problem_of(**changes), measured())
    assert names(ranking) == ["portable", "ours"]
    assert not any(candidate.measured or candidate.rows for candidate in ranking.candidates)
    assert "(by cost model: " in why(ranking) and said in why(ranking)
    assert lost(ranking) == [
        "ours: legal, but estimated at 900.0 us against 2.0 us of portable",
    ]


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (H100, "evidence of NVIDIA H200 is not used for NVIDIA H100 80GB HBM3: times of one"),
        (SLICE, "evidence of NVIDIA H200 of 132 SMs is not used for NVIDIA H200 of 60 SMs:"),
        (dataclasses.replace(H200, compute_capability=(8, 0)), "no phase database for sm_80"),
        (dataclasses.replace(H200, compute_capability=(12, 0)), "no phase database for sm_120"),
    ],
)
def test_evidence_of_one_device_is_not_used_for_another(device, said, ship):
    ship(measured())
    ranking = ranked(problem_of(), device=device, shipped=True)
    assert names(ranking) == ["portable", "ours"]
    assert said in why(ranking)


def test_other_versions_of_the_software_do_not_put_evidence_aside():
    database = measured(driver="1.0", cuda="9.0", torch="1.0", triton="0.1", python="2.7")
    assert names(ranked(problem_of(), database)) == ["ours", "portable"]


@pytest.mark.parametrize("alone", ["portable", "ours"])
def test_a_route_without_evidence_comes_after_those_that_have_it(alone):
    """A native route too: it becomes a default only where it was measured."""
    estimates = {"ours": 1.0, "portable": 2000.0}
    if alone == "ours":
        estimates = {"ours": 2000.0, "portable": 1.0}
    ranking = ranked(problem_of(), measured({alone: TIMES[alone]}), registry=routes(**estimates))
    other = {"ours": "portable", "portable": "ours"}[alone]
    assert names(ranking) == [alone, other]
    assert f"{alone} is the only legal route with evidence here (by evidence of" in why(ranking)
    (text,) = lost(ranking)
    assert text.startswith(f"{other}: legal, but without evidence here, so behind {alone}")
    assert "(the route was not measured on problems of this family: decode" in text
    assert "estimated at 1.0 us by cost model" in text


def test_a_route_that_was_measured_elsewhere_alone_comes_after_one_measured_here():
    near = measured({"portable": TIMES["portable"]})
    far = measured({"ours": TIMES["ours"]}, grid()[:4])  # batches up to 8
    database = dataclasses.replace(near, models=near.models + far.models)
    ranking = ranked(problem_of(32), database, registry=routes(ours=1.0))
    assert names(ranking) == ["portable", "ours"]
    assert "; batch=32: measured 1 to 8;" in lost(ranking)[0]


def test_peers_are_no_candidates_unless_they_are_registered():
    times = {**TIMES, "flashinfer_fa3": by_bytes(1.0, 9e6)}
    database = measured(times)
    assert names(ranked(problem_of(), database)) == ["ours", "portable"]
    registry = routes()
    registry.register_attention(FakeRoute("flashinfer_fa3", 1e9).record())
    assert names(ranked(problem_of(), database, registry=registry))[0] == "flashinfer_fa3"


def test_a_fast_route_that_is_not_legal_is_not_chosen():
    registry = registry_of(
        FakeRoute("ours", refusal="page_size=16: takes 64"), FakeRoute("portable")
    )
    ranking = ranked(problem_of(), measured(), registry=registry)
    assert names(ranking) == ["portable"]
    assert [str(each) for each in ranking.rejections] == ["ours: page_size=16: takes 64"]


def test_what_a_graph_cannot_hold_stays_last_whatever_was_measured():
    safe = FakeRoute("portable", 700.0).record()
    ours = dataclasses.replace(FakeRoute("ours").record(), graph_safe=False)
    ranking = ranked(problem_of(), measured(), registry=registry_of(ours, safe))
    assert names(ranking) == ["portable", "ours"]
    only = ranked(problem_of(), measured({"ours": TIMES["ours"]}), registry=registry_of(ours, safe))
    assert names(only) == ["portable", "ours"]
    assert "portable is the only legal route without evidence here (by cost model" in why(only)
    assert "cannot be captured in a CUDA graph" in lost(only)[0]


def test_the_order_of_a_batch_invariant_problem_is_that_of_one_query():
    """One route is faster for few tokens, the other for many; both are measured everywhere."""
    times = {"ours": by_bytes(1.0, 1e6), "portable": by_bytes(40.0, 4e6)}
    problems = [*grid(), *grid(batch_invariant=True)]
    database = measured(times, problems)
    seen = {False: set(), True: set()}
    for flag, batch, capacity in itertools.product((False, True), (1, 8, 32), (1024, 16384)):
        ranking = ranked(problem_of(batch, capacity, batch_invariant=flag), database)
        seen[flag].add((*names(ranking), ranking.candidates[0].measured))
    assert len(seen[False]) == 2
    assert len(seen[True]) == 1
    # Nor does it depend on the phase, on ragged queries, or on how far all of them are outside.
    one = seen[True].pop()
    for changes in (
        {"phase": "mixed", "total_qo_len": 9, "max_qo_len": 3, "batch": 8},
        {"phase": "append", "qo_len": 64, "batch": 2},
        {"phase": "prefill", "qo_len": 4096, "batch": 1},
        {"capacity": 1 << 22, "batch": 512},
    ):
        ranking = ranked(problem_of(batch_invariant=True, **changes), database)
        assert (*names(ranking), ranking.candidates[0].measured) == one, changes


def test_one_query_is_a_problem_that_its_rules_accept():
    for changes in (
        {},
        {"phase": "mixed", "total_qo_len": 9, "max_qo_len": 3},
        {"batch": 0, "max_qo_len": 0},
    ):
        problem = one_query(problem_of(batch_invariant=True, window_left=5, **changes))
        assert dataclasses.replace(problem) == problem  # checks anew
        assert (problem.phase, problem.batch, problem.window_left) == ("decode", 1, 5)
    train = problem_of(phase="train", differentiable=True, batch_invariant=True)
    assert one_query(train).phase == "train"


def test_the_callers_database_goes_first_and_another_speaks_where_it_has_nothing(ship):
    reverse = {"ours": TIMES["portable"], "portable": TIMES["ours"]}
    ship(measured(problems=[*grid(), *grid(window_left=9)]))
    registry = routes(ours=1.0, portable=1.0)
    own = measured(reverse)
    assert names(ranked(problem_of(), registry=registry, shipped=True)) == ["ours", "portable"]
    found = ranked(problem_of(), own, registry=registry, shipped=True)
    assert names(found) == ["portable", "ours"] and found.found.database is own
    windowed = problem_of(window_left=9)
    assert names(ranked(windowed, own, registry=routes(), shipped=True)) == ["ours", "portable"]
    assert names(ranked(windowed, own, registry=routes())) == ["portable", "ours"]
    other = measured(reverse, device="NVIDIA H100 80GB HBM3")
    assert names(ranked(problem_of(), other, registry=registry, shipped=True))[0] == "ours"


def test_a_broken_database_harms_no_call(ship, monkeypatch):
    database = measured()
    vars(database)["index"] = None  # asking it raises
    ranking = ranked(problem_of(), database)
    assert names(ranking) == ["portable", "ours"]
    assert "by cost model: the phase database of sm_90 is broken: AttributeError" in why(ranking)

    def damaged(arch):
        raise ValueError("sm90.json: sha256='1': must be '2', of its content")

    monkeypatch.setattr(databases_module, "shipped", damaged)
    ranking = ranked(problem_of(), shipped=True)
    assert "the shipped phase database is broken: sm90.json: sha256='1'" in why(ranking)
    assert names(ranked(problem_of(), measured(), shipped=True)) == ["ours", "portable"]


def test_a_database_without_evidence_says_so():
    ranking = ranked(problem_of(), PhaseDatabase(arch="sm_90"))
    assert "by cost model: the phase database of sm_90 has no evidence" in why(ranking)


def test_rankings_remember_by_the_databases_too():
    rankings, registry = Rankings(), routes()
    some, none = Databases([measured()], with_shipped=False), Databases((), with_shipped=False)
    for databases, first in ((some, "ours"), (none, "portable")) * 2:
        found = rankings.rank(problem_of(), H200, registry, databases=databases)
        assert names(found)[0] == first
    assert len(rankings._known) == 2


def test_threads_that_ask_at_once_get_the_same(ship):
    ship(measured())
    registry, found, start = routes(), [], threading.Barrier(8)

    def ask():
        start.wait()
        for batch in range(1, 33):
            ranking = rank(problem_of(batch), H200, registry)
            found.append((batch, names(ranking), ranking.candidates[0].rows))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 * 32 and len({(b, tuple(n), r) for b, n, r in found}) == 32


@pytest.fixture
def on_h200(monkeypatch):
    """Tensors stay on the CPU, where the fake routes write; planning sees an H200."""
    for module in (differentiable, engine_module, serve, traced, traced_sequences):
        monkeypatch.setattr(module, "device_facts", lambda device: H200)


def call(batch=8, tokens=4096):
    q = torch.randn(batch, 16, 64)
    k = torch.randn(1, 1, 4, 64).expand(batch, tokens, 4, 64)
    return q, k, k


def contiguous(times=TIMES, **changes):
    def like(problem):
        return dataclasses.replace(
            problem, cache_kind="contiguous", page_size=problem.kv_capacity, **changes
        )

    return measured(times, [like(problem) for problem in grid()])


def test_a_plan_carries_what_its_choice_rests_on(on_h200):
    plan = StreamAttnEngine(registry=routes(), phase_db=contiguous()).plan(*call())
    assert plan.route == "ours"
    assert plan.backend_plan.estimated_by == "evidence"
    assert plan.backend_plan.evidence and set(plan.backend_plan.evidence) <= set(
        plan._ranking.candidates[0].rows
    )
    assert f"rows {', '.join(plan.backend_plan.evidence)})" in plan.info.reason
    none = StreamAttnEngine(registry=routes(), phase_db=()).plan(*call())
    assert (none.route, none.backend_plan.evidence) == ("portable", ())
    assert none.backend_plan.estimated_by == "cost model"
    assert "(by cost model: phase_db=(): no evidence is used)" in none.reason


def test_a_measured_route_that_refuses_to_build_gives_way_to_the_next(on_h200):
    broken = FakeRoute("ours", native=True, failure=UnsupportedProblem("k.stride: not mine"))
    registry = registry_of(broken, FakeRoute("portable", 3.0), FakeRoute("third", 1.0))
    plan = StreamAttnEngine(registry=registry, phase_db=contiguous()).plan(*call())
    assert plan.route == "portable"
    assert "of 2 legal routes with evidence here once 1 refused to build" in plan.reason
    assert plan.info.fallback_reasons[0] == "ours: k.stride: not mine"
    assert plan.info.fallback_reasons[1].startswith("third: legal, but without evidence here")
    only = contiguous({"ours": TIMES["ours"]})
    plan = StreamAttnEngine(registry=registry, phase_db=only).plan(*call())
    assert plan.route == "third" and plan.backend_plan.evidence == ()
    assert "of 2 legal routes without evidence here once 1 refused to build (by c" in plan.reason


@pytest.fixture
def registered():
    """Two fake routes in the process's own registry, the one with evidence the dearer one."""
    made = FakeRoute("ours", 1e-2, True, body=write_batch), FakeRoute("portable", 1e-3)
    made[1].body = write_batch
    for each in made:
        default_registry().register_attention(each.record())
    yield
    for each in made:
        default_registry().unregister(each.name)


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}, {"window_left": 5}])
def test_one_shot_and_compiled_calls_follow_the_shipped_evidence(
    on_h200, ship, registered, options
):
    invariant = contiguous(batch_invariant=True)
    database = contiguous()
    ship(dataclasses.replace(database, models=database.models + invariant.models))
    q, k, v = call()

    def run(q, k, v):
        return stream_attn.decode(q, k, v, mode="exact_native", **options)

    torch._dynamo.reset()
    _, info = torch.compile(run, fullgraph=True, backend="eager")(q, k, v)
    _, ran = run(q, k, v)
    planned = StreamAttnEngine().plan(q, k, v, mode="exact_native", **options).info
    assert info.route == ran.route == planned.route
    assert info.fallback_reasons == ran.fallback_reasons == planned.fallback_reasons
    assert ran.reason == planned.reason
    assert info.reason.startswith(ran.reason + "; ranked while tracing")
    assert (ran.route == "ours") == (options.get("window_left") is None)
    assert ("by evidence of NVIDIA H200" in ran.reason) == (ran.route == "ours")


def test_whole_sequences_follow_the_shipped_evidence_compiled_or_not(on_h200, ship, registered):
    """Three lengths of 2 requests: what is between is measured too, what is beyond is not."""
    problems = [
        problem_of(2, length, length, phase="prefill", cache_kind="contiguous", page_size=length)
        for length in (16, 32, 64)
    ]
    ship(measured(problems=problems))

    def run(q, k, v):
        return stream_attn.prefill(q, k, v, mode="exact_native", return_info=True)

    for length, first in ((48, "ours"), (512, "portable")):
        q = torch.randn(2, length, 16, 64)
        k = torch.randn(2, length, 4, 64)
        torch._dynamo.reset()
        _, info = torch.compile(run, fullgraph=True, backend="eager")(q, k, k)
        _, ran = run(q, k, k)
        assert info.route == ran.route == first
        assert info.fallback_reasons == ran.fallback_reasons
        assert info.reason.startswith(ran.reason)
        assert ("by evidence of NVIDIA H200" in ran.reason) == (first == "ours")


def test_on_a_cpu_no_database_is_asked(ship):
    ship(measured())
    own = measured(device="cpu", num_sms=1)
    plan = StreamAttnEngine(registry=routes(), phase_db=own).plan(*call(2, 16))
    assert plan.route == "portable"
    assert "(by cost model: there is no phase database for cpu)" in plan.reason
