"""Build hook of the kernel packages: tags the wheel for what its shared libraries ask of a system.

The tag is read from the libraries, never assumed. A library that needs only libraries of the
manylinux policies (PEP 600) gets `manylinux_2_N`, N being the newest glibc whose symbols it binds
to; anything else gets `linux_x86_64`, which says that it runs on systems like the builder's.

Layout of ELF: System V ABI, chapters 4 and 5. Symbol versions: Linux Standard Base, section 10.7.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# What every manylinux_2_N system has, as far as our libraries use it. libstdc++ and libgcc_s are
# left out on purpose: their symbol versions follow the compiler, and our libraries link without.
POLICY_LIBRARIES = frozenset(
    {
        "ld-linux-x86-64.so.2",
        "libc.so.6",
        "libdl.so.2",
        "libm.so.6",
        "libpthread.so.0",
        "librt.so.1",
    }
)
# Older installers know no tag below this one, and glibc 2.17 is the oldest policy.
OLDEST_GLIBC_MINOR = 17

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SHT_DYNAMIC = 6
_SHT_GNU_VERNEED = 0x6FFFFFFE
_DT_NEEDED = 1
_MACHINE_X86_64 = 62


class Needs(NamedTuple):
    """What a shared library asks of the system: libraries by soname, symbol versions by name.

    No dataclass: those need their module in `sys.modules`, and hatchling does not enter this one.
    """

    libraries: tuple[str, ...]
    versions: tuple[str, ...]


def read_needs(path: Path) -> Needs:
    """Reads DT_NEEDED and the version needs of an x86-64 ELF file; else raises `ValueError`."""
    data = path.read_bytes()
    if data[:4] != b"\x7fELF" or data[4:6] != b"\x02\x01":
        raise ValueError(f"{path.name}: must be a 64-bit little-endian ELF file")
    (machine,) = struct.unpack_from("<H", data, 18)
    if machine != _MACHINE_X86_64:
        raise ValueError(f"{path.name}: machine={machine}: must be x86-64 ({_MACHINE_X86_64})")
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [_SECTION.unpack_from(data, offset + i * size) for i in range(count)]
    libraries: list[str] = []
    versions: list[str] = []
    for _, kind, _, _, start, length, link, info, _, _ in sections:
        if kind == _SHT_DYNAMIC:
            libraries += _needed(data, start, length, sections[link][4])
        elif kind == _SHT_GNU_VERNEED:
            versions += _version_needs(data, start, info, sections[link][4])
    return Needs(tuple(sorted(set(libraries))), tuple(sorted(set(versions))))


def _text(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode()


def _needed(data: bytes, start: int, length: int, strings: int) -> list[str]:
    entries = struct.iter_unpack("<qQ", data[start : start + length])
    return [_text(data, strings + value) for tag, value in entries if tag == _DT_NEEDED]


def _version_needs(data: bytes, start: int, count: int, strings: int) -> list[str]:
    found = []
    for _ in range(count):
        _, num_aux, _, aux, following = struct.unpack_from("<HHIII", data, start)
        entry = start + aux
        for _ in range(num_aux):
            _, _, _, name, step = struct.unpack_from("<IHHII", data, entry)
            found.append(_text(data, strings + name))
            entry += step
        start += following
    return found


def platform_tag(needs: Iterable[Needs]) -> str:
    """The platform tag of a wheel that holds libraries with these needs."""
    minor = OLDEST_GLIBC_MINOR
    for need in needs:
        if not POLICY_LIBRARIES.issuperset(need.libraries):
            return "linux_x86_64"
        for version in need.versions:
            match = re.fullmatch(r"GLIBC_2\.(\d+)(\.\d+)*", version)
            if match is None:
                return "linux_x86_64"
            minor = max(minor, int(match[1]))
    return f"manylinux_2_{minor}_x86_64"


class NativeWheel(BuildHookInterface):
    """Sets the tag; a standard build without a shared library is an error."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        libraries = sorted(Path(self.root, "stream_attention").rglob("*.so"))
        if not libraries:
            raise ValueError(
                f"{self.metadata.core.name}: no shared library in the package; "
                "build its wheel with ./bazelw run //tools/wheels:dist -- DIR"
            )
        tag = platform_tag(read_needs(library) for library in libraries)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"
