"""Merges of attention states by a native library: tensors in, one foreign call a run.

`MergeLaunch` fills the C struct once; `run()` is one `ctypes` call on the current stream.
`merge_rules` and `merge_record` make the capability record that a kernels package registers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from stream_attention.core.device import DeviceFacts, device_facts
from stream_attention.core.dtypes import dtype_name
from stream_attention.core.errors import Faults, shape_of
from stream_attention.core.launch import NotCopied
from stream_attention.core.native import (
    DEPENDENT_LAUNCH,
    DTYPE_CODES,
    MAX_HEAD_DIM,
    MergeGeometry,
    NativeLibrary,
    StateMergeParams,
    StatePairParams,
)
from stream_attention.core.registry import CapabilityRule, MergeProblem, MergeRecord

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
States: TypeAlias = torch.Tensor | Pair


class MergeLaunch(NotCopied):
    """`out, lse = merge(out_parts, lse_parts)`, bound to its tensors.

    out_parts: `[num_states, rows, head_dim]` fp32/fp16/bf16, last axis dense, other strides free,
        or a pair of `[rows, head_dim]`.
    lse_parts: `[num_states, rows]` fp32 natural log, any strides, or a pair of `[rows]`. `-inf`
        marks an empty state, whose output is not read.
    out: `[rows, head_dim]` fp32/fp16/bf16, last axis dense; written whole by every run.
    lse: `[rows]` fp32 contiguous, or `None`.
    attn_sink: `[num_heads]` fp32 contiguous, or `None`; row r has head `r % num_heads`.

    A row of empty states gives out 0 and lse -inf, with a sink too. Outputs must not overlap
    inputs. `run()` never syncs or allocates and may be captured. `ValueError` lists every bad
    tensor.
    """

    def __init__(
        self,
        library: NativeLibrary,
        out_parts: States,
        lse_parts: States,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
        *,
        dependent: bool = False,
        device: DeviceFacts | None = None,
    ) -> None:
        self._library = library
        self._flags = DEPENDENT_LAUNCH if dependent else 0
        self._facts = device
        self._is_pair = not isinstance(out_parts, torch.Tensor)
        self._name = f"stream_attention_state_{'pair' if self._is_pair else 'merge'}"
        self._function = getattr(library.handle, self._name)
        self.rebind(out_parts, lse_parts, out, lse, attn_sink)

    def rebind(
        self,
        out_parts: States,
        lse_parts: States,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
    ) -> None:
        """Point the launch at other tensors and load its kernel; a pair stays a pair."""
        _check(out_parts, lse_parts, out, lse, attn_sink, self._is_pair)
        fill = _pair_params if self._is_pair else _merge_params
        params = fill(out_parts, lse_parts, out)
        params.lse = 0 if lse is None else lse.data_ptr()
        params.attn_sink = 0 if attn_sink is None else attn_sink.data_ptr()
        params.num_heads = 0 if attn_sink is None else attn_sink.shape[0]
        params.flags = self._flags
        facts = self._facts or device_facts(out.device)
        # Fails here, not at run time, where the kernel would refuse.
        self.geometry: MergeGeometry = self._library.geometry(params, facts.num_sms)
        if out.is_cuda:
            with torch.cuda.device(out.device):
                name = self._name + "_prepare"
                prepare = getattr(self._library.handle, name)
                self._library.check(name, prepare(ctypes.byref(params), facts.num_sms))
        self._params = params
        self._reference = ctypes.byref(params)
        self._num_sms = facts.num_sms
        self._index = facts.index if out.device.index is None else out.device.index
        # The struct holds addresses only.
        self._tensors = (out_parts, lse_parts, out, lse, attn_sink)

    def unbind(self) -> None:
        """Keep no tensor alive; a rebind must come before the next run."""
        del self._params, self._reference, self._tensors

    def run(self, stream: int | None = None) -> None:
        """Enqueue on `stream` (a `cudaStream_t`), by default torch's current one."""
        if torch._C._cuda_getDevice() == self._index:
            if stream is None:
                stream = torch._C._cuda_getCurrentRawStream(self._index)
            status = self._function(self._reference, self._num_sms, stream)
        else:
            status = self._run_on_other_device(stream)
        if status != 0:
            self._library.check(self._name, status)

    def _run_on_other_device(self, stream: int | None) -> int:
        with torch.cuda.device(self._index):
            if stream is None:
                stream = torch._C._cuda_getCurrentRawStream(self._index)
            return int(self._function(self._reference, self._num_sms, stream))


