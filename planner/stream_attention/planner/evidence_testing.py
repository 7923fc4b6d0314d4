"""Evidence for tests: cells, rows and pairs as a good run would have left them.

Every factory takes the fields to change by name, so that a test says only what is bad about a row.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from stream_attention.core.problem import AttentionProblem
from stream_attention.planner.cells import Cell
from stream_attention.planner.evidence import (
    Correctness,
    EvidenceRow,
    Fingerprint,
    PairRow,
    Samples,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
COMMAND = "measure --arch=sm_90"
TAKEN_AT = "2025-01-02T03:04:05Z"
KERNEL = (("num_registers", "168"), ("shared_bytes", "98304"), ("spill_bytes", "0"))
NATIVE_ARCHS = {"sm80": "sm_80", "sm90": "sm_90", "sm100": "sm_100"}
PORTABLE = ("torch", "triton")

_BYTES_A_MICROSECOND = 4e6
_LAUNCH_US = 2.0
# Sample i of a measurement over its median: odd in number, so that the median is exact.
_SPREAD = tuple(1 + 0.001 * ((7 * i) % 25 - 12) for i in range(25))


def good_cell(
    kv_lens: Sequence[int] = (4096, 4096), qo_lens: Sequence[int] | None = None, **changes: Any
) -> Cell:
    """A paged bf16 decode of requests with `kv_lens` tokens, 32 query heads over 8 of 128.

    qo_lens: 1 each by default. changes: fields of the problem.
    """
    queries = tuple(qo_lens) if qo_lens is not None else (1,) * len(kv_lens)
    page = changes.get("page_size", 16)
    fields: dict[str, Any] = {
        "batch": len(kv_lens),
        "total_qo_len": sum(queries),
        "max_qo_len": max(queries, default=0),
        "kv_capacity": -(-max(kv_lens, default=0) // page) * page,
        "num_qo_heads": 32,
        "num_kv_heads": 8,
        "head_dim_qk": 128,
        "head_dim_vo": 128,
        "q_dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "out_dtype": "bfloat16",
        "sm_scale": 128**-0.5,
    }
    return Cell(
        problem=AttentionProblem(**{**fields, **changes}), qo_lens=queries, kv_lens=tuple(kv_lens)
    )


def good_fingerprint(arch: str = "sm_90", **changes: Any) -> Fingerprint:
    """An environment of that architecture; `"cpu"` has no driver, no CUDA and no clocks."""
    cuda = arch != "cpu"
    fields: dict[str, Any] = {
        "device": f"Device of {arch}",
        "arch": arch,
        "num_sms": 132 if cuda else 8,
        "l2_bytes": 60 << 20,
        "driver": "580.1" if cuda else None,
        "cuda": "13.0" if cuda else None,
        "sm_clock_mhz": 1980 if cuda else None,
        "memory_clock_mhz": 3201 if cuda else None,
        "cpu": "A CPU",
        "python": "3.12.3",
        "torch": "2.13.0",
        "triton": "3.5.0",
    }
    return Fingerprint(**{**fields, **changes})


def good_correctness(**changes: Any) -> Correctness:
    """Errors at a third of their bounds."""
    fields: dict[str, Any] = {
        "max_error": 1e-3,
        "max_bound": 3e-3,
        "rms_error": 1e-4,
        "rms_bound": 3e-4,
        "rows_checked": 2,
        "rows": 2,
        "tolerance": "core.testing.tolerance",
    }
    return Correctness(**{**fields, **changes})


def good_samples(p50_us: float = 50.0, *, arch: str = "sm_90", **changes: Any) -> Samples:
    """25 samples within 1.2 % of their median `p50_us`."""
    fields: dict[str, Any] = {
        "samples_us": tuple(p50_us * spread for spread in _SPREAD),
        "method": "cpu_cold" if arch == "cpu" else "cuda_graph_cold",
        "calls_per_sample": 1 if arch == "cpu" else 10,
        "num_pools": 128,  # so that small cells are cold too
    }
    return Samples(**{**fields, **changes})


def role_of(route: str) -> str:
    """The role of a contender by the first word of its name."""
    if route.partition("_")[0] in NATIVE_ARCHS:
        return "native"
    return "portable" if route.partition("_")[0] in PORTABLE else "external"


def floor_us(cell: Cell) -> float:
    """A plausible time to read the cell's KV bytes."""
    return _LAUNCH_US + cell.kv_tokens * cell.problem.kv_token_bytes / _BYTES_A_MICROSECOND


