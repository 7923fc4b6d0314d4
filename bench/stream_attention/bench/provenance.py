"""What a row says of its contender beside the time: versions, range, kernel, clocks."""

from __future__ import annotations

from typing import Any

import torch

from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.contenders import Contender, Facts
from stream_attention.bench.machine import current_clocks
from stream_attention.bench.supported import supported_range


def facts_of_row(
    contender: Contender, case: AttentionCase, device: torch.device, timed: bool
) -> dict[str, Any]:
    """Fields of a `Row`: `versions`, `supports`, and where it was timed `kernel` and `clocks`.

    A contender that fails to answer has none of what it was asked.
    """
    return {
        "versions": versions_of(contender),
        "supports": supported_range(contender, case, device),
        "kernel": _answer(lambda: contender.kernel(case, device)) if timed else (),
        "clocks": current_clocks(device) if timed else (),
    }


def versions_of(*contenders: Contender) -> Facts:
    """Distributions of all contenders with their versions, by name."""
    found: dict[str, str] = {}
    for contender in contenders:
        found.update(_answer(lambda contender=contender: tuple(contender.versions().items())))
    return tuple(sorted(found.items()))


def _answer(ask: Any) -> Facts:
    try:
        return tuple(ask())
    except Exception:
        return ()
