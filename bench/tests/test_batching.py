"""Continuous batching: every token of a trace is computed once, within the limits of a step."""

import dataclasses
import itertools
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_attention.bench.batching import Batching, simulate
from stream_attention.bench.traces import Trace, TraceRequest
from stream_attention.planner.workloads import WorkloadBatch, WorkloadRequest

LIKE = WorkloadBatch(requests=(WorkloadRequest(kv_len=1),), num_qo_heads=4, num_kv_heads=2)


def trace_of(*rows, block_tokens=0):
    return Trace("t", "generic", tuple(TraceRequest(*row) for row in rows), block_tokens)


@st.composite
def traces(draw):
    gaps = draw(st.lists(st.integers(0, 30_000), min_size=1, max_size=8))
    arrivals = itertools.accumulate(gaps)
    return trace_of(*((at, draw(st.integers(1, 40)), draw(st.integers(0, 6))) for at in arrivals))


@st.composite
def batchings(draw):
    most = draw(st.integers(1, 4))
    return Batching(
        max_batch=most,
        chunk_tokens=draw(st.integers(1, 20)),
        budget_tokens=most + draw(st.integers(0, 20)),
    )


@settings(max_examples=100, deadline=None)
@given(traces(), batchings())
def test_every_token_is_computed_once_and_in_order(trace, batching):
    done = defaultdict(int)
    finished, steps = [], 0
    for batch in simulate(trace, batching, LIKE):
        steps += 1
        assert batch.batch <= batching.max_batch
        assert batch.num_qo_tokens <= batching.budget_tokens
        for row in batch.requests:
            index = int(row.label.removeprefix("request "))
            request = trace.requests[index]
            assert row.kv_len == done[index] + row.qo_len, "tokens follow those before them"
            done[index] = row.kv_len
            decodes = row.kv_len > request.prompt_tokens
            assert (row.phase == "decode") == decodes
            assert decodes or row.qo_len <= batching.chunk_tokens
            if row.phase == "prefill":
                assert row.qo_len == row.kv_len
            if row.kv_len == request.prompt_tokens:
                finished.append(index)
    for index, request in enumerate(trace.requests):
        assert done[index] == request.prompt_tokens + max(request.output_tokens - 1, 0)
    assert sorted(finished) == list(range(len(trace.requests)))
    assert steps <= sum(r.prompt_tokens + r.output_tokens for r in trace.requests)


def steps_of(trace, **fields):
    batches = simulate(trace, Batching(**fields), LIKE)
    return [[(row.phase, row.qo_len, row.kv_len) for row in b.requests] for b in batches]


def test_decodes_go_first_and_prompts_take_what_is_left():
    trace = trace_of((0, 3, 4), (0, 10, 2))
    assert steps_of(trace, max_batch=2, chunk_tokens=4, budget_tokens=5) == [
        [("prefill", 3, 3), ("prefill", 2, 2)],
        [("decode", 1, 4), ("append", 4, 6)],
        [("decode", 1, 5), ("append", 4, 10)],
        [("decode", 1, 6), ("decode", 1, 11)],
    ]


def test_a_request_waits_for_its_arrival_and_for_room():
    trace = trace_of((0, 1, 3), (25, 1, 1))
    early = steps_of(trace, max_batch=2, step_us=10, query_token_us=0)
    assert [len(step) for step in early] == [1, 1, 1, 1]
    slow = steps_of(trace, max_batch=2, step_us=30, query_token_us=0)
    assert [len(step) for step in slow] == [1, 2, 1]
    full = steps_of(trace, max_batch=1, step_us=30, query_token_us=0)
    assert [len(step) for step in full] == [1, 1, 1, 1]


def test_step_times_grow_with_the_tokens():
    trace = trace_of((0, 100, 3), (1000, 1, 1))
    counts = [
        [len(step) for step in steps_of(trace, step_us=1, query_token_us=us)] for us in (1.0, 20.0)
    ]
    assert counts == [[1, 1, 1, 1], [1, 2, 1]]


def test_equal_first_blocks_are_a_shared_prefix_in_whole_pages():
    rows = (
        (0, 100, 5, (1, 2, 3)),
        (0, 90, 5, (1, 2, 9)),
        (0, 80, 5, (7, 2)),
    )
    trace = trace_of(*rows, block_tokens=40)
    batches = list(simulate(trace, Batching(chunk_tokens=1000), LIKE))
    shared = [(row.prefix_group, row.prefix_len) for row in batches[1].requests]
    assert shared == [(1, 80), (1, 80), (None, 0)]
    table, pages = batches[1].page_table(0)
    assert table[0, :5].tolist() == table[1, :5].tolist() and pages == 7 + 1 + 6
    chunked = next(iter(simulate(trace, Batching(chunk_tokens=36), LIKE)))
    assert [row.prefix_len for row in chunked.requests] == [32, 32, 0], "only what is held"
    flat = dataclasses.replace(LIKE, cache_kind="contiguous")
    assert all(not r.prefix_len for b in simulate(trace, Batching(), flat) for r in b.requests)


def test_capacity_and_geometry_are_those_of_the_example():
    like = dataclasses.replace(LIKE, capacity=128, layout="HND", label="mine")
    batches = list(simulate(trace_of((0, 127, 2)), Batching(), like))
    assert {(b.capacity, b.layout, b.num_qo_heads) for b in batches} == {(128, "HND", 4)}
    assert [b.label for b in batches] == ["t step 0", "t step 1"]
    with pytest.raises(ValueError, match=r"capacity=128: request 0 of t grows to 129.*use 144"):
        simulate(trace_of((0, 127, 3)), Batching(), like)
    row = WorkloadRequest(phase="train", qo_len=4, kv_len=4)
    train = dataclasses.replace(LIKE, requests=(row,), cache_kind="contiguous")
    with pytest.raises(ValueError, match="a serving loop does not train"):
        simulate(trace_of((0, 1, 1)), Batching(), train)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_batch": 0}, "max_batch=0: must be an int >= 1; use 64"),
        ({"chunk_tokens": 1.5}, "chunk_tokens=1.5: must be an int >= 1"),
        ({"step_us": 0}, "step_us=0: must be an int >= 1"),
        ({"query_token_us": float("nan")}, "query_token_us=nan: must be a number in"),
        ({"query_token_us": "1"}, "query_token_us='1': must be a number in"),
        (
            {"max_batch": 9, "budget_tokens": 8},
            "budget_tokens=8: must be at least .*; use 9",
        ),
    ],
)
def test_bad_limits_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Batching(**fields)