def merge_on_host(
    library: NativeLibrary,
    out_parts: States,
    lse_parts: States,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    *,
    num_sms: int = 1,
) -> None:
    """The same merge on CPU tensors: the kernel's indices and algebra, thread by thread."""
    facts = DeviceFacts(type="cpu", num_sms=num_sms)
    launch = MergeLaunch(library, out_parts, lse_parts, out, lse, attn_sink, device=facts)
    name = launch._name + "_host"
    library.check(name, getattr(library.handle, name)(launch._reference, num_sms))


def merge_rules(
    library: NativeLibrary, device_reason: Callable[[DeviceFacts], str | None]
) -> tuple[CapabilityRule, ...]:
    """Legality table of a state-merge kernel: library, device, and what all kernels share."""
    return (
        CapabilityRule("library", lambda problem, device: library.reason()),
        CapabilityRule("device", lambda problem, device: device_reason(device)),
        CapabilityRule("head_dim", lambda problem, device: _head_dim_reason(problem)),
        CapabilityRule("part_dtype", lambda problem, device: _dtype_reason(problem, "part_dtype")),
        CapabilityRule("out_dtype", lambda problem, device: _dtype_reason(problem, "out_dtype")),
    )


def merge_record(
    name: str,
    package: str,
    library: NativeLibrary,
    device_reason: Callable[[DeviceFacts], str | None],
) -> MergeRecord:
    """The capability record of a package's state-merge kernels."""

    def build(
        out_parts: States,
        lse_parts: States,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
    ) -> MergeLaunch:
        return MergeLaunch(library, out_parts, lse_parts, out, lse, attn_sink)

    return MergeRecord(name, package, merge_rules(library, device_reason), build)


def _head_dim_reason(problem: MergeProblem) -> str | None:
    if 1 <= problem.head_dim <= MAX_HEAD_DIM:
        return None
    return f"head_dim={problem.head_dim}: state kernels take 1..{MAX_HEAD_DIM}; use {MAX_HEAD_DIM}"


def _dtype_reason(problem: MergeProblem, parameter: str) -> str | None:
    value = getattr(problem, parameter)
    if value in DTYPE_CODES:
        return None
    return f"{parameter}={value!r}: state kernels take {', '.join(DTYPE_CODES)}; use float32"


def _merge_params(out_parts: Any, lse_parts: Any, out: torch.Tensor) -> StateMergeParams:
    num_states, rows, head_dim = out_parts.shape
    return StateMergeParams(
        out_parts=out_parts.data_ptr(),
        lse_parts=lse_parts.data_ptr(),
        out=out.data_ptr(),
        parts_state_stride=out_parts.stride(0),
        parts_row_stride=out_parts.stride(1),
        lse_state_stride=lse_parts.stride(0),
        lse_row_stride=lse_parts.stride(1),
        out_row_stride=out.stride(0),
        rows=rows,
        num_states=num_states,
        head_dim=head_dim,
        parts_dtype=DTYPE_CODES[dtype_name(out_parts.dtype)],
        out_dtype=DTYPE_CODES[dtype_name(out.dtype)],
    )


