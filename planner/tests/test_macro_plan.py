"""Macro plans give each request the oracle's answer, whatever cohort and memory it is served in."""

import dataclasses
import gc
import itertools
import math
import weakref

import pytest
import torch

from stream_attention import ContiguousKVCache, StalePlanError, StreamAttnEngine
from stream_attention.core.describe import describe
from stream_attention.core.testing.contract import mutate
from stream_attention.core.testing.golden import golden
from stream_attention.core.testing.hostile import HOSTILE
from stream_attention.core.testing.problems import Case, build
from stream_attention.planner.cohorts import MACROS

NAMES = tuple(macro.name for macro in MACROS)
# Every class of every macro, none of whose requests are neighbours, and an idle one among them.
MIXED = (1, 3, 0, 17, 1, 5, 33, 1)
# Lengths above these cost the oracle too much for what another of them shows.
MAX_TOKENS = 300


def mixed(case, qo_lens=MIXED):
    """The case as a mixed batch: its lengths in turn, its geometry, its memory and its options."""
    lens = tuple(itertools.islice(itertools.cycle(case.kv_lens), len(qo_lens)))
    return dataclasses.replace(case, qo_lens=qo_lens, kv_lens=lens, call="ragged")


HOSTILE_MIXES = [mixed(case) for case in HOSTILE if case.kv_lens and case.max_kv_len <= MAX_TOKENS]
PACKED = [case for case in HOSTILE if case.call == "ragged" and len(set(case.qo_lens)) > 1]


def planned(built, macro, engine=None, **options):
    options = {"return_lse": True, **built.options, **options}
    engine = engine or StreamAttnEngine()
    return engine.plan_batch(built.q, built.cache, built.case.qo_lens, macro=macro, **options)


def poisoned(built):
    total, heads = built.q.shape[:2]
    out = torch.full((total, heads, built.case.dim_vo), math.nan, dtype=built.q.dtype)
    return {"out": out, "lse": torch.full((total, heads), math.nan)}


def check_every_macro(built):
    want = golden(built.q, built.cache, built.qo_indptr, **built.options)
    for macro in NAMES:
        given = poisoned(built)
        out, lse, info = planned(built, macro, **given).run()
        assert out.data_ptr() == given["out"].data_ptr()
        want.check(out, lse, f"{macro}, {built.case!r}: ")
        assert info.route == f"macro({macro}): torch"


@pytest.mark.parametrize("case", HOSTILE_MIXES, ids=lambda case: case.name)
def test_a_scattered_mix_equals_the_oracle_in_every_macro(case):
    check_every_macro(build(case))


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
def test_a_hostile_batch_as_it_is_equals_the_oracle_in_every_macro(case):
    check_every_macro(build(case))


EDGES = [
    Case(name="no_requests", qo_lens=(), kv_lens=()),
    Case(name="no_queries", qo_lens=(0, 0), kv_lens=(5, 0)),
    Case(name="one_idle", qo_lens=(0, 1, 0, 1, 0), kv_lens=(5, 9, 0, 33, 2)),
    Case(name="no_tokens", qo_lens=(1, 4, 1), kv_lens=(0, 0, 0), spare=0),
    Case(
        name="no_tokens_contiguous",
        qo_lens=(1, 4, 1),
        kv_lens=(0, 0, 0),
        spare=0,
        cache_kind="contiguous",
    ),
    Case(
        name="full_contiguous",
        qo_lens=(1, 4, 1),
        kv_lens=(9, 9, 9),
        spare=0,
        cache_kind="contiguous",
        has_lengths=False,
    ),
    Case(
        name="per_head_contiguous",
        qo_lens=(1, 4, 1),
        kv_lens=((9, 0), (3, 30), (1, 2)),
        cache_kind="contiguous",
        layout="HND",
    ),
]


@pytest.mark.parametrize("case", EDGES, ids=lambda case: case.name)
def test_edges_of_a_batch_equal_the_oracle(case):
    check_every_macro(build(case))


MUTABLE = [
    Case(name="paged", qo_lens=MIXED, kv_lens=(64,) * len(MIXED), head_dim_qk=32),
    Case(
        name="per_head",
        qo_lens=MIXED,
        kv_lens=((48, 48),) * len(MIXED),
        head_dim_qk=32,
        layout="HND",
    ),
    Case(
        name="contiguous",
        qo_lens=MIXED,
        kv_lens=(50,) * len(MIXED),
        head_dim_qk=32,
        cache_kind="contiguous",
        spare=0,
    ),
]


@pytest.mark.parametrize("macro", NAMES)
@pytest.mark.parametrize("case", MUTABLE, ids=lambda case: case.name)
def test_contents_change_in_place_between_runs(case, macro):
    built = build(dataclasses.replace(case, spare=0))
    given = poisoned(built)
    plan = planned(built, macro, **given)
    for seed in range(4):
        mutate(built, seed)
        for tensor in given.values():
            tensor.fill_(math.nan)
        out, lse, _ = plan.run()
        golden(built.q, built.cache, built.qo_indptr, **built.options).check(out, lse)


def test_two_plans_in_turns_do_not_disturb_each_other():
    builts = [build(dataclasses.replace(MUTABLE[0], spare=0), seed) for seed in (1, 2)]
    plans = [planned(built, macro) for built, macro in zip(builts, NAMES[1:], strict=True)]
    want = [plan.run()[0].clone() for plan in plans]
    for _ in range(3):
        got = [plan.run()[0] for plan in plans]
        assert all(map(torch.equal, got, want))
    for built, out in zip(builts, got, strict=True):
        golden(built.q, built.cache, built.qo_indptr).check(out)


