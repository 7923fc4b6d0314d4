"""Which macro a batch gets and why, which route each cohort gets, and what is refused."""

import copy
import dataclasses
import pickle
import re

import pytest
import torch

from stream_attention import ContiguousKVCache, PagedKVCache, StreamAttnEngine, UnsupportedProblem
from stream_attention.core.registry import AttentionRecord, CapabilityRule
from stream_attention.planner.testing import FakeRoute, registry_of, write_batch

LENS = (1, 20, 1, 1)


def paged(batch=4, pages=4, heads=2, dim=16):
    count = batch * pages
    pool = torch.randn(2, count, 16, heads, dim)
    return PagedKVCache(
        key=pool[0],
        value=pool[1],
        page_table=torch.arange(count, dtype=torch.int32).view(batch, pages),
        sequence_lengths=torch.full((batch,), 33, dtype=torch.int32),
    )


def queries(lens=LENS, heads=4, dim=16):
    return torch.randn(sum(lens), heads, dim)


def engine_of(*routes):
    return StreamAttnEngine(registry=registry_of(*routes))


def route(name, estimate_us=lambda p, d: 10.0, reason=lambda p, d: None, **fields):
    """A fake's launch under a record of its own."""
    fake = FakeRoute(name, body=write_batch, workspace_bytes=64)
    record = fake.record()
    rules = (CapabilityRule("rule", reason),)
    record = dataclasses.replace(record, estimate_us=estimate_us, rules=rules, **fields)
    return fake, record


def decoding(name="native", **fields):
    """A route that takes up to 16 packed rows, equally many a request, as native decode does."""

    def reason(problem, device):
        if not problem.uniform or problem.max_qo_len * problem.gqa_group_size > 16:
            return "max_qo_len: takes 16 rows, equally many a request"
        return None

    return route(name, lambda p, d: 1.0, reason, native=True, **fields)


def test_decode_requests_of_a_mix_get_the_route_that_takes_no_mix():
    native, record = decoding()
    portable, other = route("portable", lambda p, d: 100.0 * p.batch + p.total_qo_len)
    q, cache = queries(), paged()
    plan = engine_of(other, record).plan_batch(q, cache, LENS, return_lse=True)
    assert [c.name for c in plan.cohorts] == ["decode", "prefill"]
    assert [c.requests for c in plan.cohorts] == [(0, 2, 3), (1,)]
    assert plan.routes == ("native", "portable")
    assert plan.qo_lens == LENS
    out, lse, info = plan.run()
    assert torch.equal(out[..., 0], q[..., 0])
    assert torch.equal(lse, q[..., 0])
    assert info is plan.info
    assert info.route == plan.route == "macro(phases): native + portable"
    assert (info.backend_used, info.guarantee, info.splits) == ("none", "exact", 1)
    # 1 + (100 + 20), the copies, and their bytes: 3 rows of q, out and lse, table and lengths.
    moved = 3 * (4 * 16 * 4 * 2 + 4 * 4) + 3 * 4 * 4 + 3 * 4
    estimate = 121.0 + 3.0 * plan.explain().count("index_select") + moved / 6e3
    assert plan.backend_plan.estimate_us == pytest.approx(estimate)
    assert f"{moved} bytes, no K or V" in plan.reason
    (launch,) = native.built
    assert launch.bound.qo_indptr is None
    assert launch.bound.kv.key.data_ptr() == cache.key.data_ptr()
    assert portable.built[-1].bound.q.data_ptr() == q[1].data_ptr()  # in place
    own = 3 * 8 + 3 * 8 + 3 * 8  # rows, requests, and where the rows go back from, int64
    assert plan.workspace_bytes == info.workspace_bytes == 2 * 64 + moved + own


