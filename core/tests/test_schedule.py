"""The schedule's fields take documented words, each rule rejects, and records evaluate back."""

import dataclasses

import pytest

from stream_attention.core.ir import broken_rules
from stream_attention.core.schedule import (
    SCHEDULE_RULES,
    VOCABULARY,
    KernelSchedule,
)

WARPS = KernelSchedule(
    name="of_warps",
    kernel="decode_kernel",
    target="sm_90a",
    instances=("decode_kernel<8>", "decode_kernel<16>"),
    ownership="kv_range",
    orientation="tokens_on_m",
    state_scope="warp",
    threads=256,
    rows=8,
    tile_tokens=128,
    head_dim=128,
    element_bytes=2,
    vector_elements=8,
    load_engine="cp_async",
    gather="page_of_sixteen",
    stages=3,
    mma_engine="mma_sync",
    shared_bytes=106_128,
    blocks_per_sm=2,
    split="equal_ranges",
    merge="exchange",
    scheduler="device_ranges",
    launch="dependent_cooperative",
    softmax="online",
)
PRODUCTS = {"load_engine": "tma_tensor", "target": "sm_100a", "rows": 128, "tile_tokens": 64}
TENSOR_MEMORY = dataclasses.replace(
    WARPS, mma_engine="tcgen05", accumulator="tmem", tmem_columns=96, **PRODUCTS
)
# A legal schedule that the change of fields makes illegal by exactly the rule of that text.
REJECTED = {
    ("name", "must be a non-empty string"): (WARPS, {"name": ""}),
    ("kernel", "must be a non-empty string"): (WARPS, {"kernel": None}),
    ("target", "must be one of sm_80, sm_90a, sm_100a"): (WARPS, {"target": "sm_90"}),
    ("instances", "must be a tuple of distinct non-empty strings"): (
        WARPS,
        {"instances": ("a", "b", "a")},
    ),
    ("element_bytes", "must be an int >= 1"): (WARPS, {"element_bytes": 0}),
    ("vector_elements", "must be an int >= 1"): (WARPS, {"vector_elements": True}),
    ("blocks_per_sm", "must be an int >= 1"): (WARPS, {"blocks_per_sm": 0}),
    ("rows", "must be an int >= 0"): (
        dataclasses.replace(WARPS, mma_engine="none", orientation="none"),
        {"rows": -8},
    ),
    ("tile_tokens", "must be an int >= 0"): (
        dataclasses.replace(WARPS, mma_engine="none", orientation="none"),
        {"tile_tokens": -1},
    ),
    ("head_dim", "must be an int >= 0"): (WARPS, {"head_dim": -128}),
    ("stages", "must be an int >= 0"): (
        dataclasses.replace(WARPS, load_engine="ld_global", stages=0),
        {"stages": -1},
    ),
    ("tmem_columns", "must be an int >= 0"): (WARPS, {"tmem_columns": -32}),
    ("shared_bytes", "must be an int >= 0"): (
        dataclasses.replace(WARPS, load_engine="ld_global", stages=0),
        {"shared_bytes": -1},
    ),
    ("threads", "must be whole warps: a multiple of 32, at least 32"): (WARPS, {"threads": 40}),
    ("cluster_size", "must be a power of two"): (WARPS, {"cluster_size": 3}),
    ("threads", "warpgroup engines (wgmma, tcgen05) need whole warpgroups of 128"): (
        TENSOR_MEMORY,
        {"threads": 160},
    ),
    ("orientation", "must be none without an mma_engine, and name the operand on M with one"): (
        WARPS,
        {"orientation": "none", "rows": 16, "tile_tokens": 128},
    ),
    (
        "mma_engine",
        "M of the tile must be a multiple of 16 (mma_sync) or 64 (wgmma, tcgen05), N of 8",
    ): (WARPS, {"rows": 12}),
    ("accumulator", "must be tmem with tcgen05, registers without"): (
        TENSOR_MEMORY,
        {"accumulator": "registers", "tmem_columns": 0},
    ),
    (
        "tmem_columns",
        "must be a multiple of 32, positive with the accumulator in tmem and 0 without",
    ): (
        TENSOR_MEMORY,
        {"tmem_columns": 100},
    ),
    ("stages", "asynchronous loads need a ring of one slot at least; others have none"): (
        WARPS,
        {"stages": 0},
    ),
    (
        "shared_bytes",
        "must hold the ring: stages * tile_tokens * head_dim * element_bytes",
    ): (WARPS, {"shared_bytes": 3 * 128 * 128 * 2 - 1}),
    ("merge", "must be none where nothing is split, and join the parts where something is"): (
        WARPS,
        {"split": "none"},
    ),
    (
        "launch",
        "blocks that wait for one another (exchange, tree_exchange) must be resident together",
    ): (WARPS, {"launch": "dependent"}),
    ("cluster_size", "a merge in the cluster needs more than one block of it"): (
        dataclasses.replace(WARPS, merge="cluster", cluster_size=2),
        {"cluster_size": 1},
    ),
}
WORD_RULES = {
    (name, f"must be one of {', '.join(words)}"): words for name, words in VOCABULARY.items()
}


