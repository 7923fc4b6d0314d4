"""Registers, spills, shared memory and legality of every kernel, from what ptxas said of them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from stream_attention.core import legality, resources
from stream_attention.core.arch_limits import ARCHES
from stream_attention.core.native import NativeLibrary
from stream_attention.core.schedule import KernelSchedule
from stream_attention.core.state_schedules import MERGE, PAIR
from stream_attention.core.testing.native_library import Shape, require


class ResourcesSuite:
    """schedules: the package's records. arch: of its limits. target: what ptxas builds for.

    vector_bytes: widths of the state kernels' loads. max_registers: of these by elements a vector.
    """

    library: NativeLibrary
    schedules: tuple[KernelSchedule, ...]
    arch: str
    target: str
    vector_bytes: tuple[int, ...]
    max_registers: Mapping[int, int]

    @pytest.fixture(name="compiled")
    def compiled_fixture(self):
        """Instance → what ptxas says of it."""
        require(self.library)
        return resources.compiled_kernels(self.library)

    @pytest.fixture(name="facts")
    def facts_fixture(self, compiled):
        """(record, instance, facts) of every instance that a record names."""
        return [
            (record, name, facts)
            for record in self.schedules
            for name, facts in resources.facts(self.library, record).items()
        ]

    def test_facts_of_the_library_are_there(self, compiled):
        assert resources.reason(self.library) is None

    def test_every_compiled_kernel_is_an_instance_of_exactly_one_record(self, compiled):
        named = [name for record in self.schedules for name in record.instances]
        assert len(named) == len(set(named))
        assert set(named) == set(compiled)

    def test_records_have_names_of_their_own(self):
        names = [record.name for record in self.schedules]
        assert names
        assert len(names) == len(set(names))

    def test_records_print_and_evaluate_back(self):
        for record in self.schedules:
            assert eval(repr(record), {"KernelSchedule": KernelSchedule}) == record

    def test_every_kernel_is_built_for_the_architecture(self, compiled):
        assert {kernel.target for kernel in compiled.values()} == {self.target}
        assert {record.target for record in self.schedules} == {self.target}

    def test_every_kernel_is_legal_on_the_architecture(self, facts):
        broken = {
            name: legality.reasons(record, of_launch, ARCHES[self.arch])
            for record, name, of_launch in facts
        }
        assert {name: reasons for name, reasons in broken.items() if reasons} == {}

    def test_state_kernels_have_every_width_of_loads(self):
        for kernel in (PAIR, MERGE):
            widths = {
                (record.element_bytes, record.vector_elements)
                for record in self.schedules
                if record.kernel == kernel
            }
            assert widths == {
                (size, elements)
                for size in (2, 4)
                for elements in {1, *(width // size for width in self.vector_bytes)}
            }

    def test_registers_of_state_kernels_stay_within_the_bound_of_their_vectors(self, facts):
        state = [each for each in facts if each[0].kernel in (PAIR, MERGE)]
        assert state
        assert [
            (name, of_launch.registers)
            for record, name, of_launch in state
            if of_launch.registers > self.max_registers[record.vector_elements]
        ] == []

    def test_shared_memory_is_dynamic_only(self, compiled):
        assert {name: kernel for name, kernel in compiled.items() if kernel.shared_bytes} == {}

    def test_launches_of_state_kernels_take_no_more_than_their_records_say(self):
        """Of many states, in blocks of the most threads; the merge's record is reached."""
        require(self.library)
        for record in self.schedules:
            if record.kernel != MERGE:
                continue
            dtype = "float32" if record.element_bytes == 4 else "bfloat16"
            # One element more than vectors of 16 bytes can part goes by single elements; what 16
            # divides and 32 does not goes by 16.
            head_dim = {1: 65, 16 // record.element_bytes: 16 // record.element_bytes}.get(
                record.vector_elements, 64
            )
            shape = Shape(129, 1 << 16, head_dim, parts_dtype=dtype, out_dtype=dtype)
            form = self.library.geometry(shape.params(), 100)
            assert form.vector_elements == record.vector_elements
            assert form.block_threads == record.threads
            assert form.shared_bytes == record.shared_bytes
