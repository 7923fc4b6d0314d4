"""How each kernel of this package works: one printable record a compiled form.

The decode kernels (`csrc/decode_block.cuh`, `csrc/decode_wide.cuh`, and with `batch_invariant`
`csrc/decode_invariant.cuh`), and the state merges that every kernels package has.
"""

from __future__ import annotations

from typing import Any

from stream_attention.core.device import DeviceFacts
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.schedule import KernelSchedule
from stream_attention.core.state_schedules import state_schedules

TARGET = "sm_90a"
# `Arch::kMaxVectorBytes` and `Arch::kDependentLaunch` of csrc/arch.cuh.
MAX_VECTOR_BYTES, DEPENDENT_LAUNCH = 16, True
QUERY_TYPES = ("__nv_bfloat16", "__half")
GATHERS = ("page_of_token", "page_of_sixteen")

# (head_dim, rows) → slots of the ring and bytes of shared memory, as csrc/decode_shape.cuh and
# csrc/decode_wide.cuh come to them: the ring has as many slots as fit, and an odd number.
_BLOCK_16BIT = {
    (64, 8): (3, 104_080),
    (64, 16): (5, 172_176),
    (64, 24): (5, 174_736),
    (64, 32): (5, 177_296),
    (80, 8): (5, 108_688),
    (80, 16): (7, 152_720),
    (80, 24): (7, 155_792),
    (80, 32): (7, 158_864),
    (96, 8): (3, 86_928),
    (96, 16): (7, 197_264),
    (96, 24): (7, 201_104),
    (96, 32): (7, 204_944),
    (128, 8): (3, 106_128),
    (192, 8): (7, 180_096),
    (192, 16): (7, 186_496),
    (256, 8): (5, 173_952),
}
_BLOCK_8BIT = {
    (64, 8): (5, 108_176),
    (64, 16): (7, 151_696),
    (80, 8): (5, 108_688),
    (80, 16): (7, 152_720),
    (96, 8): (3, 80_784),
    (96, 16): (7, 182_928),
    (128, 8): (3, 106_128),
    (128, 16): (5, 176_272),
    (192, 8): (7, 101_312),
    (192, 16): (7, 107_712),
    (256, 8): (7, 124_864),
}
_INVARIANT_16BIT = {
    (64, 8): (3, 107_872),
    (64, 16): (5, 179_040),
    (64, 32): (5, 190_304),
    (80, 8): (5, 113_248),
    (80, 16): (7, 161_120),
    (80, 32): (7, 174_944),
    (96, 8): (3, 92_256),
    (96, 16): (7, 207_200),
    (96, 32): (7, 224_096),
    (128, 8): (3, 112_992),
    (128, 16): (5, 189_280),
    (128, 32): (5, 210_784),
    (192, 8): (7, 189_968),
    (192, 16): (7, 205_584),
    (256, 8): (5, 186_896),
}
_INVARIANT_8BIT = {
    (64, 8): (5, 111_968),
    (64, 16): (7, 158_560),
    (80, 8): (5, 113_248),
    (80, 16): (7, 161_120),
    (96, 8): (3, 86_112),
    (96, 16): (7, 192_864),
    (128, 8): (3, 112_992),
    (128, 16): (5, 189_280),
    (192, 8): (7, 111_120),
    (192, 16): (7, 126_736),
    (256, 8): (7, 137_744),
}
_WIDE_16BIT = {(128, 16): (5, 96_992), (128, 32): (5, 109_792)}

_COMMON: dict[str, Any] = {
    "kernel": "decode_kernel",
    "target": TARGET,
    "ownership": "kv_range",
    "orientation": "tokens_on_m",
    "load_engine": "cp_async",
    "scheduler": "device_ranges",
    "launch": "dependent_cooperative",
}
_BLOCK = {
    **_COMMON,
    "state_scope": "warp",
    "mma_engine": "mma_sync",
    "softmax": "online",
    "split": "equal_ranges",
    "merge": "exchange",
}
_INVARIANT = {**_BLOCK, "split": "tree_nodes", "merge": "tree_exchange"}
_WIDE = {
    **_BLOCK,
    "state_scope": "block",
    "roles": "weigh_and_add",
    "mma_engine": "wgmma",
    "softmax": "online_headroom",
}