def rejected(schedule, changes):
    """What `dataclasses.replace` would make, unchecked."""
    made = object.__new__(KernelSchedule)
    for field in dataclasses.fields(KernelSchedule):
        value = changes.get(field.name, getattr(schedule, field.name))
        object.__setattr__(made, field.name, value)
    return made


def test_every_rule_has_an_accepting_and_a_rejecting_case():
    rules = [(rule.parameter, rule.text) for rule in SCHEDULE_RULES]
    assert len(rules) == len(set(rules))
    assert set(rules) == set(REJECTED) | set(WORD_RULES)


@pytest.mark.parametrize("rule", sorted(REJECTED), ids=str)
def test_a_rule_rejects_alone_and_accepts_what_it_was_changed_from(rule):
    schedule, changes = REJECTED[rule]
    assert not broken_rules(schedule, SCHEDULE_RULES)
    broken = [
        (fault.parameter, fault.rule)
        for fault in broken_rules(rejected(schedule, changes), SCHEDULE_RULES)
    ]
    assert rule in broken
    # Numbers that are none at all may break what is made of them too.
    assert len(broken) == 1 or rule[1].startswith("must be an int") or rule[0] == "orientation"
    with pytest.raises(ValueError, match=rule[0]):
        dataclasses.replace(schedule, **changes)


@pytest.mark.parametrize("field", sorted(VOCABULARY))
def test_a_field_takes_its_words_and_no_other(field):
    for word, meaning in VOCABULARY[field].items():
        assert meaning
        faults = broken_rules(rejected(WARPS, {field: word}), SCHEDULE_RULES)
        assert not [f for f in faults if f.rule.startswith("must be one of")]
    for word in ("", "no such word", None, ["online"], 3):
        with pytest.raises(ValueError, match=f"{field}=.*: must be one of .*; use '"):
            dataclasses.replace(WARPS, **{field: word})


def test_all_faults_come_at_once():
    with pytest.raises(ValueError, match="3 faults") as caught:
        dataclasses.replace(WARPS, threads=33, softmax="none", name="")
    assert "threads=33: must be whole warps: a multiple of 32, at least 32; use 32" in str(
        caught.value
    )


@pytest.mark.parametrize("schedule", [WARPS, TENSOR_MEMORY])
def test_repr_evaluates_back_and_leaves_defaults_out(schedule):
    assert eval(repr(schedule), {"KernelSchedule": KernelSchedule}) == schedule
    assert "cluster_size" not in repr(schedule)


def test_ring_bytes_are_those_of_its_tiles():
    assert WARPS.ring_bytes == 3 * 128 * 128 * 2
