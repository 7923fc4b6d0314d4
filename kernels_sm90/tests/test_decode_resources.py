"""Registers, spills, stack and shared memory of every decode instance, from the report of ptxas."""

import re

import pytest

from stream_attention.core.testing.native_library import library_file, require
from stream_attention.kernels_sm90 import decode
from stream_attention.kernels_sm90.library import LIBRARY

ROWS = (8, 16)
# One block of 256 threads an SM may use 255; by packed rows, what is there now and a little room.
MAX_REGISTERS = {8: 176, 16: 232}
SHARED_LIMIT = 227 << 10
ENTRY = re.compile(
    r"Compiling entry function '\S*decode_kernelI(13__nv_bfloat16|6__half)Li(\d+)ELi(\d+)E\S*' "
    r"for '(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers(.*?)\n",
    re.DOTALL,
)


@pytest.fixture(name="kernels", scope="module")
def kernels_fixture():
    require(LIBRARY)
    found = ENTRY.findall(library_file(LIBRARY, ".ptxas.txt").read_text())
    return {(dtype, int(dim), int(rows)): rest for dtype, dim, rows, *rest in found}


def test_report_holds_every_instance(kernels):
    assert set(kernels) == {
        (dtype, dim, rows)
        for dtype in ("13__nv_bfloat16", "6__half")
        for dim in decode.HEAD_DIMS
        for rows in ROWS
    }


def test_no_instance_spills_or_has_a_stack(kernels):
    for instance, (target, stack, stores, loads, _, _) in kernels.items():
        assert (target, stack, stores, loads) == ("sm_90a", "0", "0", "0"), instance


def test_registers_stay_within_the_bound_of_their_rows(kernels):
    for (dtype, dim, rows), (_, _, _, _, registers, rest) in kernels.items():
        assert int(registers) <= MAX_REGISTERS[rows], (dtype, dim, rows)
        assert "smem" not in rest, "static shared memory"


@pytest.mark.parametrize("dim", decode.HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 8, 9, 16])
def test_dynamic_shared_memory_fits_an_sm(dim, group):
    require(LIBRARY)
    params = decode.DecodeParams(
        batch=1, qo_len=1, num_kv_heads=1, group=group, capacity=1, page_size=16, head_dim=dim,
        dtype=2,
    )  # fmt: skip
    result = decode.DecodeGeometry()
    assert decode.functions().stream_attention_decode_geometry(params, 132, result) == 0
    assert SHARED_LIMIT / 2 < result.shared_bytes <= SHARED_LIMIT
