"""The schedules of the state kernels (`csrc/include/stream_attention/state_kernels.cuh`).

They are compiled once for each architecture; what differs is the widest load and the launch.
"""

from __future__ import annotations

from typing import Any

from stream_attention.core.dtypes import dtype_bytes
from stream_attention.core.native import DTYPE_CODES
from stream_attention.core.schedule import KernelSchedule

PAIR, MERGE = "state_pair_kernel", "state_merge_kernel"
WARP, BLOCK_THREADS, MAX_SLICES = 32, 128, 8  # state_geometry.h
# A block of 256 threads finds room four times on a multiprocessor with 64 registers a thread, and
# three times with 80, which vectors of 32 bytes take.
BLOCKS_PER_SM, WIDE_VECTOR_BYTES, WIDE_BLOCKS_PER_SM = 4, 32, 3


def _instances(kernel: str, element_bytes: int, elements: int) -> tuple[str, ...]:
    """Of every dtype of this size that parts may have, and every one of the output."""
    return tuple(
        f"{kernel}<Arch, {parts}, {out}, {elements}>"
        for dtype, parts in DTYPE_CODES.items()
        if dtype_bytes(dtype) == element_bytes
        for out in DTYPE_CODES.values()
    )


def state_schedules(
    target: str, max_vector_bytes: int, dependent_launch: bool
) -> tuple[KernelSchedule, ...]:
    """The records of both kernels by element size and vector width.

    max_vector_bytes: the widest load of the architecture (`Arch::kMaxVectorBytes`).
    """
    records = []
    for element_bytes in (2, 4):
        widths = {1, 16 // element_bytes, max_vector_bytes // element_bytes}
        for elements in sorted(widths):
            wide = elements * element_bytes >= WIDE_VECTOR_BYTES
            common: dict[str, Any] = {
                "target": target,
                "ownership": "output_vectors",
                "element_bytes": element_bytes,
                "vector_elements": elements,
                "load_engine": "ld_global",
                "softmax": "states",
                "state_scope": "thread",
                "blocks_per_sm": WIDE_BLOCKS_PER_SM if wide else BLOCKS_PER_SM,
                "launch": "dependent" if dependent_launch else "plain",
            }
            suffix = f"{8 * element_bytes}bit_by_{elements}"
            records.append(
                KernelSchedule(
                    name=f"state_pair_{suffix}",
                    kernel=PAIR,
                    instances=_instances(PAIR, element_bytes, elements),
                    threads=BLOCK_THREADS,
                    **common,
                )
            )
            # Slices of a block meet in shared memory: a maximum, a sum and the vector of each.
            threads = WARP * MAX_SLICES
            records.append(
                KernelSchedule(
                    name=f"state_merge_{suffix}",
                    kernel=MERGE,
                    instances=_instances(MERGE, element_bytes, elements),
                    threads=threads,
                    shared_bytes=threads * (elements + 2) * 4,
                    **common,
                )
            )
    return tuple(records)
