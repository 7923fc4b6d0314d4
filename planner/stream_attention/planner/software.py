"""Versions of the software here, beside those that a measurement was made with."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import torch

from stream_attention.planner.evidence import Fingerprint

_DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION = re.compile(r"\s(\d+\.\d+(?:\.\d+)*)\s")


def driver_version(path: Path = _DRIVER) -> str | None:
    """The version of NVIDIA's driver as the kernel names it; `None` where it does not."""
    try:
        found = _DRIVER_VERSION.search(path.read_text(errors="replace"))
    except OSError:
        return None
    return None if found is None else found.group(1)


def software_here() -> dict[str, str | None]:
    """The versions that a `Fingerprint` holds too; `None` = could not be found out."""
    try:
        triton: str | None = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton,
    }


def differing(measured: Fingerprint) -> tuple[tuple[str, str, str], ...]:
    """`(name, version measured with, version here)` of what is not the same.

    What was not known when it was measured is not compared.
    """
    found = []
    for name, here in software_here().items():
        there = getattr(measured, name)
        if there is not None and there != here:
            found.append((name, str(there), "unknown" if here is None else str(here)))
    return tuple(found)
