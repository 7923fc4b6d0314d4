"""What every check of an attention sink has in common; who checks says what it must be."""

from __future__ import annotations

from typing import Any

import torch

from stream_attention.core.cache_checks import require_dense
from stream_attention.core.errors import Faults, shape_of


def require_sink(faults: Faults, sink: Any, kind: str, nearest: Any = "None") -> bool:
    """A sink is given, and is a tensor. kind, nearest: said of one that is none."""
    return sink is not None and faults.require(
        isinstance(sink, torch.Tensor), "attn_sink", type(sink).__name__, kind, nearest
    )


def require_fp32_sink(
    faults: Faults,
    sink: Any,
    *,
    kind: str,
    shape: tuple[int, ...] | None,
    axes: str,
    device: torch.device | None,
    place: str,
) -> bool:
    """A sink is given, and is a dense tensor; records what else keeps it from fp32 `shape`.

    shape: of one axis, or `()` where no sink fits. shape, device: `None` = any. kind, axes, place:
    said of another kind, shape or device.
    """
    if not require_sink(faults, sink, kind) or not require_dense(faults, "attn_sink", sink):
        return False
    faults.require(
        sink.dtype == torch.float32,
        "attn_sink.dtype",
        sink.dtype,
        "must be torch.float32",
        "attn_sink.float()",
    )
    faults.require(
        shape is None or (sink.dim() == 1 and shape_of(sink) == shape),
        "attn_sink.shape",
        shape_of(sink),
        axes,
        shape or None,
    )
    faults.require(
        device is None or sink.device == device,
        "attn_sink.device",
        str(sink.device),
        place,
        str(device),
    )
    return True
