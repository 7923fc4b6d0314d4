"""What a route receives and what it gives back: bound tensors in, a runnable launch out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch

from stream_attention.core.backend_plan import AttentionBackendPlan
from stream_attention.core.cache import KVView


@dataclass(frozen=True, slots=True, eq=False)
class BoundTensors:
    """The memory of one call, checked against its problem before a route sees it.

    q: `[total_qo_len, num_qo_heads, head_dim_qk]`, last axis contiguous, other strides free.
    kv: the cache's `KVView`.
    qo_indptr: `[batch + 1]` int32 on the device, or `None` when each request has
        `total_qo_len // batch` queries.
    out: `[total_qo_len, num_qo_heads, head_dim_vo]`, written whole by every run.
    lse: `[total_qo_len, num_qo_heads]` fp32 natural log, or `None`; written whole by every run.
    attn_sink: `[num_qo_heads]` fp32 logits, or `None`.
    """

    q: torch.Tensor
    kv: KVView
    qo_indptr: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None = None
    attn_sink: torch.Tensor | None = None


class NotCopied:
    """What is bound to memory: `copy.copy`, `copy.deepcopy` and pickling raise `TypeError`.

    A shallow copy would share scratch and outputs with its original, and a deep one would compute
    on tensors that nobody else holds.
    """

    __slots__ = ()

    _instead = "make another over the tensors that it shall use"

    def _refuse(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: cannot be copied or pickled, being bound to its tensors, "
            f"scratch and outputs; {self._instead}"
        )

    def __copy__(self) -> NoReturn:
        self._refuse()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse()

    def __reduce__(self) -> NoReturn:
        self._refuse()


@runtime_checkable
class Launch(Protocol):
    """A built route. Owns its scratch; two launches never share any.

    `run()` enqueues on the current stream, allocates nothing on a GPU, never syncs, and may be
    captured in a graph; a plan looks the method up once, when it is made. `rebind(bound)` swaps
    addresses for tensors of the same shapes, strides, dtypes and device. `unbind()` drops every
    reference to bound tensors and keeps the scratch; a `rebind` must come before the next run
    (one-shot calls keep launches that way). `reset()` makes the scratch as new, for use after an
    aborted launch.
    """

    backend_plan: AttentionBackendPlan

    def run(self) -> None: ...

    def rebind(self, bound: BoundTensors) -> None: ...

    def unbind(self) -> None: ...

    def reset(self) -> None: ...
