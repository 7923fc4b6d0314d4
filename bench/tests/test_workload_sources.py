"""Sources of batches: strata cover what they name, boundaries are there, contents come once."""

import dataclasses
import itertools
import json

import pytest

from stream_attention.bench.batching import Batching
from stream_attention.bench.traces import Trace, TraceRequest
from stream_attention.bench.workload_sources import (
    SOURCES,
    STRATUM_BATCHES,
    STRATUM_HEADS,
    STRATUM_LENGTHS,
    STRATUM_PHASES,
    SourcedBatch,
    boundary,
    deduplicated,
    from_traces,
    strata,
    stratified,
)
from stream_attention.planner.workloads import WorkloadBatch, WorkloadRequest

LIKE = WorkloadBatch(requests=(WorkloadRequest(kv_len=1),), num_qo_heads=4, num_kv_heads=2)
TRACE = Trace(
    "t", "generic", (TraceRequest(0, 40, 5), TraceRequest(0, 9, 3), TraceRequest(9, 3, 3))
)


@pytest.fixture(scope="module")
def drawn():
    return list(stratified(seed=0))


@pytest.fixture(scope="module")
def marks():
    return {sourced.origin: sourced.batch for sourced in boundary()}


def test_every_stratum_is_covered_by_a_batch_within_it(drawn):
    fit, rest = strata()
    by_name = {stratum.name: stratum for stratum in (*fit, *rest)}
    assert len(by_name) == len(fit) + len(rest)
    assert {sourced.origin for sourced in drawn} == {stratum.name for stratum in fit}
    for sourced in drawn:
        stratum, batch = by_name[sourced.origin], sourced.batch
        assert sourced.source == "stratified"
        assert stratum.batches[0] <= batch.batch <= stratum.batches[1]
        assert stratum.lengths[0] <= min(batch.kv_lens)
        assert max(batch.kv_lens) <= stratum.lengths[1]
        heads = (batch.num_qo_heads, batch.num_kv_heads, batch.head_dim_qk)
        assert heads == stratum.heads
        assert batch.kv_bytes <= 16 << 30
        phases = {request.phase for request in batch.requests}
        if stratum.phase == "mixed":
            assert {"decode", "append"} <= phases and batch.problem().phase == "mixed"
        else:
            assert phases == {stratum.phase}


def test_strata_are_the_product_but_for_one_request_that_is_mixed():
    fit, rest = strata()
    pairs = {(s.phase, s.batches) for s in (*fit, *rest)}
    want = set(itertools.product(STRATUM_PHASES, STRATUM_BATCHES)) - {("mixed", (1, 1))}
    assert pairs == want
    assert len(fit) + len(rest) == len(want) * len(STRATUM_LENGTHS) * len(STRATUM_HEADS)


def test_strata_that_do_not_fit_are_named_and_not_drawn():
    fit, rest = strata(1 << 30)
    assert rest and all(stratum.least_kv_bytes > 1 << 30 for stratum in rest)
    found = list(stratified(0, most_kv_bytes=1 << 30))
    assert {sourced.origin for sourced in found} == {stratum.name for stratum in fit}
    assert max(sourced.batch.kv_bytes for sourced in found) <= 1 << 30


def test_a_draw_depends_on_its_seed_and_number_alone(drawn):
    again = {sourced.origin: sourced.batch for sourced in stratified(seed=0)}
    assert again == {sourced.origin: sourced.batch for sourced in drawn}
    more = {s.batch.content_digest for s in stratified(seed=0, per_stratum=2)}
    assert {s.batch.content_digest for s in drawn} <= more
    other = {sourced.origin: sourced.batch for sourced in stratified(seed=1)}
    assert sum(other[name] == batch for name, batch in again.items()) < len(again) / 10


def test_draws_vary_memory_form_and_dtype(drawn):
    forms = {(s.batch.cache_kind, s.batch.layout, s.batch.q_dtype) for s in drawn}
    assert len(forms) == 8


