"""What a traced call must be told by name before torch is asked: kinds of arguments, gradients.

An operator's schema would refuse them in torch's words, or take one for another (`True` for 1.0).
Raised while tracing, an error reaches the caller inside the compiler's own, or, where a graph may
break, as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar

from stream_attention.core.cache import CACHE_CLASSES, PagedKVCache
from stream_attention.core.call_checks import check_grad, require_values
from stream_attention.core.errors import Faults
from stream_attention.core.problem import MAX_WINDOW
from stream_attention.planner.modes import DEFAULT_MODE, MODES

_TENSOR = "must be None or a torch.Tensor"
_HUGE = 1 << 128  # the first int that float32 cannot hold
_WIDE = 1 << 63
_NO_GRADIENT = "a serving call returns no gradient"


def check_kinds(
    faults: Faults,
    *,
    tensors: dict[str, Any],
    numbers: dict[str, Any],
    counts: dict[str, Any],
    flags: dict[str, Any],
    mode: Any,
    names: dict[str, Any],
) -> None:
    """Tensors, numbers, counts and names may be `None`; a flag is no number."""
    if not isinstance(mode, str):
        faults.add("mode", mode, f"must be one of {', '.join(MODES)}", repr(DEFAULT_MODE))
    rows: tuple[tuple[Any, dict[str, Any], str], ...] = (
        (torch.Tensor, tensors, _TENSOR),
        ((int, float), numbers, "must be None or a number"),
        (int, counts, "must be None or an int"),
        (bool, flags, "must be a bool"),
        (str, names, "must be None or a non-empty string"),
    )
    for kinds, values, rule in rows:
        for name, value in values.items():
            if value is None and kinds is not bool:
                continue
            if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
                faults.add(name, value, rule)
            elif type(value) is not int:  # torch 2.11 compares no member of an enum while tracing
                continue
            elif kinds == (int, float) and abs(value) >= _HUGE:
                faults.add(name, value, "must be a number that float32 can hold", "None")
            elif kinds is int and (value <= -_WIDE or (value >= _WIDE and "window" not in name)):
                faults.add(name, value, "must fit 64 bits here", "None")


def check_cache_kinds(faults: Faults, cache: Any, v_cache: Any) -> None:
    """A cache object whole, or a key tensor beside a value tensor."""
    if isinstance(cache, CACHE_CLASSES):
        if v_cache is not None:
            faults.add("v_cache", type(v_cache).__name__, "a cache object brings its own", "None")
        pools = {"key": cache.key, "value": cache.value}
        if isinstance(cache, PagedKVCache):  # without a table it would pass for a contiguous one
            pools["page_table"] = cache.page_table
        if not isinstance(cache.layout, str):
            faults.add("layout", cache.layout, "must be 'NHD' or 'HND'", "'NHD'")
    elif not isinstance(cache, torch.Tensor):
        kind = type(cache).__name__
        faults.add("cache", kind, "must be a cache, or a key tensor beside v_cache")
        return
    else:
        pools = {"v_cache": v_cache} if require_values(faults, v_cache) else {}
    for name, value in pools.items():
        if not isinstance(value, torch.Tensor):
            faults.add(name, type(value).__name__, "must be a torch.Tensor")


def check_gradients(faults: Faults, tensors: dict[str, Any]) -> None:
    """Whoever wants a gradient of a serving call would get none."""
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            check_grad(faults, name, tensor, _NO_GRADIENT)


def check_identity(faults: Faults, out: Any, lse: Any, read: dict[str, Any]) -> None:
    """An output that is one of the tensors read; memory that overlaps is for the run to see."""
    for name, tensor in (("out", out), ("lse", lse)):
        for other, value in read.items():
            if tensor is not None and tensor is value:
                faults.add(name, f"overlaps {other}", "must have memory of its own", "torch.empty")


def bounded(window: int | None) -> int | None:
    """A window that 64 bits hold: one of `MAX_WINDOW` sees everything, as a larger one does."""
    return min(window, MAX_WINDOW) if type(window) is int else window


def settled(value: Any) -> Any:
    """A checked number as the plain one that it is in this call, with a guard on a symbolic one.

    What is decided while tracing is decided for one value, and is traced again for another. A guard
    on a float takes torch's own function: `float` leaves it symbolic. A member of an enum or of
    another subclass is a constant as it is, and torch would not have it.
    """
    return guard_scalar(value) if type(value) in (int, float) else value
