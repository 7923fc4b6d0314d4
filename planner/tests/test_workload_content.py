"""The digest names what is computed, and JSON keeps everything."""

import dataclasses
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_attention.planner.page_tables import PageLayout
from stream_attention.planner.plain import canonical_json
from stream_attention.planner.workload_content import BATCH_KEYS, read_text
from stream_attention.planner.workloads import WorkloadBatch, WorkloadRequest

ROWS = (
    WorkloadRequest(kv_len=64, prefix_group=7, prefix_len=32),
    WorkloadRequest(kv_len=80, prefix_group=7, prefix_len=32),
    WorkloadRequest(kv_len=64, prefix_group=8, prefix_len=32),
    WorkloadRequest(kv_len=48, prefix_group=8, prefix_len=32),
    WorkloadRequest(phase="verify", qo_len=4, kv_len=60, tree=(-1, 0, 0, 2)),
    WorkloadRequest(phase="append", qo_len=30, kv_len=90),
)
BASE = WorkloadBatch(requests=ROWS, num_qo_heads=8, num_kv_heads=2, capacity=96)


def changed(**fields):
    return dataclasses.replace(BASE, **fields)


def with_row(index, **fields):
    rows = list(ROWS)
    rows[index] = dataclasses.replace(rows[index], **fields)
    return changed(requests=tuple(rows))


def renamed(batch, names):
    rows = (
        dataclasses.replace(row, prefix_group=names[row.prefix_group])
        if row.prefix_group is not None
        else row
        for row in batch.requests
    )
    return dataclasses.replace(batch, requests=tuple(rows))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.permutations([0, 1, 50, 7, 8]), st.text(max_size=5))
def test_labels_names_of_groups_and_order_are_no_content(seed, names, label):
    other = renamed(BASE, dict(zip((7, 8), names, strict=False)))
    rows = [dataclasses.replace(row, label=label) for row in other.requests]
    random.Random(seed).shuffle(rows)
    other = dataclasses.replace(other, requests=tuple(rows), label=label)
    assert other.content_digest == BASE.content_digest


@pytest.mark.parametrize(
    "same",
    [
        changed(head_dim_vo=128),
        changed(kv_dtype="bfloat16", out_dtype="bfloat16"),
        changed(sm_scale=128**-0.5),
        changed(capacity=None),
        with_row(5, phase="verify"),
        with_row(0, label="the first"),
    ],
)
def test_what_is_stated_and_what_a_default_means_are_one_content(same):
    assert same != BASE and same.content_digest == BASE.content_digest


def test_a_chain_is_no_tree_and_one_member_is_no_group():
    plain = WorkloadBatch(requests=(WorkloadRequest(phase="verify", qo_len=3, kv_len=40),))
    (row,) = plain.requests
    chain = dataclasses.replace(row, tree=(-1, 0, 1), prefix_group=4, prefix_len=16)
    assert WorkloadBatch(requests=(chain,)).content_digest == plain.content_digest


@pytest.mark.parametrize(
    "other",
    [
        with_row(5, kv_len=91),
        with_row(5, qo_len=31),
        with_row(4, tree=(-1, 0, 1, 1)),
        with_row(4, tree=None),
        with_row(0, prefix_group=8),
        with_row(0, prefix_group=None, prefix_len=0),
        changed(requests=ROWS[1:]),
        changed(requests=(*ROWS, ROWS[-1])),
        changed(num_qo_heads=16),
        changed(num_kv_heads=4),
        changed(head_dim_qk=64, head_dim_vo=128),
        changed(head_dim_vo=64),
        changed(q_dtype="float16"),
        changed(kv_dtype="float8_e4m3fn"),
        changed(kv_dtype="float8_e4m3fn", kv_scales="head"),
        changed(out_dtype="float32"),
        changed(layout="HND"),
        changed(page_size=8),
        changed(page_layout=PageLayout("sequential")),
        changed(capacity=128),
        changed(sm_scale=0.0),
        changed(logits_soft_cap=30.0),
        changed(has_sink=True),
        changed(return_lse=True),
        changed(batch_invariant=True),
    ],
)
def test_what_changes_the_computation_changes_the_digest(other):
    assert other.content_digest != BASE.content_digest