def test_every_macro_keeps_its_reason():
    _, record = decoding()
    _, other = route("portable", lambda p, d: 100.0 * p.batch + p.total_qo_len)
    plan = engine_of(other, record).plan_batch(queries(), paged(), LENS, mode="exact_native")
    text = plan.explain()
    assert re.search(
        r"rejected    macro\(unified\): legal, but estimated at 423\.0 us against \d+\.\d us of "
        r"macro\(phases\)\nrejected    macro\(cohorts\): the same cohorts as macro\(phases\)\n"
        r"cohort decode: requests 0, 2, 3; gathered\n  route       native \(none, cpu\)\n",
        text,
    )
    assert "cohort prefill: requests 1; in place\n  route       portable" in text
    assert "\n  rejected    native: max_qo_len: takes 16 rows" in text
    assert text.count("native: max_qo_len: takes 16 rows") == 1
    assert re.fullmatch(
        r"exact_native: every token is read; phases has the lowest sum of estimates \(\d+\.\d us\) "
        r"of 2 macro plans; every run copies 3 rows of q, out; page-table rows; lengths of decode "
        r"\(scattered in the batch\): \d+ bytes, no K or V; "
        r"decode by native, prefill by portable",
        plan.reason,
    )
    assert plan.info.fallback_reasons[1] == "macro(cohorts): the same cohorts as macro(phases)"
    assert plan.info.fallback_reasons[-1].startswith("prefill: native: max_qo_len")
    named = engine_of(other, record).plan_batch(queries(), paged(), LENS, macro="unified")
    assert "macro='unified' was asked for; every cohort lies in place" in named.reason
    lost = "macro(phases): not compared: macro='unified' was asked for"
    assert named.info.fallback_reasons[0] == lost


def test_equal_sums_go_to_one_launch_and_lower_ones_win():
    # What lies in place costs no copies, so that the sums of these estimates are equal.
    lens = (1, 1, 1, 20)
    for each, chosen in ((0.0, "unified"), (-1.0, "phases"), (1.0, "unified")):
        _, record = route("only", lambda p, d, each=each: p.total_qo_len + each)
        plan = engine_of(record).plan_batch(queries(lens), paged(), lens)
        assert plan.route == f"macro({chosen}): only", each


def test_a_sum_that_is_no_number_loses():
    _, record = route("only", lambda p, d: float("nan") if p.phase == "mixed" else 1.0)
    plan = engine_of(record).plan_batch(queries(), paged(), LENS)
    assert plan.route == "macro(phases): only"


def test_a_batch_of_equal_requests_is_one_uniform_launch():
    lens = (3, 3, 3, 3)
    fake, record = decoding()
    plan = engine_of(record).plan_batch(queries(lens), paged(), lens)
    assert plan.route == "macro(unified): native"
    assert len(fake.built) == 1
    assert fake.built[0].bound.qo_indptr is None
    assert "unified is the only macro plan; every cohort lies in place" in plan.reason
    assert plan.workspace_bytes == 64


def test_batch_invariant_plans_follow_from_each_request_alone():
    seen = set()
    for lens in ((1, 1, 1, 1), (1, 3, 1, 1), (3, 3, 3, 3), (3, 5, 20, 1), (0, 1, 0, 3)):
        native, record = decoding()
        portable, other = route("portable")
        plan = engine_of(record, other).plan_batch(
            queries(lens), paged(), lens, batch_invariant=True
        )
        assert plan.route.startswith("macro(phases): ")
        assert "with batch_invariant=True, macro='auto' is 'phases'" in plan.reason
        for launch in (*native.built, *portable.built):
            indptr = launch.bound.qo_indptr
            counts = {1} if indptr is None else set(indptr.diff().tolist())
            seen |= {(count, indptr is None) for count in counts}
    assert seen == {(1, True), (3, False), (5, False), (20, False)}


def test_what_a_route_refuses_is_a_reason_and_the_others_are_taken():
    _, record = decoding()
    with pytest.raises(UnsupportedProblem) as caught:
        engine_of(record).plan_batch(queries(), paged(), LENS)
    text = str(caught.value)
    assert text.startswith("no macro plan serves this batch\n  macro(unified): cohort all: ")
    assert "macro(phases): cohort prefill: no route serves this problem" in text
    assert "macro(cohorts): the same cohorts as macro(phases)" in text
    assert text.count("takes 16 rows") == 2
    lens = (1, 3, 1, 1)
    plan = engine_of(record).plan_batch(queries(lens), paged(), lens)
    assert plan.route == "macro(phases): native"
    assert "phases is the only macro plan; " in plan.reason
    assert plan.info.fallback_reasons[0].startswith("macro(unified): cohort all: no route serves")
    with pytest.raises(UnsupportedProblem, match="macro='unified' was asked for"):
        engine_of(record).plan_batch(queries(lens), paged(), lens, macro="unified")


