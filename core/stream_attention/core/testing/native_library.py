"""What tests of kernels packages share: embedded code, and a model of the launch geometry."""

from __future__ import annotations

import functools
import importlib.resources
import importlib.util
import os
import re
import subprocess
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stream_attention.core.native import MergeGeometry, NativeLibrary, StateMergeParams

# Set for tests that Bazel runs: there a library that does not load is a failure, not a skip.
REQUIRE_LIBRARIES = "STREAM_ATTENTION_REQUIRE_LIBRARIES"

_DTYPES = ("float32", "float16", "bfloat16")
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def require(library: NativeLibrary) -> NativeLibrary:
    """The library, loaded; skips the calling test where the sources are used without building."""
    reason = library.reason()
    if reason is not None:
        if os.environ.get(REQUIRE_LIBRARIES) == "1":
            raise AssertionError(reason)
        raise unittest.SkipTest(reason)
    return library


def library_file(library: NativeLibrary, suffix: str = ".so") -> Path:
    """Path of the library, or of the file beside it that ends in `suffix`."""
    name = library.file_name.removesuffix(".so") + suffix
    return Path(str(importlib.resources.files(library.package).joinpath(name)))


@functools.cache
def _cuobjdump(library: NativeLibrary, *options: str) -> str:
    """Output of cuobjdump, which comes with nvdisasm inside the triton wheel."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise AssertionError("triton is not installed, whose wheel holds cuobjdump")
    tools = Path(spec.origin).parent / "backends" / "nvidia" / "bin"
    command = [str(tools / "cuobjdump"), *options, str(library_file(library))]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def embedded_code(library: NativeLibrary) -> tuple[set[str], set[str]]:
    """`(targets of the machine code, targets of the PTX)`, e.g. `({"sm_80"}, {"sm_80"})`."""
    listed = _cuobjdump(library, "-lelf", "-lptx")
    machine = set(re.findall(r"^ELF file.*\.(sm_\w+)\.cubin$", listed, re.MULTILINE))
    ptx = set(re.findall(r"^PTX file.*\.(sm_\w+)\.ptx$", listed, re.MULTILINE))
    return machine, ptx


def instructions(library: NativeLibrary) -> set[str]:
    """Every opcode, with its modifiers, of the library's machine code, e.g. `"LDG.E.128"`."""
    listed = _cuobjdump(library, "-sass")
    return set(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", listed, re.M))


def kernels_with(library: NativeLibrary, opcode: str) -> set[str]:
    """Kernels, by their mangled names, whose machine code has an instruction `opcode`."""
    sections = _cuobjdump(library, "-sass").split("Function : ")[1:]
    found = re.compile(rf"\b{opcode}\b")
    return {section.split("\n", 1)[0].strip() for section in sections if found.search(section)}


def illegal_descriptors(library: NativeLibrary) -> set[str]:
    """Kernels with a memory descriptor in an odd uniform register.

    A descriptor is a pair that begins at an even one; ptxas 13.0 was seen to name `UR1`, which is
    an illegal instruction when it runs.
    """
    kernels = set()
    for section in _cuobjdump(library, "-sass").split("Function : ")[1:]:
        if re.search(r"desc\[UR\d*[13579]\]", section):
            kernels.add(section.split("\n", 1)[0].strip())
    return kernels


def early_accesses(library: NativeLibrary) -> set[str]:
    """Kernels that touch global memory before they wait for their producer.

    Of those that wait (`griddepcontrol.wait`, ACQBULK) alone: under dependent launch the producer
    may still be writing what an earlier access reads. Relaxed loads of the device's scope (STRONG)
    may come earlier: that is how a kernel says that it takes a value for a hint.
    """
    kernels = set()
    for section in _cuobjdump(library, "-sass").split("Function : ")[1:]:
        wait = re.search(r"\bACQBULK\b", section)
        access = re.search(
            r"\b(?:LDG(?![\w.]*\.STRONG\.GPU)|LDGSTS|STG|LD|ST|ATOMG?|RED|UBLKCP)\b[.\s]", section
        )
        if wait and access and access.start() < wait.start():
            kernels.add(section.split("\n", 1)[0].strip())
    return kernels


@dataclass(frozen=True, slots=True)
class Shape:
    """A merge as the geometry sees it: dense parts `[num_states, rows, row_stride]` at `base`."""

    num_states: int
    rows: int
    head_dim: int
    parts_dtype: str = "float32"
    out_dtype: str = "float32"
    row_pad: int = 0
    out_pad: int = 0
    base: int = 1 << 40
    out_base: int = 1 << 41

    def params(self) -> StateMergeParams:
        """The C struct; its addresses are made up, so nothing may follow them."""
        stride = self.head_dim + self.row_pad
        return StateMergeParams(
            out_parts=self.base,
            lse_parts=1 << 42,
            out=self.out_base,
            parts_state_stride=stride * self.rows,
            parts_row_stride=stride,
            lse_state_stride=self.rows,
            lse_row_stride=1,
            out_row_stride=self.head_dim + self.out_pad,
            rows=self.rows,
            num_states=self.num_states,
            head_dim=self.head_dim,
            parts_dtype=_DTYPES.index(self.parts_dtype),
            out_dtype=_DTYPES.index(self.out_dtype),
        )


def _vector_elements(shape: Shape, max_bytes: int) -> int:
    """By looking at addresses: of the first rows and states, every vector must lie on its size."""
    size, out_size = _BYTES[shape.parts_dtype], _BYTES[shape.out_dtype]
    stride = shape.head_dim + shape.row_pad
    for width in sorted({max_bytes, 16}, reverse=True):
        elements = width // size
        if shape.head_dim % elements:
            continue
        out_width = min(16, elements * out_size)
        loads = [
            shape.base + size * (stride * (state * shape.rows + row) + column)
            for state in range(3)
            for row in range(3)
            for column in range(0, shape.head_dim, elements)
        ]
        stores = [
            shape.out_base + out_size * ((shape.head_dim + shape.out_pad) * row + column)
            for row in range(17)
            for column in range(0, shape.head_dim, elements)
        ]
        if all(at % width == 0 for at in loads) and all(at % out_width == 0 for at in stores):
            return elements
    return 1


def model_geometry(shape: Shape, num_sms: int, max_bytes: int) -> MergeGeometry:
    """The launch geometry, written a second time and in another way."""
    elements = _vector_elements(shape, max_bytes)
    per_row = shape.head_dim // elements
    vectors = shape.rows * per_row
    slices = next(s for s in (1, 2, 4, 8) if s == 8 or 4 * s >= shape.num_states)
    wide = {1: 128, 2: 64, 4: 32, 8: 32}[slices]
    block = wide if -(-vectors // wide) >= 2 * num_sms else 32
    return MergeGeometry(
        grid=-(-vectors // block),
        block_vectors=block,
        state_slices=slices,
        vector_elements=elements,
        vectors_per_row=per_row,
        num_vectors=vectors,
        shared_bytes=0 if slices == 1 else slices * block * (elements + 2) * 4,
    )


def geometry_shapes() -> Iterator[Shape]:
    """Shapes on both sides of every decision of the geometry."""
    for num_states in (0, 1, 2, 4, 5, 8, 9, 16, 17, 129):
        for rows in (1, 2, 7, 132, 4097, 1 << 20, (1 << 31) + 5):
            for head_dim in (1, 4, 8, 12, 16, 63, 64, 80, 96, 128, 192, 200, 256, 500, 512):
                if rows * head_dim <= 1 << 36:  # above, some grids exceed CUDA's limit
                    yield Shape(num_states, rows, head_dim)
    for parts_dtype in _DTYPES:
        for out_dtype in _DTYPES:
            for head_dim in (8, 16, 24, 64, 72, 128):
                for row_pad, out_pad in ((0, 0), (8, 0), (0, 4), (4, 8), (2, 0), (1, 1), (0, 1)):
                    for shift in (0, 2, 4, 8, 16, 32):
                        at = {"base": (1 << 40) + shift, "out_base": (1 << 41) + 2 * shift}
                        if shift % _BYTES[parts_dtype] == 0:
                            yield Shape(
                                3, 1000, head_dim, parts_dtype, out_dtype, row_pad, out_pad, **at
                            )
