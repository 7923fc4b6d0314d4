"""Each rule refuses what it is for, and nothing else does: without it, the bad row would count."""

from __future__ import annotations

import datetime
import math

import pytest

from stream_attention.planner.evidence import plain_of, row_from_plain
from stream_attention.planner.evidence_rules import (
    ROW_RULES,
    SET_RULES,
    Context,
    check_set,
    latest,
    refusals,
)
from stream_attention.planner.evidence_testing import (
    COMMIT,
    good_cell,
    good_correctness,
    good_fingerprint,
    good_pair,
    good_row,
    good_samples,
    lost_pair,
    lost_row,
)

LARGE = good_cell((4096,) * 16)
NOW = datetime.datetime(2025, 2, 1, tzinfo=datetime.timezone.utc)
GOOD = [
    good_row(),
    good_row(route="triton"),
    good_row(route="flashinfer_fa3"),
    good_row(route="torch", arch="cpu"),
    good_row(route="sm80_decode", arch="sm_80"),
    good_row(route="sm80_decode", arch="sm_90"),
    good_row(route="sm100_decode", arch="sm_100"),
    good_row(good_cell((1,))),
    good_row(taken_at="2025-01-02T03:04:05+00:00"),
    lost_row(),
    lost_row(route="sm90_decode"),
    lost_row(route="sm90_decode", arch="sm_80"),
    lost_row(outcome="failed", reason="RuntimeError: out of memory"),
    lost_row(outcome="wrong", reason="implausible", timing=good_samples(0.1)),
    lost_row(
        outcome="wrong",
        reason="max error",
        correctness=good_correctness(max_error=math.nan, rms_error=None, rows_checked=0),
    ),
    good_pair(),
    good_pair(first="torch", second="sdpa_math", arch="cpu"),
    lost_pair(),
    lost_pair(first="sm90_decode", environment=good_fingerprint("sm_80")),
]


def samples(p50_us=13.0, **changes):
    return {"timing": good_samples(p50_us, **changes)}


def checked(**changes):
    return {"correctness": good_correctness(**changes)}


def facts(arch="sm_90", **changes):
    return {"environment": good_fingerprint(arch, **changes)}


