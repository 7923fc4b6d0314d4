"""Native kernel libraries: found as package data, loaded on first use, checked against this file.

The structures mirror `core/csrc/include/stream_attention/state_abi.h`. Nothing here imports torch
or touches a GPU; a library that is missing or does not fit is a reason, an error only when used.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.resources
from dataclasses import dataclass
from typing import Any

ABI_VERSION = 1

# enum StreamAttentionDtype
DTYPE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2}
# enum StreamAttentionFlags
DEPENDENT_LAUNCH = 1

MAX_HEAD_DIM = 512


class StateMergeParams(ctypes.Structure):
    """`StreamAttentionStateMergeParams`: merge of `num_states` states; strides in elements."""

    _fields_ = [
        ("out_parts", ctypes.c_void_p),
        ("lse_parts", ctypes.c_void_p),
        ("attn_sink", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("parts_state_stride", ctypes.c_int64),
        ("parts_row_stride", ctypes.c_int64),
        ("lse_state_stride", ctypes.c_int64),
        ("lse_row_stride", ctypes.c_int64),
        ("out_row_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("num_states", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("parts_dtype", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("flags", ctypes.c_int32),
    ]


class StatePairParams(ctypes.Structure):
    """`StreamAttentionStatePairParams`: merge of two states at separate addresses."""

    _fields_ = [
        ("out_a", ctypes.c_void_p),
        ("out_b", ctypes.c_void_p),
        ("lse_a", ctypes.c_void_p),
        ("lse_b", ctypes.c_void_p),
        ("attn_sink", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("out_a_row_stride", ctypes.c_int64),
        ("out_b_row_stride", ctypes.c_int64),
        ("lse_a_row_stride", ctypes.c_int64),
        ("lse_b_row_stride", ctypes.c_int64),
        ("out_row_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("head_dim", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("parts_dtype", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class StateGeometry(ctypes.Structure):
    """`StreamAttentionStateGeometry`: how a merge is launched."""

    _fields_ = [
        ("num_vectors", ctypes.c_int64),
        ("grid", ctypes.c_int32),
        ("block_vectors", ctypes.c_int32),
        ("state_slices", ctypes.c_int32),
        ("vector_elements", ctypes.c_int32),
        ("vectors_per_row", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
    ]


# enum StreamAttentionStruct, in order.
STRUCTURES = (StateMergeParams, StatePairParams, StateGeometry)


class NativeLibraryError(RuntimeError):
    """A native library is missing, does not load, or is of another build than this package."""


class NativeLaunchError(RuntimeError):
    """A native function refused its arguments or CUDA refused the launch."""

    def __init__(self, function: str, status: int, text: str) -> None:
        super().__init__(f"{function}: {text} (status {status})")
        self.status = status


@dataclass(frozen=True, slots=True)
class MergeGeometry:
    """Launch of a merge: `grid` blocks of `block_vectors` × `state_slices` threads.

    A thread owns a vector of `vector_elements` of one row; `num_vectors` counts them all.
    """

    grid: int
    block_vectors: int
    state_slices: int
    vector_elements: int
    vectors_per_row: int
    num_vectors: int
    shared_bytes: int

    @property
    def block_threads(self) -> int:
        return self.block_vectors * self.state_slices


class NativeLibrary:
    """The shared library `file_name` in the data of `package`, loaded lazily. Thread-safe.

    Without a lock, which a fork would copy as another thread holds it: threads that come at once
    load the same library.
    """

    def __init__(self, package: str, file_name: str) -> None:
        self.package = package
        self.file_name = file_name
        self._handle: Any = None
        self._reason: str | None = None
        self._files = contextlib.ExitStack()

    def __repr__(self) -> str:
        return f"NativeLibrary({self.package!r}, {self.file_name!r})"

    def reason(self) -> str | None:
        """Why the library cannot be used, or `None`. Loads it on the first call."""
        if self._handle is None and self._reason is None:
            try:
                self._handle = self._load()
            except NativeLibraryError as error:
                self._reason = str(error)
        return None if self._handle is not None else self._reason

    @property
    def handle(self) -> Any:
        """The loaded `ctypes.CDLL`; `NativeLibraryError` with the reason if there is none."""
        reason = self.reason()
        if reason is not None:
            raise NativeLibraryError(reason)
        return self._handle

    def error_text(self, status: int) -> str:
        """What a non-zero result of a function of this library means."""
        return self.handle.stream_attention_error_string(status).decode()

    def check(self, function: str, status: int) -> None:
        """Raise `NativeLaunchError` unless `status` is 0."""
        if status != 0:
            raise NativeLaunchError(function, status, self.error_text(status))

    def arch(self) -> int:
        """The compute capability that the library is built for: 80, 90 or 100."""
        return int(self.handle.stream_attention_arch())

    def geometry(self, params: ctypes.Structure, num_sms: int) -> MergeGeometry:
        """Launch geometry of `params` on a GPU of `num_sms` multiprocessors; needs no GPU."""
        if isinstance(params, StateMergeParams):
            name = "stream_attention_state_merge_geometry"
        else:
            name = "stream_attention_state_pair_geometry"
        raw = StateGeometry()
        status = getattr(self.handle, name)(ctypes.byref(params), num_sms, ctypes.byref(raw))
        self.check(name, status)
        fields = MergeGeometry.__dataclass_fields__
        return MergeGeometry(**{field: int(getattr(raw, field)) for field in fields})

    def _load(self) -> Any:
        try:
            resource = importlib.resources.files(self.package).joinpath(self.file_name)
        except ModuleNotFoundError as error:
            raise NativeLibraryError(f"package {self.package} is not installed") from error
        if not resource.is_file():
            raise NativeLibraryError(
                f"{self.file_name} is not in package {self.package}; build it with Bazel "
                f"(./bazelw run //tools/cuda:stage_libraries) or install the wheel"
            )
        # A package inside a zip file has to be unpacked, and to stay so while the library is used.
        path = self._files.enter_context(importlib.resources.as_file(resource))
        try:
            handle = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeLibraryError(f"{self.file_name} does not load: {error}") from error
        self._check_abi(handle)
        _declare(handle)
        return handle

    def _check_abi(self, handle: Any) -> None:
        try:
            version = int(handle.stream_attention_abi_version())
            measure = handle.stream_attention_params_bytes
        except AttributeError as error:
            raise NativeLibraryError(
                f"{self.file_name} is not a StreamAttn library: {error}"
            ) from error
        if version != ABI_VERSION:
            raise NativeLibraryError(
                f"{self.file_name} has ABI {version}, this core needs {ABI_VERSION}; install "
                f"packages of one version"
            )
        measure.restype = ctypes.c_int64
        for code, structure in enumerate(STRUCTURES):
            size, expected = int(measure(code)), ctypes.sizeof(structure)
            if size != expected:
                raise NativeLibraryError(
                    f"{self.file_name}: {structure.__name__} takes {size} bytes, this core has "
                    f"{expected}; install packages of one version"
                )


def _declare(handle: Any) -> None:
    """Argument and result types of every exported function, so that a wrong call raises here."""
    pointer, integer = ctypes.c_void_p, ctypes.c_int32
    handle.stream_attention_arch.restype = integer
    handle.stream_attention_error_string.restype = ctypes.c_char_p
    handle.stream_attention_error_string.argtypes = (integer,)
    for kind, params in (("merge", StateMergeParams), ("pair", StatePairParams)):
        address = ctypes.POINTER(params)
        geometry = getattr(handle, f"stream_attention_state_{kind}_geometry")
        geometry.argtypes = (address, integer, ctypes.POINTER(StateGeometry))
        geometry.restype = integer
        launch = getattr(handle, f"stream_attention_state_{kind}")
        launch.argtypes = (address, integer, pointer)
        launch.restype = integer
        for form in ("prepare", "host"):
            function = getattr(handle, f"stream_attention_state_{kind}_{form}")
            function.argtypes = (address, integer)
            function.restype = integer
