"""The dtypes of the contract, by name, so that the IR prints and evaluates without torch."""

from __future__ import annotations

import torch

QUERY_DTYPES = ("bfloat16", "float16", "float32")
KV_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")
OUT_DTYPES = QUERY_DTYPES

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float64": 8}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` → `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """`"bfloat16"` → `torch.bfloat16`."""
    return getattr(torch, name)


def dtype_bytes(name: str) -> int:
    """Bytes an element of a contract dtype takes."""
    return _BYTES[name]
