"""The Triton kernels compile for compute capability 8.0, 9.0 and 10.0 and fit their shared memory.

No GPU is needed: Triton compiles ahead of time for a named target. The arguments are those that a
launch of the route would pass, so the table of tiles is what is tested.

Triton decides when it is imported whether it compiles or interprets, so it is imported by the tests
and not here: other files of one process ask for the interpreter when they are collected.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch

from stream_attention.core.device import DeviceFacts
from stream_attention.core.testing.checks import bind
from stream_attention.core.testing.compiles import SHARED_LIMIT, compile_for
from stream_attention.core.testing.problems import Case, build

_DECODE = Case(qo_lens=(1, 1), kv_lens=(600, 600), num_qo_heads=8, head_dim_qk=128, call="batch")


def _case(**changes: Any) -> Case:
    return dataclasses.replace(_DECODE, **changes)


CASES = {
    "decode_d128": _case(),
    "decode_d64_fp8": _case(head_dim_qk=64, kv_dtype="float8_e4m3fn", kv_scales="head"),
    "decode_d512": _case(head_dim_qk=512, dtype="float16", kv_lens=(200, 200)),
    "decode_d512_fp32": _case(head_dim_qk=512, dtype="float32"),
    "decode_d80_contiguous": _case(head_dim_qk=80, cache_kind="contiguous"),
    "dims_192_128_window_cap_sink": _case(
        head_dim_qk=192, head_dim_vo=128, window_left=9, logits_soft_cap=30.0, sink=1.0
    ),
    "one_request": _case(qo_lens=(1,), kv_lens=(4000,)),
    "prefill_d128": _case(qo_lens=(200, 1), kv_lens=(600, 600), call="ragged"),
    "prefill_d64_contiguous": _case(
        qo_lens=(200, 200), head_dim_qk=64, cache_kind="contiguous", call="block"
    ),
    "prefill_d256": _case(qo_lens=(200, 1), head_dim_qk=256, call="ragged"),
    "prefill_d512": _case(qo_lens=(200, 1), head_dim_qk=512, call="ragged"),
    "batch_invariant_wide_scale": _case(kv_lens=(3000, 40), sm_scale=1e38, logits_soft_cap=9.0),
    "batch_invariant_not_causal": _case(causal=False, window_right=3, kv_lens=(3000, 40)),
}
INVARIANT = {"batch_invariant_not_causal", "batch_invariant_wide_scale"}


@pytest.fixture(autouse=True)
def compiler() -> None:
    """An error where another file of this process has asked for Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        pytest.fail(
            "TRITON_INTERPRET='1': the interpreter compiles nothing, and another test file turned "
            "it on; run this file in a process of its own",
            pytrace=False,
        )


def _launch(name: str) -> Any:
    from stream_attention.core.routes import triton_route

    built = build(CASES[name], 0)
    described = bind(built, batch_invariant=name in INVARIANT)
    device = DeviceFacts(type="cpu", num_sms=132)
    return triton_route.TritonLaunch(described.problem, device, described.bound)


@pytest.mark.parametrize("capability", sorted(SHARED_LIMIT))
@pytest.mark.parametrize("name", sorted(CASES))
def test_attention_compiles_and_fits(name: str, capability: int) -> None:
    from stream_attention.core.routes import triton_kernels

    launch = _launch(name)
    compiled = compile_for(
        triton_kernels.attention_split, launch._split_args, launch._split_meta, capability
    )
    assert compiled.metadata.shared <= SHARED_LIMIT[capability]
    ptx = compiled.asm["ptx"]
    if "fp32" not in name:
        assert "mma" in ptx, "the products do not use the tensor cores"
    assert "v4.b32" in ptx or "cp.async.cg" in ptx, "K and V are not loaded 16 bytes at a time"


@pytest.mark.parametrize("capability", sorted(SHARED_LIMIT))
def test_schedule_and_mergecompile_for(capability: int) -> None:
    from stream_attention.core.routes import triton_kernels, triton_merge

    launch = _launch("decode_d128")
    assert launch.config.schedule == "scan"
    for kernel, (args, meta) in (
        (triton_kernels.schedule_splits, launch._schedule_args),
        (triton_merge.merge_splits, launch._merge_args),
    ):
        compiled = compile_for(kernel, args, meta, capability)
        assert compiled.metadata.shared <= SHARED_LIMIT[capability]


@pytest.mark.parametrize("capability", sorted(SHARED_LIMIT))
def test_merge_of_fixed_splits_compiles(capability: int) -> None:
    from stream_attention.core.routes import triton_merge

    launch = _launch("batch_invariant_not_causal")
    args, meta = launch._merge_args
    compiled = compile_for(triton_merge.merge_slots, args, meta, capability)
    assert compiled.metadata.shared <= SHARED_LIMIT[capability]


def test_one_kernel_serves_every_capacity_of_a_batch_invariant_request() -> None:
    """Two that Triton specialised apart might round apart."""
    found = set()
    for kv_lens in ((100, 40), (1025, 40), (30_000, 9)):
        case = _case(kv_lens=kv_lens, sink=1.0, window_left=None)
        found.add(_specialization(case, batch_invariant=True))
    assert len(found) == 1


def test_cases_cover_every_schedule() -> None:
    assert {_launch(name).config.schedule for name in CASES} == {"direct", "even", "scan", "fixed"}


def _specialization(name_of_case: Case, **options: Any) -> tuple[Any, ...]:
    """What Triton's cache key holds of a launch: constants, and the class of every argument."""
    from stream_attention.core.routes import triton_kernels, triton_route

    described = bind(build(name_of_case, 0), **options)
    device = DeviceFacts(type="cpu", num_sms=132)
    launch = triton_route.TritonLaunch(described.problem, device, described.bound)
    free = set(triton_kernels.attention_split.do_not_specialize)
    classes = []
    pairs = zip(triton_kernels.attention_split.arg_names, launch._split_args, strict=False)
    for name, value in pairs:
        if isinstance(value, torch.Tensor) or value is None:
            classes.append((name, None if value is None else value.dtype))
        elif isinstance(value, int) and name not in free:
            classes.append((name, value == 1, value % 16 == 0, value.bit_length() > 31))
    return (tuple(classes), tuple(sorted(launch._split_meta.items())))


def test_nothing_recompiles_when_batch_lengths_or_page_counts_change() -> None:
    first = _specialization(_case(qo_lens=(1, 1), kv_lens=(1000, 4000)))
    for lens, spare in (((900, 5000, 77), 0), ((2000,) * 16, 5), ((1500, 1111) * 10, 3)):
        other = _case(qo_lens=(1,) * len(lens), kv_lens=lens, spare=spare)
        assert _specialization(other) == first
