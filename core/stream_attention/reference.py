"""The fp64 oracle under its public name; it lives in `stream_attention.core.oracle`."""

from stream_attention.core.oracle import attention

__all__ = ["attention"]
