"""Each rule of the compiler by a scenario, and each mutant of its source by a scenario that fails.

A scenario takes the module that it judges, so that a mutant is judged by the same ones.
"""

import types

import pytest

from stream_attention.core.testing.mutants import survivors
from stream_attention.planner import phase_compiler
from stream_attention.planner.cell_requests import CellRequest
from stream_attention.planner.evidence_testing import (
    good_cell,
    good_pair,
    good_row,
    good_samples,
    lost_pair,
    lost_row,
)
from stream_attention.planner.phase_compiler import CellEvidence

CELL = good_cell()
NATIVE, OTHER_NATIVE, PORTABLE = "sm90_decode", "sm90_other", "triton"
PEER, OTHER = "flashinfer_xqa", "flashinfer_fa3"


def decided(compiler, rows, pairs=(), baselines=(PEER, OTHER), hold_out=False, **changes):
    request = CellRequest(cell=CELL, name="cell", baselines=baselines, **changes)
    return compiler.decide(request, CellEvidence(tuple(rows), tuple(pairs)), hold_out)


def row(route, us=50.0, **changes):
    return good_row(CELL, route, us, **changes)


def lost(route, outcome="unsupported"):
    return lost_row(CELL, route, outcome, "it says why")


def pair(ratio, first=NATIVE, second=PEER, **changes):
    return good_pair(CELL, first, second, ratio, **changes)


def exact_pair(ratios, first=NATIVE, second=PEER):
    """A pair whose ratios are exactly these: the peer takes 64 us each time."""
    ours, peers = (
        good_samples(samples_us=tuple(64.0 * each for each in times))
        for times in (ratios, [1.0] * len(ratios))
    )
    return good_pair(CELL, first, second, first_timing=ours, second_timing=peers)


def rows(native=40.0, portable=60.0, peer=50.0):
    return [row(NATIVE, native), row(PORTABLE, portable), row(PEER, peer), lost(OTHER)]


def native_that_beats_the_best_peer_is_chosen(compiler):
    found = decided(compiler, rows(), [pair(0.8)])
    assert (found.status, found.chosen, found.own) == ("native", NATIVE, NATIVE)
    assert (found.baseline, found.regret, found.own_regret) == (PEER, 0.0, 0.0)
    assert found.missing == () and f"{NATIVE} beats {PEER} (ratio 0.8000" in found.reason
    assert f"out: {OTHER} unsupported" in found.reason and "faster" not in found.reason
    assert "too few" not in found.reason
    assert "not chosen" not in found.reason and "fallback" not in found.reason
    assert (found.ratio.first, found.ratio.second, found.ratio.num_pairs) == (NATIVE, PEER, 25)
    assert found.ratio.low < found.ratio.p50 < found.ratio.high < 0.81
    assert found.ratio.level == 0.95 and "at 95% of 25 pairs" in found.reason


def a_tie_at_the_margin_is_enough(compiler):
    found = decided(compiler, rows(50.0), [exact_pair([1.0] * 25)], tie_margin=0.0)
    assert found.chosen == NATIVE and f"{NATIVE} ties {PEER}" in found.reason
    found = decided(compiler, rows(50.0), [exact_pair([1.009] * 25)])
    assert found.chosen == NATIVE and f"{NATIVE} ties {PEER}" in found.reason


def above_the_margin_the_peer_is_the_fallback_and_the_loss_stays(compiler):
    found = decided(compiler, rows(49.0), [exact_pair([1.011] * 25)])
    assert (found.status, found.chosen, found.own) == ("external", PEER, NATIVE)
    assert found.ratio.p50 == pytest.approx(1.011)
    assert f"{PEER} is the fallback; native {NATIVE} is not chosen" in found.reason
    assert f"neither beats nor ties {PEER} (ratio 1.0110" in found.reason
    assert found.regret == pytest.approx(50 / 49 - 1) and found.own_regret == 0.0


def the_interval_decides_not_the_median_of_the_ratios(compiler):
    # Median 0.99, but so few pairs say so that the interval reaches 1.05.
    wide = exact_pair([0.99] * 13 + [1.05] * 12)
    found = decided(compiler, rows(), [wide])
    assert found.ratio.p50 == 0.99 and found.chosen == PEER


def medians_of_separate_runs_decide_nothing_against_a_peer(compiler):
    assert decided(compiler, rows(40.0), [pair(1.1)]).chosen == PEER
    found = decided(compiler, rows(50.5), [pair(0.98)])
    assert found.chosen == NATIVE and found.regret == pytest.approx(0.01)


def a_baseline_without_a_row_leaves_the_cell_unresolved(compiler):
    found = decided(compiler, rows()[:3], [pair(0.8)])
    assert (found.status, found.chosen) == ("unresolved", "")
    assert found.missing == (f"outcome of {OTHER}",) and found.own == NATIVE
    assert found.regret is None and found.own_regret is None and found.baseline == PEER
    assert "not every outcome" in found.reason and "not chosen" not in found.reason
    found = decided(compiler, [*rows()[:3], row("sdpa_flash", 30.0)], [pair(0.8)])
    assert "not eligible: sdpa_flash 30 us" in found.reason


