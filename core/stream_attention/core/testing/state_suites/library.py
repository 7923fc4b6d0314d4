"""The shared library as a file: exports, embedded code, what it needs to load; and its record."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from stream_attention.core import native
from stream_attention.core.device import DeviceFacts
from stream_attention.core.native import NativeLibrary, NativeLibraryError
from stream_attention.core.registry import MergeProblem, Registry
from stream_attention.core.schedule import KernelSchedule
from stream_attention.core.testing.native_library import (
    Shape,
    early_accesses,
    embedded_code,
    illegal_descriptors,
    instructions,
    kernels_with,
    library_file,
)
from stream_attention.core.testing.state_suites.base import LibraryTests

EXPORTS = frozenset(
    {
        "stream_attention_abi_version",
        "stream_attention_arch",
        "stream_attention_error_string",
        "stream_attention_params_bytes",
        "stream_attention_state_merge",
        "stream_attention_state_merge_geometry",
        "stream_attention_state_merge_host",
        "stream_attention_state_merge_prepare",
        "stream_attention_state_pair",
        "stream_attention_state_pair_geometry",
        "stream_attention_state_pair_host",
        "stream_attention_state_pair_prepare",
    }
)
# Opcodes of machine code that an engine or a launch is known by → (field, words).
ENGINES = {
    "HMMA": ("mma_engine", ("mma_sync",)),
    "HGMMA": ("mma_engine", ("wgmma",)),
    "LDGSTS": ("load_engine", ("cp_async",)),
    "ACQBULK": ("launch", ("dependent", "dependent_cooperative")),
}
PROBLEM = MergeProblem(num_states=4, head_dim=64, part_dtype="float32", out_dtype="bfloat16")


def _listing(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class LibrarySuite(LibraryTests):
    """What differs: the code inside, the names exported and the devices that the record serves.

    machine_code, ptx: targets of the embedded code. instructions: opcodes it must have.
    served: the compute capabilities, of those asked, that the package's rule accepts.
    schedules: the package's records.
    """

    capabilities: ModuleType
    schedules: tuple[KernelSchedule, ...]
    exports: frozenset[str] = EXPORTS
    machine_code: frozenset[str]
    ptx: frozenset[str]
    instructions: frozenset[str]
    served: frozenset[tuple[int, int]]
    arch: int

    def test_exports_are_the_abi_and_nothing_else(self, library):
        listed = _listing("nm", "--dynamic", "--defined-only", str(library_file(library)))
        assert {line.split()[-1] for line in listed.splitlines()} == self.exports

    def test_needs_no_cuda_library_to_load(self, library):
        listed = _listing("readelf", "--dynamic", str(library_file(library)))
        needed = [line for line in listed.splitlines() if "(NEEDED)" in line]
        assert needed
        assert [line for line in needed if "cuda" in line or "stdc++" in line] == []

    def test_holds_no_path_of_the_machine_it_was_built_on(self, library):
        content = library_file(library).read_bytes()
        traces = (b"/sandbox/", b"/execroot/", b"external/cuda", b"tmpxft", b"/csrc/")
        assert [trace for trace in traces if trace in content] == []

    def test_embedded_code_is_for_this_architecture(self, library):
        assert embedded_code(library) == (self.machine_code, self.ptx)
        assert library.arch() == self.arch

    def test_machine_code_has_the_instructions_of_the_architecture(self, library):
        found = instructions(library)
        assert found >= self.instructions
        assert not {name for name in found if name.startswith(("LDL", "STL"))}

    @pytest.mark.parametrize("opcode", sorted(ENGINES))
    def test_machine_code_has_the_engines_that_the_records_name(self, library, opcode):
        field, words = ENGINES[opcode]
        named = {
            name
            for record in self.schedules
            if getattr(record, field) in words
            for name in record.instances
        }
        assert len(kernels_with(library, opcode)) == len(named)

    def test_machine_code_names_no_illegal_descriptor(self, library):
        assert illegal_descriptors(library) == set()

    def test_no_kernel_reads_or_writes_before_it_waits_for_its_producer(self, library):
        assert early_accesses(library) == set()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="would launch on made-up addresses")
    @pytest.mark.parametrize("function", ["prepare", "launch"])
    def test_launch_without_a_driver_is_a_cuda_error(self, library, function):
        address = ctypes.byref(Shape(3, 1000, 64).params())
        if function == "prepare":
            status = library.handle.stream_attention_state_merge_prepare(address, 100)
        else:
            status = library.handle.stream_attention_state_merge(address, 100, None)
        with pytest.raises(native.NativeLaunchError, match=r"CUDA|device") as caught:
            library.check(function, status)
        assert caught.value.status > 0

    def test_status_text_names_refusals_and_cuda_errors(self, library):
        assert library.error_text(0) == "success"
        assert "head_dim" in library.error_text(-4)
        assert library.error_text(1) == "invalid argument"

    def test_import_of_the_package_does_not_import_torch(self):
        code = f"import sys, {self.library.package} as package; sys.exit('torch' in sys.modules)"
        environment = dict(
            os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path)
        )
        done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
        assert done.returncode == 0

    def test_missing_library_is_a_reason_and_not_an_import_error(self):
        missing = NativeLibrary(self.library.package, "libmissing.so")
        assert f"libmissing.so is not in package {self.library.package}" in missing.reason()
        with pytest.raises(NativeLibraryError, match="stage_libraries"):
            _ = missing.handle

    def test_file_that_is_no_library_is_a_reason(self):
        reason = NativeLibrary(self.library.package, "capabilities.py").reason()
        assert "capabilities.py does not load" in reason

    def test_library_of_another_abi_is_a_reason(self, library, monkeypatch):
        monkeypatch.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
        reason = NativeLibrary(library.package, library.file_name).reason()
        assert f"has ABI {native.ABI_VERSION - 1}, this core needs {native.ABI_VERSION}" in reason

    @pytest.mark.parametrize("code", [0, 1, 2])
    def test_structure_of_another_size_is_a_reason(self, library, monkeypatch, code):
        class Longer(ctypes.Structure):
            _fields_ = [*native.STRUCTURES[code]._fields_, ("more", ctypes.c_int64)]

        structures = list(native.STRUCTURES)
        structures[code] = Longer
        monkeypatch.setattr(native, "STRUCTURES", structures)
        reason = NativeLibrary(library.package, library.file_name).reason()
        size = ctypes.sizeof(Longer)
        assert f"Longer takes {size - 8} bytes, this core has {size}" in reason

    @pytest.mark.parametrize(
        "capability", [(7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (10, 3), (12, 0)]
    )
    def test_device_rule_names_the_device_that_it_rejects(self, library, capability):
        registry = Registry(discover=False)
        self.capabilities.register(registry)
        (record,) = registry.merge_records()
        device = DeviceFacts(type="cuda", compute_capability=capability, num_sms=100)
        reasons = record.reasons(PROBLEM, device)
        if capability in self.served:
            assert reasons == ()
        else:
            assert len(reasons) == 1
            assert reasons[0].startswith(f"device={device.arch}: kernels_sm{self.arch} needs")

    def test_cpu_is_rejected_with_a_reason(self):
        assert self.capabilities.device_reason(DeviceFacts(type="cpu")).startswith("device=cpu: ")