def _pair_params(out_parts: Any, lse_parts: Any, out: torch.Tensor) -> StatePairParams:
    (out_a, out_b), (lse_a, lse_b) = out_parts, lse_parts
    rows, head_dim = out_a.shape
    return StatePairParams(
        out_a=out_a.data_ptr(),
        out_b=out_b.data_ptr(),
        lse_a=lse_a.data_ptr(),
        lse_b=lse_b.data_ptr(),
        out=out.data_ptr(),
        out_a_row_stride=out_a.stride(0),
        out_b_row_stride=out_b.stride(0),
        lse_a_row_stride=lse_a.stride(0),
        lse_b_row_stride=lse_b.stride(0),
        out_row_stride=out.stride(0),
        rows=rows,
        head_dim=head_dim,
        parts_dtype=DTYPE_CODES[dtype_name(out_a.dtype)],
        out_dtype=DTYPE_CODES[dtype_name(out.dtype)],
    )


def _check(
    out_parts: States,
    lse_parts: States,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    is_pair: bool,
) -> None:
    faults = Faults()
    paired = (not isinstance(out_parts, torch.Tensor), not isinstance(lse_parts, torch.Tensor))
    form = "pairs" if is_pair else "tensors"
    if not faults.require(
        paired == (is_pair, is_pair), "out_parts, lse_parts", paired, f"must both be {form}"
    ):
        faults.raise_if_any("merge")
    parts = out_parts if not isinstance(out_parts, torch.Tensor) else (out_parts,)
    logs = lse_parts if not isinstance(lse_parts, torch.Tensor) else (lse_parts,)
    shape = shape_of(out)
    if not faults.require(len(shape) == 2, "out.shape", shape, "must be [rows, head_dim]"):
        faults.raise_if_any("merge")
    head_dim = shape[1]
    faults.require(
        1 <= head_dim <= MAX_HEAD_DIM, "head_dim", head_dim, f"must be 1..{MAX_HEAD_DIM}"
    )
    lead = () if is_pair else shape_of(parts[0])[:1]
    for name, tensors, want in (
        ("out_parts", parts, (*lead, *shape)),
        ("lse_parts", logs, (*lead, shape[0])),
        ("lse", (lse,), shape[:1]),
    ):
        for tensor in tensors:
            if tensor is not None:
                got = shape_of(tensor)
                faults.require(got == want, f"{name}.shape", got, f"must be {want}")
    if attn_sink is not None:
        got = shape_of(attn_sink)
        legal = len(got) == 1 and got[0] >= 1
        faults.require(legal, "attn_sink.shape", got, "must be [num_heads]")
    _check_memory(faults, parts, logs, out, lse, attn_sink)
    faults.raise_if_any("merge")


def _check_memory(
    faults: Faults,
    parts: Any,
    logs: Any,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
) -> None:
    named = [("out_parts", tensor) for tensor in parts] + [("out", out)]
    for name, tensor in named:
        dtype = dtype_name(tensor.dtype)
        faults.require(
            dtype in DTYPE_CODES, f"{name}.dtype", dtype, f"must be one of {tuple(DTYPE_CODES)}"
        )
        dense = tensor.shape[-1] == 1 or tensor.stride(-1) == 1
        faults.require(dense, f"{name}.stride(-1)", tensor.stride(-1), "must be 1")
    first = parts[0].dtype
    faults.require(
        all(tensor.dtype == first for tensor in parts), "out_parts.dtype", first, "must be equal"
    )
    floats = [("lse_parts", tensor) for tensor in logs]
    floats += [("lse", lse)] if lse is not None else []
    floats += [("attn_sink", attn_sink)] if attn_sink is not None else []
    for name, tensor in floats:
        faults.require(
            tensor.dtype == torch.float32, f"{name}.dtype", dtype_name(tensor.dtype), "must be fp32"
        )
    for name, vector in (("lse", lse), ("attn_sink", attn_sink)):
        if vector is not None:
            faults.require(
                vector.is_contiguous(), f"{name}.stride()", vector.stride(), "must be contiguous"
            )
    for name, tensor in named + floats:
        faults.require(
            tensor.device == out.device,
            f"{name}.device",
            str(tensor.device),
            f"must be {out.device}",
        )


__all__ = ["MergeLaunch", "merge_on_host", "merge_record", "merge_rules"]
