"""Blocks that fit on a multiprocessor, against what NVIDIA's own calculator says."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_attention.core.arch_limits import (
    ARCHES,
    ArchLimits,
    ResourceFacts,
    block_registers,
    blocks_by,
    occupancy,
)
from stream_attention.core.schedule import TARGETS, VOCABULARY

# (arch, threads, registers, dynamic shared bytes, barriers, blocks): by cuda_occupancy.h of CUDA
# 13.0, compiled for the host, at the largest carve-out. Every resource limits some of them.
CALCULATED = (
    (80, 1024, 32, 113_000, 5, 1),
    (80, 256, 128, 49_152, 1, 2),
    (80, 96, 24, 49_152, 16, 3),
    (80, 160, 65, 0, 0, 5),
    (80, 160, 64, 1000, 5, 6),
    (80, 128, 24, 10_240, 1, 14),
    (80, 128, 24, 0, 1, 16),
    (80, 96, 24, 1000, 1, 21),
    (80, 32, 64, 0, 0, 32),
    (80, 32, 24, 0, 16, 32),
    (80, 128, 40, 167_000, 1, 0),
    (90, 512, 255, 10_240, 16, 0),
    (90, 160, 65, 232_449, 16, 0),
    (90, 96, 128, 116_000, 5, 1),
    (90, 128, 255, 100_000, 5, 2),
    (90, 512, 40, 1000, 5, 3),
    (90, 32, 24, 49_152, 0, 4),
    (90, 256, 32, 0, 5, 8),
    (90, 160, 40, 1000, 1, 9),
    (90, 32, 168, 10_240, 5, 12),
    (90, 32, 24, 10_240, 0, 20),
    (90, 32, 65, 1000, 0, 28),
    (100, 1024, 80, 0, 0, 0),
    (100, 32, 80, 232_448, 0, 1),
    (100, 1024, 24, 100_000, 16, 2),
    (100, 96, 64, 113_000, 16, 2),
    (100, 256, 80, 10_240, 0, 3),
    (100, 160, 65, 0, 1, 5),
    (100, 96, 65, 10_240, 5, 9),
    (100, 128, 32, 0, 5, 12),
    (100, 32, 32, 0, 0, 32),
)
SM_100 = ARCHES["sm_100"]
SMALL = ResourceFacts(threads=128, registers=40)


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared_bytes", "barriers", "blocks"), CALCULATED
)
def test_occupancy_is_that_of_nvidias_calculator(
    arch, threads, registers, shared_bytes, barriers, blocks
):
    facts = ResourceFacts(
        threads=threads,
        registers=registers,
        dynamic_shared_bytes=shared_bytes,
        barriers=barriers,
    )
    assert occupancy(facts, ARCHES[f"sm_{arch}"]) == blocks


def test_every_resource_limits_some_calculated_case():
    limiting = set()
    for arch, threads, registers, shared_bytes, barriers, blocks in CALCULATED:
        facts = ResourceFacts(
            threads=threads,
            registers=registers,
            dynamic_shared_bytes=shared_bytes,
            barriers=barriers,
        )
        by = blocks_by(facts, ARCHES[f"sm_{arch}"])
        tight = [name for name, most in by.items() if most == blocks]
        limiting.update(tight if len(tight) == 1 else ())
    assert limiting == {"blocks", "threads", "registers", "shared memory", "barriers"}


def test_tensor_memory_limits_blocks_where_it_is_taken():
    assert occupancy(dataclasses.replace(SMALL, tmem_columns=256), SM_100) == 2
    assert occupancy(dataclasses.replace(SMALL, tmem_columns=512), SM_100) == 1
    assert occupancy(dataclasses.replace(SMALL, tmem_columns=32), ARCHES["sm_90"]) == 0


def test_static_and_dynamic_shared_memory_count_together():
    static = dataclasses.replace(SMALL, static_shared_bytes=50_000, dynamic_shared_bytes=60_000)
    assert static.shared_bytes == 110_000
    assert occupancy(static, SM_100) == 2


def test_a_block_needs_registers_in_every_partition():
    one_warp = ResourceFacts(threads=32, registers=255)
    assert block_registers(one_warp, SM_100) == 4 * 256 * 32


@given(
    st.integers(1, 2000),
    st.integers(1, 300),
    st.integers(0, 1 << 18),
    st.sampled_from(sorted(ARCHES)),
)
def test_more_of_a_resource_never_fits_more_blocks(threads, registers, shared_bytes, arch):
    facts = ResourceFacts(threads=threads, registers=registers, dynamic_shared_bytes=shared_bytes)
    blocks = occupancy(facts, ARCHES[arch])
    for name in ("threads", "registers", "dynamic_shared_bytes", "barriers"):
        more = dataclasses.replace(facts, **{name: getattr(facts, name) + 1})
        assert 0 <= occupancy(more, ARCHES[arch]) <= blocks
    if blocks:
        limits = ARCHES[arch]
        assert blocks * facts.warps <= limits.warps
        assert blocks * registers * threads <= limits.registers
        assert blocks * (shared_bytes + limits.reserved_shared_bytes) <= limits.shared_bytes


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ResourceFacts)])
def test_facts_that_cannot_be_are_refused(name):
    for value in (-1, 1.5, None, True):
        with pytest.raises(ValueError, match=f"{name}={value}: must be an int >="):
            dataclasses.replace(SMALL, **{name: value})


def test_every_target_belongs_to_one_architecture_with_sources_and_known_engines():
    targets = [target for limits in ARCHES.values() for target in limits.targets]
    assert len(targets) == len(set(targets))
    assert set(TARGETS) <= set(targets)
    for arch, limits in ARCHES.items():
        assert limits.arch == arch
        assert limits.sources
        assert set(limits.load_engines) <= set(VOCABULARY["load_engine"])
        assert set(limits.mma_engines) <= set(VOCABULARY["mma_engine"])
        assert eval(repr(limits), {"ArchLimits": ArchLimits}) == limits
