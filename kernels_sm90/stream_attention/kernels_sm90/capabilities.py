"""What the kernels of this package support, as data with reasons."""

from __future__ import annotations

from stream_attention.core.device import DeviceFacts
from stream_attention.core.native_merge import merge_record
from stream_attention.core.registry import Registry
from stream_attention.kernels_sm90.library import LIBRARY

# sm_90a code is for this compute capability alone, neither for earlier nor for later ones.
COMPUTE_CAPABILITY = (9, 0)


def device_reason(device: DeviceFacts) -> str | None:
    """Why the library cannot run on `device`, or `None`."""
    if device.compute_capability == COMPUTE_CAPABILITY:
        return None
    return f"device={device.arch}: kernels_sm90 needs compute capability 9.0; use an H100 or H200"


def register(registry: Registry) -> None:
    """Add the records of this package to `registry`."""
    from stream_attention.kernels_sm90 import decode

    registry.register_attention(decode.RECORD)
    registry.register_merge(
        merge_record("sm90_state_merge", "stream-attention-kernels-sm90", LIBRARY, device_reason)
    )
