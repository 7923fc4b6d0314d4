"""Facts of the kernels that a route launches, as its package tells them."""

from __future__ import annotations

import importlib

from stream_attention.bench.contenders import Facts
from stream_attention.core import resources
from stream_attention.core.device import DeviceFacts
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import AttentionRecord

_FIRST_PARTY = "stream-attention-"
# Of several instances of a kernel the one that takes most, as the device must hold each.
_COUNTED = ("threads", "registers", "dynamic_shared_bytes", "static_shared_bytes", "spill_bytes")


def kernel_facts(record: AttentionRecord, problem: AttentionProblem, device: DeviceFacts) -> Facts:
    """Names and resources of the kernels that a plan of `problem` launches; `()` without records.

    Raises `ResourcesError` where what the compiler said of them is not there.
    """
    if record.schedules is None:
        return ()
    schedules = record.schedules(problem, device)
    package = record.package.removeprefix(_FIRST_PARTY).replace("-", "_")
    library = importlib.import_module(f"stream_attention.{package}.library").LIBRARY
    found = [
        facts for schedule in schedules for facts in resources.facts(library, schedule).values()
    ]
    counts = {name: str(max(getattr(facts, name) for facts in found)) for name in _COUNTED}
    names = {"kernel": ", ".join(schedule.name for schedule in schedules)}
    return tuple(sorted({**counts, **names}.items()))
