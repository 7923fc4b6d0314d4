"""The portable Triton route: exact attention on any GPU, for the whole contract.

Everything that depends on lengths is decided on the device, so one captured graph serves every
length mix up to the plan's capacity. Triton is imported when a launch is built, not before.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch

from stream_attention.core.backend_plan import AttentionBackendPlan, LaunchSpec
from stream_attention.core.device import DeviceFacts
from stream_attention.core.launch import BoundTensors, NotCopied
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import (
    AttentionRecord,
    CapabilityRule,
    MergeProblem,
    Registry,
)
from stream_attention.core.routes.triton_config import (
    SlotShape,
    TritonConfig,
    choose_config,
    wide_scale,
)
from stream_attention.core.tile_plan import AttentionTilePlan

ROUTE = "triton"


def _answer_strides(bound: BoundTensors) -> tuple[int, int, int, int]:
    """Of token and head: those of out, then those of lse."""
    lse = bound.lse
    own = (0, 0) if lse is None else (lse.stride(0), lse.stride(1))
    return (bound.out.stride(0), bound.out.stride(1), *own)


class TritonLaunch(NotCopied):
    """A built plan of the Triton route. See `stream_attention.core.launch.Launch`."""

    def __init__(
        self,
        problem: AttentionProblem,
        device: DeviceFacts,
        bound: BoundTensors,
        config: TritonConfig | None = None,
        merge_records: tuple[Any, ...] = (),
    ) -> None:
        from stream_attention.core.routes import triton_kernels, triton_merge

        self._kernels, self._merges = triton_kernels, triton_merge
        self._problem = problem
        self._device = device
        self.config = config or choose_config(problem, device, bound.qo_indptr is not None)
        self._merge_records = merge_records
        # Token positions are int32 on the device; a tile past the last must not overflow.
        self._capacity = min(problem.kv_capacity, (1 << 31) - 1 - self.config.block_n)
        self._scratch_out: torch.Tensor | None = None
        self._scratch_lse: torch.Tensor | None = None
        split_axis = self.config.max_splits if self.config.schedule in ("even", "fixed") else 1
        self._grid = (self.config.items * problem.num_kv_heads, split_axis, 1)
        # Tiles a split, and where each request's work items end: written by `schedule_splits`.
        scanned = problem.batch if self.config.schedule == "scan" else 0
        heads, ints = problem.num_kv_heads, {"dtype": torch.int32, "device": bound.q.device}
        self._split_tiles = torch.zeros(heads if scanned else 0, **ints)
        self._item_ends = torch.zeros(heads * scanned, **ints)
        self._fixed = self.config.schedule == "fixed"
        self._slots = SlotShape.of(problem, self.config)
        if self.config.schedule != "direct" and problem.total_qo_len:
            shape: tuple[int, ...] = (self.config.max_splits, problem.total_qo_len)
            shape = (*shape, problem.num_qo_heads)
            if self._fixed:  # never none, so that one kernel serves every capacity
                rows = problem.batch * problem.num_kv_heads * self._slots.slots * self._slots.rows
                shape = (max(1, rows),)
            kwargs = {"dtype": torch.float32, "device": bound.q.device}
            self._scratch_out = torch.empty((*shape, problem.head_dim_vo), **kwargs)
            self._scratch_lse = torch.full(shape, float("-inf"), **kwargs)
        one = torch.ones(1, dtype=torch.float32, device=bound.q.device)
        self._unit_scale = one.expand(problem.num_kv_heads)
        self._merge: Any = None
        self._merge_name = "triton merge_slots" if self._fixed else "triton merge_splits"
        self._merge_grid = (problem.total_qo_len * problem.num_qo_heads, 1, 1)
        if self._fixed:
            rows = problem.batch * problem.num_kv_heads * self._slots.merge_rows
            self._merge_grid = (rows, 1, 1)
        elif self._scratch_out is not None:
            self._merge = self._native_merge(bound)
        self.rebind(bound)
        self.backend_plan = self._plan()

    def _plan(self) -> AttentionBackendPlan:
        config, problem = self.config, self._problem
        launches = [LaunchSpec("attention_split", self._grid, 32 * config.num_warps)]
        if config.schedule == "scan":
            launches.insert(0, LaunchSpec("schedule_splits", (problem.num_kv_heads, 1, 1), 128))
        workspace = 0
        if self._scratch_out is not None and self._scratch_lse is not None:
            workspace = 4 * (self._scratch_out.numel() + self._scratch_lse.numel())
            workspace += 4 * (self._split_tiles.numel() + self._item_ends.numel())
            if self._merge_grid[0]:
                launches.append(LaunchSpec(self._merge_name, self._merge_grid, 128))
        split_tokens = config.chunk_tiles * config.block_n if self._fixed else 0
        if split_tokens * config.max_splits < problem.kv_tokens_seen:  # long requests take more
            split_tokens = 0
        return AttentionBackendPlan(
            route=ROUTE,
            backend="triton",
            arch=self._device.arch,
            splits=config.max_splits,
            split_tokens=split_tokens,
            workspace_bytes=workspace,
            launches=tuple(launches),
            estimate_us=_estimate_us(problem, self._device),
        )

    def _native_merge(self, bound: BoundTensors) -> Any:
        """A kernel package's merge of the splits, or `None` where ours must do it."""
        problem = self._problem
        merge = MergeProblem(
            num_states=self.config.max_splits,
            head_dim=problem.head_dim_vo,
            part_dtype="float32",
            out_dtype=problem.out_dtype,
            has_sink=problem.has_sink,
        )
        if not (_flat(bound.out, 2) and (bound.lse is None or _flat(bound.lse, 1))):
            return None
        for record in self._merge_records:
            if not record.reasons(merge, self._device):
                self._merge_name = record.name
                return record.build(*self._merge_tensors(bound))
        return None

    def _merge_tensors(self, bound: BoundTensors) -> tuple[Any, ...]:
        assert self._scratch_out is not None and self._scratch_lse is not None
        splits, dim = self.config.max_splits, self._problem.head_dim_vo
        return (
            self._scratch_out.view(splits, -1, dim),
            self._scratch_lse.view(splits, -1),
            bound.out.view(-1, dim),
            None if bound.lse is None else bound.lse.view(-1),
            bound.attn_sink,
        )

    def rebind(self, bound: BoundTensors) -> None:
        """Point the launch at tensors of the same shapes, strides, dtypes and device."""
        if self._merge is not None:
            self._merge.rebind(*self._merge_tensors(bound))
        self._bound = bound
        self._split_args, self._split_meta = self._split_arguments(bound)
        self._schedule_args = self._schedule_arguments(bound)
        self._merge_args = self._merge_arguments(bound)

    def unbind(self) -> None:
        """Keep no bound tensor alive; a rebind must come before the next run."""
        if self._merge is not None:
            self._merge.unbind()
        del self._bound, self._split_args, self._split_meta, self._schedule_args, self._merge_args

    def _split_arguments(self, bound: BoundTensors) -> tuple[tuple[Any, ...], dict[str, Any]]:
        problem, config, kv = self._problem, self.config, bound.kv
        direct = self._scratch_out is None or self._fixed
        out = bound.out if direct else self._scratch_out
        lse = bound.lse if direct else self._scratch_lse
        parts = (self._scratch_out, self._scratch_lse) if self._fixed else (None, None)
        assert out is not None
        key, value = kv.key, kv.value
        fp8 = problem.kv_dtype == "float8_e4m3fn"
        if fp8:
            key, value = key.view(torch.uint8), value.view(torch.uint8)
        has_scale = kv.key_scale is not None or kv.value_scale is not None
        key_scale, value_scale = kv.key_scale, kv.value_scale
        if has_scale and (key_scale is None or value_scale is None):
            key_scale = self._unit_scale if key_scale is None else key_scale
            value_scale = self._unit_scale if value_scale is None else value_scale
        uniform = bound.qo_indptr is None
        table, lens = kv.page_table, kv.kv_lens
        args = (
            bound.q, key, value, table, lens, bound.qo_indptr, key_scale, value_scale,
            bound.attn_sink, self._item_ends, self._split_tiles, out, lse, *parts,
            problem.batch, problem.total_qo_len, problem.max_qo_len if uniform else 0,
            self._capacity,
            problem.num_kv_heads, problem.gqa_group_size, problem.head_dim_qk, problem.head_dim_vo,
            float(problem.sm_scale), float(problem.logits_soft_cap or 1.0),
            min(problem.window_left or 0, (1 << 31) - 1),
            min(problem.window_right or 0, (1 << 31) - 1),
            config.min_tiles, config.max_splits, config.chunk_tiles,
            config.slots, self._slots.slots, self._slots.rows,
            bound.q.stride(0), bound.q.stride(1), key.stride(0), key.stride(1), key.stride(2),
            value.stride(0), value.stride(1), value.stride(2),
            table.stride(0) if table is not None else 0,
            table.stride(1) if table is not None else 0,
            lens.stride(0) if lens is not None else 0,
            lens.stride(1) if lens is not None else 0,
            key_scale.stride(0) if key_scale is not None else 0,
            value_scale.stride(0) if value_scale is not None else 0,
            out.stride(-3), out.stride(-2), 0 if direct else out.stride(0),
            0 if lse is None else lse.stride(-2),
            0 if lse is None else lse.stride(-1),
            0 if direct or lse is None else lse.stride(0),
        )  # fmt: skip
        meta = {
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_QK": config.block_qk,
            "BLOCK_VO": config.block_vo,
            "PAGE": problem.page_size if problem.cache_kind == "paged" else 1,
            "PAGED": problem.cache_kind == "paged",
            "FP8": fp8,
            "HAS_LENS": lens is not None,
            "HAS_SCALE": has_scale,
            "UNIFORM": uniform,
            "SCHEDULE": config.schedule,
            "CAUSAL": problem.causal,
            "HAS_LEFT": problem.window_left is not None,
            "HAS_RIGHT": problem.window_right is not None and not problem.causal,
            "HAS_CAP": problem.logits_soft_cap is not None,
            "HAS_SINK": bound.attn_sink is not None,
            "STORE_LSE": lse is not None,
            "PAD_QK": config.block_qk != problem.head_dim_qk,
            "PAD_VO": config.block_vo != problem.head_dim_vo,
            "DOT_FP32": _interpreting(),
            "BLOCK_B": 128,
            "WIDE": wide_scale(problem),
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }
        return args, meta

    def _schedule_arguments(self, bound: BoundTensors) -> tuple[tuple[Any, ...], dict[str, Any]]:
        problem, config, lens = self._problem, self.config, bound.kv.kv_lens
        uniform = bound.qo_indptr is None
        args = (
            lens, bound.qo_indptr, self._item_ends, self._split_tiles,
            problem.batch, problem.max_qo_len if uniform else 0, self._capacity,
            problem.gqa_group_size, config.slots, config.min_tiles, config.max_splits,
            0 if lens is None else lens.stride(0), 0 if lens is None else lens.stride(1),
        )  # fmt: skip
        meta = {
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "UNIFORM": uniform,
            "HAS_LENS": lens is not None,
            "BLOCK_B": 128,
            "num_warps": 4,
        }
        return args, meta

    def _merge_arguments(self, bound: BoundTensors) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._scratch_out is None or self._scratch_lse is None:
            return (), {}
        if self._fixed:
            return self._slot_arguments(bound)
        problem, lse = self._problem, bound.lse
        args = (
            self._scratch_out, self._scratch_lse, bound.attn_sink, bound.out, lse,
            self.config.max_splits, problem.num_qo_heads, problem.head_dim_vo,
            self._scratch_out.stride(0), problem.head_dim_vo, self._scratch_lse.stride(0),
            *_answer_strides(bound),
        )  # fmt: skip
        return args, self._merge_meta(bound)

    def _slot_arguments(self, bound: BoundTensors) -> tuple[tuple[Any, ...], dict[str, Any]]:
        problem, config, lens = self._problem, self.config, bound.kv.kv_lens
        uniform = bound.qo_indptr is None
        args = (
            self._scratch_out, self._scratch_lse, lens, bound.qo_indptr, bound.attn_sink,
            bound.out, bound.lse, problem.max_qo_len if uniform else 0, self._capacity,
            problem.num_kv_heads, problem.gqa_group_size, problem.head_dim_vo,
            min(problem.window_left or 0, (1 << 31) - 1), config.chunk_tiles,
            config.slots, self._slots.slots, self._slots.rows, self._slots.merge_rows,
            0 if lens is None else lens.stride(0), 0 if lens is None else lens.stride(1),
            *_answer_strides(bound),
        )  # fmt: skip
        meta = {
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "UNIFORM": uniform,
            "HAS_LENS": lens is not None,
            "HAS_LEFT": problem.window_left is not None,
        }
        return args, {**self._merge_meta(bound), **meta}

    def _merge_meta(self, bound: BoundTensors) -> dict[str, Any]:
        return {
            "BLOCK_S": 16,
            "BLOCK_VO": self.config.block_vo,
            "HAS_SINK": bound.attn_sink is not None,
            "STORE_LSE": bound.lse is not None,
            "num_warps": 4,
        }

    def run(self) -> None:
        """Enqueue on the current stream: one launch, and one more when there are splits."""
        problem, config = self._problem, self.config
        if not problem.total_qo_len:
            return
        if config.schedule == "scan":
            args, meta = self._schedule_args
            self._kernels.schedule_splits[(problem.num_kv_heads, 1, 1)](*args, **meta)
        self._kernels.attention_split[self._grid](*self._split_args, **self._split_meta)
        if self._merge is not None:
            self._merge.run()
        elif self._scratch_out is not None and self._merge_grid[0]:
            args, meta = self._merge_args
            merge = self._merges.merge_slots if self._fixed else self._merges.merge_splits
            merge[self._merge_grid](*args, **meta)

    def reset(self) -> None:
        """Make the scratch as new: every state empty."""
        if self._scratch_lse is not None:
            self._scratch_lse.fill_(float("-inf"))


