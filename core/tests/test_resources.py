"""The file of a library's kernels: what is read from it, and why where it cannot be."""

import dataclasses
import json
import sys

import pytest

from stream_attention.core import resources
from stream_attention.core.arch_limits import ResourceFacts
from stream_attention.core.native import NativeLibrary
from stream_attention.core.resources import CompiledKernel, ResourcesError
from stream_attention.core.state_schedules import state_schedules

SAID = {"target": "sm_90a", "registers": 40, "barriers": 1, "stack_bytes": 0}
SAID |= {"spill_bytes": 0, "shared_bytes": 16}
MERGE = next(r for r in state_schedules("sm_90a", 16, True) if r.name == "state_merge_16bit_by_8")
CONTENT = {"format": 1, "kernels": dict.fromkeys(MERGE.instances, SAID)}


@pytest.fixture(name="package")
def package_fixture(tmp_path, monkeypatch):
    """An importable package of its own name; `write` puts a file beside its library."""
    name = f"kernels_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / name
    sys.modules.pop(name, None)
    resources._read.cache_clear()


def library(package, content=None):
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (package / "libkernels.resources.json").write_text(text)
    return NativeLibrary(package.name, "libkernels.so")


def test_facts_join_the_file_with_the_schedule(package):
    of = library(package, CONTENT)
    assert resources.reason(of) is None
    found = resources.facts(of, MERGE)
    assert set(found) == set(MERGE.instances)
    assert set(found.values()) == {
        ResourceFacts(
            threads=256,
            registers=40,
            static_shared_bytes=16,
            dynamic_shared_bytes=256 * 10 * 4,
            barriers=1,
        )
    }


def test_what_the_caller_does_with_the_kernels_is_not_remembered(package):
    of = library(package, CONTENT)
    resources.compiled_kernels(of).clear()
    assert resources.compiled_kernels(of)


def test_a_missing_file_is_a_reason_that_says_how_to_get_it(package):
    of = library(package)
    reason = resources.reason(of)
    assert f"libkernels.resources.json is not in package {package.name}" in reason
    assert "install its wheel, or ./bazelw run //tools/cuda:stage_libraries" in reason
    with pytest.raises(ResourcesError, match="stage_libraries"):
        resources.facts(of, MERGE)


def test_a_missing_package_is_a_reason():
    reason = resources.reason(NativeLibrary("stream_attention.no_such_package", "lib.so"))
    assert "is not in package stream_attention.no_such_package" in reason


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not understood"),
        ("[]", "is not understood"),
        ("[" * 200_000, "is not understood: ValueError('is nested too deeply"),
        ('{"format": 1, "format": 1}', "key 'format' is given 2 times"),
        ("{}", "is not understood: KeyError"),
        ({"format": 2, "kernels": {}}, "has format 2, this core reads 1"),
        ({"format": 1, "kernels": {}}, "names no kernel"),
        ({"format": 1, "kernels": []}, "is not understood"),
        ({"format": 1, "kernels": {"a": {}}}, "is not understood: TypeError"),
        ({"format": 1, "kernels": {"a": {**SAID, "more": 1}}}, "is not understood: TypeError"),
        (
            {"format": 1, "kernels": {"a": {**SAID, "registers": -1}}},
            "registers=-1: must be an int >= 1",
        ),
        (
            {"format": 1, "kernels": {"a": {**SAID, "spill_bytes": "0"}}},
            "spill_bytes='0': must be an int >= 0",
        ),
    ],
)
def test_a_file_that_is_not_understood_is_a_reason(package, content, message):
    of = library(package, content)
    assert message in resources.reason(of)
    with pytest.raises(ResourcesError, match=r"libkernels\.resources\.json"):
        resources.compiled_kernels(of)


def test_bytes_that_are_no_text_are_a_reason(package):
    (package / "libkernels.resources.json").write_bytes(b"\xff\xfe{")
    assert "libkernels.resources.json" in resources.reason(library(package))


def test_an_instance_that_the_library_does_not_have_is_named(package):
    of = library(package, CONTENT)
    other = dataclasses.replace(MERGE, instances=(*MERGE.instances, "state_merge_kernel<Arch, 9>"))
    with pytest.raises(ResourcesError, match=r"does not name \['state_merge_kernel<Arch, 9>'\]"):
        resources.facts(of, other)


def test_compiled_kernels_print_and_evaluate_back():
    kernel = CompiledKernel(**SAID)
    assert eval(repr(kernel), {"CompiledKernel": CompiledKernel}) == kernel
