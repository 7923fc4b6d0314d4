"""Each rule of legality accepts one kernel, and rejects it with one fact changed."""

import dataclasses

import pytest

from stream_attention.core import legality
from stream_attention.core.arch_limits import ARCHES, ResourceFacts
from stream_attention.core.schedule import KernelSchedule

COMMON = {
    "kernel": "kernel",
    "ownership": "query_tile",
    "orientation": "rows_on_m",
    "state_scope": "warp",
    "threads": 128,
    "rows": 64,
    "tile_tokens": 64,
    "head_dim": 64,
    "element_bytes": 2,
    "vector_elements": 8,
    "stages": 2,
    "shared_bytes": 20_000,
    "blocks_per_sm": 2,
    "softmax": "online",
}
SM_80 = KernelSchedule(
    name="sm_80", target="sm_80", load_engine="cp_async", mma_engine="mma_sync", **COMMON
)
SM_90 = KernelSchedule(
    name="sm_90",
    target="sm_90a",
    load_engine="tma_tensor",
    mma_engine="wgmma",
    launch="dependent",
    **COMMON,
)
SM_100 = KernelSchedule(
    name="sm_100",
    target="sm_100a",
    load_engine="tma_tensor",
    mma_engine="tcgen05",
    accumulator="tmem",
    tmem_columns=256,
    **COMMON,
)


def facts_for(schedule):
    return ResourceFacts(
        threads=schedule.threads,
        registers=128,
        dynamic_shared_bytes=schedule.shared_bytes,
        barriers=1,
        tmem_columns=schedule.tmem_columns,
        cluster_size=schedule.cluster_size,
    )


# Rule → (schedule that it accepts on its own architecture, changes of the schedule, of the facts,
# with which it rejects).
EXAMPLES = {
    "target": (SM_90, {"target": "sm_100a"}, {}),
    "load_engine": (SM_80, {"load_engine": "tma_bulk"}, {}),
    "mma_engine": (
        SM_100,
        {"mma_engine": "wgmma", "accumulator": "registers", "tmem_columns": 0},
        {"tmem_columns": 0},
    ),
    "launch": (SM_80, {"launch": "dependent"}, {}),
    "facts": (SM_90, {}, {"dynamic_shared_bytes": 19_999}),
    "threads": (SM_90, {"threads": 1152}, {"threads": 1152, "registers": 32}),
    "thread_registers": (SM_90, {}, {"registers": 256}),
    "block_registers": (SM_90, {"threads": 512}, {"threads": 512, "registers": 136}),
    "shared_bytes": (SM_80, {}, {"static_shared_bytes": 163 * 1024 - 20_000 + 1}),
    "tmem_columns": (SM_100, {"tmem_columns": 544}, {"tmem_columns": 544}),
    "cluster_size": (SM_90, {"cluster_size": 16}, {"cluster_size": 16}),
    "barriers": (SM_90, {}, {"barriers": 17}),
    "spills": (SM_90, {}, {"spill_bytes": 4}),
    "stack": (SM_90, {}, {"stack_bytes": 16}),
    "occupancy": (SM_90, {"blocks_per_sm": 5}, {}),
}
# What a block cannot have at all leaves no room for it either.
NO_ROOM = {"threads", "thread_registers", "block_registers", "shared_bytes", "tmem_columns"}
NO_ROOM |= {"barriers"}


def limits_of(schedule):
    return ARCHES[schedule.name]


def broken(schedule, facts, limits):
    candidate = legality.Candidate(schedule, facts, limits)
    return {name for name, rule in legality.RULES.items() if not rule.holds(candidate)}


def test_every_rule_has_an_accepting_and_a_rejecting_example():
    assert set(EXAMPLES) == set(legality.RULES)


@pytest.mark.parametrize("name", sorted(legality.RULES))
def test_a_rule_accepts(name):
    schedule = EXAMPLES[name][0]
    assert legality.reasons(schedule, facts_for(schedule), limits_of(schedule)) == ()


@pytest.mark.parametrize("name", sorted(legality.RULES))
def test_a_rule_rejects_alone_and_says_what_would_be_legal(name):
    schedule, changes, of_facts = EXAMPLES[name]
    made = dataclasses.replace(schedule, **{"blocks_per_sm": 1, **changes})
    facts = dataclasses.replace(facts_for(schedule), **of_facts)
    found = broken(made, facts, limits_of(schedule))
    assert found == {name} | ({"occupancy"} if name in NO_ROOM else set())
    reasons = legality.reasons(made, facts, limits_of(schedule))
    assert len(reasons) == len(found)
    rule = legality.RULES[name]
    (reason,) = [each for each in reasons if rule.text in each]
    assert reason.startswith(f"{rule.parameter}=")
    assert "; use " in reason


def test_all_reasons_come_at_once():
    facts = dataclasses.replace(facts_for(SM_80), spill_bytes=8, stack_bytes=8, registers=255)
    reasons = legality.reasons(dataclasses.replace(SM_80, blocks_per_sm=3), facts, ARCHES["sm_90"])
    assert len(reasons) == 4
    assert reasons[0] == (
        "target='sm_80': must be code for this architecture; use sm_90a for sm_90"
    )
    assert reasons[-1].startswith("blocks on a multiprocessor=(2, {'registers': 2}): must be as")
