"""What one block and one multiprocessor of an architecture have, and how many blocks fit there.

`ARCHES` is data with its sources. `ResourceFacts` is what a compiled kernel takes; `occupancy`
says how many blocks of it are resident on a multiprocessor at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from stream_attention.core.ir import Rule, check_rules, evaluable_repr, is_int

WARP = 32
BLOCK_THREADS = 1024
BLOCK_BARRIERS = 16
"""Named barriers of a block (PTX ISA 9.0, bar / barrier: resources 0 .. 15)."""
TMEM_LANES = 128
"""Lanes of tensor memory, of 32 bits a column (PTX ISA 9.0, Tensor Memory)."""


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class ArchLimits:
    """Limits of an architecture, which `sources` gives.

    arch: as `DeviceFacts.arch`. targets: what code of this architecture is compiled for. Numbers
    without `block_` or `thread_` in their names are a multiprocessor's. thread_registers: most of a
    thread. register_unit: registers are given to a warp in multiples of so many; partitions: of
    the multiprocessor, each with its part of the registers. shared_bytes: at the largest carve-out.
    block_shared_bytes: what a block may opt in to, static and dynamic together.
    reserved_shared_bytes: what the system takes of every block. shared_unit: blocks get shared
    memory in multiples of so many bytes. barriers: named ones; before sm_90 all blocks have all of
    theirs. tmem_columns: of tensor memory.
    cluster_size: most blocks of a portable cluster; 1 where there are none. load_engines,
    mma_engines: words of `schedule.VOCABULARY` for which there are instructions.
    dependent_launch: programmatic dependent launch.
    """

    arch: str
    targets: tuple[str, ...]
    sources: tuple[str, ...]
    threads: int = 2048
    warps: int = 64
    blocks: int = 32
    registers: int = 65_536
    block_registers: int = 65_536
    thread_registers: int = 255
    register_unit: int = 256
    partitions: int = 4
    shared_bytes: int
    block_shared_bytes: int
    reserved_shared_bytes: int = 1024
    shared_unit: int = 128
    barriers: int = 64
    tmem_columns: int = 0
    cluster_size: int = 1
    load_engines: tuple[str, ...]
    mma_engines: tuple[str, ...]
    dependent_launch: bool = False

    __repr__ = evaluable_repr


_GUIDE = "CUDA C++ Programming Guide 13.0, Compute Capabilities, Technical Specifications"
_OCCUPANCY = "cuda_occupancy.h of CUDA 13.0: allocation units, partitions, barriers"

SM_80 = ArchLimits(
    arch="sm_80",
    targets=("sm_80",),
    sources=(
        f"{_GUIDE} (8.0): threads, warps, blocks, registers, 164 KB shared, 163 KB a block",
        _OCCUPANCY,
        "PTX ISA 9.0: cp.async needs sm_80; mma.sync of bf16 sm_80",
    ),
    shared_bytes=164 << 10,
    barriers=32 * BLOCK_BARRIERS,
    block_shared_bytes=163 << 10,
    load_engines=("ld_global", "cp_async"),
    mma_engines=("none", "mma_sync"),
)
SM_90 = ArchLimits(
    arch="sm_90",
    targets=("sm_90", "sm_90a"),
    sources=(
        f"{_GUIDE} (9.0): threads, warps, blocks, registers, 228 KB shared, 227 KB a block",
        f"{_GUIDE}, Thread Block Clusters: 8 blocks are portable",
        _OCCUPANCY,
        "PTX ISA 9.0: cp.async.bulk and griddepcontrol need sm_90, wgmma sm_90a",
    ),
    shared_bytes=228 << 10,
    block_shared_bytes=227 << 10,
    cluster_size=8,
    load_engines=("ld_global", "cp_async", "tma_bulk", "tma_tensor"),
    mma_engines=("none", "mma_sync", "wgmma"),
    dependent_launch=True,
)
SM_100 = ArchLimits(
    arch="sm_100",
    targets=("sm_100", "sm_100a"),
    sources=(
        f"{_GUIDE} (10.0): threads, warps, blocks, registers, 228 KB shared, 227 KB a block",
        f"{_GUIDE}, Thread Block Clusters: 8 blocks are portable",
        _OCCUPANCY,
        "PTX ISA 9.0: tcgen05 needs sm_100a, has 512 columns of tensor memory; no wgmma",
    ),
    shared_bytes=228 << 10,
    block_shared_bytes=227 << 10,
    tmem_columns=512,
    cluster_size=8,
    load_engines=("ld_global", "cp_async", "tma_bulk", "tma_tensor"),
    mma_engines=("none", "mma_sync", "tcgen05"),
    dependent_launch=True,
)
ARCHES: dict[str, ArchLimits] = {limits.arch: limits for limits in (SM_80, SM_90, SM_100)}


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class ResourceFacts:
    """What one launch of a compiled kernel takes.

    threads: of a block. registers, spill_bytes (stores and loads) and stack_bytes: of a thread.
    static_shared_bytes, dynamic_shared_bytes, barriers, tmem_columns: of a block.
    cluster_size: blocks of a cluster.
    """

    threads: int
    registers: int
    static_shared_bytes: int = 0
    dynamic_shared_bytes: int = 0
    spill_bytes: int = 0
    stack_bytes: int = 0
    barriers: int = 0
    tmem_columns: int = 0
    cluster_size: int = 1

    def __post_init__(self) -> None:
        check_rules(self, _FACT_RULES)

    __repr__ = evaluable_repr

    @property
    def shared_bytes(self) -> int:
        """Static and dynamic shared memory of a block."""
        return self.static_shared_bytes + self.dynamic_shared_bytes

    @property
    def warps(self) -> int:
        """Warps of a block; a part-filled one takes what a whole one does."""
        return -(-self.threads // WARP)


def _fact(name: str, low: int) -> Rule:
    return Rule(
        name,
        f"must be an int >= {low}",
        lambda f: is_int(getattr(f, name)) and getattr(f, name) >= low,
        lambda f: low,
    )


_FACT_RULES = (
    *(_fact(name, 1) for name in ("threads", "registers", "cluster_size")),
    *(_fact(name, 0) for name in ("static_shared_bytes", "dynamic_shared_bytes", "spill_bytes")),
    *(_fact(name, 0) for name in ("stack_bytes", "barriers", "tmem_columns")),
)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def warp_registers(facts: ResourceFacts, limits: ArchLimits) -> int:
    """Registers that a warp is given: `registers · 32`, in whole units."""
    return _up(facts.registers * WARP, limits.register_unit)


def block_registers(facts: ResourceFacts, limits: ArchLimits) -> int:
    """Registers that the hardware asks to be there for a block: of warps in every partition."""
    return warp_registers(facts, limits) * _up(facts.warps, limits.partitions)


def blocks_by(facts: ResourceFacts, limits: ArchLimits) -> dict[str, int]:
    """How many blocks fit on a multiprocessor by each resource alone.

    A resource that the kernel does not take is left out. One block that may not be launched at all
    (too many threads or registers, too much shared memory) gives 0.
    """
    shared = _up(facts.shared_bytes + limits.reserved_shared_bytes, limits.shared_unit)
    a_partition = limits.registers // limits.partitions // warp_registers(facts, limits)
    found = {
        "blocks": limits.blocks,
        "threads": limits.warps // facts.warps if facts.threads <= BLOCK_THREADS else 0,
        "registers": a_partition * limits.partitions // facts.warps,
        "shared memory": limits.shared_bytes // shared,
    }
    fits = block_registers(facts, limits) <= limits.block_registers
    if not fits or facts.registers > limits.thread_registers:
        found["registers"] = 0
    if facts.shared_bytes > limits.block_shared_bytes:
        found["shared memory"] = 0
    if facts.barriers:
        by_barriers = limits.barriers // facts.barriers
        found["barriers"] = by_barriers if facts.barriers <= BLOCK_BARRIERS else 0
    if facts.tmem_columns:
        found["tensor memory"] = limits.tmem_columns // facts.tmem_columns
    return found


def occupancy(facts: ResourceFacts, limits: ArchLimits) -> int:
    """Blocks that are resident on a multiprocessor at once, at the largest shared carve-out.

    As `cudaOccMaxActiveBlocksPerMultiprocessor` counts, and with tensor memory, of which it knows
    nothing. A cluster needs its blocks on several multiprocessors, which is not counted.
    """
    return min(blocks_by(facts, limits).values())
