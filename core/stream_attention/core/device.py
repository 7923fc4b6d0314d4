"""Facts of a device that plans depend on, read once per device."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch

from stream_attention.core.ir import Rule, check_rules, evaluable_repr, is_int


@dataclass(frozen=True, slots=True, repr=False)
class DeviceFacts:
    """A device as routes and cost models see it.

    `compute_capability` is `(major, minor)` on CUDA and `None` elsewhere; `num_sms` counts
    streaming multiprocessors on CUDA and threads torch may use on a CPU; sizes are in bytes.
    """

    type: str
    name: str = ""
    index: int = 0
    compute_capability: tuple[int, int] | None = None
    num_sms: int = 1
    l2_bytes: int = 0

    def __post_init__(self) -> None:
        check_rules(self, _RULES)

    __repr__ = evaluable_repr

    @property
    def arch(self) -> str:
        """`"sm_90"` on CUDA, else the device type."""
        if self.compute_capability is None:
            return self.type
        major, minor = self.compute_capability
        return f"sm_{major}{minor}"


_RULES = (
    Rule("type", "must be a non-empty device type", lambda d: bool(d.type), lambda d: "'cpu'"),
    Rule("num_sms", "must be an int >= 1", lambda d: is_int(d.num_sms) and d.num_sms >= 1),
    Rule(
        "compute_capability",
        "must be (major, minor) on cuda and None elsewhere",
        lambda d: (
            len(d.compute_capability) == 2 if d.type == "cuda" else d.compute_capability is None
        ),
    ),
)


@functools.lru_cache(maxsize=64)
def _facts(device_type: str, index: int) -> DeviceFacts:
    if device_type != "cuda":
        return DeviceFacts(type=device_type, num_sms=max(1, torch.get_num_threads()))
    properties = torch.cuda.get_device_properties(index)
    return DeviceFacts(
        type="cuda",
        name=properties.name,
        index=index,
        compute_capability=(properties.major, properties.minor),
        num_sms=properties.multi_processor_count,
        l2_bytes=getattr(properties, "L2_cache_size", 0),
    )


def device_facts(device: torch.device) -> DeviceFacts:
    """Facts of `device`; a CUDA device without an index means the current one."""
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if device.type == "cuda" else 0
    return _facts(device.type, index)


def without_autocast(device: torch.device) -> Any:
    """A context in which a caller's autocast neither rounds products nor refuses dtypes.

    Asks nothing of torch that torch 2.10 and 2.11 cannot trace.
    """
    if device.type in ("cpu", "cuda"):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
