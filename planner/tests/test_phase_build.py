"""From rows to a database: which rows count, what order and more rows change, sides and regret."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_attention.core.testing.mutants import survivors
from stream_attention.planner import phase_build, phase_regret
from stream_attention.planner.cell_requests import CellRequest
from stream_attention.planner.cost_model import features_of
from stream_attention.planner.evidence_rules import Context
from stream_attention.planner.evidence_testing import (
    COMMIT,
    TAKEN_AT,
    good_cell,
    good_correctness,
    good_fingerprint,
    good_pair,
    good_row,
    good_samples,
    lost_pair,
    lost_row,
)
from stream_attention.planner.phase_compiler import CellEvidence, decide
from stream_attention.planner.phase_db import loads

NATIVE, PORTABLE, PEER, OTHER = "sm90_decode", "triton", "flashinfer_xqa", "flashinfer_fa3"
LATER = "2025-01-03T00:00:00Z"
CELLS = [good_cell((1024 << step,) * batch) for batch in (1, 4, 16) for step in (0, 1, 2)]
REQUESTS = [
    CellRequest(cell=cell, name=f"cell {index}", baselines=(PEER, OTHER))
    for index, cell in enumerate(CELLS)
]


def times_of(cell):
    """Portable is the faster of ours where requests are many, native where they are few."""
    batch, tokens = cell.problem.batch, cell.kv_tokens
    launch = 4.0 + tokens * 1e-3
    return {NATIVE: launch + 0.5 * batch, PORTABLE: launch + 4.0, PEER: launch + 6.0}


def rows_of(cell):
    times = times_of(cell)
    singles = [good_row(cell, route, us) for route, us in times.items()]
    return [*singles, lost_row(cell, OTHER), good_pair(cell, NATIVE, PEER, 0.9)]


EVERY = [row for cell in CELLS for row in rows_of(cell)]


def compiled(rows=EVERY, requests=REQUESTS, build=phase_build, arch="sm_90", **options):
    return build.compile_database(arch, rows, requests, **options)


def cell_of(database, name="cell 0"):
    return {each.name: each for each in database.cells}[name]


def refused(database):
    return {each.row: " ".join(each.reasons) for each in database.refused}


# --- which rows count: scenarios of the module that builds ---------------------------------------


def good_rows_all_count(build):
    database = compiled(build=build)
    assert database.refused == () and database.environment == good_fingerprint()
    assert {each.status for each in database.cells} == {"native", "portable"}
    assert (database.commit, database.compiled_at) == (COMMIT, TAKEN_AT)
    assert len(database.models) == 3 and database.evidence == ()


def a_row_that_the_rules_refuse_is_reported_and_does_not_count(build):
    bad = good_row(CELLS[0], OTHER, 1.0, commit=f"{COMMIT}+abc")
    wrong = good_row(CELLS[0], OTHER, 1.0, correctness=good_correctness(max_error=9.0))
    for row, words in ((bad, "local_changes"), (wrong, "error_above_bound")):
        others = [each for each in EVERY if each.id != lost_row(CELLS[0], OTHER).id]
        database = compiled([row, *others], build=build)
        assert words in refused(database)[row.id]
        (found,) = database.refused
        assert (found.contender, found.cell) == (OTHER, CELLS[0].digest[:16])
        assert cell_of(database).missing == (f"outcome of {OTHER}",)


def a_pair_that_the_rules_refuse_is_reported_by_both_names(build):
    bad = good_pair(CELLS[0], NATIVE, PEER, 0.9, commit=f"{COMMIT}+abc")
    others = [row for row in EVERY if row.id != good_pair(CELLS[0], NATIVE, PEER, 0.9).id]
    database = compiled([bad, *others], build=build)
    assert [each.contender for each in database.refused] == [f"{NATIVE}:{PEER}"]
    assert cell_of(database).missing == (f"pair {NATIVE}:{PEER}",)


def a_row_of_a_cell_that_was_not_asked_for_is_reported(build):
    other = good_row(good_cell((512,)), PEER)
    database = compiled([other, *EVERY], build=build)
    assert "not among those" in refused(database)[other.id] and len(database.refused) == 1


def the_environment_of_most_rows_counts_and_no_other(build):
    other = good_row(CELLS[0], PEER, 1.0, environment=good_fingerprint(driver="1.0"))
    database = compiled([other, *EVERY], build=build)
    assert "environment: is not that of most rows: driver" in refused(database)[other.id]
    assert cell_of(database).regret == 0.0 and database.environment == good_fingerprint()


def the_callers_environment_counts_instead(build):
    facts = good_fingerprint(driver="1.0")
    one = good_row(CELLS[0], NATIVE, environment=facts)
    database = compiled([one, *EVERY], build=build, context=Context(environment=facts))
    assert database.environment == facts and len(database.refused) == len(EVERY)


def the_newest_row_of_a_contender_counts(build):
    newer = good_row(CELLS[0], PEER, 70.0, taken_at=LATER)
    for rows in ([newer, *EVERY], [*EVERY, newer]):
        database = compiled(rows, build=build)
        old = good_row(CELLS[0], PEER, times_of(CELLS[0])[PEER])
        assert "superseded" in refused(database)[old.id] and len(database.refused) == 1
        assert {c.route: c.p50_us for c in cell_of(database).candidates}[PEER] == 70.0
        assert database.compiled_at == LATER


def rows_of_two_sources_do_not_count_together(build):
    other = good_row(CELLS[0], NATIVE, 5.0, commit="f" * 40, taken_at=LATER)
    with pytest.raises(ValueError, match="mixed_commits"):
        compiled([other, *EVERY], build=build)
    same_time = good_row(CELLS[0], NATIVE, 5.0, commit="f" * 40)  # breaks a rule of its cell too
    with pytest.raises(ValueError, match=r"(?s)mixed_commits.*measured_twice"):
        compiled([same_time, *EVERY], build=build)
    database = compiled([other, *EVERY], build=build, context=Context(commit=COMMIT))
    assert "other_commit" in refused(database)[other.id] and database.commit == COMMIT


def an_absurd_floor_hides_no_absurd_time_and_costs_its_cell_alone(build):
    liar = good_row(CELLS[0], OTHER, 0.01, floor_us=0.01)
    others = [row for row in EVERY if row.id != lost_row(CELLS[0], OTHER).id]
    database = compiled([*others, liar], build=build)
    assert set(refused(database)) == {row.id for row in (*rows_of(CELLS[0])[:3], liar)} | {
        good_pair(CELLS[0], NATIVE, PEER, 0.9).id
    }
    said = refused(database)[liar.id]
    assert "floors_differ: floor_us=" in said and "row_implausible: " in said
    statuses = [each.status for each in database.cells]
    assert statuses.count("unresolved") == 1 and cell_of(database).status == "unresolved"
    alone = compiled([good_row(CELLS[0], NATIVE, 9.0), liar], build=build)
    assert alone.environment is None and len(alone.refused) == 2


def other_architectures_have_their_own_database(build):
    elsewhere = good_row(CELLS[0], "sm80_decode", 1.0, arch="sm_80")
    database = compiled([elsewhere, *EVERY], build=build)
    assert database == compiled(build=build) and database.refused == ()
    other = compiled([elsewhere, *EVERY], build=build, arch="sm_80")
    assert [c.route for c in cell_of(other).candidates] == ["sm80_decode"]
    assert {each.status for each in other.cells} == {"unresolved"}


def nothing_measured_resolves_nothing(build):
    database = compiled([], build=build)
    assert database.environment is None and database.models == () and database.commit == ""
    assert {each.status for each in database.cells} == {"unresolved"}
    assert cell_of(database).missing == (
        *(f"outcome of {PEER}", f"outcome of {OTHER}"),
        "correct contender",
    )


def cells_are_held_out_by_their_content(build):
    database = compiled(build=build, salt="a", hold_out_share=0.5)
    held = {each.name for each in database.cells if each.hold_out}
    assert 0 < len(held) < len(CELLS)
    renamed = [dataclasses.replace(each, name=f"x{each.name}") for each in REQUESTS]
    again = compiled(requests=renamed, build=build, salt="a", hold_out_share=0.5)
    assert {each.name for each in again.cells if each.hold_out} == {f"x{name}" for name in held}
    other = compiled(build=build, salt="b", hold_out_share=0.5)
    assert {each.name for each in other.cells if each.hold_out} != held
    calibration = {each.cell.digest[:16] for each in database.cells if not each.hold_out}
    for model in database.models:
        assert {point.cell for point in model.points} == calibration


def regret_is_of_ours_and_of_all(build):
    database = compiled(build=build, hold_out_share=0.5, salt="a")
    for summary in (database.own_regret, database.all_regret):
        # The least and the most bytes are outside of what the others measured.
        assert summary.leave_one_out.num_cells == len(CELLS) - 2
        assert summary.leave_one_out.num_outside == 2
        sides = summary.calibration.num_cells + summary.calibration.num_outside
        held = summary.hold_out.num_cells + summary.hold_out.num_outside
        assert sides == sum(not each.hold_out for each in database.cells)
        assert held == sum(each.hold_out for each in database.cells)
    alone = [row for row in EVERY if getattr(row, "requested", "") in (NATIVE, PEER, OTHER)]
    database = compiled(alone, build=build, hold_out_share=0.0)
    assert database.own_regret.calibration.num_cells == 0  # nothing to choose among ours
    assert database.all_regret.calibration.num_cells == len(CELLS)


def evidence_is_kept_in_order_and_once(build):
    files = [("sm_90-b", "2"), ("sm_90-a", "1"), ("sm_90-b", "2")]
    assert compiled(build=build, evidence=files).evidence == (files[1], files[0])


BUILD_SCENARIOS = [
    each
    for each in list(globals().values())
    if getattr(each, "__code__", None) and each.__code__.co_varnames[:1] == ("build",)
]


@pytest.mark.parametrize("scenario", BUILD_SCENARIOS, ids=lambda each: each.__name__)
def test_which_rows_count(scenario):
    scenario(phase_build)


def test_every_mutant_of_the_build_is_noticed():
    equivalent = {
        "0.25": "a choice",
        "context or Context()": "the same where none is given",
    }
    alive, num_mutants = survivors(phase_build, BUILD_SCENARIOS, equivalent)
    assert num_mutants >= 6
    assert not alive


# --- regret: scenarios of the module that judges the models --------------------------------------


def judged_of(regret, cell, times, name="cell", weight=1.0, hold_out=False, **row_changes):
    request = CellRequest(cell=cell, name=name, baselines=(PEER,), weight=weight)
    rows = tuple(good_row(cell, route, us, **row_changes) for route, us in times.items())
    return regret.Judged(request, decide(request, CellEvidence(rows), hold_out))


def seen(regret, held=()):
    return [
        judged_of(regret, cell, times_of(cell), f"cell {index}", hold_out=index in held)
        for index, cell in enumerate(CELLS)
    ]


def regret_is_what_the_models_choice_costs(regret):
    judged = seen(regret)
    models = regret.models_of(judged)
    # In this cell the truth is another than the models': they take native, portable is faster.
    odd = judged_of(regret, CELLS[0], {NATIVE: 20.0, PORTABLE: 16.0, PEER: 10.0}, "odd", 3.0)
    fine = judged_of(regret, CELLS[1], {NATIVE: 8.0, PORTABLE: 9.0, PEER: 10.0}, "fine", 1.0)
    own = regret.regrets([odd, fine], models)[0].calibration
    assert (own.num_cells, own.num_outside, own.worst_cell) == (2, 0, "odd")
    assert own.worst == pytest.approx(0.25)
    assert own.geometric_mean == pytest.approx(1.25**0.75 - 1)
    every = regret.regrets([odd, fine], models)[1].calibration
    assert every.worst == pytest.approx(1.0)


def cells_that_no_model_is_inside_of_are_counted_apart(regret):
    models = regret.models_of(seen(regret))
    far = judged_of(regret, good_cell((1 << 17,) * 64), {NATIVE: 900.0, PORTABLE: 800.0})
    found = regret.regrets([far], models)[0].calibration
    assert (found.num_cells, found.num_outside, found.worst) == (0, 1, None)


def where_there_is_one_route_there_is_no_choice(regret):
    models = regret.models_of(seen(regret))
    alone = judged_of(regret, CELLS[0], {NATIVE: 9.0, PEER: 5.0})
    assert regret.regrets([alone], models)[0].calibration.num_cells == 0
    assert regret.regrets([alone], models)[1].calibration.num_cells == 1


def models_see_calibration_alone(regret):
    judged = seen(regret, held=(0, 4))
    models = regret.models_of(judged)
    kept = {CELLS[index].digest[:16] for index in range(len(CELLS)) if index not in (0, 4)}
    assert len(models) == 3
    assert all({point.cell for point in model.points} == kept for model in models)
    found = regret.regrets(judged, models)[0]
    assert found.calibration.num_cells == len(CELLS) - 2
    assert found.hold_out.num_cells + found.hold_out.num_outside == 2


def a_cell_that_is_left_out_does_not_tell_its_own_time(regret):
    judged = seen(regret)
    liar = judged_of(regret, CELLS[4], {NATIVE: 500.0, PORTABLE: 5.0, PEER: 900.0}, "liar")
    found = regret.regrets([*judged[:4], liar, *judged[5:]], ())[0].leave_one_out
    # The others say that native is the faster here: a model of the liar itself would know better.
    assert (found.num_cells, found.worst_cell) == (len(CELLS) - 2, "liar")
    assert found.worst == pytest.approx(99.0)


def a_cell_that_is_left_out_is_asked_for_where_the_others_are(regret):
    judged = seen(regret)
    far = judged_of(regret, good_cell((1 << 17,) * 64), {NATIVE: 9.0, PORTABLE: 8.0})
    found = regret.regrets([*judged, far], ())[0].leave_one_out
    assert (found.num_cells, found.num_outside) == (len(CELLS) - 1, 2)  # now 16 x 4096 is inside


def what_would_tell_the_time_of_a_cell_that_is_left_out_is_left_out_too(regret):
    twin = good_cell((2048,) * 4, layout="HND")  # of the same terms
    told = judged_of(regret, twin, {NATIVE: 500.0, PORTABLE: 5.0, PEER: 900.0}, "twin")
    judged = [*seen(regret), told]
    models = regret._without(regret._measured(judged), judged[4])
    assert {model.route for model in models} == {NATIVE, PORTABLE, PEER}
    left = {cell.digest[:16] for cell in CELLS if cell != CELLS[4]}
    assert all({point.cell for point in model.points} == left for model in models)
    assert all(model.error_p50 is None for model in models)
    # Of the routes that did not compete on it, no model is needed.
    judged[4] = judged_of(regret, CELLS[4], {NATIVE: 9.0, PORTABLE: 8.0})
    models = regret._without(regret._measured(judged), judged[4])
    assert {model.route for model in models} == {NATIVE, PORTABLE}


def routes_that_are_wrong_or_allocate_beside_others_are_no_choice(regret):
    request = CellRequest(cell=CELLS[0], name="cell", baselines=(PEER,))
    rows = (
        good_row(CELLS[0], NATIVE, 9.0),
        good_row(CELLS[0], PORTABLE, 1.0, timed_allocations=3),
        lost_row(CELLS[0], PEER, "wrong", "by far"),
    )
    judged = regret.Judged(request, decide(request, CellEvidence(rows)))
    assert [each.route for each in judged.pool(with_peers=True)] == [NATIVE]
    assert regret.models_of([judged] * 1) == ()


def equal_estimates_go_by_role(regret):
    same = {NATIVE: 7.0, PORTABLE: 7.0, PEER: 7.0}
    judged = [judged_of(regret, cell, same) for cell in CELLS]
    models = regret.models_of(judged)
    odd = judged_of(regret, CELLS[0], {PEER: 5.0, PORTABLE: 8.0, NATIVE: 10.0})
    assert regret.regrets([odd], models)[1].calibration.worst == pytest.approx(1.0)


def the_worst_of_equals_is_named_by_order(regret):
    models = regret.models_of(seen(regret))
    odd = [judged_of(regret, CELLS[0], {NATIVE: 20.0, PORTABLE: 16.0}, name) for name in ("b", "a")]
    assert regret.regrets(odd, models)[0].calibration.worst_cell == "a"


REGRET_SCENARIOS = [
    each
    for name, each in list(globals().items())
    if getattr(each, "__code__", None)
    and each.__code__.co_varnames[:1] == ("regret",)
    and name not in ("judged_of", "seen")
]


@pytest.mark.parametrize("scenario", REGRET_SCENARIOS, ids=lambda each: each.__name__)
def test_regret(scenario):
    scenario(phase_regret)


def test_every_mutant_of_the_regret_is_noticed():
    alive, num_mutants = survivors(
        phase_regret, REGRET_SCENARIOS, {"2": "of whole numbers, 1 is all that is less"}
    )
    assert num_mutants >= 12
    assert not alive


# --- properties ----------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_order_and_number_of_the_rows_change_no_byte(numbers):
    rows = [*EVERY, *numbers.sample(EVERY, 5)]
    numbers.shuffle(rows)
    requests = list(REQUESTS)
    numbers.shuffle(requests)
    assert compiled(rows, requests).dumps() == FIRST


FIRST = compiled().dumps()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, len(CELLS) - 1),
    st.sampled_from(["sm90_other", "torch", "sdpa_flash", "flash_attn_4"]),
    st.floats(1.001, 100.0),
    st.integers(0, 2),
)
def test_slower_rows_change_no_choice(index, route, factor, allocations):
    cell = CELLS[index]
    slower = max(times_of(cell).values()) * factor
    row = good_row(cell, route, slower, timed_allocations=allocations)
    requests, rows = REQUESTS[index : index + 1], rows_of(cell)
    (before,) = compiled(rows, requests).cells
    (after,) = compiled([row, *rows], requests).cells
    for name in ("status", "chosen", "own", "baseline", "ratio", "regret", "own_regret"):
        assert getattr(after, name) == getattr(before, name)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([PEER, OTHER]),
    st.sampled_from(["gone", "refused", "failed", "wrong", "unsupported", "pair"]),
    st.floats(5.0, 500.0),
)
def test_a_baseline_that_is_lost_never_makes_native_win_silently(route, how, us):
    cell = CELLS[0]
    kept = [row for row in rows_of(cell) if getattr(row, "requested", "") != route]
    lost = []
    if how == "refused":
        lost = [good_row(cell, route, us, timing=good_samples(us, method="host"))]
    elif how == "pair":
        kept = [row for row in kept if not hasattr(row, "first")]
        lost = [good_row(cell, route, us)]
        lost.append(lost_pair(cell, NATIVE, route, "failed", "out of memory"))
    elif how != "gone":
        lost = [lost_row(cell, route, how, "it says why")]
    database = compiled([*kept, *lost], REQUESTS[:1])
    found = cell_of(database)
    if how in ("gone", "refused"):
        assert found.status == "unresolved" and f"outcome of {route}" in found.missing
        assert (how == "refused") == bool(database.refused)
    elif how == "pair":
        assert found.status == "unresolved"
    elif found.status == "native":
        assert f"{route} {how}" in found.reason


def test_the_same_cell_or_name_twice_is_refused():
    twice = [*REQUESTS, dataclasses.replace(REQUESTS[0], name="other")]
    with pytest.raises(ValueError, match="must differ from that of cell 0"):
        compiled([], twice)
    with pytest.raises(ValueError, match="must be there once"):
        compiled([], [REQUESTS[0], dataclasses.replace(REQUESTS[1], name="cell 0")])


def test_what_is_compiled_is_read_back_and_asked():
    database = loads(FIRST)
    assert database == compiled() and database.dumps() == FIRST
    problem = CELLS[random.Random(0).randrange(len(CELLS))].problem
    estimates = database.lookup(problem)
    assert estimates == compiled().lookup(problem) and features_of(problem)["batch"] > 0
    assert {each.route for each in estimates} == {NATIVE, PORTABLE, PEER}


# --- absurd times --------------------------------------------------------------------------------


@pytest.mark.parametrize("us", [1e-320, 1e-200, 1e-4, 1e10, 1e200, 1.7e308])
def test_times_without_measure_are_refused_and_end_no_compiler(us):
    rows = [
        good_row(cell, NATIVE, us, timing=good_samples(samples_us=(us,) * 25)) for cell in CELLS
    ]
    database = compiled(rows)
    assert database.models == () and database.environment is None
    assert len(refused(database)) == len(CELLS)
    assert all("time_range: timing.samples_us" in each for each in refused(database).values())


@pytest.mark.parametrize("us", [1e-3, 1e9])
def test_times_at_the_ends_of_the_range_are_compiled(us):
    rows = [
        good_row(cell, NATIVE, us, timing=good_samples(samples_us=(us,) * 25)) for cell in CELLS
    ]
    rows = [dataclasses.replace(row, floor_us=us) for row in rows]
    database = compiled(rows)
    assert database.refused == () and len(database.models) == 1
