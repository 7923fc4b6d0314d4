"""Calibration and hold-out: which side a workload is on, by its content alone.

A side is a function of (digest, salt, share) and of nothing else, so a corpus that grows moves no
workload, duplicates are on one side whatever their labels, and a larger share only moves workloads
from calibration to hold-out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from stream_attention.core.errors import Faults
from stream_attention.planner.workloads import WorkloadBatch

CALIBRATION, HOLD_OUT = "calibration", "hold_out"
SIDES = (CALIBRATION, HOLD_OUT)
_DIGEST_LENGTH = 64
_HASH_BITS = 64


@dataclass(frozen=True, slots=True)
class Split:
    """Workloads on their sides, each content once, in the order in which they were first given."""

    calibration: tuple[WorkloadBatch, ...]
    hold_out: tuple[WorkloadBatch, ...]


def assignment(digest: str, salt: str, hold_out_share: float) -> str:
    """`"hold_out"` where the first 64 bits of SHA-256(salt, digest) are below `share · 2^64`.

    digest: a `content_digest`. salt: names the split; another salt draws another split.
    hold_out_share: the share of contents to hold out, 0 … 1. Raises `ValueError` with every fault.
    """
    _check(digest, salt, hold_out_share)
    # The digest has a fixed length, so no two (salt, digest) give the same text.
    name = f"{digest}:{salt}".encode()
    number = int.from_bytes(hashlib.sha256(name).digest()[: _HASH_BITS // 8], "big")
    held = number < Fraction(hold_out_share) * 2**_HASH_BITS
    return HOLD_OUT if held else CALIBRATION


def split(batches: Iterable[WorkloadBatch], salt: str, hold_out_share: float) -> Split:
    """Every batch on the side of its content; later duplicates are left out."""
    sides: dict[str, list[WorkloadBatch]] = {side: [] for side in SIDES}
    seen: set[str] = set()
    for batch in batches:
        digest = batch.content_digest
        if digest not in seen:
            seen.add(digest)
            sides[assignment(digest, salt, hold_out_share)].append(batch)
    return Split(tuple(sides[CALIBRATION]), tuple(sides[HOLD_OUT]))


def _check(digest: Any, salt: Any, share: Any) -> None:
    faults = Faults()
    faults.require(
        isinstance(digest, str)
        and len(digest) == _DIGEST_LENGTH
        and set(digest) <= set("0123456789abcdef"),
        "digest",
        digest,
        f"must be {_DIGEST_LENGTH} hex digits in lower case",
        "batch.content_digest",
    )
    faults.require(
        isinstance(salt, str) and bool(salt),
        "salt",
        salt,
        "must be a str that is not empty",
        "'hold-out'",
    )
    number = isinstance(share, (int, float)) and not isinstance(share, bool)
    if not (number and 0 <= share <= 1):
        nearest = min(max(share, 0), 1) if number and share == share else 0.2
        faults.add("hold_out_share", share, "must be a number in 0..1", nearest)
    faults.raise_if_any("assignment")