def test_phases_windows_and_dropout_are_content():
    rows = (WorkloadRequest(phase="prefill", qo_len=8, kv_len=8),)
    flat = WorkloadBatch(requests=rows, cache_kind="contiguous")
    train = (dataclasses.replace(rows[0], phase="train"),)
    variants = [
        flat,
        dataclasses.replace(flat, causal=False),
        dataclasses.replace(flat, window_left=4),
        dataclasses.replace(flat, causal=False, window_right=4),
        dataclasses.replace(flat, requests=train),
        dataclasses.replace(flat, requests=train, dropout_p=0.1, dropout_seed=0),
        dataclasses.replace(flat, requests=train, dropout_p=0.1, dropout_seed=1),
        dataclasses.replace(flat, requests=train, dropout_p=0.2, dropout_seed=0),
    ]
    assert len({batch.content_digest for batch in variants}) == len(variants)


def test_the_digest_stays_what_it_was():
    """Evidence is filed under digests: a change of this one orphans it."""
    batch = WorkloadBatch(requests=(WorkloadRequest(kv_len=4096),) * 2)
    assert batch.content_digest == PINNED


PINNED = "c4cadab24e185691be81f037a1f9cff21b1be58633660973692a0f55f29a35e1"


@pytest.mark.parametrize("batch", [BASE, with_row(0, label="a"), changed(sm_scale=0, label="b")])
def test_json_gives_the_batch_back(batch):
    text = json.dumps(batch.to_json())
    assert WorkloadBatch.from_json(json.loads(text)) == batch
    assert set(json.loads(text)) == set(BATCH_KEYS)


def test_json_holds_equal_neighbours_once():
    batch = WorkloadBatch(requests=(WorkloadRequest(kv_len=5),) * 65536)
    data = batch.to_json()
    assert [entry["count"] for entry in data["requests"]] == [65536]
    assert WorkloadBatch.from_json(data) == batch


def test_json_keys_are_all_the_fields_of_a_batch():
    names = {field.name for field in dataclasses.fields(WorkloadBatch)}
    assert set(BATCH_KEYS) == names | {"schema", "version"}


def without(data, key):
    return {name: value for name, value in data.items() if name != key}


DATA = BASE.to_json()
ENTRY = DATA["requests"][0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "batch='list': must be an object"),
        (without(DATA, "schema"), "batch.schema=None: must say what the object is"),
        ({**DATA, "version": 2}, "batch.version=2: this code reads version 1"),
        ({**DATA, "version": True}, "batch.version=True: this code reads version 1"),
        (
            {**DATA, "page_sizes": 16},
            "page_sizes=16: is no key of this object; use page_size",
        ),
        (without(DATA, "causal"), "batch.causal=None: is missing"),
        ({**DATA, "page_layout": {"order": "shuffled"}}, "batch.page_layout.spare_pages=None: is"),
        ({**DATA, "page_layout": None}, "batch.page_layout='NoneType': must be an object"),
        ({**DATA, "requests": {}}, "batch.requests='dict': must be a list"),
        ({**DATA, "requests": [3]}, r"batch.requests\[0\]='int': must be an object"),
        (
            {**DATA, "requests": [ENTRY, without({**ENTRY, "kvlen": 3}, "kv_len")]},
            r"batch.requests\[1\].kvlen=3: is no key of this object; use kv_len",
        ),
        ({**DATA, "requests": [{**ENTRY, "count": 0}]}, r"requests\[0\].count=0: must be an int"),
        ({**DATA, "requests": [{**ENTRY, "count": 10**12}]}, "all together at most 1048576"),
        ({**DATA, "layout": "DHN"}, "layout='DHN': must be one of"),
    ],
)
def test_bad_json_names_keys_and_values(data, message):
    with pytest.raises(ValueError, match=message):
        WorkloadBatch.from_json(data)


def test_unknown_and_missing_keys_are_reported_at_once():
    data = without({**DATA, "color": 1, "requests": [without(ENTRY, "tree")]}, "layout")
    with pytest.raises(ValueError) as error:
        WorkloadBatch.from_json(data)
    assert "batch.color=1" in str(error.value) and "batch.layout=None" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "file.json: is no JSON .Expecting"),
        ("[1]", "file.json: must hold an object, not list"),
        ('{"a": 1, "a": 2}', "key 'a' is given 2 times"),
        ('{"a": NaN}', "NaN is no number of JSON"),
        ("[" * 100_000, "file.json: is nested too deeply"),
    ],
)
def test_text_that_is_no_object_says_where(text, message):
    with pytest.raises(ValueError, match=message):
        read_text(text, "file.json")


def test_canonical_json_has_one_text_and_no_nan():
    assert canonical_json({"b": [1, "é"], "a": None}) == '{"a":null,"b":[1,"\\u00e9"]}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))
