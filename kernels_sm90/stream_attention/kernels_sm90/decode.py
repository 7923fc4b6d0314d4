"""The route `sm90_decode`: exact decode and verify by `csrc/decode.cu`, one launch a call.

Every block cuts the work from the lengths, so one captured graph serves every length mix up to the
capacity. `csrc/decode_block.cuh` has the algorithm, `csrc/decode_wide.cuh` that of many rows,
`csrc/decode_invariant.cuh` that of `batch_invariant`; `schedules.py` says how each form works.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from stream_attention.core.backend_plan import AttentionBackendPlan, LaunchSpec
from stream_attention.core.device import DeviceFacts
from stream_attention.core.errors import UnsupportedProblem
from stream_attention.core.launch import BoundTensors, NotCopied
from stream_attention.core.native import DTYPE_CODES, NativeLaunchError, NativeLibrary
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import AttentionRecord, CapabilityRule
from stream_attention.core.tile_plan import AttentionTilePlan
from stream_attention.kernels_sm90.capabilities import device_reason
from stream_attention.kernels_sm90.decode_abi import DecodeGeometry, DecodeParams
from stream_attention.kernels_sm90.library import LIBRARY
from stream_attention.kernels_sm90.schedules import decode_schedules

ROUTE = "sm90_decode"
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
DTYPES = ("bfloat16", "float16")
KV_DTYPES = (*DTYPES, "float8_e4m3fn")
MAX_ROWS = 64
MAX_FACTOR = 1e30
LOG2E = math.log2(math.e)
CALL_STRUCT = 2  # what `stream_attention_decode_struct_bytes` knows a prepared call as
MAX_CAPACITY = (1 << 31) - 4097
MAX_STRIDE_BYTES = 1 << 36
MAX_TOKENS = 1 << 36  # of a batch at capacity: its tiles of 64 tokens and more are counted in int32


@functools.cache
def functions(library: NativeLibrary = LIBRARY) -> Any:
    """The library with the decode functions declared; `NativeLibraryError` where it is missing."""
    handle = library.handle
    params, geometry = ctypes.POINTER(DecodeParams), ctypes.POINTER(DecodeGeometry)
    int32, int64 = ctypes.c_int32, ctypes.c_int64
    handle.stream_attention_decode_struct_bytes.restype = int64
    for which, structure in enumerate((DecodeParams, DecodeGeometry)):
        size = handle.stream_attention_decode_struct_bytes(which)
        assert size == ctypes.sizeof(structure), (structure, size)
    assert handle.stream_attention_decode_struct_bytes(CALL_STRUCT) > 0
    handle.stream_attention_decode_error_string.restype = ctypes.c_char_p
    for name, arguments, result in (
        ("geometry", (params, int32, geometry), int32),
        ("prepare", (params, int32, ctypes.c_void_p, int64), int32),
        ("tiles", (int32, int32, int32, int32, ctypes.c_void_p, ctypes.c_void_p), None),
        ("begin", (int32, int32, int32), int32),
        ("owner", (int32, int32, int32), int32),
        ("shares", (int32, int32, *[ctypes.c_void_p] * 3), None),
        ("blocks_for", (int32, int32), int32),
        ("part_begin", (int32, int32, int32), int32),
        ("divide", (int32, int32), int32),
        ("slice_log2", (int32, int32), int32),
        ("nodes", (*[int32] * 4, ctypes.c_void_p), None),
        ("node_begin", (int32,) * 5, int32),
        ("node", (*[int32] * 5, *[ctypes.c_void_p] * 3), None),
    ):
        function = getattr(handle, f"stream_attention_decode_{name}")
        function.argtypes, function.restype = arguments, result
    handle.stream_attention_decode.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    handle.stream_attention_decode.restype = int32
    return handle


def launcher() -> Any:
    """`stream_attention_decode` for what `byref` and `from_param` return, converted once.

    A function object of its own, without argument types: ctypes passes the arguments of every call
    through those, converted or not (0.20 us a call; 0.12 us so).
    """
    return functions()["stream_attention_decode"]


def check(function: str, status: int) -> None:
    """Raise `NativeLaunchError` unless `status` is 0."""
    if status != 0:
        text = functions().stream_attention_decode_error_string(status).decode()
        raise NativeLaunchError(function, status, text)


def shape_params(problem: AttentionProblem) -> DecodeParams:
    """The params of a problem without its memory."""
    params = DecodeParams()
    params.batch, params.qo_len = problem.batch, problem.max_qo_len
    params.num_kv_heads, params.group = problem.num_kv_heads, problem.gqa_group_size
    params.capacity, params.page_size = problem.kv_capacity, problem.page_size
    params.head_dim, params.dtype = problem.head_dim_qk, DTYPE_CODES[problem.q_dtype]
    params.kv_dtype = int(problem.kv_dtype != problem.q_dtype)
    params.causal = int(problem.causal)
    window = problem.window_left
    params.window_left = -1 if window is None else min(window, (1 << 31) - 1)
    params.sm_scale = problem.sm_scale
    params.soft_cap = problem.logits_soft_cap or 0.0
    params.batch_invariant = int(problem.batch_invariant)
    return params


def geometry(problem: AttentionProblem, num_sms: int) -> DecodeGeometry:
    """Grid, shared memory and scratch of a problem; needs no GPU."""
    result = DecodeGeometry()
    name = "stream_attention_decode_geometry"
    params = shape_params(problem)
    check(name, getattr(functions(), name)(ctypes.byref(params), num_sms, ctypes.byref(result)))
    return result


def _strides(tensor: torch.Tensor) -> list[int]:
    """Strides in elements, 0 for an axis of one element: what it says there keeps no alignment."""
    return [
        stride if size > 1 else 0
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]


class DecodeLaunch(NotCopied):
    """A built plan of the route. See `stream_attention.core.launch.Launch`."""

    def __init__(self, problem: AttentionProblem, device: DeviceFacts, bound: BoundTensors) -> None:
        self._function = launcher()
        self._num_sms, self._index = device.num_sms, device.index
        self._current_stream = torch._C._cuda_getCurrentRawStream
        form = geometry(problem, device.num_sms)
        self._scratch = torch.full(
            (form.scratch_floats,), -1, dtype=torch.int32, device=bound.q.device
        )
        # What the first run outside a capture owes the workspace. A fill that is captured has not
        # happened before the first replay; after any other the run's stream waits, not the host.
        self._owed: Callable[[], None] | None = self.reset
        if not torch.cuda.is_current_stream_capturing():
            fill = torch.cuda.Event()
            fill.record(torch.cuda.current_stream(device.index))
            self._owed = functools.partial(self._wait_for, fill)
        self._params = shape_params(problem)
        # What every run launches, made by `rebind`: opaque, and refused before.
        call_bytes = functions().stream_attention_decode_struct_bytes(CALL_STRUCT)
        self._prepared = (ctypes.c_char * call_bytes)()
        self._reference = ctypes.byref(self._prepared)
        # One object, so that stream and arguments belong together whoever looks at them.
        self._call: tuple[int | None, tuple[Any, ...]] = (None, ())
        self.rebind(bound)
        self.backend_plan = AttentionBackendPlan(
            route=ROUTE,
            backend="cuda",
            arch="sm_90a",
            splits=form.blocks_per_head,
            workspace_bytes=4 * form.scratch_floats,
            launches=(
                LaunchSpec("decode_kernel", (form.grid, 1, 1), form.threads, form.shared_bytes),
            ),
            estimate_us=estimate_us(problem, device),
        )

    def rebind(self, bound: BoundTensors) -> None:
        """Point the launch at tensors of the same shapes, strides, dtypes and device."""
        params, kv = self._params, bound.kv
        tensors = {
            "q": bound.q,
            "key": kv.key,
            "value": kv.value,
            "page_table": kv.page_table,
            "kv_lens": kv.kv_lens,
            "attn_sink": bound.attn_sink,
            "key_scale": kv.key_scale,
            "value_scale": kv.value_scale,
            "out": bound.out,
            "lse": bound.lse,
            "scratch": self._scratch,
        }
        for name, tensor in tensors.items():
            setattr(params, name, None if tensor is None else tensor.data_ptr())
        params.num_pages = kv.key.shape[0]
        params.q_token_stride, params.q_head_stride = _strides(bound.q)[:2]
        params.k_page_stride, params.k_token_stride, params.k_head_stride = _strides(kv.key)[:3]
        params.v_page_stride, params.v_token_stride, params.v_head_stride = _strides(kv.value)[:3]
        if kv.page_table is not None:
            params.table_batch_stride, params.table_head_stride = _strides(kv.page_table)[:2]
        if kv.kv_lens is not None:
            params.lens_batch_stride, params.lens_head_stride = kv.kv_lens.stride()
        for name, scale in (("key", kv.key_scale), ("value", kv.value_scale)):
            if scale is not None:
                setattr(params, f"{name}_scale_stride", scale.stride(0))
        params.out_token_stride, params.out_head_stride = bound.out.stride()[:2]
        if bound.lse is not None:
            params.lse_token_stride, params.lse_head_stride = bound.lse.stride()
        with torch.cuda.device(self._index):
            name = "stream_attention_decode_prepare"
            prepare = getattr(functions(), name)
            call_bytes = ctypes.sizeof(self._prepared)
            params_at = ctypes.byref(params)
            check(name, prepare(params_at, self._num_sms, self._reference, call_bytes))
        self._bound: BoundTensors | None = bound

    def unbind(self) -> None:
        """Keep no bound tensor alive; a rebind must come before the next run."""
        self._bound = None

    def run(self) -> None:
        """Enqueue on the current stream: one launch.

        A first run on another stream than the plan was made on waits for the plan's. A captured one
        cannot: the caller's capture must begin behind it (`torch.cuda.graph` sees to that).
        """
        stream, arguments = self._call
        current = self._current_stream(self._index)
        if current != stream:
            arguments = self._arguments_on(current)
        if status := self._function(*arguments):
            check("stream_attention_decode", status)

    def _arguments_on(self, stream: int) -> tuple[Any, ...]:
        """Converted arguments of a launch on `stream`, kept for the runs on it that follow."""
        arguments = (self._reference, ctypes.c_void_p.from_param(stream))
        if self._owed is not None and not torch.cuda.is_current_stream_capturing():
            self._owed()
            self._owed = None
        if self._owed is None:
            self._call = (stream, arguments)
        return arguments

    def _wait_for(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._index).wait_event(event)

    def reset(self) -> None:
        """Empty the workspace, in which an aborted launch may have left partial states.

        Waits for the current stream, since the next run may be on another one. During a capture the
        fill is captured, and takes place at every replay.
        """
        self._scratch.fill_(-1)
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self._index).synchronize()


def _library_reason(problem: AttentionProblem, device: DeviceFacts) -> str | None:
    return LIBRARY.reason()


def _serving_reason(problem: AttentionProblem, device: DeviceFacts) -> str | None:
    if problem.differentiable or problem.mask is not None:
        return "differentiable or mask: serves neither; use stream_attention.train or prefill"
    return None


def _scale_reason(problem: AttentionProblem, device: DeviceFacts) -> str | None:
    """Scores are scaled in fp32 and in powers of two."""
    cap = problem.logits_soft_cap
    factors = (problem.sm_scale / cap, cap * LOG2E) if cap else (problem.sm_scale * LOG2E,)
    if all(abs(factor) < MAX_FACTOR for factor in factors):
        return None
    return (
        f"(sm_scale, logits_soft_cap)={(problem.sm_scale, cap)}: the scale times log2(e), or by a "
        f"cap the quotient and the cap times log2(e), must be below {MAX_FACTOR:g}"
    )


def _dtype_reason(problem: AttentionProblem, device: DeviceFacts) -> str | None:
    queries, tokens = (problem.q_dtype, problem.out_dtype), problem.kv_dtype
    alike = queries[0] in DTYPES and queries[0] == queries[1]
    if alike and tokens in (queries[0], KV_DTYPES[-1]):
        return None
    return (
        f"dtypes (q, kv, out)={(queries[0], tokens, queries[1])}: q and out must be one of "
        f"{DTYPES} alike, kv the same or {KV_DTYPES[-1]!r}; use 'bfloat16'"
    )


def _head_dim_reason(problem: AttentionProblem, device: DeviceFacts) -> str | None:
    dims = (problem.head_dim_qk, problem.head_dim_vo)
    if dims[0] == dims[1] and dims[0] in HEAD_DIMS:
        return None
    nearest = min(HEAD_DIMS, key=lambda dim: abs(dim - dims[0]))
    return f"head_dim (qk, vo)={dims}: must be equal and one of {HEAD_DIMS}; use {nearest}"


def _rows_reason(problem: AttentionProblem, device: DeviceFacts) -> str | None:
    if not problem.uniform:
        return "qo_indptr: every request must have the same number of queries"
    rows = problem.max_qo_len * problem.gqa_group_size
    if rows > MAX_ROWS:
        return (
            f"max_qo_len={problem.max_qo_len}: queries times group size {problem.gqa_group_size} "
            f"must be at most {MAX_ROWS}; use {max(1, MAX_ROWS // problem.gqa_group_size)}"
        )
    return None


def _window_reason(problem: AttentionProblem, device: DeviceFacts) -> str | None:
    if problem.window_right is None or problem.causal:
        return None
    return f"window_right={problem.window_right}: takes no window to the right; use None"


def _size_reason(problem: AttentionProblem, device: DeviceFacts) -> str | None:
    sizes = (problem.batch, problem.total_qo_len, problem.kv_capacity)
    if min(sizes) >= 1:
        return None
    return f"(batch, total_qo_len, kv_capacity)={sizes}: each must be at least 1"


def _capacity_reason(problem: AttentionProblem, device: DeviceFacts) -> str | None:
    if problem.kv_capacity > MAX_CAPACITY:
        return (
            f"kv_capacity={problem.kv_capacity}: must be at most {MAX_CAPACITY}; use {MAX_CAPACITY}"
        )
    tokens = problem.batch * problem.kv_capacity
    if tokens > MAX_TOKENS:
        return f"batch * kv_capacity={tokens}: must be at most {MAX_TOKENS}; use {MAX_TOKENS}"
    return None


RULES = (
    CapabilityRule("device", lambda problem, device: device_reason(device)),
    CapabilityRule("library", _library_reason),
    CapabilityRule("serving", _serving_reason),
    CapabilityRule("scale", _scale_reason),
    CapabilityRule("dtype", _dtype_reason),
    CapabilityRule("head_dim", _head_dim_reason),
    CapabilityRule("rows", _rows_reason),
    CapabilityRule("window", _window_reason),
    CapabilityRule("size", _size_reason),
    CapabilityRule("capacity", _capacity_reason),
)


def estimate_us(problem: AttentionProblem, device: DeviceFacts) -> float:
    """Launch, tail and merge, and the K/V bytes at what the kernel reaches on an H200.

    Of a window only what it shows is read. Rows beyond those that a block takes read K and V again,
    from L2. Not counted with `batch_invariant`: whoever else is in the batch, the choice between
    routes must be the same.
    """
    kv_bytes = problem.batch * problem.kv_tokens_seen * problem.kv_token_bytes
    dim, rows = problem.head_dim_qk, problem.max_qo_len * problem.gqa_group_size
    widened = problem.kv_dtype == KV_DTYPES[-1]
    together = 8 if dim > 192 else 16 if widened or dim > 128 else 32
    groups = 1 if problem.batch_invariant else -(-rows // together)
    return 6.0 + groups * kv_bytes / 4.4e6


def refusal(problem: AttentionProblem, bound: BoundTensors) -> str | None:
    """Why a legal problem is not served over these tensors, from their metadata.

    A pool without pages, an output not aligned to 8, strides past what the kernel counts (64 GiB in
    K and V, 2^32 elements in the page table), or packed queries that are batch-invariant: the same
    request beside one of more queries is not served.
    """
    if problem.batch_invariant and bound.qo_indptr is not None:
        return (
            "qo_indptr with batch_invariant=True: among requests of other numbers of queries the "
            "bits would be another route's; use q of [batch, queries, num_qo_heads, head_dim]"
        )
    if bound.kv.key.numel() == 0:
        return f"key.shape={tuple(bound.kv.key.shape)}: the pool holds no page"
    if bound.out.data_ptr() % 8:
        return f"out.data_ptr()={bound.out.data_ptr()}: must be a multiple of 8"
    for name, tensor in (("key", bound.kv.key), ("value", bound.kv.value)):
        if max(_strides(tensor)[:2]) * tensor.element_size() >= MAX_STRIDE_BYTES:
            return f"{name}.stride()={tensor.stride()}: of pages and tokens must be below 64 GiB"
    table = bound.kv.page_table
    if table is not None and _strides(table)[0] >= 1 << 32:
        return f"page_table.stride()={table.stride()}: must be below 2^32"
    return None


def build(
    problem: AttentionProblem,
    tile_plan: AttentionTilePlan,
    device: DeviceFacts,
    bound: BoundTensors,
) -> DecodeLaunch:
    """A launch; `UnsupportedProblem` with what `refusal` says."""
    if reason := refusal(problem, bound):
        raise UnsupportedProblem(reason)
    return DecodeLaunch(problem, device, bound)


RECORD = AttentionRecord(
    route=ROUTE,
    backend="cuda",
    package="stream-attention-kernels-sm90",
    rules=RULES,
    estimate_us=estimate_us,
    build=build,
    native=True,
    refuses=refusal,
    schedules=decode_schedules,
)