# (rule, row, context, what the message says)
BAD = [
    ("commit", good_row(commit=""), {}, "commit='': must be 40 hexadecimal digits"),
    ("commit", good_row(commit="main"), {}, "commit='main'"),
    ("commit", good_row(commit=COMMIT[:39]), {}, "must be 40 hexadecimal digits"),
    ("commit", good_row(commit=COMMIT + "\n"), {}, "must be 40 hexadecimal digits"),
    ("commit", good_row(commit=COMMIT.upper()), {}, "must be 40 hexadecimal digits"),
    ("commit", good_pair(commit="unknown"), {}, "commit='unknown'"),
    ("local_changes", good_row(commit=f"{COMMIT}+changes"), {}, "without local changes"),
    ("local_changes", good_pair(commit=f"{COMMIT}+"), {}, "use a commit of them"),
    ("other_commit", good_row(), {"commit": "f" * 40}, f"commit='{COMMIT}': must be ffff"),
    ("command", good_row(command=""), {}, "command='': must be the command line"),
    ("command", good_pair(command=" \t"), {}, "must be the command line that measured"),
    ("taken_at", good_row(taken_at=""), {}, "taken_at='': must be a time in UTC with seconds"),
    ("taken_at", good_row(taken_at="2025-01-02"), {}, "use '2025-01-31T12:00:00Z'"),
    ("taken_at", good_row(taken_at="2025-01-02T03:04:05"), {}, "must be a time in UTC"),
    ("taken_at", good_row(taken_at="2025-01-02T03:04:05+01:00"), {}, "must be a time in UTC"),
    ("taken_at", good_row(taken_at="2025-02-30T03:04:05Z"), {}, "must be a time in UTC"),
    ("taken_at", good_pair(taken_at="yesterday"), {}, "taken_at='yesterday'"),
    ("taken_in_future", good_row(taken_at="2025-02-01T00:06:00Z"), {}, "2025-02-01T00:00Z"),
    ("taken_in_future", good_pair(taken_at="9999-01-01T00:00:00Z"), {}, "must not be after now"),
    ("arch", good_row(route="triton", **facts("rocm")), {}, "environment.arch='rocm'"),
    ("arch", good_row(route="triton", **facts("sm90")), {}, "must be cpu, or as sm_90"),
    ("driver", good_row(**facts(driver=None)), {}, "(None, '13.0'): must be known on a GPU"),
    ("driver", good_row(**facts(cuda=None)), {}, "('580.1', None)"),
    ("driver", lost_pair(**facts(cuda=None)), {}, "must be known on a GPU"),
    ("versions", good_row(route="flashinfer_fa3", versions=()), {}, "must name the distribution"),
    ("versions", good_pair(versions=()), {}, "with its version"),
    (
        "environment",
        good_row(),
        {"environment": good_fingerprint(driver="9", cuda=None)},
        "is another: driver: '580.1', not '9'; cuda: '13.0', not None",
    ),
    ("route_arch", good_row(**facts("sm_80")), {}, "'sm90_decode': cannot have run on sm_80"),
    ("route_arch", good_row(**facts("sm_100")), {}, "cannot have run on sm_100"),
    ("route_arch", good_row(route="sm80_decode", **facts("sm_75")), {}, "run on sm_75"),
    ("route_arch", good_row(route="sm100_decode"), {}, "cannot have run on sm_90"),
    ("route_arch", good_row(arch="cpu"), {}, "cannot have run on cpu"),
    ("route_arch", good_pair(**facts("sm_80")), {}, "cannot have run on sm_80"),
    (
        "route_arch",
        lost_row(route="sm90_decode", resolved="sm90_decode", role="native", **facts("sm_80")),
        {},
        "run on",
    ),
    ("resolved", good_row(resolved="triton"), {}, "'triton': sm90_decode was asked for"),
    ("resolved", good_row(resolved=""), {}, "use sm90_decode"),
    ("resolved", lost_row(outcome="wrong", resolved="torch"), {}, "what else ran"),
    ("registered", good_row(route="mystery"), {"routes": ("torch",)}, "one of torch"),
    ("registered", good_pair(), {"routes": ("sm90_decode",)}, "'flashinfer_fa2_tensor_core'"),
    ("role", good_row(role="portable"), {}, "role='portable': sm90_decode: must be native"),
    ("role", good_row(route="triton", role="native", kernel=(("a", "1"),)), {}, "no others"),
    ("reason", lost_row(reason=" "), {}, "must say why it is unsupported"),
    ("reason", lost_row(outcome="failed", reason="failed"), {}, "must say why it is failed"),
    ("reason", lost_pair(reason="unsupported"), {}, "reasons=('unsupported',)"),
    ("untimed", good_row(timing=None), {}, "timing=None: what is ok must be timed"),
    ("untimed", good_pair(first_timing=None), {}, "first_timing=None"),
    ("untimed", good_pair(second_timing=None), {}, "second_timing=None"),
    ("unchecked", good_row(correctness=None), {}, "correctness=None: what is ok must be compared"),
    ("unchecked", good_pair(first_correctness=None), {}, "first_correctness=None"),
    ("unchecked", good_pair(second_correctness=None), {}, "second_correctness=None"),
    ("method", good_row(**samples(method="host")), {}, "times the host, not the kernel"),
    ("method", good_row(**samples(method="cuda_graph_warm")), {}, "data in the cache"),
    ("method", good_row(**samples(method="cuda_eager_cold")), {}, "launches from Python"),
    ("method", good_row(**samples(method="cuda_eager_warm")), {}, "cache; times launches"),
    ("method", good_row(**samples(method="cpu_cold")), {}, "only cuda_graph_cold counts"),
    ("method", good_row(route="torch", arch="cpu", **samples()), {}, "only cpu_cold counts"),
    ("method", good_row(**samples(method="CUDA_GRAPH_COLD")), {}, "use cuda_graph_cold"),
    (
        "method",
        good_pair(
            first_timing=good_samples(9.0, method="host"),
            second_timing=good_samples(9.0, method="host"),
        ),
        {},
        "second_timing.method='host'",
    ),
    ("samples", good_row(**samples(samples_us=(9.0,) * 20 + (math.nan,))), {}, "1 of 21 are not"),
    ("samples", good_row(**samples(samples_us=(9.0,) * 20 + (math.inf,))), {}, "[inf]"),
    ("samples", good_row(**samples(samples_us=(9.0,) * 20 + (0.0, -1.0))), {}, "[0.0, -1.0]"),
    ("samples", good_pair(second_timing=good_samples(math.nan)), {}, "second_timing.samples_us"),
    ("too_few_samples", good_row(**samples(samples_us=(13.0,) * 14)), {}, "14: must be >= 15"),
    ("too_few_samples", good_row(**samples(samples_us=())), {}, "timing.num_samples=0"),
    ("too_few_samples", good_row(), {"min_samples": 26}, "must be >= 26"),
    (
        "too_few_samples",
        good_row(route="torch", **facts("cpu"), **samples(arch="cpu", samples_us=(13.0,) * 4)),
        {},
        "must be >= 5",
    ),
    (
        "too_few_samples",
        good_pair(
            first_timing=good_samples(samples_us=(9.0,) * 3),
            second_timing=good_samples(samples_us=(9.0,) * 3),
        ),
        {},
        "first_timing.num_samples=3",
    ),
    ("warm_rotation", good_row(**samples(num_pools=1)), {}, "33554432 bytes of K and V fit into"),
    (
        "pair_lengths",
        good_pair(first_timing=good_samples(9.0, samples_us=(9.0,) * 24)),
        {},
        "num_samples=(24, 25): sample i of both is one pair",
    ),
    (
        "pair_unlike",
        good_pair(first_timing=good_samples(9.0, calls_per_sample=11)),
        {},
        "must be the same for both",
    ),
    ("pair_unlike", good_pair(second_timing=good_samples(9.0, num_pools=129)), {}, "129"),
    (
        "warm_rotation",
        good_row(**samples(num_pools=127), **facts(l2_bytes=0)),
        {},
        "fit into 0 of L2",
    ),
    ("floor", good_row(floor_us=None), {}, "floor_us=None: must be the time to read"),
    ("floor", good_row(floor_us=0.0), {}, "floor_us=0.0"),
    ("floor", good_row(floor_us=math.nan), {}, "floor_us=nan"),
    ("floor", good_row(floor_us=math.inf, **samples(9e8)), {}, "floor_us=inf"),
    ("time_range", good_row(**samples(2e9)), {}, "samples_us=[1976000000.0, 1"),
    ("time_range", good_row(floor_us=9e-4, **samples(9e-4)), {}, "floor_us=0.0009: must be in"),
    ("time_range", good_row(floor_us=9e-4), {}, "must be in 0.001..1e+09 microseconds"),
    ("time_range", good_row(floor_us=1e-3, **samples(9e-4)), {}, "timing.samples_us=[0.0008"),
    ("time_range", lost_row(floor_us=1.1e9), {}, "floor_us=1100000000.0"),
    ("time_range", lost_row(floor_us=math.nan), {}, "floor_us=nan: must be in 0.001"),
    ("time_range", good_pair(second_timing=good_samples(1e-300)), {}, "second_timing.samples_us"),
    ("implausible", good_row(floor_us=20.0, **samples(9.9)), {}, "takes more than 10, its floor"),
    (
        "implausible",
        good_row(route="torch", arch="cpu", floor_us=200.0, **samples(19.0, arch="cpu")),
        {},
        "takes more than 20",
    ),
    # 256 MiB, of which 60 may lie in L2, and a floor that is as absurd as the time.
    (
        "beyond_roofline",
        good_row(LARGE, p50_us=38.0, **facts(device="NVIDIA H200", l2_bytes=1 << 62)),
        {},
        "timing.p50_us=38.0: memory of NVIDIA H200 alone takes 41.6",
    ),
    (
        "beyond_roofline",
        good_row(LARGE, p50_us=38.0, **facts(device="NVIDIA H200")),
        {},
        "timing.p50_us=38.0: memory of NVIDIA H200 alone takes 41.6",
    ),
    (
        "beyond_roofline",
        good_pair(
            LARGE,
            second_timing=good_samples(38.0),
            first_timing=good_samples(50.0),
            **facts(device="NVIDIA H200"),
        ),
        {},
        "second_timing.p50_us=38.0",
    ),
    ("bound_missing", good_row(**checked(max_bound=None)), {}, "correctness.max_bound=None"),
    ("bound_missing", good_row(**checked(rms_bound=math.nan)), {}, "rms_bound=nan"),
    ("bound_missing", good_row(**checked(rms_bound=math.inf)), {}, "must be finite and >= 0"),
    ("bound_missing", good_pair(second_correctness=good_correctness(max_bound=None)), {}, "second"),
    ("error_missing", good_row(**checked(max_error=math.nan)), {}, "max_error=nan"),
    ("error_missing", good_row(**checked(rms_error=None)), {}, "rms_error=None"),
    ("error_missing", good_row(**checked(rms_error=-1.0)), {}, "must be a number >= 0, not NaN"),
    ("error_missing", good_pair(first_correctness=good_correctness(max_error=None)), {}, "first"),
    ("error_above_bound", good_row(**checked(max_error=0.0031)), {}, "must be at most 0.003"),
    ("error_above_bound", good_row(**checked(rms_error=math.inf)), {}, "rms_error=inf"),
    (
        "error_above_bound",
        good_pair(second_correctness=good_correctness(rms_error=1.0)),
        {},
        "second_correctness.rms_error=1.0: must be at most 0.0003",
    ),
    ("rows_unchecked", good_row(**checked(rows_checked=0)), {}, "rows_checked=0: must be in 1.."),
    ("rows_unchecked", good_row(**checked(rows_checked=3)), {}, "rows, which are 2"),
    ("tolerance", good_row(**checked(tolerance=" ")), {}, "must name the rule that made"),
    ("allocations", good_row(timed_allocations=None), {}, "must be counted on a GPU"),
    ("kernel", good_row(kernel=()), {}, "registers, spills and shared memory must be known"),
]


