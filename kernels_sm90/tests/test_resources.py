"""Registers, spills, stack and shared memory of every kernel, from the report of ptxas."""

import pytest

from stream_attention.core.testing.native_library import (
    expected_kernels,
    library_file,
    parse_ptxas,
    require,
)
from stream_attention.kernels_sm90.library import LIBRARY

VECTOR_BYTES = (16,)
# By elements a vector. A block has at most 256 threads: 64 registers let 4 such blocks reside on an
# SM, with 4 loads in flight a thread.
MAX_REGISTERS = {1: 48, 4: 60, 8: 64}


@pytest.fixture(name="kernels", scope="module")
def kernels_fixture():
    require(LIBRARY)
    # test_decode_resources.py has the decode kernels.
    return parse_ptxas(library_file(LIBRARY, ".ptxas.txt").read_text(), other="decode_kernel")


def test_report_holds_every_kernel_exactly_once(kernels):
    identities = [kernel.identity for kernel in kernels]
    assert set(identities) == expected_kernels(VECTOR_BYTES)
    assert len(identities) == len(set(identities))


def test_every_kernel_is_built_for_the_architecture(kernels):
    assert {kernel.target for kernel in kernels} == {"sm_90a"}


def test_no_kernel_spills_or_has_a_stack(kernels):
    assert [k for k in kernels if k.spill_bytes or k.stack_bytes] == []


def test_registers_stay_within_the_bound_of_their_vector_width(kernels):
    assert [k for k in kernels if k.registers > MAX_REGISTERS[k.elements]] == []


def test_shared_memory_is_dynamic_only(kernels):
    assert [k for k in kernels if k.shared_bytes] == []


def test_parser_refuses_a_report_it_does_not_understand():
    with pytest.raises(ValueError, match="not a state kernel"):
        parse_ptxas("ptxas info : Compiling entry function '_Z3foov' for 'sm_90a'\n")