def good_row(
    cell: Cell | None = None,
    route: str = "sm90_decode",
    p50_us: float | None = None,
    *,
    arch: str = "sm_90",
    **changes: Any,
) -> EvidenceRow:
    """A row that every rule accepts: `route` ran on `cell` in `p50_us` (1.3 floors by default)."""
    cell = good_cell() if cell is None else cell
    p50_us = 1.3 * floor_us(cell) if p50_us is None else p50_us
    fields: dict[str, Any] = {
        "cell": cell,
        "requested": route,
        "resolved": route,
        "role": role_of(route),
        "outcome": "ok",
        "environment": good_fingerprint(arch),
        "versions": (("torch", "2.13.0"),),
        "correctness": good_correctness(),
        "timing": good_samples(p50_us, arch=arch),
        # A test that wants another time wants no quarrel about the floor.
        "floor_us": min(floor_us(cell), 0.9 * p50_us),
        "timed_allocations": None if arch == "cpu" else 0,
        "workspace_bytes": 4096,
        "kernel": KERNEL if role_of(route) == "native" else (),
        "commit": COMMIT,
        "command": COMMAND,
        "taken_at": TAKEN_AT,
    }
    return EvidenceRow(**{**fields, **changes})


def lost_row(
    cell: Cell | None = None,
    route: str = "flashinfer_fa3",
    outcome: str = "unsupported",
    reason: str = "head_dim: must be 128",
    *,
    arch: str = "sm_90",
    **changes: Any,
) -> EvidenceRow:
    """A good row of a contender that did not run: no timing, no correctness, and the reason."""
    fields: dict[str, Any] = {
        "resolved": "",
        "outcome": outcome,
        "reasons": (reason,),
        "correctness": None,
        "timing": None,
        "timed_allocations": None,
        "workspace_bytes": None,
        "kernel": (),
    }
    return good_row(cell, route, arch=arch, **{**fields, **changes})


def good_pair(
    cell: Cell | None = None,
    first: str = "sm90_decode",
    second: str = "flashinfer_fa2_tensor_core",
    ratio: float = 0.9,
    *,
    second_us: float | None = None,
    arch: str = "sm_90",
    **changes: Any,
) -> PairRow:
    """A pair that every rule accepts, whose median ratio first over second is `ratio`."""
    cell = good_cell() if cell is None else cell
    second_us = 1.5 * floor_us(cell) if second_us is None else second_us
    # The samples of the two are spread in opposite order: their ratios spread too.
    ratios = sorted(up / down for up, down in zip(_SPREAD, reversed(_SPREAD), strict=True))
    first_us = ratio * second_us / statistics.median(ratios)
    firsts = good_samples(first_us, arch=arch)
    seconds = good_samples(
        second_us, arch=arch, samples_us=tuple(second_us * spread for spread in reversed(_SPREAD))
    )
    fields: dict[str, Any] = {
        "cell": cell,
        "first": first,
        "second": second,
        "outcome": "ok",
        "environment": good_fingerprint(arch),
        "versions": (("torch", "2.13.0"),),
        "first_correctness": good_correctness(),
        "second_correctness": good_correctness(),
        "first_timing": firsts,
        "second_timing": seconds,
        "commit": COMMIT,
        "command": COMMAND,
        "taken_at": TAKEN_AT,
    }
    return PairRow(**{**fields, **changes})


def lost_pair(
    cell: Cell | None = None,
    first: str = "sm90_decode",
    second: str = "flashinfer_fa3",
    outcome: str = "unsupported",
    reason: str = "flashinfer_fa3: head_dim: must be 128",
    **changes: Any,
) -> PairRow:
    """A good pair row of two that could not be compared: no samples, and the reason."""
    fields: dict[str, Any] = {
        "outcome": outcome,
        "reasons": (reason,),
        "first_correctness": None,
        "second_correctness": None,
        "first_timing": None,
        "second_timing": None,
    }
    return good_pair(cell, first, second, **{**fields, **changes})
