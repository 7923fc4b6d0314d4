"""What the kernels of this package support, as data with reasons."""

from __future__ import annotations

from stream_attention.core.device import DeviceFacts
from stream_attention.core.native_merge import merge_record
from stream_attention.core.registry import Registry
from stream_attention.kernels_sm80.library import LIBRARY

# Code for 8.0 runs on every 8.x; the driver compiles the PTX beside it for what came later.
MIN_COMPUTE_CAPABILITY = (8, 0)


def device_reason(device: DeviceFacts) -> str | None:
    """Why the library cannot run on `device`, or `None`."""
    capability = device.compute_capability
    if capability is not None and capability >= MIN_COMPUTE_CAPABILITY:
        return None
    return (
        f"device={device.arch}: kernels_sm80 needs compute capability >= 8.0; use an A100 or later"
    )


def register(registry: Registry) -> None:
    """Add the records of this package to `registry`."""
    registry.register_merge(
        merge_record("sm80_state_merge", "stream-attention-kernels-sm80", LIBRARY, device_reason)
    )
