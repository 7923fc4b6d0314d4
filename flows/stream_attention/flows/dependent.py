"""Whether launches may be set up while the ones before them run."""

from __future__ import annotations

from typing import Any

import torch


def is_dependent(device: Any) -> bool:
    """Programmatic dependent launch: of compute capability 9.0. A kernel that is launched so calls
    `kernel_parts.await_previous` before all else.
    """
    device = torch.device(device)
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
