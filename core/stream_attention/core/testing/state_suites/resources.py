"""Registers, spills, stack and shared memory of every kernel, from the report of ptxas."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from stream_attention.core.native import NativeLibrary
from stream_attention.core.testing.native_library import (
    expected_kernels,
    library_file,
    parse_ptxas,
    require,
)


class ResourcesSuite:
    """vector_bytes: widths of the loads. target: what ptxas builds for, e.g. `"sm_90a"`.

    max_registers: by elements a vector. other: kernels whose own test the package has.
    """

    library: NativeLibrary
    vector_bytes: tuple[int, ...]
    target: str
    max_registers: Mapping[int, int]
    other: str | None = None

    @pytest.fixture(name="kernels")
    def kernels_fixture(self):
        require(self.library)
        report = library_file(self.library, ".ptxas.txt").read_text()
        return parse_ptxas(report, other=self.other)

    def test_report_holds_every_kernel_exactly_once(self, kernels):
        identities = [kernel.identity for kernel in kernels]
        assert set(identities) == expected_kernels(self.vector_bytes)
        assert len(identities) == len(set(identities))

    def test_every_kernel_is_built_for_the_architecture(self, kernels):
        assert {kernel.target for kernel in kernels} == {self.target}

    def test_no_kernel_spills_or_has_a_stack(self, kernels):
        assert [k for k in kernels if k.spill_bytes or k.stack_bytes] == []

    def test_registers_stay_within_the_bound_of_their_vector_width(self, kernels):
        assert [k for k in kernels if k.registers > self.max_registers[k.elements]] == []

    def test_shared_memory_is_dynamic_only(self, kernels):
        assert [k for k in kernels if k.shared_bytes] == []

    def test_parser_refuses_a_report_it_does_not_understand(self):
        with pytest.raises(ValueError, match="not a state kernel"):
            parse_ptxas(f"ptxas info : Compiling entry function '_Z3foov' for '{self.target}'\n")
