"""Peak extra memory of a piece of work: what it allocated beyond what was there before."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

Result = TypeVar("Result")

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): resets the peak resident set size


def peak_extra(device: torch.device, work: Callable[[], Result]) -> tuple[Result, int | None]:
    """Run `work` and give its result and the peak of extra bytes while it ran.

    CUDA: torch's allocator, so what a library allocates by itself is not seen. CPU: the process's
    resident set, so everything touched is seen; `None` where the system does not let it be reset.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = work()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    _return_freed_memory()
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
        before = _status_bytes("VmRSS")
    except OSError:
        return work(), None
    result = work()
    return result, max(0, _status_bytes("VmHWM") - before)


def held_bytes(device: torch.device) -> int | None:
    """Bytes that tensors hold on a CUDA device, by torch's allocator; `None` on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def num_allocations(device: torch.device, work: Callable[[], object]) -> int | None:
    """Calls of torch's CUDA allocator while `work` is enqueued; `None` on a CPU, work is not run.

    What a library allocates by itself is not seen.
    """
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    work()
    return torch.cuda.memory_stats(device)["allocation.all.allocated"] - before


def _return_freed_memory() -> None:
    """Give freed heap back to the system: memory that is used again would not show as a rise."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        pass  # not glibc: what is measured is then a lower bound


def _status_bytes(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{name} is not in {_STATUS}")


def keep_what_is_loaded() -> None:
    """Let later collections look only at what is made from now on.

    Imports of torch and of peers leave millions of objects, and every row collects several times.
    """
    gc.collect()
    gc.freeze()
