"""The range that a contender says it supports: asked with one parameter varied at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from stream_attention.bench.cases import FP8, AttentionCase
from stream_attention.bench.contenders import Contender
from stream_attention.core.dtypes import QUERY_DTYPES
from stream_attention.core.problem import CACHE_KINDS, LAYOUTS

# Values that serving meets. None of these changes what lengths a case may have.
VARIED: Mapping[str, tuple[Any, ...]] = {
    "head_dim": (32, 64, 80, 96, 128, 192, 256, 512),
    "group": (1, 2, 3, 4, 5, 7, 8, 16, 32, 64),
    "page_size": (1, 8, 16, 32, 64, 128, 256),
    "q_len": (1, 2, 5, 16, 64, 128),
    "dtype": QUERY_DTYPES,
    "kv_dtype": (None, FP8),
    "layout": LAYOUTS,
    "cache": CACHE_KINDS,
    "batch_invariant": (False, True),
}


def supported_range(
    contender: Contender, case: AttentionCase, device: torch.device
) -> tuple[str, ...]:
    """`parameter: values that it takes`, a line a parameter of `VARIED`, all else as in `case`.

    What it says by `supports` counts; nothing is built. A line without values says that it takes
    none of them.
    """
    lines = []
    for name, values in VARIED.items():
        taken = [value for value in values if _takes(contender, case, device, name, value)]
        lines.append(f"{name}: {', '.join(_spelled(name, case, value) for value in taken)}")
    return tuple(lines)


def _takes(
    contender: Contender, case: AttentionCase, device: torch.device, name: str, value: Any
) -> bool:
    try:
        return not contender.reasons(_varied(case, name, value), device)
    except Exception:  # a case that there is not, or a contender that cannot say
        return False


def _varied(case: AttentionCase, name: str, value: Any) -> AttentionCase:
    if name == "group":
        return replace(case, num_qo_heads=value * case.num_kv_heads)
    if name == "q_len":
        return replace(case, q_len=value, q_lengths=None)
    if name == "page_size":
        return replace(case, page_size=value, capacity=None)
    if name == "cache" and value == "contiguous":
        return replace(case, cache=value, page_size=16)
    return replace(case, **{name: value})


def _spelled(name: str, case: AttentionCase, value: Any) -> str:
    if name == "kv_dtype" and value is None:
        return case.dtype
    return str(value)
