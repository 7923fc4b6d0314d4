"""Calibration and hold-out: nothing moves, duplicates land together, shares are kept."""

import dataclasses
import hashlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stream_attention.planner.split import HOLD_OUT, SIDES, assignment, split
from stream_attention.planner.workloads import WorkloadBatch, WorkloadRequest


def batch_of(kv_lens, label="", group=None):
    prefix = {} if group is None else {"prefix_group": group, "prefix_len": 16}
    rows = tuple(WorkloadRequest(kv_len=16 + n, label=label, **prefix) for n in kv_lens)
    return WorkloadBatch(requests=rows, label=label)


LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=4)
CORPUS = st.lists(LENGTHS, max_size=12)
SHARES = st.sampled_from([0.0, 0.2, 0.5, 1.0])


def digests(batches):
    return [batch.content_digest for batch in batches]


@settings(max_examples=60, deadline=None)
@given(CORPUS, CORPUS, SHARES, st.integers(0, 12))
@example(first=[[1], [2]], more=[[3]], share=0.5, place=0)
def test_adding_workloads_moves_none(first, more, share, place):
    small = [batch_of(lens) for lens in first]
    large = small[:place] + [batch_of(lens) for lens in more] + small[place:]
    before, after = split(small, "a", share), split(large, "a", share)
    assert set(digests(before.calibration)) <= set(digests(after.calibration))
    assert set(digests(before.hold_out)) <= set(digests(after.hold_out))


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.randoms(use_true_random=False), SHARES)
def test_duplicates_land_together_whatever_they_are_called(lens, rng, share):
    shuffled = list(lens)
    rng.shuffle(shuffled)
    twins = [batch_of(lens, group=1), batch_of(shuffled, label="twin", group=rng.randint(2, 99))]
    found = split(twins, "a", share)
    assert len(found.calibration) + len(found.hold_out) == 1
    assert len({assignment(twin.content_digest, "a", share) for twin in twins}) == 1


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=8), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_only_moves_to_hold_out(content, one, other):
    digest = hashlib.sha256(content).hexdigest()
    small, large = sorted((one, other))
    if assignment(digest, "a", small) == HOLD_OUT:
        assert assignment(digest, "a", large) == HOLD_OUT


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("salt", ["a", "b"])
def test_the_share_is_the_one_asked_for(share, salt):
    names = [hashlib.sha256(bytes([n % 256, n // 256])).hexdigest() for n in range(4000)]
    held = sum(assignment(name, salt, share) == HOLD_OUT for name in names)
    # Five standard deviations of a binomial count; 0 and 1 are exact.
    assert abs(held - share * 4000) <= 5 * (4000 * share * (1 - share)) ** 0.5


def test_another_salt_draws_another_split():
    names = [hashlib.sha256(bytes([n])).hexdigest() for n in range(200)]
    sides = [[assignment(name, salt, 0.5) for name in names] for salt in ("a", "b")]
    agree = sum(one == other for one, other in zip(*sides, strict=True))
    assert 60 < agree < 140


def test_an_assignment_stays_what_it_was():
    names = [hashlib.sha256(bytes([n])).hexdigest() for n in range(8)]
    assert [SIDES.index(assignment(name, "hold-out", 0.5)) for name in names] == PINNED


PINNED = [0, 0, 0, 1, 0, 1, 0, 0]


def test_each_content_is_kept_once_and_first():
    first, twin = batch_of([1, 2], "first"), batch_of([2, 1], "twin")
    found = split([first, twin], "a", 1.0)
    assert found.hold_out == (first,) and found.calibration == ()
    assert dataclasses.replace(first, label="x") != first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"digest": "ab"}, "digest='ab': must be 64 hex digits"),
        ({"digest": "AB" * 32}, "must be 64 hex digits in lower case"),
        ({"salt": ""}, "salt='': must be a str that is not empty"),
        ({"hold_out_share": 1.5}, "hold_out_share=1.5: must be a number in 0..1; use 1"),
        ({"hold_out_share": float("nan")}, "hold_out_share=nan: .*; use 0.2"),
        ({"hold_out_share": True}, "hold_out_share=True"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    good = {"digest": "ab" * 32, "salt": "a", "hold_out_share": 0.2}
    with pytest.raises(ValueError, match=message):
        assignment(**{**good, **changes})


def test_all_bad_arguments_are_named_at_once():
    with pytest.raises(ValueError, match="assignment: 3 faults"):
        assignment("x", "", -1)