def test_scattered_requests_of_a_contiguous_cache_are_read_as_pages_without_a_copy():
    fake, record = route("only")
    key = torch.randn(4, 24, 2, 16)
    lens = torch.tensor([[5, 6], [7, 8], [0, 24], [1, 2]], dtype=torch.int32)
    cache = ContiguousKVCache(key=key, value=key + 1, sequence_lengths=lens)
    plan = engine_of(record).plan_batch(queries(), cache, LENS, macro="phases")
    plan.run()
    decode, prefill = (launch.bound.kv for launch in fake.built)
    assert decode.key.data_ptr() == key.data_ptr()
    assert (decode.page_size, decode.max_pages, decode.batch) == (24, 1, 3)
    assert decode.page_table.tolist() == [[[0], [0]], [[2], [2]], [[3], [3]]]
    assert decode.kv_lens.tolist() == [[5, 6], [0, 24], [1, 2]]
    assert prefill.page_table is None
    assert prefill.key.data_ptr() == key[1].data_ptr()
    assert "requests 0, 2, 3; gathered, the contiguous cache read as one page" in plan.explain()
    assert plan.info.guarantee == "exact"


def test_shared_lists_stay_shared_when_they_are_gathered():
    fake, record = route("only")
    engine_of(record).plan_batch(queries(), paged(), LENS, macro="phases")
    kv = fake.built[0].bound.kv
    assert (kv.page_table.stride(1), kv.kv_lens.stride(1)) == (0, 0)
    assert kv.page_table.shape == (3, 2, 4)


class Stuck(FakeRoute):
    """Its launches fail to be reset."""

    def build(self, *args):
        launch = super().build(*args)

        def reset():
            launch.resets += 1
            raise RuntimeError("stuck")

        launch.reset = reset
        return launch


def test_reset_resets_every_cohort_also_when_one_fails():
    fake = Stuck()
    plan = engine_of(fake).plan_batch(queries(), paged(), LENS, macro="phases")
    with pytest.raises(RuntimeError, match="stuck"):
        plan.reset()
    assert [launch.resets for launch in fake.built] == [1, 1]


def test_every_fault_is_told_at_once():
    with pytest.raises(ValueError) as caught:
        StreamAttnEngine().plan_batch(
            queries(), paged(), [1, -2, 1.5, True, 4], macro="phase", mode="exact", sm_scale="x"
        )
    text = str(caught.value)
    for line in (
        "mode='exact': must be one of",
        "macro='phase': must be one of auto, unified, phases, cohorts; use 'phases'",
        "qo_lens[1]=-2: request 1 must have an int >= 0; use 0",
        "qo_lens[2]=1.5: request 2 must have an int >= 0",
        "qo_lens[3]=True: request 3 must have an int >= 0",
        "qo_lens='5 entries': must have one entry for each request of the cache's batch = 4",
        "sm_scale='x': must be a finite number",
    ):
        assert line in text, (line, text)


@pytest.mark.parametrize(
    ("lens", "line"),
    [
        ((1, 20, 1, 2), r"sum\(qo_lens\)=24: must sum to the rows of q \(23, 4, 16\), .*; use 23"),
        ((1, 20, 2), "qo_lens='3 entries': must have one entry .* = 4; use 4 entries"),
        (torch.tensor(LENS), r"qo_lens='Tensor': must be a list or tuple .*qo_lens\.tolist\(\)"),
        (23, "qo_lens='int': must be a list or tuple of host ints"),
        (None, "qo_lens='NoneType': must be a list or tuple of host ints"),
        ("1111", "qo_lens='str': must be a list or tuple of host ints"),
        ([-1] * 20, "qo_lens='20 faults': the first 8 are listed"),
        ((1 << 70, 1, 1, 1), "must sum to the rows of q"),
    ],
)
def test_lengths_that_are_none_are_refused(lens, line):
    with pytest.raises(ValueError, match=line):
        StreamAttnEngine().plan_batch(queries(), paged(), lens)