@pytest.mark.parametrize(
    "wanted",
    [
        *(f"length {n} {kind}" for n in (0, 1, 63, 64, 65) for kind in ("paged", "contiguous")),
        *(f"page {page}, length {page + step}" for page in (16, 64) for step in (-1, 0, 1)),
        *(f"first split, one request of {n}" for n in (255, 256, 257)),
        *(f"first split, four requests of {n}" for n in (511, 512, 513)),
        *(f"group {group}, length 4096" for group in (1, 3, 16)),
        *("more splits than tiles", "a tree of 15 tokens", "no queries beside one"),
        *("1 requests of 17", "65536 requests of 1", "65536 requests of 17"),
        *("2 queries", "16 queries", "17 queries", "63 queries", "64 queries", "65 queries"),
        *("64 requests share 64 pages", "64 requests share none"),
    ],
)
def test_boundaries_are_there(marks, wanted):
    assert wanted in marks


def test_boundary_batches_are_what_they_are_called(marks):
    assert marks["length 0 paged"].kv_lens == (0,)
    assert marks["page 64, length 65"].page_size == 64
    assert marks["page 64, length 65"].max_pages == 2
    group = marks["group 3, length 65"]
    assert group.num_qo_heads // group.num_kv_heads == 3
    assert min(marks["more splits than tiles"].kv_lens) <= 64
    shared = marks["64 requests share 64 pages"]
    assert shared.page_table(0)[1] == 64 + 64
    assert marks["64 requests share none"].kv_bytes == shared.kv_bytes
    assert {b.problem().phase for b in marks.values()} == {
        *("decode", "verify", "append", "prefill", "mixed", "train")
    }


def test_many_requests_are_light_as_data(marks):
    batch = marks["65536 requests of 17"]
    assert batch.batch == 65536
    assert len(json.dumps(batch.to_json())) < 2000
    assert len({id(request) for request in batch.requests}) == 1


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_gives_each_content_once(source):
    like = dataclasses.replace(LIKE, capacity=64)
    found = list(
        {
            "trace": lambda: from_traces([TRACE, TRACE], Batching(), like),
            "stratified": lambda: stratified(0),
            "boundary": boundary,
        }[source]()
    )
    digests = [sourced.batch.content_digest for sourced in found]
    assert len(set(digests)) == len(digests) > 3
    assert {sourced.source for sourced in found} == {source}


def test_steps_of_traces_can_be_thinned_and_cut():
    whole = [s.origin for s in from_traces([TRACE], Batching(), LIKE)]
    assert whole[0] == "t step 0" and len(whole) == 5
    assert [s.origin for s in from_traces([TRACE], Batching(), LIKE, every=2)] == whole[::2]
    assert [s.origin for s in from_traces([TRACE], Batching(), LIKE, most_steps=2)] == whole[:2]


def test_duplicates_are_dropped_across_sources_and_the_first_stays():
    batch = WorkloadBatch(requests=(WorkloadRequest(kv_len=5), WorkloadRequest(kv_len=6)))
    twin = dataclasses.replace(batch, requests=batch.requests[::-1], label="twin")
    other = dataclasses.replace(batch, layout="HND")
    rows = [SourcedBatch("trace", str(n), b) for n, b in enumerate((batch, twin, other, batch))]
    assert [sourced.origin for sourced in deduplicated(rows)] == ["0", "2"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stratified(0.5), "seed=0.5: must be an int"),
        (lambda: stratified(0, per_stratum=0), "per_stratum=0: must be an int >= 1"),
        (lambda: stratified(0, most_kv_bytes=0), "most_kv_bytes=0: must be an int >= 1"),
        (lambda: from_traces([], Batching(), LIKE, every=0), "every=0: must be an int >= 1"),
        (lambda: from_traces([], Batching(), LIKE, most_steps=-1), "most_steps=-1: must be None"),
    ],
)
def test_bad_arguments_are_named_before_the_first_batch(call, message):
    with pytest.raises(ValueError, match=message):
        call()