@pytest.mark.parametrize("row", GOOD)
def test_a_good_row_counts(row):
    assert refusals(row, Context(now=NOW)) == ()


def test_every_rule_has_a_row_that_it_refuses_and_a_name_of_its_own():
    names = [rule.name for rule in ROW_RULES]
    assert len(set(names)) == len(names)
    assert {rule for rule, *_ in BAD} == set(names)


@pytest.mark.parametrize(("name", "row", "context", "said"), BAD)
def test_a_bad_row_is_refused_by_its_rule_alone(name, row, context, said):
    context = Context(now=NOW, **context)
    found = refusals(row, context)
    assert {refusal.rule for refusal in found} == {name}
    assert said in " | ".join(map(str, found))
    others = [rule for rule in ROW_RULES if rule.name != name]
    assert refusals(row, context, others) == ()


def test_all_that_is_wrong_with_a_row_is_said_at_once():
    row = good_row(
        commit="abc+changes", command="", taken_at="", correctness=None, **samples(method="host")
    )
    names = [refusal.rule for refusal in refusals(row)]
    assert names == ["commit", "local_changes", "command", "taken_at", "unchecked", "method"]


def test_the_slack_of_clocks_is_no_future():
    row = good_row(taken_at="2025-02-01T00:04:00Z")
    assert refusals(row, Context(now=NOW)) == ()