def test_more_rows_than_offsets_count_are_refused():
    q = torch.empty(1, 1, 8).expand(1 << 31, 1, 8)
    with pytest.raises(
        ValueError, match=r"sum\(qo_lens\)=2147483648: a batch has fewer than 2\^31"
    ):
        StreamAttnEngine().plan_batch(q, paged(1, 1, 1, 8), [1 << 31])


@pytest.mark.parametrize("macro", [None, 3, "", "Auto", ["auto"]])
def test_a_macro_that_is_none_is_refused(macro):
    with pytest.raises(
        ValueError, match=r"macro=.*: must be one of auto, unified, phases, cohorts"
    ):
        StreamAttnEngine().plan_batch(queries(), paged(), LENS, macro=macro)


def test_other_faults_are_told_without_a_result_being_made():
    cache = paged()
    cache.sequence_lengths[2] = 65
    with pytest.raises(ValueError, match=r"sequence_lengths\[2\]=65: request 2 must hold"):
        StreamAttnEngine().plan_batch(queries(), cache, LENS)
    with pytest.raises(ValueError) as caught:
        StreamAttnEngine().plan_batch(queries().view(23, 1, 4, 16), "cache", (1, 2))
    assert "q.shape=(23, 1, 4, 16): must be packed" in str(caught.value)
    assert "cache='str'" in str(caught.value)


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_macro_plan_and_its_launch_are_not_copied(made):
    plan = engine_of(FakeRoute()).plan_batch(queries(), paged(), LENS)
    with pytest.raises(TypeError, match=r"MacroPlan: cannot .* engine\.plan_batch\(\.\.\.\)"):
        made(plan)
    with pytest.raises(TypeError, match="MacroLaunch: cannot be copied"):
        made(plan._launch)


def test_what_a_graph_can_hold_goes_first_on_cuda(monkeypatch):
    from stream_attention.core.device import DeviceFacts
    from stream_attention.planner import macro_plan

    facts = DeviceFacts(type="cuda", compute_capability=(9, 0), num_sms=132)
    monkeypatch.setattr(macro_plan, "device_facts", lambda device: facts)
    _, native = decoding(graph_safe=False)
    _, mixes = route("mixes", lambda p, d: 500.0, lambda p, d: None if not p.uniform else "no")
    _, prefills = route("prefills", reason=lambda p, d: "no" if p.max_qo_len < 20 else None)
    assert isinstance(native, AttentionRecord)
    prefills = dataclasses.replace(prefills, estimate_us=lambda p, d: 900.0 if p.batch > 1 else 1.0)
    plan = engine_of(native, mixes, prefills).plan_batch(queries(), paged(), LENS)
    assert plan.route == "macro(unified): mixes"
    assert "of 2 macro plans that a CUDA graph can hold" in plan.reason
    lost = plan.info.fallback_reasons[0]
    assert lost.startswith("macro(phases): legal, but cannot be captured in a CUDA graph")


def test_what_cannot_win_by_its_launches_alone_is_not_built(monkeypatch):
    from stream_attention.core.device import DeviceFacts
    from stream_attention.planner import macro_plan

    facts = DeviceFacts(
        type="cuda", name="NVIDIA H200", compute_capability=(9, 0), num_sms=132, l2_bytes=60 << 20
    )
    monkeypatch.setattr(macro_plan, "device_facts", lambda device: facts)
    for us, is_built in ((1.7, False), (1.8, True)):  # two launches take 1.77 us
        fake, record = route("mixes", lambda p, d, us=us: us if not p.uniform else us / 4)
        plan = engine_of(record).plan_batch(queries(), paged(), LENS, macro="auto")
        assert plan.route == "macro(unified): mixes"
        lost = plan.info.fallback_reasons[0]
        assert (len(fake.built) > 1) == is_built
        if not is_built:
            assert lost == (
                "macro(phases): not built: lower bound 1.77 us by launches of NVIDIA H200: "
                "macro(unified) takes 1.70 us"
            )
