"""Cohorts of a batch: a partition by each request's own queries, and a place for every row."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_attention.planner.cohorts import (
    IDLE,
    MACROS,
    Cohort,
    lay_out,
    offsets,
    partition,
    to_run,
)

BY_NAME = {macro.name: macro for macro in MACROS}
LENS = st.lists(st.sampled_from((0, 1, 1, 2, 3, 8, 16, 17, 64, 65, 200)), max_size=40)
GROUPS = st.sampled_from((1, 2, 5, 8, 64))
each_macro = pytest.mark.parametrize("macro", MACROS, ids=lambda macro: macro.name)


@each_macro
@settings(max_examples=100, deadline=None)
@given(qo_lens=LENS, group=GROUPS)
def test_cohorts_partition_the_requests_and_keep_their_order(macro, qo_lens, group):
    cohorts = partition(qo_lens, group, macro)
    every = [request for cohort in cohorts for request in cohort.requests]
    assert sorted(every) == list(range(len(qo_lens)))
    for cohort in cohorts:
        assert cohort.requests
        assert list(cohort.requests) == sorted(cohort.requests)
        assert cohort.qo_lens == tuple(qo_lens[request] for request in cohort.requests)
    order = [name for name, _ in macro.classes]
    places = [order.index(cohort.name) for cohort in cohorts]
    assert places == sorted(set(places))
    assert partition(tuple(qo_lens), group, macro) == cohorts


@each_macro
@settings(max_examples=50, deadline=None)
@given(qo_lens=LENS, others=LENS, group=GROUPS)
def test_a_request_s_class_does_not_depend_on_who_else_is_there(macro, qo_lens, others, group):
    def classes(lens):
        return {r: c.name for c in partition(lens, group, macro) for r in c.requests}

    alone, beside = classes(qo_lens), classes([*others, *qo_lens])
    for request, name in alone.items():
        assert beside[len(others) + request] == name


@each_macro
@settings(max_examples=100, deadline=None)
@given(qo_lens=LENS, group=GROUPS)
def test_every_row_has_one_place_and_comes_back_from_where_it_went(macro, qo_lens, group):
    cohorts = to_run(qo_lens, group, macro)
    layout = lay_out(qo_lens, cohorts)
    starts = offsets(qo_lens)
    written = []
    for cohort, place in zip(cohorts, layout.places, strict=True):
        own = [row for r in cohort.requests for row in range(starts[r], starts[r + 1])]
        span = range(*place.rows)
        assert [layout.rows[n] for n in span] == own if place.rows_gathered else list(span) == own
        written += [] if place.rows_gathered else span
        span = range(*place.requests)
        found = [layout.requests[n] for n in span] if place.requests_gathered else list(span)
        assert found == list(cohort.requests)
        # What lies together is not gathered.
        neighbours = all(b == a + 1 for a, b in itertools.pairwise(cohort.requests))
        assert place.requests_gathered != neighbours
        assert place.rows_gathered <= place.requests_gathered
    for span, sources in layout.returns:
        assert [layout.rows[source] for source in sources] == list(range(*span))
        written += range(*span)
    assert sorted(written) == list(range(sum(qo_lens)))
    # Copies back lie between cohorts in place, so that there are never many.
    assert len(layout.returns) <= 1 + sum(not place.rows_gathered for place in layout.places)


def test_classes_of_phases_and_of_rows():
    names = {
        ("phases", 0, 4): IDLE,
        ("phases", 1, 4): "decode",
        ("phases", 2, 4): "verify",
        ("phases", 16, 4): "verify",
        ("phases", 17, 4): "prefill",
        ("cohorts", 0, 4): IDLE,
        ("cohorts", 1, 4): "decode",
        ("cohorts", 1, 64): "decode",
        ("cohorts", 2, 1): "rows_2_8",
        ("cohorts", 2, 4): "rows_2_8",
        ("cohorts", 3, 4): "rows_9_64",
        ("cohorts", 16, 4): "rows_9_64",
        ("cohorts", 17, 4): "rows_65_up",
        ("unified", 0, 4): "all",
        ("unified", 99, 4): "all",
    }
    for (macro, qo_len, group), name in names.items():
        assert BY_NAME[macro].class_of(qo_len, group) == name, (macro, qo_len, group)


def test_requests_without_queries_run_in_no_cohort_of_phases():
    assert [c.requests for c in to_run((0, 1, 0, 1), 2, BY_NAME["phases"])] == [(1, 3)]
    assert [c.requests for c in to_run((0, 1), 2, BY_NAME["unified"])] == [(0, 1)]
    assert [c.requests for c in to_run((0, 0), 2, BY_NAME["phases"])] == [(0, 1)]
    assert [c.requests for c in to_run((), 2, BY_NAME["phases"])] == [()]


def test_neighbours_lie_in_place_and_an_idle_one_between_them_parts_only_requests():
    (place,) = lay_out((0, 1, 0, 1), to_run((0, 1, 0, 1), 2, BY_NAME["phases"])).places
    assert (place.rows, place.rows_gathered) == ((0, 2), False)
    assert (place.requests, place.requests_gathered) == ((0, 2), True)


def test_a_cohort_is_checked_and_evaluates_back():
    cohort = Cohort("decode", (0, 3), (1, 1))
    assert eval(repr(cohort), {"Cohort": Cohort}) == cohort
    with pytest.raises(ValueError) as caught:
        Cohort("decode", (3, 0), (1, -1, 2))
    assert str(caught.value).splitlines() == [
        "Cohort: 2 faults",
        "  requests=(3, 0): must be a tuple of ints >= 0, strictly ascending",
        "  qo_lens=(1, -1, 2): must be a tuple of ints >= 0, one a request",
    ]
