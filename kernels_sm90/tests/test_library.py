"""The shared library as a file: exports, embedded code, what it needs to load; and its record."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from stream_attention.core import native
from stream_attention.core.device import DeviceFacts
from stream_attention.core.native import NativeLibrary, NativeLibraryError
from stream_attention.core.registry import MergeProblem, Registry
from stream_attention.core.testing.native_library import (
    Shape,
    embedded_code,
    instructions,
    library_file,
    require,
)
from stream_attention.kernels_sm90 import capabilities
from stream_attention.kernels_sm90.library import LIBRARY

MACHINE_CODE = {"sm_90a"}
PTX = set()
# Wide read-once loads; the wait for, and the release of, the neighbours of a dependent launch.
INSTRUCTIONS = {"LDG.E.NA.128", "ACQBULK", "PREEXIT"}
SERVED = {(9, 0)}
ARCH = 90

EXPORTS = {
    "stream_attention_abi_version",
    "stream_attention_arch",
    "stream_attention_decode",
    "stream_attention_decode_begin",
    "stream_attention_decode_error_string",
    "stream_attention_decode_geometry",
    "stream_attention_decode_owner",
    "stream_attention_decode_prepare",
    "stream_attention_decode_struct_bytes",
    "stream_attention_decode_tiles",
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
PROBLEM = MergeProblem(num_states=4, head_dim=64, part_dtype="float32", out_dtype="bfloat16")


@pytest.fixture(name="library", scope="module")
def library_fixture():
    return require(LIBRARY)


def _listing(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_exports_are_the_abi_and_nothing_else(library):
    listed = _listing("nm", "--dynamic", "--defined-only", str(library_file(library)))
    assert {line.split()[-1] for line in listed.splitlines()} == EXPORTS


def test_needs_no_cuda_library_to_load(library):
    listed = _listing("readelf", "--dynamic", str(library_file(library)))
    needed = [line for line in listed.splitlines() if "(NEEDED)" in line]
    assert needed
    assert [line for line in needed if "cuda" in line or "stdc++" in line] == []


def test_holds_no_path_of_the_machine_it_was_built_on(library):
    content = library_file(library).read_bytes()
    traces = (b"/sandbox/", b"/execroot/", b"external/cuda", b"tmpxft", b"/csrc/")
    assert [trace for trace in traces if trace in content] == []


def test_embedded_code_is_for_this_architecture(library):
    assert embedded_code(library) == (MACHINE_CODE, PTX)
    assert library.arch() == ARCH


def test_machine_code_has_the_instructions_of_the_architecture(library):
    found = instructions(library)
    assert found >= INSTRUCTIONS
    assert not {name for name in found if name.startswith(("LDL", "STL"))}


@pytest.mark.skipif(torch.cuda.is_available(), reason="would launch on made-up addresses")
@pytest.mark.parametrize("function", ["prepare", "launch"])
def test_launch_without_a_driver_is_a_cuda_error(library, function):
    address = ctypes.byref(Shape(3, 1000, 64).params())
    if function == "prepare":
        status = library.handle.stream_attention_state_merge_prepare(address, 100)
    else:
        status = library.handle.stream_attention_state_merge(address, 100, None)
    with pytest.raises(native.NativeLaunchError, match=r"CUDA|device") as caught:
        library.check(function, status)
    assert caught.value.status > 0


def test_status_text_names_refusals_and_cuda_errors(library):
    assert library.error_text(0) == "success"
    assert "head_dim" in library.error_text(-4)
    assert library.error_text(1) == "invalid argument"


def test_import_of_the_package_does_not_import_torch():
    code = "import sys, stream_attention.kernels_sm90 as package; sys.exit('torch' in sys.modules)"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == 0


def test_missing_library_is_a_reason_and_not_an_import_error():
    missing = NativeLibrary(LIBRARY.package, "libmissing.so")
    assert f"libmissing.so is not in package {LIBRARY.package}" in missing.reason()
    with pytest.raises(NativeLibraryError, match="stage_libraries"):
        _ = missing.handle


def test_file_that_is_no_library_is_a_reason():
    reason = NativeLibrary(LIBRARY.package, "capabilities.py").reason()
    assert "capabilities.py does not load" in reason


def test_library_of_another_abi_is_a_reason(library, monkeypatch):
    monkeypatch.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
    reason = NativeLibrary(library.package, library.file_name).reason()
    assert f"has ABI {native.ABI_VERSION - 1}, this core needs {native.ABI_VERSION}" in reason


@pytest.mark.parametrize("code", [0, 1, 2])
def test_structure_of_another_size_is_a_reason(library, monkeypatch, code):
    class Longer(ctypes.Structure):
        _fields_ = [*native.STRUCTURES[code]._fields_, ("more", ctypes.c_int64)]

    structures = list(native.STRUCTURES)
    structures[code] = Longer
    monkeypatch.setattr(native, "STRUCTURES", structures)
    reason = NativeLibrary(library.package, library.file_name).reason()
    size = ctypes.sizeof(Longer)
    assert f"Longer takes {size - 8} bytes, this core has {size}" in reason


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (10, 3), (12, 0)])
def test_device_rule_names_the_device_that_it_rejects(library, capability):
    registry = Registry(_discovered=True)
    capabilities.register(registry)
    (record,) = registry.merge_records()
    device = DeviceFacts(type="cuda", compute_capability=capability, num_sms=100)
    reasons = record.reasons(PROBLEM, device)
    if capability in SERVED:
        assert reasons == ()
    else:
        assert len(reasons) == 1
        assert reasons[0].startswith(f"device={device.arch}: kernels_sm{ARCH} needs")


def test_cpu_is_rejected_with_a_reason():
    assert capabilities.device_reason(DeviceFacts(type="cpu")).startswith("device=cpu: ")
