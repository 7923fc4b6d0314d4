"""StreamAttn: exact attention for serving, planned once and run many times.

The facade of one namespace over several packages. Public names resolve lazily to the package that
owns them; a name whose package is missing raises an `ImportError` that names the wheel.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

__path__ = pkgutil.extend_path(__path__, __name__)

_OWNER = {
    "AttentionBackendPlan": "core.backend_plan",
    "AttentionInfo": "core.info",
    "AttentionProblem": "core.problem",
    "AttentionTilePlan": "core.tile_plan",
    "ContiguousKVCache": "core.cache",
    "PagedKVCache": "core.cache",
    "StalePlanError": "core.errors",
    "UnsupportedProblem": "core.errors",
    "merge_states": "core.state",
    "reference": "reference",
    "StreamAttnEngine": "planner.engine",
    "attention": "planner.api",
    "decode": "planner.api",
    "prefill": "planner.api",
    "train": "planner.api",
}
_WHEEL = {"core": "stream-attention-core", "planner": "stream-attention-planner"}

__all__ = sorted(_OWNER)


def __getattr__(name: str) -> Any:
    owner = _OWNER.get(name)
    if owner is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = owner.partition(".")[0]
    try:
        module = importlib.import_module(f"{__name__}.{owner}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{package}":
            raise
        wheel = _WHEEL.get(package, "stream-attention-core")
        raise ImportError(
            f"stream_attention.{name} needs the package {wheel}, which is not installed; "
            f"install {wheel} or stream-attention"
        ) from error
    value = module if owner == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