def test_what_is_no_row_is_refused():
    with pytest.raises(ValueError, match="row=None: must be an EvidenceRow or a PairRow"):
        refusals(None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("environment", "sm_90"),
        ("commit", ""),
        ("routes", "torch"),
        ("min_samples", 0),
        ("now", datetime.datetime(2025, 1, 1)),
        ("now", "2025"),
    ],
)
def test_a_context_of_a_wrong_form_cannot_be_made(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        Context(**{field: value})


SHORT = good_cell((64,))
LATER = "2025-01-02T03:04:06Z"
FLOOR = good_row(SHORT, "triton", 9.0)
LOW = good_row(route="torch", floor_us=5.0)
HIGH, LOST = good_row(route="triton", floor_us=11.0), lost_row(floor_us=11.0)
# (rule, rows, what the message says)
BAD_SETS = [
    ("empty", [], "none counts"),
    ("empty", [good_row(command="")], "none counts"),
    (
        "mixed_environments",
        [good_row(), good_row(SHORT, **facts(driver="9", num_sms=1))],
        "is not the first row's: num_sms: 1, not 132; driver: '9', not '580.1'",
    ),
    ("mixed_environments", [good_row(), good_pair(**facts(torch="3"))], "torch: '3'"),
    ("mixed_commits", [good_row(), good_row(SHORT, commit="f" * 40)], "sm90_decode: a kernel's"),
    (
        "mixed_versions",
        [good_row(), good_row(SHORT, "triton", versions=(("torch", "1"),))],
        "versions=['1', '2.13.0']: torch: must be one in a set",
    ),
    (
        "mixed_roles",
        [good_row(route="triton"), good_row(SHORT, "triton", role="external")],
        "role=['external', 'portable']: triton: must be one in a set",
    ),
    ("duplicate_ids", [good_row(), good_row()], "is there 2 times: a row counts once"),
    ("measured_twice", [good_row(), good_row(taken_at=LATER)], "sm90_decode on cell 60d0fd"),
    (
        "measured_twice",
        [good_pair(first="triton", second="torch"), good_pair(first="torch", second="triton")],
        "torch and triton on cell",
    ),
    ("measured_twice", [lost_row(), lost_row(reason="other")], "nobody said which row counts"),
    ("floors_differ", [good_row(), LOW], "floors of rows "),
    ("floors_differ", [LOW, good_row(), good_pair()], "must be within 2x; use one run of all"),
    ("floors_differ", [good_row(), lost_row(floor_us=24.0)], "us=[10.388608, 24.0]"),
    ("row_implausible", [good_row(route="torch", floor_us=9.0, **samples(5.0)), HIGH], "=5.0: re"),
    ("row_implausible", [HIGH, good_row(route="torch", floor_us=9.0, **samples(5.0))], "5.5, its"),
    ("row_implausible", [good_row(route="torch", floor_us=9.0, **samples(5.0)), LOST], "is 11"),
    ("pair_implausible", [HIGH, good_row(), good_pair(second_us=5.4, ratio=1.1)], "floor is 11"),
    ("pair_implausible", [good_row(), HIGH, good_pair(second_us=5.4, ratio=1.1)], "floor is 11"),
    ("pair_implausible", [FLOOR, good_pair(SHORT, second_us=0.5)], "second_timing.p50_us=0.5"),
    ("pair_implausible", [FLOOR, good_pair(SHORT, ratio=0.01, second_us=9.0)], "first_timing"),
]


def test_every_rule_of_sets_has_a_set_that_it_refuses():
    assert {rule for rule, *_ in BAD_SETS} == {rule.name for rule in SET_RULES}


@pytest.mark.parametrize(("name", "rows", "said"), BAD_SETS)
def test_a_bad_set_is_refused_by_its_rule_alone(name, rows, said):
    context = Context(now=NOW)
    verdict = check_set(rows, context)
    assert {refusal.rule for refusal in verdict.refusals} == {name}
    assert said in " | ".join(map(str, verdict.refusals))
    with pytest.raises(ValueError, match=f"evidence: refused\n  {name}: "):
        verdict.rows()
    others = [rule for rule in SET_RULES if rule.name != name]
    assert check_set(rows, context, others).refusals == ()


def test_a_good_set_counts_and_a_bad_row_is_out_with_its_reasons():
    bad = good_row(SHORT, command="", commit="f" * 40, **facts(driver="9"))
    rows = [good_row(), good_row(route="triton"), lost_row(), good_pair(), good_row(SHORT)]
    rows.append(good_row(SHORT, "triton", commit="f" * 40))  # no kernel of the package
    verdict = check_set([*rows, bad], Context(now=NOW))
    assert verdict.rows() == tuple(rows) == verdict.accepted
    ((row, found),) = verdict.refused
    assert row == bad and [refusal.rule for refusal in found] == ["command"]


def test_a_set_is_judged_in_its_context():
    verdict = check_set([good_row()], Context(environment=good_fingerprint("sm_80"), now=NOW))
    assert [refusal.rule for refusal in verdict.refused[0][1]] == ["environment"]


def test_the_latest_of_rows_is_kept_where_one_says_so():
    old, new, other = good_row(), good_row(taken_at=LATER), good_row(SHORT)
    assert latest([new, old, other, old]) == ((new, other), (old,))
    assert check_set(latest([new, old, other])[0], Context(now=NOW)).refusals == ()


@pytest.mark.parametrize("taken_at", ["2025-01-02T03:04:05+00:00", "unknown"])
def test_rows_whose_order_is_unknown_are_all_kept(taken_at):
    rows = (good_row(), good_row(taken_at=taken_at))
    assert latest(rows) == (rows, ())


def test_a_row_of_a_file_is_judged_as_the_one_that_was_written():
    for name, row, context, _ in BAD:
        again = row_from_plain(plain_of(row))
        found = refusals(again, Context(now=NOW, **context))
        assert {refusal.rule for refusal in found} == {name}


def test_floors_of_one_cell_may_differ_by_two_and_on_a_cpu_by_ten():
    row = good_row(route="torch", floor_us=5.5)
    assert check_set([HIGH, row], Context(now=NOW)).refusals == ()
    (slow, fast) = (
        good_row(route=route, arch="cpu", floor_us=floor, **samples(40.0, arch="cpu"))
        for route, floor in (("torch", 100.0), ("triton", 10.0))
    )
    assert check_set([slow, fast], Context(now=NOW)).refusals == ()


def test_floors_of_two_cells_or_environments_are_held_apart():
    other = good_row(good_cell((64, 64)), route="torch", floor_us=2.0)
    assert check_set([HIGH, other], Context(now=NOW)).refusals == ()
    elsewhere = good_row(route="torch", floor_us=2.0, **facts(driver="9"))
    verdict = check_set([HIGH, elsewhere], Context(now=NOW))
    assert [refusal.rule for refusal in verdict.refusals] == ["mixed_environments"]


@pytest.mark.parametrize("floor_us", [1e-3, 1e9])
def test_the_ends_of_the_range_of_times_count(floor_us):
    timing = good_samples(samples_us=(floor_us,) * 25)
    assert refusals(good_row(floor_us=floor_us, timing=timing), Context(now=NOW)) == ()
