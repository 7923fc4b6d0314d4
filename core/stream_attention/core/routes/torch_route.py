"""The torch route: exact attention on any device torch has, for the whole contract.

A chunked online softmax. Query rows are cut into items (`torch_items`), K and V are gathered page
by page into a small buffer that stays in the cache (`torch_kv`), scores and state are fp32
(`torch_softmax`), and the output is rounded once. The constants below bound the memory, whatever
the batch and the lengths. Lengths and page tables are read on the host at every run, so they may
change in place between runs; on CUDA that read is a sync, which the cost model charges and a graph
capture refuses.

Measured at B8, 8192 tokens, 32/8 heads, D128, fp32, shuffled pages of 16, torch 2.13, one thread of
an EPYC (CPU time, smallest of 14 interleaved runs): 92 ms, against 608 ms for `index_select` of the
pages and SDPA with `enable_gqa` (6.6 x) and 26 ms for reading K and V once. Peak memory beside the
cache: 17 MB. The rest of the floor is the copy of each chunk and products of 4 rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from stream_attention.core.backend_plan import AttentionBackendPlan, LaunchSpec
from stream_attention.core.device import DeviceFacts
from stream_attention.core.launch import BoundTensors, NotCopied
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import AttentionRecord, CapabilityRule
from stream_attention.core.routes.torch_exec import Call, run_alone, run_group
from stream_attention.core.routes.torch_items import Items, Visibility, build_items, split_items
from stream_attention.core.routes.torch_kv import PoolReader, shared_lists
from stream_attention.core.tile_plan import AttentionTilePlan

if TYPE_CHECKING:
    from stream_attention.core.registry import Registry

ROUTE = "torch"

# K or V of one chunk in fp32. 1, 2, 4 and 8 MB take 105, 92, 93 and 102 ms of one thread at B8, 8K,
# 32/8, D128 on an EPYC with 1 MB of L2 a core and 32 MB of L3; larger ones wait less for threads.
CHUNK_BYTES = 4 << 20
MAX_CHUNK_TOKENS = 4096
# Batch-invariant: whatever the capacity, which the longest request of a batch sets. 512, 1024, 2048
# and 4096 take 36, 37, 39 and 46 ms for 256 fp32 queries over 8192 tokens of 4/2 heads of 64, and
# 24, 21, 17 and 19 ms for 4 of one query over 16384 (one thread of the same machine, torch 2.13).
INVARIANT_CHUNK_TOKENS = 1024
# Scores of one chunk (4 MB in fp32), which also bounds the rows of an item.
SCORE_ELEMENTS = 1 << 20
MAX_ROWS = 256
# Spans up to this many tokens are run together, in groups of at most this much K or V.
GROUP_TOKENS = 256
GROUP_ELEMENTS = 1 << 20
# The cost model, for ranking only; a thread of the same machine.
ROWS_GUESS = 32
CPU_BYTES_PER_US = 6_000.0
CPU_FLOPS_PER_US = 45_000.0
CUDA_BYTES_PER_US = 200_000.0
CUDA_FLOPS_PER_US = 150_000.0  # fp32, a multiprocessor; of an A100 that is 16 of its 19.5 TFLOP/s
CUDA_SCORES_PER_US = 60_000.0  # written once and read or written five times, at 1.5 TB/s
LAUNCH_US = 5.0
ITEM_LAUNCHES = 15
CHUNK_LAUNCHES = 20


class TorchLaunch(NotCopied):
    """One bound call of the torch route; implements `Launch`.

    Owns the gather buffers (`workspace_bytes`); other temporaries are bounded by a few times
    `4 * SCORE_ELEMENTS` bytes and freed by every `run`. `run` raises `RuntimeError` inside a CUDA
    graph capture: it reads lengths on the host.
    """

    __slots__ = (
        "_bound",
        "_chunk_tokens",
        "_key",
        "_problem",
        "_rows",
        "_shared",
        "_sight",
        "_value",
        "backend_plan",
    )

    def __init__(self, problem: AttentionProblem, device: DeviceFacts, bound: BoundTensors) -> None:
        kv = bound.kv
        self._problem = problem
        self._bound = bound
        self._shared = shared_lists(kv)
        self._sight = Visibility.of(problem.causal, problem.window_left, problem.window_right)
        heads = kv.num_kv_heads if self._shared else 1
        self._chunk_tokens, self._rows = chunk_and_rows(problem, heads)
        copy = problem.batch_invariant  # one place and form for all, whoever owns the page
        self._key = PoolReader(kv.key, heads, self._chunk_tokens, copy)
        self._value = PoolReader(kv.value, heads, self._chunk_tokens, copy)
        self.backend_plan = AttentionBackendPlan(
            route=ROUTE,
            backend="torch",
            arch=device.arch,
            workspace_bytes=self._key.workspace_bytes + self._value.workspace_bytes,
            launches=(LaunchSpec("torch_online_softmax"),),
            estimate_us=estimate_us(problem, device),
        )

    def rebind(self, bound: BoundTensors) -> None:
        """Use other tensors of the same shapes, strides, dtypes and device."""
        self._bound = bound
        self._key.bind(bound.kv.key)
        self._value.bind(bound.kv.value)

    def unbind(self) -> None:
        """Keep no bound tensor alive; a rebind must come before the next run."""
        del self._bound
        self._key.unbind()
        self._value.unbind()

    def reset(self) -> None:
        """Nothing to clean: every run writes its buffers before it reads them."""

    def run(self) -> None:
        """Compute the bound call; reads lengths on the host (a sync on anything but a CPU)."""
        bound = self._bound
        if bound.q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "route='torch': reads sequence lengths on the host and cannot be captured in a "
                "CUDA graph; use the triton route"
            )
        # Scores and state stay fp32 under a caller's autocast, which would round the products, and
        # a plan that was made without gradients may be run with them.
        with torch.no_grad(), torch.autocast(bound.q.device.type, enabled=False):
            self._run()

    def _run(self) -> None:
        """`run` in the modes that it needs."""
        bound = self._bound
        items, any_empty = self._items()
        if any_empty:
            bound.out.zero_()
            if bound.lse is not None:
                bound.lse.fill_(float("-inf"))
        if not len(items):
            return
        p = self._problem
        heads = bound.kv.num_kv_heads if self._shared else 1
        if p.batch_invariant:  # shapes of every operation depend on the request alone
            alone, groups = np.arange(len(items)), []
        else:
            alone, groups = split_items(
                items,
                GROUP_TOKENS,
                GROUP_ELEMENTS,
                heads * p.gqa_group_size,
                heads * max(p.head_dim_qk, p.head_dim_vo),
            )
        split = (bound.kv.num_kv_heads, p.gqa_group_size)
        call = Call(
            p,
            bound,
            bound.q.unflatten(1, split),
            bound.out.unflatten(1, split),
            None if bound.lse is None else bound.lse.unflatten(1, split),
            self._key,
            self._value,
            self._sight,
            self._shared,
            self._chunk_tokens,
        )
        for index in alone.tolist():
            run_alone(call, items, index)
        for tokens, index in groups:
            run_group(call, items.take(index), tokens)

    def _items(self) -> tuple[Items, bool]:
        """Work items of this run, and whether any output row must be written as empty."""
        bound = self._bound
        kv, batch = bound.kv, bound.kv.batch
        heads = 1 if self._shared else kv.num_kv_heads
        if kv.kv_lens is None:
            lens = np.full(batch * heads, kv.capacity, dtype=np.int64)
        else:
            shown = kv.kv_lens[:, :heads].cpu().numpy().astype(np.int64)
            lens = np.clip(shown, 0, kv.capacity).reshape(-1)
        total = bound.q.shape[0]
        if bound.qo_indptr is None:
            each = total // batch if batch else 0
            start = np.arange(batch, dtype=np.int64) * each
            length = np.full(batch, each, dtype=np.int64)
        else:
            indptr = bound.qo_indptr.cpu().numpy().astype(np.int64)
            start, length = indptr[:-1], np.diff(indptr)
        covered = int(length.sum()) == total
        if heads > 1:
            start, length = np.repeat(start, heads), np.repeat(length, heads)
        items, any_empty = build_items(lens, start, length, self._rows, self._sight)
        return items, any_empty or not covered


def chunk_and_rows(problem: AttentionProblem, heads: int) -> tuple[int, int]:
    """Most tokens of a chunk and query rows of an item, where an item holds `heads` KV heads.

    Both shape the products, so with `batch_invariant` they follow from the heads alone.
    """
    token_bytes = 4 * heads * max(problem.head_dim_qk, problem.head_dim_vo)
    most = min(MAX_CHUNK_TOKENS, max(problem.kv_capacity, problem.page_size))
    if problem.batch_invariant:
        most = INVARIANT_CHUNK_TOKENS
    tokens = max(16, min(most, CHUNK_BYTES // token_bytes))
    rows = SCORE_ELEMENTS // (heads * problem.gqa_group_size * tokens)
    return tokens, max(1, min(MAX_ROWS, rows))


_RULES = (
    CapabilityRule(
        "mask",
        lambda p, d: (
            None
            if p.mask is None
            else f"mask={p.mask!r}: the torch route takes no attn_mask; use route 'torch_sdpa'"
        ),
    ),
    CapabilityRule(
        "differentiable",
        lambda p, d: (
            "differentiable=True: the torch route writes into buffers; use route 'torch_sdpa'"
            if p.differentiable
            else None
        ),
    ),
)


def estimate_us(problem: AttentionProblem, device: DeviceFacts) -> float:
    """Roofline guess in microseconds: K/V bytes and FLOPs, plus the host's work per item.

    On CUDA the products are fp32 without tensor cores, scores go through memory, and every step of
    every item is a launch of its own.
    """
    p = problem
    seen = float(p.kv_capacity)  # tokens that a row sees, on average
    if p.causal:
        seen -= min(p.max_qo_len, p.kv_capacity) / 2 - 0.5
    if p.window_left is not None:
        seen = min(seen, p.window_left + ROWS_GUESS)
    read = min(p.kv_capacity, seen + p.max_qo_len)
    moved = p.batch * read * p.kv_token_bytes
    pairs = p.total_qo_len * seen * p.num_qo_heads
    flops = 2.0 * pairs * (p.head_dim_qk + p.head_dim_vo)
    if device.type == "cuda":
        work = flops / (CUDA_FLOPS_PER_US * device.num_sms) + pairs / CUDA_SCORES_PER_US
        return 1000.0 + LAUNCH_US * _launches(p, seen) + moved / CUDA_BYTES_PER_US + work
    items = p.batch * max(1, -(-p.max_qo_len // ROWS_GUESS))
    threads = max(1, device.num_sms)
    rate = moved / CPU_BYTES_PER_US + flops / CPU_FLOPS_PER_US
    return 50.0 + 100.0 * items + rate / threads


def _launches(problem: AttentionProblem, seen: float) -> float:
    """Kernels that a run enqueues where rows see `seen` tokens; short items share theirs."""
    p = problem
    heads = 1 if p.per_head_lists else p.num_kv_heads
    tokens, rows = chunk_and_rows(p, heads)
    tiles = max(-(-p.total_qo_len // rows), p.batch if p.max_qo_len else 0)
    items = tiles * (p.num_kv_heads // heads)
    if seen <= GROUP_TOKENS and not p.batch_invariant:
        wide = heads * max(p.head_dim_qk, p.head_dim_vo, rows * p.gqa_group_size)
        items = -(-items // max(1, int(GROUP_ELEMENTS / (max(seen, 1.0) * wide))))
    return items * (ITEM_LAUNCHES + CHUNK_LAUNCHES * max(1.0, seen / tokens))


def build(
    problem: AttentionProblem,
    tile_plan: AttentionTilePlan,
    device: DeviceFacts,
    bound: BoundTensors,
) -> TorchLaunch:
    """A launch over `bound`; `ValueError` for a schedule that was not lowered to page lists."""
    if tile_plan.kind == "fixed_subset":
        raise ValueError(
            "tile_plan.kind='fixed_subset': must be lowered to page lists first; "
            "use AttentionTilePlan.page_lists"
        )
    return TorchLaunch(problem, device, bound)


def register(registry: Registry) -> None:
    """Add the route to `registry`."""
    registry.register_attention(
        AttentionRecord(
            route=ROUTE,
            backend="torch",
            package="stream-attention-core",
            rules=_RULES,
            estimate_us=estimate_us,
            build=build,
            graph_safe=False,
        )
    )
