"""Generated write launches compile for compute capability 8.0, 9.0 and 10.0; no GPU is needed.

Triton decides when it is imported whether it compiles or interprets, so it is imported by the tests
and not here: other files of one process ask for the interpreter when they are collected.
"""

import os

import pytest
import torch

from stream_attention.core.testing.compiles import SHARED_LIMIT, compile_for
from stream_attention.flows import load_flow
from stream_attention.flows.pool import FlowPool
from stream_attention.flows.testing.every_op import EveryOp

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def compiler(tmp_path, monkeypatch):
    """An error where another file of this process has asked for Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        pytest.fail("TRITON_INTERPRET='1': run this file in a process of its own", pytrace=False)
    monkeypatch.setenv("STREAM_ATTENTION_CACHE", str(tmp_path))


def compiled(launch, capability):
    """What `launch.run()` would compile on a device of that capability."""
    on_such_a_device = dict.fromkeys(("DEPENDENT", "launch_pdl"), capability >= 90)
    meta = {**launch._meta, **on_such_a_device}
    return compile_for(launch._kernel, launch._args, meta, capability)


CASES = {
    "quest_d128": ("gqa_quest_sparse_attention", 16, 128, torch.bfloat16, {}),
    "quest_d128_page64_fp8": ("gqa_quest_sparse_attention", 64, 128, FP8, {"k_scale": 0.5}),
    "h2o_page32_d80": ("h2o_sparse_attention", 32, 80, torch.float16, {}),
    "tokens_d64": ("gqa_h2o_token_sparse_attention", 1, 64, torch.bfloat16, {}),
    "lserve_page64_fp8_fields": (
        "lserve_sparse_attention",
        64,
        128,
        torch.bfloat16,
        {"fields_dtype": FP8},
    ),
    "value_energy_page256_d256": ("value_energy_centroid", 256, 256, torch.float32, {}),
    "state_hnd": ("running_average_block", 16, 128, torch.bfloat16, {"layout": "HND"}),
}


@pytest.mark.parametrize("capability", sorted(SHARED_LIMIT))
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_write_compiles_fits_and_moves_16_bytes_at_a_time(name, capability):
    flow, page_size, head_dim, dtype, options = CASES[name]
    pool = FlowPool(load_flow(flow), 4, page_size, 2, head_dim, dtype, **options)
    new = torch.zeros((2, 1, 2, head_dim), dtype=torch.bfloat16)
    table, lengths = torch.zeros((2, 4), dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    launch = pool.write_launch(new, new, table, lengths, lengths_after=lengths.clone())
    found = compiled(launch, capability)
    assert found.metadata.shared <= SHARED_LIMIT[capability]
    if page_size > 1 and head_dim % 64 == 0:
        assert "ld.global.v4.b32" in found.asm["ptx"], "K is not loaded 16 bytes at a time"


@pytest.mark.parametrize("capability", sorted(SHARED_LIMIT))
def test_packed_tokens_and_masks_compile(capability):
    pool = FlowPool(load_flow("running_average_block"), 4, 16, 2, 128)
    new, ints = torch.zeros((9, 2, 128)), torch.zeros(3, dtype=torch.int32)
    table = torch.zeros((2, 4), dtype=torch.int32)
    options = {"indptr": ints, "max_new": 9, "active": ints[:2]}
    launch = pool.write_launch(new, new, table, ints[1:], **options, lengths_include_new=True)
    assert compiled(launch, capability).asm["cubin"]


@pytest.mark.parametrize(
    ("page_size", "head_dim", "capability"), [(1, 48, 80), (7, 48, 90), (16, 64, 100)]
)
def test_every_op_compiles(page_size, head_dim, capability):
    pool = FlowPool(EveryOp(), 4, page_size, 2, head_dim, fields_dtype=torch.float32)
    new, lengths = torch.zeros((2, 1, 2, head_dim)), torch.zeros(2, dtype=torch.int32)
    launch = pool.write_launch(new, new, torch.zeros((2, 4), dtype=torch.int32), lengths)
    assert compiled(launch, capability).asm["cubin"]