def _instances(shape: str, element_bytes: int, gather: str) -> tuple[str, ...]:
    whole = "true" if gather == "page_of_sixteen" else "false"
    return tuple(
        f"decode_kernel<{query}, {query if element_bytes > 1 else 'unsigned char'}, {shape}, "
        f"{whole}>"
        for query in QUERY_TYPES
    )


def _of_warps(
    form: str, fields: dict[str, Any], element_bytes: int, table: dict[tuple[int, int], tuple]
) -> tuple[KernelSchedule, ...]:
    """The records of `DecodeShape` (csrc/decode_shape.cuh): each warp its own tokens."""
    records = []
    for (head_dim, rows), (stages, shared_bytes) in table.items():
        warps = 8 if head_dim <= 128 else 4
        chunk = 32 if head_dim * element_bytes <= 128 else 16  # tokens of a warp
        invariant = "true" if form == "invariant" else "false"
        shape = f"DecodeShape<{head_dim}, {rows}, {element_bytes}, {invariant}>"
        records += [
            KernelSchedule(
                name=f"decode_{form}_{head_dim}_by_{rows}_{8 * element_bytes}bit_{gather}",
                instances=_instances(shape, element_bytes, gather),
                threads=32 * warps,
                rows=rows,
                tile_tokens=chunk * warps,
                head_dim=head_dim,
                element_bytes=element_bytes,
                vector_elements=16 // element_bytes,
                gather=gather,
                stages=stages,
                shared_bytes=shared_bytes,
                blocks_per_sm=2 if rows == 8 and head_dim <= 128 else 1,
                **fields,
            )
            for gather in GATHERS
        ]
    return tuple(records)


def _of_warpgroups(table: dict[tuple[int, int], tuple]) -> tuple[KernelSchedule, ...]:
    """The records of `WideShape` (csrc/decode_wide.cuh): the block has one state."""
    return tuple(
        KernelSchedule(
            name=f"decode_wide_{head_dim}_by_{rows}_16bit_{gather}",
            instances=_instances(f"WideShape<{head_dim}, {rows}>", 2, gather),
            threads=256,
            rows=rows,
            tile_tokens=64,
            head_dim=head_dim,
            element_bytes=2,
            vector_elements=8,
            gather=gather,
            stages=stages,
            shared_bytes=shared_bytes,
            blocks_per_sm=2,
            **_WIDE,
        )
        for (head_dim, rows), (stages, shared_bytes) in table.items()
        for gather in GATHERS
    )


DECODE: tuple[KernelSchedule, ...] = (
    *_of_warps("block", _BLOCK, 2, _BLOCK_16BIT),
    *_of_warps("block", _BLOCK, 1, _BLOCK_8BIT),
    *_of_warpgroups(_WIDE_16BIT),
    *_of_warps("invariant", _INVARIANT, 2, _INVARIANT_16BIT),
    *_of_warps("invariant", _INVARIANT, 1, _INVARIANT_8BIT),
)
SCHEDULES: tuple[KernelSchedule, ...] = (
    *DECODE,
    *state_schedules(TARGET, MAX_VECTOR_BYTES, DEPENDENT_LAUNCH),
)


def decode_schedules(problem: AttentionProblem, device: DeviceFacts) -> tuple[KernelSchedule, ...]:
    """What a decode plan of the problem launches: one kernel, whatever the device.

    Of the instances that serve the problem, that of the fewest rows that hold the problem's, or of
    the most (csrc/decode_instances.cuh). Empty where there is none.
    """
    whole = problem.cache_kind == "contiguous" or problem.page_size % 16 == 0
    alike = [
        record
        for record in DECODE
        if record.head_dim == problem.head_dim_qk
        and record.element_bytes == (2 if problem.kv_dtype == problem.q_dtype else 1)
        and record.gather == GATHERS[whole]
        and (record.split == "tree_nodes") == problem.batch_invariant
    ]
    rows = problem.max_qo_len * problem.gqa_group_size
    holding = [record for record in alike if record.rows >= rows]
    if holding:
        return (min(holding, key=lambda record: record.rows),)
    return (max(alike, key=lambda record: record.rows),) if alike else ()
