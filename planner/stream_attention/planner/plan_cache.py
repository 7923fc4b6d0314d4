"""A bounded store of idle launches, so that one-shot calls need not be planned anew each time."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Hashable

import torch

from stream_attention.core.describe import Described
from stream_attention.planner.dispatch import Built

MAX_PLANS = 32
MAX_SCRATCH_BYTES = 256 << 20


class _Idle(deque["Built"]):
    """Idle launches of one key, the latest last; `used` grows with every one that is given back.

    scratch_bytes: of each of them.
    """

    used = 0
    scratch_bytes = 0


class PlanCache:
    """Idle launches, unbound, by key, least recently used first to go; thread-safe.

    A launch is taken out while it is used and given back after, so no two calls ever share its
    scratch: a second thread with the same key builds a second launch. Bounded by `max_plans` and by
    the scratch they own, `max_scratch_bytes`.

    There is no lock, which a fork would copy as another thread holds it, and on which a signal's
    handler or a finalizer that computes attention would wait for ever. Each step is one operation
    of a dict or a deque, and what an interrupt leaves behind any of them is a whole cache: at worst
    a launch is not kept. Nothing is counted that could be read off.
    """

    def __init__(
        self, max_plans: int = MAX_PLANS, max_scratch_bytes: int = MAX_SCRATCH_BYTES
    ) -> None:
        self.max_plans = max_plans
        self.max_scratch_bytes = max_scratch_bytes
        self._idle: dict[Hashable, _Idle] = {}
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        return sum(map(len, list(self._idle.values())))

    @property
    def scratch_bytes(self) -> int:
        """Scratch of all idle launches."""
        return sum(len(idle) * idle.scratch_bytes for idle in list(self._idle.values()))

    def take(self, key: Hashable) -> Built | None:
        """An idle launch for `key`, now the caller's alone, or `None`."""
        idle = self._idle.get(key)
        try:
            return None if idle is None else idle.pop()
        except IndexError:  # all of them are in use
            return None

    def give(self, key: Hashable, plan: Built) -> None:
        """Keep `plan` for later calls; the oldest go where the bounds ask for it.

        One that is larger than all may be together is not kept, and no other goes for it.
        """
        if plan.backend_plan.workspace_bytes > self.max_scratch_bytes:
            return
        idle = self._idle.get(key)
        if idle is None:
            idle = self._idle.setdefault(key, _Idle())
        idle.scratch_bytes = plan.backend_plan.workspace_bytes
        idle.append(plan)
        idle.used = next(self._clock)
        while self._is_full() and self._drop_oldest():
            pass

    def _is_full(self) -> bool:
        """Whether the bounds are passed; a key whose launches are all in use counts as one."""
        every = list(self._idle.values())
        if len(every) > self.max_plans or sum(map(len, every)) > self.max_plans:
            return True
        return self.scratch_bytes > self.max_scratch_bytes

    def _drop_oldest(self) -> bool:
        """Drop one launch, or a key that has none; `False` where there is nothing to drop."""
        known = [
            (key, idle) for key in list(self._idle) if (idle := self._idle.get(key)) is not None
        ]
        if not known:
            return False
        key, oldest = min(known, key=lambda entry: entry[1].used)
        with contextlib.suppress(IndexError):
            oldest.popleft()
        if not oldest:
            self._idle.pop(key, None)
        return True

    def clear(self) -> None:
        """Drop every idle launch."""
        self._idle = {}


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