def test_an_output_of_another_dtype_and_none_of_lse():
    built = build(mixed(Case(qo_lens=(1, 1), kv_lens=(40, 7), head_dim_qk=32)))
    want = golden(built.q, built.cache, built.qo_indptr, out_dtype=torch.float32)
    for macro in NAMES:
        out = poisoned(built)["out"].float()
        got, _ = planned(built, macro, out=out, return_lse=False).run()
        assert got is out or got.data_ptr() == out.data_ptr()
        want.check(got)


def rows_of(lens, request):
    start = sum(lens[:request])
    return slice(start, start + lens[request])


# One request of 1, one of 4 and one of 24 queries: alone, among neighbours and among strangers.
COMPANY = [
    (1,),
    (4,),
    (24,),
    (1, 4, 24),
    (1, 1, 4, 4, 24),
    (1, 2, 1, 4, 24, 4, 1, 24),
    (0, 24, 4, 0, 1, 0),
    (1, 0, 1, 4, 1, 24, 4),
]


@pytest.mark.parametrize("macro", NAMES)
@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_batch_invariant_bits_do_not_depend_on_who_else_is_there(kind, macro):
    """All requests of as many queries are the same one: theirs must be one answer."""
    answers = {}
    for q_form, lens in itertools.product(("dense", "transposed"), COMPANY):
        case = Case(qo_lens=lens, kv_lens=(70,) * len(lens), cache_kind=kind, q_form=q_form)
        built = build(dataclasses.replace(case, num_qo_heads=6, dtype="float32"))
        q, cache = built.q, built.cache
        rng = torch.Generator().manual_seed(3)
        tokens = torch.randn(2, 70, *cache.key.shape[2:], generator=rng)
        queries = torch.randn(24, *q.shape[1:], generator=rng)
        for request, count in enumerate(lens):
            q[rows_of(lens, request)] = queries[:count]
            for pool, values in zip((cache.key, cache.value), tokens, strict=True):
                if kind == "contiguous":
                    pool[request, :70] = values
                else:
                    pages = cache.page_table[request].long()
                    at = torch.arange(70)
                    pool[pages[at // 16], at % 16] = values
        out, _, _ = planned(built, macro, batch_invariant=True).run()
        for request, count in enumerate(lens):
            mine = out[rows_of(lens, request)].clone()
            assert torch.equal(answers.setdefault(count, mine), mine), (q_form, lens, request)


def test_a_pair_of_tensors_is_a_cache_and_no_k_or_v_is_copied():
    built = build(
        mixed(Case(qo_lens=(1, 1), kv_lens=(40, 7), cache_kind="contiguous", dtype="float32"))
    )
    key, value = (t.nan_to_num() for t in (built.cache.key, built.cache.value))
    cache = ContiguousKVCache(key=key, value=value)
    want = golden(built.q, cache, built.qo_indptr)
    plan = StreamAttnEngine().plan_batch(
        built.q, key, list(built.case.qo_lens), v_cache=value, macro="phases"
    )
    want.check(plan.run()[0])
    key.mul_(0.5)  # read where it lies
    golden(built.q, cache, built.qo_indptr).check(plan.run()[0])
    assert plan.workspace_bytes < 4 * key.numel() + sum(
        built.backend_plan.workspace_bytes for _, built in plan._parts
    )


@pytest.mark.parametrize("macro", NAMES)
def test_a_bound_tensor_that_changed_is_named(macro):
    built = build(mixed(Case(qo_lens=(1, 1), kv_lens=(40, 7), head_dim_qk=32)))
    plan = planned(built, macro)
    plan.run()
    built.cache.page_table.set_(built.cache.page_table.clone())
    with pytest.raises(StalePlanError, match=r"page_table\.data_ptr\(\) changed"):
        plan.run()
    plan = planned(built, macro)
    built.q.resize_(built.q.shape[0] - 1, *built.q.shape[1:])
    with pytest.raises(StalePlanError, match=r"q\.shape changed from"):
        plan.run()


@pytest.mark.parametrize("inference", [False, True])
def test_runs_in_and_out_of_inference_mode_and_with_gradients(inference):
    built = build(mixed(Case(qo_lens=(1, 1), kv_lens=(40, 7), head_dim_qk=32)))
    with torch.inference_mode(inference):
        given = poisoned(built)
    wants = built.q.requires_grad_()
    with torch.no_grad():
        plan = planned(built, "phases", **given)
    want = golden(wants.detach(), built.cache, built.qo_indptr)
    for mode in (False, True):
        with torch.inference_mode(mode):
            out, lse, _ = plan.run()
            want.check(out, lse)
            assert not out.requires_grad


def bound_of(built):
    options = {**built.options, "return_lse": True}
    return describe(built.q, built.cache, built.qo_indptr, **options).bound


def test_the_launch_of_a_macro_is_rebound_and_unbound_like_any_other():
    case = mixed(Case(qo_lens=(1, 1), kv_lens=(40, 7), head_dim_qk=32))
    first, second = build(case, 1), build(case, 2)
    launch = planned(first, "phases")._launch
    launch.unbind()
    held = weakref.ref(first.q)
    del first
    gc.collect()
    assert held() is None
    bound = bound_of(second)
    launch.rebind(bound)
    launch.run()
    golden(second.q, second.cache, second.qo_indptr).check(bound.out, bound.lse)