def a_route_of_ours_without_a_row_leaves_it_unresolved(compiler):
    found = decided(compiler, rows(), [pair(0.8)], routes=(NATIVE, "torch"))
    assert found.missing == ("outcome of torch",)


def without_the_pair_it_is_unresolved(compiler):
    wanted = (f"pair {NATIVE}:{PEER}",)
    assert decided(compiler, rows()).missing == wanted
    others = [pair(0.8, NATIVE, OTHER), pair(0.8, PEER, NATIVE), pair(0.8, OTHER_NATIVE, PEER)]
    for other in others:
        found = decided(compiler, rows(), [other])
        assert found.missing == wanted and " is ok" not in found.reason
    assert decided(compiler, rows(), [*others, pair(0.8)]).chosen == NATIVE


def a_pair_that_failed_or_is_short_is_none(compiler):
    failed = lost_pair(CELL, NATIVE, PEER, "failed", "ran out of memory")
    found = decided(compiler, rows(), [failed])
    assert found.missing == (f"pair {NATIVE}:{PEER}",)
    assert "is failed: ran out of memory" in found.reason
    assert decided(compiler, rows(), [failed, pair(0.8)]).chosen == NATIVE
    found = decided(compiler, rows(), [exact_pair([0.5] * 5)])
    assert found.missing == (f"pair {NATIVE}:{PEER}",) and "5 samples are too few" in found.reason


def what_is_not_correct_does_not_compete(compiler):
    for outcome in ("wrong", "failed", "unsupported"):
        out = [lost(NATIVE, outcome), *rows()[1:]]
        found = decided(compiler, out)
        assert (found.chosen, found.own) == (PEER, PORTABLE), outcome
        assert f"{NATIVE} {outcome}" in found.reason and "native" not in found.reason
        found = decided(compiler, [row(NATIVE), lost(PEER, outcome), row(OTHER, 70.0)])
        assert found.missing == (f"pair {NATIVE}:{OTHER}",) and found.baseline == OTHER


def a_peer_that_allocates_competes_only_alone(compiler):
    fast = row(OTHER, 30.0, timed_allocations=2)
    found = decided(compiler, [*rows()[:3], fast], [pair(0.8)])
    assert (found.chosen, found.baseline, found.regret) == (NATIVE, PEER, 0.0)
    assert f"faster, but allocates: {OTHER} 30 us" in found.reason
    found = decided(compiler, [*rows()[:2], lost(PEER), fast], [pair(0.8, NATIVE, OTHER)])
    assert (found.chosen, found.baseline) == (NATIVE, OTHER)
    assert found.regret == pytest.approx(40 / 30 - 1) and "allocates" not in found.reason


def ours_that_allocates_competes_only_alone(compiler):
    allocating = row(NATIVE, 40.0, timed_allocations=1)
    found = decided(compiler, [allocating, *rows()[1:]])
    assert (found.own, found.chosen) == (PORTABLE, PEER)
    assert f"faster, but allocates: {NATIVE}" in found.reason
    found = decided(compiler, [allocating, lost(PORTABLE), *rows()[2:]], [pair(0.8)])
    assert found.chosen == NATIVE


def what_is_not_counted_is_not_free_of_allocations(compiler):
    uncounted = row(OTHER, 30.0, timed_allocations=None)
    assert decided(compiler, [*rows()[:3], uncounted], [pair(0.8)]).baseline == PEER


def a_portable_route_that_is_faster_than_native_is_chosen_before_it(compiler):
    found = decided(compiler, rows(40.0, 39.0), [pair(0.8)])
    assert (found.status, found.chosen, found.own) == ("portable", PORTABLE, PORTABLE)
    assert f"{PORTABLE} is our fastest, and no baseline is faster" in found.reason
    assert f"{PORTABLE} of ours takes 39 us, it 40" in found.reason
    assert "neither" not in found.reason


def a_peer_that_is_faster_than_the_portable_route_is_chosen_before_it(compiler):
    found = decided(compiler, rows(49.0, 48.0, 47.0), [pair(1.05)])
    assert (found.status, found.chosen, found.own) == ("external", PEER, PORTABLE)
    assert found.own_regret == pytest.approx(48 / 47 - 1) and found.regret == 0.0
    assert "neither beats nor ties" in found.reason and "of ours takes" not in found.reason


def a_native_loss_falls_back_on_the_portable_route_where_it_is_faster(compiler):
    found = decided(compiler, rows(47.0, 48.0, 49.0), [pair(1.05)])
    assert (found.chosen, found.own) == (PORTABLE, NATIVE)
    assert found.regret == pytest.approx(48 / 47 - 1)
    assert f"{PORTABLE} is the fallback" in found.reason


