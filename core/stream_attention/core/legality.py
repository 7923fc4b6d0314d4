"""Whether a kernel may run on an architecture and does what its schedule says, from facts.

`RULES` is the table: name → rule over a `Candidate`. `reasons` says all that a candidate breaks.
"""

from __future__ import annotations

from dataclasses import dataclass

from stream_attention.core.arch_limits import (
    BLOCK_BARRIERS,
    BLOCK_THREADS,
    ArchLimits,
    ResourceFacts,
    block_registers,
    blocks_by,
    occupancy,
)
from stream_attention.core.ir import Rule, broken_rules
from stream_attention.core.schedule import KernelSchedule


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule, what its compiled kernel takes, and the architecture that it is to run on."""

    schedule: KernelSchedule
    facts: ResourceFacts
    limits: ArchLimits


def _launched(candidate: Candidate) -> tuple[int, int, int, int]:
    facts = candidate.facts
    return facts.threads, facts.dynamic_shared_bytes, facts.tmem_columns, facts.cluster_size


def _scheduled(candidate: Candidate) -> tuple[int, int, int, int]:
    of = candidate.schedule
    return of.threads, of.shared_bytes, of.tmem_columns, of.cluster_size


def _fitting(candidate: Candidate) -> tuple[int, dict[str, int]]:
    by = blocks_by(candidate.facts, candidate.limits)
    few = {name: blocks for name, blocks in by.items() if blocks < candidate.schedule.blocks_per_sm}
    return occupancy(candidate.facts, candidate.limits), few


RULES: dict[str, Rule] = {
    "target": Rule(
        "target",
        "must be code for this architecture",
        lambda c: c.schedule.target in c.limits.targets,
        lambda c: f"{c.limits.targets[-1]} for {c.limits.arch}",
        lambda c: c.schedule.target,
    ),
    "load_engine": Rule(
        "load_engine",
        "must be an instruction of this architecture",
        lambda c: c.schedule.load_engine in c.limits.load_engines,
        lambda c: c.limits.load_engines[-1],
        lambda c: c.schedule.load_engine,
    ),
    "mma_engine": Rule(
        "mma_engine",
        "must be an instruction of this architecture",
        lambda c: c.schedule.mma_engine in c.limits.mma_engines,
        lambda c: c.limits.mma_engines[-1],
        lambda c: c.schedule.mma_engine,
    ),
    "launch": Rule(
        "launch",
        "dependent launches need sm_90 or later",
        lambda c: c.schedule.launch == "plain" or c.limits.dependent_launch,
        lambda c: "plain",
        lambda c: c.schedule.launch,
    ),
    "facts": Rule(
        "(threads, dynamic_shared_bytes, tmem_columns, cluster_size)",
        "what is launched must be what the schedule says",
        lambda c: _launched(c) == _scheduled(c),
        _scheduled,
        _launched,
    ),
    "threads": Rule(
        "threads",
        f"a block has at most {BLOCK_THREADS}",
        lambda c: c.facts.threads <= BLOCK_THREADS,
        lambda c: BLOCK_THREADS,
        lambda c: c.facts.threads,
    ),
    "thread_registers": Rule(
        "registers",
        "a thread has at most 255",
        lambda c: c.facts.registers <= c.limits.thread_registers,
        lambda c: c.limits.thread_registers,
        lambda c: c.facts.registers,
    ),
    "block_registers": Rule(
        "registers of a block",
        "its warps must find theirs in every partition of a multiprocessor",
        lambda c: block_registers(c.facts, c.limits) <= c.limits.block_registers,
        lambda c: f"at most {c.limits.block_registers}, by fewer threads or registers",
        lambda c: block_registers(c.facts, c.limits),
    ),
    "shared_bytes": Rule(
        "shared_bytes",
        "static and dynamic together must be what a block may opt in to",
        lambda c: c.facts.shared_bytes <= c.limits.block_shared_bytes,
        lambda c: c.limits.block_shared_bytes,
        lambda c: c.facts.shared_bytes,
    ),
    "tmem_columns": Rule(
        "tmem_columns",
        "must be there on a multiprocessor",
        lambda c: c.facts.tmem_columns <= c.limits.tmem_columns,
        lambda c: c.limits.tmem_columns,
        lambda c: c.facts.tmem_columns,
    ),
    "cluster_size": Rule(
        "cluster_size",
        "must be a portable size",
        lambda c: c.facts.cluster_size <= c.limits.cluster_size,
        lambda c: c.limits.cluster_size,
        lambda c: c.facts.cluster_size,
    ),
    "barriers": Rule(
        "barriers",
        f"a block has at most {BLOCK_BARRIERS}",
        lambda c: c.facts.barriers <= BLOCK_BARRIERS,
        lambda c: BLOCK_BARRIERS,
        lambda c: c.facts.barriers,
    ),
    "spills": Rule(
        "spill_bytes",
        "registers must not be put into local memory and read back: that queues behind the loads",
        lambda c: c.facts.spill_bytes == 0,
        lambda c: 0,
        lambda c: c.facts.spill_bytes,
    ),
    "stack": Rule(
        "stack_bytes",
        "arrays must live in registers, not in local memory",
        lambda c: c.facts.stack_bytes == 0,
        lambda c: 0,
        lambda c: c.facts.stack_bytes,
    ),
    "occupancy": Rule(
        "blocks on a multiprocessor",
        "must be as many as the schedule counts on (beside it: what allows fewer)",
        lambda c: occupancy(c.facts, c.limits) >= c.schedule.blocks_per_sm,
        lambda c: f"blocks_per_sm={occupancy(c.facts, c.limits)}, or less of it",
        _fitting,
    ),
}


def reasons(schedule: KernelSchedule, facts: ResourceFacts, limits: ArchLimits) -> tuple[str, ...]:
    """Every rule that the kernel breaks, in words; empty where it is legal."""
    return tuple(map(str, broken_rules(Candidate(schedule, facts, limits), RULES.values())))
