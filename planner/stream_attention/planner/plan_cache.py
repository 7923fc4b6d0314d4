"""A bounded store of idle launches, so that one-shot calls need not be planned anew each time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

import torch

from stream_attention.core.describe import Described
from stream_attention.planner.dispatch import Built

MAX_PLANS = 32
MAX_SCRATCH_BYTES = 256 << 20


class PlanCache:
    """Idle launches, unbound, by key, least recently used first to go; thread-safe.

    A launch is taken out while it is used and given back after, so no two calls ever share its
    scratch: a second thread with the same key builds a second launch. Bounded by `max_plans` and by
    the scratch they own, `max_scratch_bytes`.
    """

    def __init__(
        self, max_plans: int = MAX_PLANS, max_scratch_bytes: int = MAX_SCRATCH_BYTES
    ) -> None:
        self.max_plans = max_plans
        self.max_scratch_bytes = max_scratch_bytes
        self._idle: OrderedDict[Hashable, list[Built]] = OrderedDict()
        self._count = 0
        self._bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    @property
    def scratch_bytes(self) -> int:
        """Scratch of all idle launches."""
        return self._bytes

    def take(self, key: Hashable) -> Built | None:
        """An idle launch for `key`, now the caller's alone, or `None`."""
        with self._lock:
            idle = self._idle.get(key)
            if idle is None:
                return None
            plan = idle.pop()
            if not idle:
                del self._idle[key]
            self._count -= 1
            self._bytes -= plan.backend_plan.workspace_bytes
            return plan

    def give(self, key: Hashable, plan: Built) -> None:
        """Keep `plan` for later calls; the oldest go where the bounds ask for it.

        One that is larger than all may be together is not kept, and no other goes for it.
        """
        if plan.backend_plan.workspace_bytes > self.max_scratch_bytes:
            return
        dropped = []  # destroyed outside of the lock: freeing scratch may take a while
        with self._lock:
            self._idle.setdefault(key, []).append(plan)
            self._idle.move_to_end(key)
            self._count += 1
            self._bytes += plan.backend_plan.workspace_bytes
            while self._count > self.max_plans or (
                self._bytes > self.max_scratch_bytes and self._count
            ):
                oldest = next(iter(self._idle))
                idle = self._idle[oldest]
                gone = idle.pop(0)
                if not idle:
                    del self._idle[oldest]
                self._count -= 1
                self._bytes -= gone.backend_plan.workspace_bytes
                dropped.append(gone)

    def clear(self) -> None:
        """Drop every idle launch."""
        with self._lock:
            self._idle, dropped = OrderedDict(), self._idle
            self._count = self._bytes = 0
        del dropped


def plan_key(described: Described, stream: int, *state: Hashable) -> Hashable:
    """Everything a launch depends on apart from addresses and contents.

    `state` is what else decided: registry and its version, mode and identity.
    """
    bound, kv = described.bound, described.bound.kv
    tensors = (
        bound.q,
        kv.key,
        kv.value,
        kv.page_table,
        kv.kv_lens,
        kv.key_scale,
        kv.value_scale,
        bound.qo_indptr,
        bound.out,
        bound.lse,
        bound.attn_sink,
    )
    return (described.problem, bound.q.device, stream, *state, *map(_geometry, tensors))


def _geometry(tensor: torch.Tensor | None) -> Hashable:
    """Shape, strides, dtype and alignment, the latter up to 64 bytes.

    No load or copy engine asks a base address for more than 16 or 32; torch's own allocations are
    aligned to 64 on a CPU and to 512 on CUDA, so that fresh tensors always share a key.
    """
    if tensor is None:
        return None
    address = tensor.data_ptr() & 63
    return tensor.shape, tensor.stride(), tensor.dtype, address & -address
