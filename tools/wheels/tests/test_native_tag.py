"""The platform tag of a native wheel follows from the ELF file."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from hatch_native import Needs, platform_tag, read_needs


def test_tag_is_the_newest_glibc_that_is_bound() -> None:
    old = Needs(("libc.so.6",), ("GLIBC_2.2.5", "GLIBC_2.14"))
    new = Needs(("libc.so.6", "libm.so.6"), ("GLIBC_2.2.5", "GLIBC_2.34"))
    assert platform_tag([old]) == "manylinux_2_17_x86_64"
    assert platform_tag([old, new]) == "manylinux_2_34_x86_64"


@pytest.mark.parametrize(
    "needs",
    [
        Needs(("libc.so.6", "libstdc++.so.6"), ("GLIBC_2.34",)),
        Needs(("libcudart.so.13", "libc.so.6"), ()),
        Needs(("libc.so.6",), ("GLIBC_PRIVATE",)),
        Needs(("libc.so.6",), ("GLIBC_ABI_DT_RELR",)),
    ],
)
def test_what_no_policy_covers_is_plain_linux(needs: Needs) -> None:
    assert platform_tag([Needs(("libc.so.6",), ()), needs]) == "linux_x86_64"


def test_needs_of_numpy_fit_the_tag_that_its_own_wheel_carries() -> None:
    """An outside witness: numpy's wheel was tagged by another tool than ours."""
    numpy = metadata.distribution("numpy")
    tags = re.findall(r"manylinux_2_(\d+)_x86_64", numpy.read_text("WHEEL") or "")
    assert tags, "numpy's wheel has no manylinux tag on this machine"
    libraries = [file for file in numpy.files or () if "_multiarray_umath" in file.name]
    needs = [
        read_needs(Path(str(numpy.locate_file(file)))) for file in libraries if file.suffix == ".so"
    ]
    assert needs
    assert all("libc.so.6" in need.libraries for need in needs)
    minors = [
        int(v.split(".")[1]) for need in needs for v in need.versions if v.startswith("GLIBC_2.")
    ]
    assert minors
    assert max(minors) <= max(map(int, tags))


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("no library")
    with pytest.raises(ValueError, match=r"text\.so: must be a 64-bit little-endian ELF file"):
        read_needs(text)
    other = tmp_path / "arm.so"
    other.write_bytes(b"\x7fELF\x02\x01".ljust(18, b"\0") + b"\xb7\x00" + bytes(64))
    with pytest.raises(ValueError, match=r"arm\.so: machine=183: must be x86-64"):
        read_needs(other)