def _flat(tensor: torch.Tensor, kept: int) -> bool:
    """Leading axes merge into rows without a copy."""
    if kept == 2:
        return tensor.stride(0) == tensor.shape[1] * tensor.stride(1) or tensor.shape[0] <= 1
    return tensor.is_contiguous()


@functools.cache
def _triton_problem() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; install triton >= 3.6"
    return None


def _interpreting() -> bool:
    """Triton's CPU interpreter is on: a way to check kernels, never a way to serve."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _device_reason(problem: AttentionProblem, device: DeviceFacts) -> str | None:
    if device.type == "cuda":
        capability = device.compute_capability or (0, 0)
        if capability >= (8, 0):
            return None
        return f"device={device.arch}: needs compute capability >= 8.0; use the torch route"
    if _interpreting():
        return None
    return f"device={device.type!r}: needs a CUDA GPU; use the torch route"


def _serving_reason(problem: AttentionProblem, device: DeviceFacts) -> str | None:
    if problem.differentiable:
        return "differentiable=True: has no backward; use torch_sdpa"
    if problem.mask is not None:
        return f"mask={problem.mask!r}: takes no explicit mask; use torch_sdpa"
    return None


RULES = (
    CapabilityRule("triton", lambda problem, device: _triton_problem()),
    CapabilityRule("device", _device_reason),
    CapabilityRule("serving", _serving_reason),
)


def _estimate_us(problem: AttentionProblem, device: DeviceFacts) -> float:
    """Two launches, K/V bytes at 3 TB/s, and products at 300 TFLOP/s, whichever binds."""
    kv_bytes = problem.batch * problem.kv_tokens_seen * problem.kv_token_bytes
    pairs = problem.total_qo_len * problem.num_qo_heads * problem.kv_tokens_seen
    flops = 2.0 * pairs * (problem.head_dim_qk + problem.head_dim_vo)
    return 8.0 + max(kv_bytes / 3e6, flops / 3e8)


def register(registry: Registry) -> None:
    """Add the route; the split merge comes from a kernel package where one is installed."""

    def build(
        problem: AttentionProblem,
        tile_plan: AttentionTilePlan,
        device: DeviceFacts,
        bound: BoundTensors,
    ) -> TritonLaunch:
        return TritonLaunch(problem, device, bound, merge_records=registry.merge_records())

    registry.register_attention(
        AttentionRecord(
            route=ROUTE,
            backend="triton",
            package="stream-attention-core",
            rules=RULES,
            estimate_us=_estimate_us,
            build=build,
        )
    )
