"""What the kernels of this package support, as data with reasons."""

from __future__ import annotations

from stream_attention.core.device import DeviceFacts
from stream_attention.core.native_merge import merge_record
from stream_attention.core.registry import Registry
from stream_attention.kernels_sm100.library import LIBRARY

# sm_100a code is for this compute capability alone, neither for earlier nor for later ones.
COMPUTE_CAPABILITY = (10, 0)


def device_reason(device: DeviceFacts) -> str | None:
    """Why the library cannot run on `device`, or `None`."""
    if device.compute_capability == COMPUTE_CAPABILITY:
        return None
    return f"device={device.arch}: kernels_sm100 needs compute capability 10.0; use a B200 or GB200"


def register(registry: Registry) -> None:
    """Add the records of this package to `registry`."""
    registry.register_merge(
        merge_record("sm100_state_merge", "stream-attention-kernels-sm100", LIBRARY, device_reason)
    )
