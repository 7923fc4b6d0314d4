"""Cells and rows: what comes back through JSON, what is refused, and digests that stay."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_attention.core.errors import shown
from stream_attention.planner.cells import MAX_REQUESTS, Cell, cell_from_plain
from stream_attention.planner.evidence import (
    OUTCOMES,
    ROLES,
    EvidenceRow,
    PairRow,
    plain_of,
    row_from_plain,
)
from stream_attention.planner.evidence_rules import check_set, latest
from stream_attention.planner.evidence_testing import (
    good_cell,
    good_correctness,
    good_fingerprint,
    good_pair,
    good_row,
    good_samples,
    lost_pair,
    lost_row,
)
from stream_attention.planner.plain import canonical_json

CELL_DIGEST = "60d0fd98f89c912743c155461e10f3c6e06e79104edd0bc3037fd5a0385b5390"
ROW_ID = "9081e97617a6d706"
PAIR_ID = "98c9e99a099a4789"

numbers = st.floats()
words = st.text(min_size=1)
facts = st.dictionaries(words, words, max_size=3).map(lambda d: tuple(sorted(d.items())))


@st.composite
def cells(draw):
    queries = tuple(draw(st.lists(st.integers(0, 5), max_size=6)))
    tokens = tuple(draw(st.integers(0, 9)) * 100 for _ in queries)
    window = draw(st.none() | st.integers(0, 1000))
    return good_cell(tokens, queries, window_left=window, sm_scale=draw(st.floats(0, 1)))


correctness = st.none() | st.builds(
    good_correctness, max_error=st.none() | numbers, rms_bound=st.none() | numbers
)
timings = st.none() | st.builds(
    good_samples,
    samples_us=st.lists(numbers, max_size=5).map(tuple),
    method=words,
    calls_per_sample=st.integers(1, 9),
)
shared = {
    "cell": cells(),
    "environment": st.sampled_from([good_fingerprint("sm_90"), good_fingerprint("cpu")]),
    "versions": facts,
    "commit": st.text(),
    "command": st.text(),
    "taken_at": st.text(),
}
losses = st.sampled_from([("ok", ()), *((outcome, ("why",)) for outcome in OUTCOMES[1:])])


@st.composite
def rows(draw):
    fields = {name: draw(strategy) for name, strategy in shared.items()}
    fields["outcome"], fields["reasons"] = draw(losses)
    if draw(st.booleans()):
        kept = ("first_correctness", "second_correctness", "first_timing", "second_timing")
        found = (correctness, correctness, timings, timings)
        fields |= {name: draw(of) for name, of in zip(kept, found, strict=True)}
        return PairRow(first="a", second="b", **fields)
    return EvidenceRow(
        requested=draw(words),
        resolved=draw(st.text()),
        role=draw(st.sampled_from(ROLES)),
        correctness=draw(correctness),
        timing=draw(timings),
        floor_us=draw(st.none() | numbers),
        timed_allocations=draw(st.none() | st.integers(0, 9)),
        supports=tuple(draw(st.lists(st.text(), max_size=2))),
        kernel=draw(facts),
        clocks=draw(facts),
        **fields,
    )


def through_json(row):
    return row_from_plain(json.loads(canonical_json(plain_of(row))))


@given(rows())
@settings(deadline=None)
def test_a_row_comes_back_through_json(row):
    again = through_json(row)
    assert repr(again) == repr(row).replace("=-0.0", "=0.0").replace("(-0.0", "(0.0").replace(
        " -0.0", " 0.0"
    )
    assert again.id == row.id and again.cell == row.cell


@given(st.lists(rows(), max_size=4))
@settings(deadline=None)
def test_no_row_breaks_the_rules_that_judge_it(found):
    verdict = check_set(found)
    assert len(verdict.accepted) + len(verdict.refused) == len(found)
    kept, superseded = latest(found)
    assert {row.id for row in found} == {row.id for row in (*kept, *superseded)}


@given(cells())
@settings(deadline=None)
def test_a_cell_comes_back_through_json(cell):
    again = cell_from_plain(json.loads(canonical_json(cell.plain())))
    assert again == cell and again.digest == cell.digest


@pytest.mark.parametrize("row", [good_row(), good_pair(), lost_row(), lost_pair()])
def test_a_row_s_repr_evaluates_back(row):
    import stream_attention.core.problem as problem
    import stream_attention.planner.cells as cells_module
    import stream_attention.planner.evidence as evidence

    names = {**vars(problem), **vars(cells_module), **vars(evidence)}
    assert eval(repr(row), names) == row


def test_digests_are_known():
    """What was measured is found by these: a change of them orphans every row there is."""
    found = (good_cell().digest, good_row().id, good_pair().id)
    assert found == (CELL_DIGEST, ROW_ID, PAIR_ID)


def test_every_field_of_a_row_is_a_part_of_its_id():
    other = {
        "cell": good_cell((64,)),
        "requested": "triton",
        "resolved": "triton",
        "role": "portable",
        "environment": good_fingerprint("sm_80"),
        "correctness": None,
        "timing": good_samples(1.0),
        "timed_allocations": 1,
        "workspace_bytes": 1,
        "floor_us": 1.0,
        "versions": (("torch", "2.12"),),
        "supports": ("all",),
        "kernel": (),
        "clocks": (("sm", "1"),),
        "commit": "f" * 40,
        "command": "other",
        "taken_at": "2025-01-02T03:04:06Z",
    }
    changed = [dataclasses.replace(good_row(), **{name: value}) for name, value in other.items()]
    changed += [
        good_row(outcome="wrong", reasons=("x",)),
        good_row(outcome="wrong", reasons=("y",)),
    ]
    assert len({row.id for row in [good_row(), *changed]}) == len(changed) + 1
    names = {field.name for field in dataclasses.fields(EvidenceRow)}
    assert names == {*other, "outcome", "reasons"}


def test_lengths_are_kept_as_runs_and_each_order_is_its_own_cell():
    cell = good_cell((512, 512, 64))
    assert cell.plain()["kv_lens"] == [[2, 512], [1, 64]]
    assert cell.digest != good_cell((64, 512, 512)).digest
    assert cell.kv_tokens == 1088


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"problem": None}, "problem=None: must be an AttentionProblem"),
        (
            {"problem": dataclasses.replace(good_cell().problem, num_qo_heads=8 * 10**308)},
            "problem=.*must have ints of 64 bits alone",
        ),
        ({"qo_lens": [1, 1]}, "qo_lens=.*must be a tuple of ints"),
        ({"qo_lens": (2, 0)}, "none above max_qo_len"),
        ({"qo_lens": (1, 0)}, "sum to problem.total_qo_len"),
        ({"qo_lens": (True, 1)}, "must be a tuple of ints"),
        ({"kv_lens": (-1, 1)}, "kv_lens=.*must be a tuple of ints in 0..problem.kv_capacity"),
        ({"kv_lens": (4097, 1)}, "in 0..problem.kv_capacity"),
        ({"kv_lens": (1,)}, "must have problem.batch entries"),
    ],
)
def test_a_cell_that_contradicts_its_problem_is_refused(changes, said):
    cell = good_cell()
    fields = {"problem": cell.problem, "qo_lens": cell.qo_lens, "kv_lens": cell.kv_lens}
    with pytest.raises(ValueError, match=f"(?s){said}"):
        Cell(**{**fields, **changes})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("kv_lens", None, "must be a list of"),
        ("kv_lens", [[0, 1]], "count >= 1"),
        ("kv_lens", [[1, True]], "must be a list of"),
        ("kv_lens", [[10**15, 1]], "must be 2 lengths in all, as problem.batch"),
        ("qo_lens", [[1, 1]], "must have problem.batch entries"),
        ("problem", {}, "batch=None: is missing"),
        ("more", 1, "must have the keys problem, qo_lens and kv_lens alone"),
    ],
)
def test_a_cell_from_a_broken_file_is_refused(key, value, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        cell_from_plain({**good_cell().plain(), key: value})


def test_a_cell_of_absurdly_many_requests_costs_no_memory():
    plain, many = good_cell().plain(), 10**15
    plain["problem"] |= {"batch": many, "total_qo_len": many}
    plain["qo_lens"] = plain["kv_lens"] = [[many, 1]]
    with pytest.raises(ValueError, match=f"batch={many}: a cell has {MAX_REQUESTS} requests"):
        cell_from_plain(plain)


@pytest.mark.parametrize("plain", [None, [], {"problem": {}}])
def test_what_is_no_cell_is_refused(plain):
    with pytest.raises(ValueError, match="must have the keys problem, qo_lens and kv_lens alone"):
        cell_from_plain(plain)


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        (None, "schema=None: must be 'stream_attention.evidence/1'"),
        ({"schema": "stream_attention.evidence/2"}, "measure again"),
        ({"schema": [1]}, r"schema=\[1\]"),
        ({"schema": "stream_attention.evidence/1"}, "kind=None: must be one of single, pair"),
        ({"schema": "stream_attention.evidence/1", "kind": []}, r"kind=\[\]"),
        ({**plain_of(good_row()), "kind": "pair"}, "requested=.*is no key of it"),
        ({**plain_of(good_row()), "surplus": 1}, "surplus=1: is no key of it"),
        ({k: v for k, v in plain_of(good_row()).items() if k != "cell"}, "cell=None: is missing"),
        ({**plain_of(good_row()), "cell": {}}, "must have the keys problem"),
        ({**plain_of(good_row()), "outcome": "good"}, "outcome='good': must be one of ok"),
    ],
)
def test_what_is_no_row_is_refused_by_name(plain, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        row_from_plain(plain)


BAD_FIELDS = [
    (good_row, "cell", None, "must be a Cell"),
    (good_row, "environment", None, "must be a Fingerprint"),
    (good_row, "requested", "", "must be a non-empty string"),
    (good_row, "resolved", None, "must be a string"),
    (good_row, "role", "ours", "must be one of native, portable, external"),
    (good_row, "outcome", "slow", "must be one of ok, unsupported, failed, wrong"),
    (good_row, "reasons", ("why",), "none where the outcome is ok"),
    (good_row, "reasons", ["why"], "must be a tuple of non-empty strings"),
    (lost_row, "reasons", (), "else one at least"),
    (lost_row, "reasons", ("",), "must be a tuple of non-empty strings"),
    (good_row, "versions", (("b", "1"), ("a", "1")), "ascending by name"),
    (good_row, "versions", (("a", "1"), ("a", "2")), "ascending by name"),
    (good_row, "kernel", (("a", 1),), "must be a tuple of (name, value) strings"),
    (good_row, "clocks", {"a": "1"}, "must be a tuple of (name, value) strings"),
    (good_row, "supports", "all", "must be a tuple of strings"),
    (good_row, "correctness", 1, "must be a Correctness, or None"),
    (good_row, "timing", (1.0,), "must be a Samples, or None"),
    (good_row, "floor_us", "1", "must be a number, or None"),
    (good_row, "timed_allocations", -1, "must be an int >= 0 of 64 bits, or None"),
    (good_row, "workspace_bytes", 1.5, "must be an int >= 0 of 64 bits, or None"),
    (good_row, "workspace_bytes", 2**63, "must be an int >= 0 of 64 bits, or None"),
    (good_row, "floor_us", 10**310, "must be a number, or None"),
    (good_row, "commit", None, "must be a string"),
    (good_row, "command", None, "must be a string"),
    (good_row, "taken_at", 0, "must be a string"),
    (good_pair, "first", "", "must be a non-empty string"),
    (good_pair, "second", "sm90_decode", "must be another contender"),
    (good_pair, "first_correctness", 1, "must be a Correctness, or None"),
    (good_pair, "second_timing", 1, "must be a Samples, or None"),
    (good_fingerprint, "device", "", "must be a non-empty string"),
    (good_fingerprint, "driver", "", "must be a non-empty string, or None"),
    (good_fingerprint, "num_sms", 0, "must be an int >= 1"),
    (good_fingerprint, "l2_bytes", -1, "must be an int >= 0"),
    (good_fingerprint, "sm_clock_mhz", 1.5, "must be an int >= 1 of 64 bits, or None"),
    (good_correctness, "max_error", "0", "must be a number, or None"),
    (good_correctness, "rows_checked", -1, "must be an int >= 0"),
    (good_correctness, "tolerance", None, "must be a string"),
    (good_samples, "samples_us", [1.0], "must be a tuple of numbers"),
    (good_samples, "samples_us", (1.0, 10**400), "must be a tuple of numbers"),
    (good_samples, "samples_us", (-(10**5000),), "must be a tuple of numbers"),
    (good_correctness, "rms_bound", 10**400, "must be a number, or None"),
    (good_fingerprint, "l2_bytes", 10**400, "must be an int >= 0 of 64 bits"),
    (good_samples, "samples_us", (True,), "must be a tuple of numbers"),
    (good_samples, "method", "", "must be a non-empty string"),
    (good_samples, "num_pools", 0, "must be an int >= 1"),
]


@pytest.mark.parametrize(("make", "field", "value", "said"), BAD_FIELDS)
def test_a_record_of_a_wrong_form_cannot_be_made(make, field, value, said):
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(make(), **{field: value})
    assert f"{field}={shown(value)}: " in str(caught.value) and said in str(caught.value)


def test_a_row_of_nan_is_kept_and_has_an_id():
    row = good_row(
        correctness=good_correctness(max_error=math.nan), outcome="wrong", reasons=("x",)
    )
    again = through_json(row)
    assert math.isnan(again.correctness.max_error) and again.id == row.id


def test_a_pair_s_ratios_are_sample_by_sample():
    pair = good_pair(
        first_timing=good_samples(samples_us=(1.0, 3.0)),
        second_timing=good_samples(samples_us=(2.0, 2.0)),
    )
    assert pair.ratios == (0.5, 1.5)
    assert lost_pair().ratios == ()


def test_differences_name_what_differs_alone():
    one, other = good_fingerprint(), good_fingerprint(driver=None, num_sms=1)
    assert one.differences(other) == ("num_sms: 132, not 1", "driver: '580.1', not None")
    assert one.differences(good_fingerprint()) == ()
    assert one.digest != other.digest and one.digest == good_fingerprint().digest


def test_a_median_needs_a_sample():
    assert good_samples(samples_us=(3.0, 1.0, 2.0)).p50_us == 2.0
    with pytest.raises(ValueError, match="has no median"):
        good_samples(samples_us=()).p50_us  # noqa: B018