def a_peer_that_is_not_eligible_is_named_and_not_chosen(compiler):
    found = decided(compiler, [*rows(), row("sdpa_flash", 10.0)], [pair(0.8)])
    assert (found.chosen, found.regret) == (NATIVE, 0.0)
    assert "faster, but not eligible: sdpa_flash 10 us" in found.reason
    for us in (40.0, 90.0):
        found = decided(compiler, [*rows(), row("sdpa_flash", us)], [pair(0.8)])
        assert "not eligible" not in found.reason
    assert {each.route for each in found.candidates} == {
        *(NATIVE, PORTABLE, PEER, OTHER),
        "sdpa_flash",
    }


def the_fastest_peer_is_the_baseline(compiler):
    found = decided(compiler, [*rows()[:3], row(OTHER, 48.0)], [pair(0.8, NATIVE, OTHER)])
    assert (found.baseline, found.chosen) == (OTHER, NATIVE)
    assert decided(compiler, [*rows()[:3], row(OTHER, 48.0)], [pair(0.8)]).status == "unresolved"


def where_no_peer_is_correct_native_needs_no_pair_and_says_who_is_out(compiler):
    found = decided(compiler, [row(NATIVE), lost(PEER, "failed"), lost(OTHER)])
    assert (found.chosen, found.baseline, found.ratio) == (NATIVE, "", None)
    assert f"{NATIVE}: no eligible baseline is correct here" in found.reason
    assert f"{PEER} failed" in found.reason
    assert "pair" not in found.reason
    assert decided(compiler, [row(PORTABLE), lost(PEER), lost(OTHER)]).chosen == PORTABLE


def where_nothing_is_correct_it_is_unresolved(compiler):
    found = decided(compiler, [lost(NATIVE), lost(PEER, "failed"), lost(OTHER)])
    assert (found.status, found.own) == ("unresolved", "")
    assert found.missing == ("correct contender",) and found.own_regret is None
    found = decided(compiler, [], baselines=())
    assert found.missing == ("correct contender",) and found.candidates == ()


def where_only_a_peer_is_correct_it_is_chosen(compiler):
    found = decided(compiler, [lost(NATIVE), row(PEER), lost(OTHER)])
    assert (found.status, found.own, found.own_regret) == ("external", "", None)
    assert f"{PEER} is the fallback" in found.reason


def ties_go_by_role_and_then_by_name(compiler):
    same = [row(PORTABLE), row(OTHER_NATIVE), row(NATIVE), row(PEER), row(OTHER)]
    for order in (same, same[::-1]):
        found = decided(compiler, order, [pair(0.8, NATIVE, OTHER)])
        assert (found.own, found.baseline, found.chosen) == (NATIVE, OTHER, NATIVE)
        assert [each.route for each in found.candidates] == [
            *(NATIVE, OTHER_NATIVE, PORTABLE),
            *(OTHER, PEER),
        ]
        lose = decided(compiler, order, [pair(1.2, NATIVE, OTHER)])
        assert lose.chosen == PORTABLE


def the_median_is_the_time_of_a_row(compiler):
    times = good_samples(samples_us=(*[40.0] * 13, *[400.0] * 12))
    found = decided(compiler, [row(NATIVE, timing=times, floor_us=30.0), *rows()[1:]], [pair(0.8)])
    native = found.candidates[0]
    assert (native.p50_us, native.allocation_free) == (40.0, True)
    assert native.row == row(NATIVE, timing=times, floor_us=30.0).id
    out = {each.route: each for each in found.candidates}[OTHER]
    assert (out.p50_us, out.allocation_free, out.reasons) == (None, None, ("it says why",))


def the_side_is_kept(compiler):
    assert not decided(compiler, rows(), [pair(0.8)]).hold_out
    assert decided(compiler, rows(), [pair(0.8)], hold_out=True).hold_out


SCENARIOS = [
    each
    for name, each in list(globals().items())
    if isinstance(each, types.FunctionType)
    and each.__code__.co_varnames[:1] == ("compiler",)
    and name != "decided"
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_rule(scenario):
    scenario(phase_compiler)


# What a mutant of these expressions changes, nothing can show.
EQUIVALENT = {
    "row.outcome == 'ok' and row.timing is not None": "what is ok and untimed is refused before",
    "row.timing is not None": "what is ok and untimed is refused before",
    "is_ok and row.timing": "the second is for the type checker",
    "candidate is None or fastest is None": "where there is a candidate there is a fastest",
    "fastest is None": "where there is a candidate there is a fastest",
}


def test_every_mutant_is_noticed():
    alive, num_mutants = survivors(phase_compiler, SCENARIOS, EQUIVALENT)
    assert num_mutants >= 60
    assert not alive
