"""Capability records: what each route supports, as data with reasons.

Kernel packages are discovered, never imported by the planner: every `stream_attention.kernels_*`
package found on the namespace path is asked once for `capabilities.register(registry)`. A package
that is not installed, or that fails to import, is a reason in `plan.explain()`, not an error.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stream_attention.core.backend_plan import Rejection
from stream_attention.core.device import DeviceFacts
from stream_attention.core.ir import Rule, check_rules, is_int
from stream_attention.core.problem import MAX_HEAD_DIM, AttentionProblem
from stream_attention.core.tile_plan import AttentionTilePlan

KERNEL_PACKAGES = ("kernels_sm80", "kernels_sm90", "kernels_sm100")


@dataclass(frozen=True, slots=True)
class CapabilityRule:
    """One row of a route's legality table.

    `reason(problem, device)` is `None` when the rule is met, else a sentence that names parameter,
    value, rule and nearest valid choice.
    """

    name: str
    reason: Callable[[Any, DeviceFacts], str | None]


@dataclass(frozen=True, slots=True)
class AttentionRecord:
    """A route to attention.

    route: unique name. backend: library or language. package: distribution that brings it.
    graph_safe: on a GPU, runs of a launch may be captured in a CUDA graph (no sync, no host read).
    native: our own architecture kernel (wins over portable routes at equal estimate).
    rules: legality table. estimate_us: cost model in microseconds, used to rank legal routes.
    build: `(problem, tile_plan, device, bound) -> Launch`; `None` for a route that is only
    differentiable. apply: `(problem, q, k, v, *, attn_sink, attn_mask, generator) -> (out, lse)`
    on `[batch, seq, heads, head_dim]` tensors, differentiable and allocating; `None` elsewhere.
    refuses: `(problem, bound) -> reason or None`, every reason that `build` raises
    `UnsupportedProblem` for where the rules hold, from metadata: `bound` may lie on the meta
    device. A compiled call asks it, to report the route that will run. `None` where `build` refuses
    nothing.
    """

    route: str
    backend: str
    package: str
    rules: tuple[CapabilityRule, ...]
    estimate_us: Callable[[AttentionProblem, DeviceFacts], float]
    build: Callable[..., Any] | None = None
    apply: Callable[..., Any] | None = None
    native: bool = False
    graph_safe: bool = True
    refuses: Callable[..., str | None] | None = None

    def reasons(self, problem: AttentionProblem, device: DeviceFacts) -> tuple[str, ...]:
        """Every reason why this route cannot serve the problem; empty when it can."""
        found = (rule.reason(problem, device) for rule in self.rules)
        return tuple(reason for reason in found if reason is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeProblem:
    """Merging of partial states: `num_states` of `[rows, head_dim]` and their lse."""

    num_states: int
    head_dim: int
    part_dtype: str
    out_dtype: str
    has_sink: bool = False

    def __post_init__(self) -> None:
        check_rules(self, _MERGE_RULES)


_MERGE_RULES = (
    Rule("num_states", "must be an int >= 1", lambda m: is_int(m.num_states) and m.num_states >= 1),
    Rule(
        "head_dim",
        f"must be an int in 1..{MAX_HEAD_DIM}",
        lambda m: is_int(m.head_dim) and 1 <= m.head_dim <= MAX_HEAD_DIM,
    ),
)


@dataclass(frozen=True, slots=True)
class MergeRecord:
    """A kernel that merges partial attention states.

    build: `(out_parts, lse_parts, out, lse, attn_sink) -> launch` with `run()`,
    `rebind(out_parts, lse_parts, out, lse, attn_sink)` and `unbind()` (see `Launch`).
    `out_parts` is `[num_states, rows, head_dim]` (first two strides free) or a pair of
    `[rows, head_dim]` tensors; `lse_parts` is `[num_states, rows]` fp32 natural log, or a pair;
    `out` `[rows, head_dim]`; `lse` `[rows]` fp32 or `None`; `attn_sink` `[num_heads]` fp32 (head =
    row % num_heads) or `None`.
    """

    name: str
    package: str
    rules: tuple[CapabilityRule, ...]
    build: Callable[..., Any]

    def reasons(self, problem: MergeProblem, device: DeviceFacts) -> tuple[str, ...]:
        """Every reason why this kernel cannot do the merge; empty when it can."""
        found = (rule.reason(problem, device) for rule in self.rules)
        return tuple(reason for reason in found if reason is not None)


@dataclass(slots=True)
class Registry:
    """The records known to this process. Reading discovers packages once; adding is thread-safe."""

    _attention: dict[str, AttentionRecord] = field(default_factory=dict)
    _merge: dict[str, MergeRecord] = field(default_factory=dict)
    _missing: dict[str, str] = field(default_factory=dict)
    _discovered: bool = False
    _version: int = 0
    _lock: Any = field(default_factory=threading.RLock)

    def register_attention(self, record: AttentionRecord) -> None:
        """Add a route; a name that is taken raises `ValueError`."""
        self._add(self._attention, record.route, record)

    def register_merge(self, record: MergeRecord) -> None:
        """Add a merge kernel; a name that is taken raises `ValueError`."""
        self._add(self._merge, record.name, record)

    def unregister(self, name: str) -> None:
        """Remove a route or merge kernel by name; an unknown name raises `KeyError`."""
        with self._lock:
            if name not in self._attention and name not in self._merge:
                raise KeyError(f"{name!r} is not registered")
            self._attention.pop(name, None)
            self._merge.pop(name, None)
            self._version += 1

    def attention_records(self) -> tuple[AttentionRecord, ...]:
        """All routes, in order of registration."""
        self._discover()
        return tuple(self._attention.values())

    def merge_records(self) -> tuple[MergeRecord, ...]:
        """All merge kernels, in order of registration."""
        self._discover()
        return tuple(self._merge.values())

    def missing(self) -> tuple[Rejection, ...]:
        """Kernel packages that are not there or failed to load, with the reason."""
        self._discover()
        return tuple(Rejection(name, (reason,)) for name, reason in self._missing.items())

    @property
    def version(self) -> int:
        """Grows with every change, so that caches of decisions can tell they are stale."""
        return self._version

    def _add(self, table: dict[str, Any], name: str, record: Any) -> None:
        with self._lock:
            if name in table:
                raise ValueError(f"name={name!r}: a record of that name is registered; rename it")
            table[name] = record
            self._version += 1

    def _discover(self) -> None:
        if self._discovered:
            return
        with self._lock:
            if self._discovered:
                return
            from stream_attention.core import routes

            self._register_whole(routes.register)
            for name in _kernel_packages():
                self._load_package(name)
            for name in KERNEL_PACKAGES:
                if name not in _kernel_packages():
                    wheel = f"stream-attention-{name.replace('_', '-')}"
                    self._missing[name] = f"package {wheel} is not installed"
            self._discovered = True

    def _load_package(self, name: str) -> None:
        try:
            module = importlib.import_module(f"stream_attention.{name}.capabilities")
            self._register_whole(module.register)
        except (
            Exception,
            SystemExit,
        ) as error:  # a broken package must not take the others with it
            self._missing[name] = f"failed to load: {type(error).__name__}: {error}"

    def _register_whole(self, register: Callable[[Registry], None]) -> None:
        """All records of one source or none: a second try must not find the first one's names."""
        before = dict(self._attention), dict(self._merge)
        try:
            register(self)
        except BaseException:
            self._attention, self._merge = before
            self._version += 1
            raise


def _kernel_packages() -> tuple[str, ...]:
    import stream_attention

    found = {
        module.name
        for module in pkgutil.iter_modules(stream_attention.__path__)
        if module.name.startswith("kernels_")
    }
    # The latest architecture first: users take the first record that serves, and code of a GPU's
    # own architecture goes before the PTX of an earlier one.
    return tuple(sorted(found, key=lambda name: (-_arch_of(name), name)))


def _arch_of(package: str) -> int:
    return int("".join(filter(str.isdigit, package)) or 0)


_DEFAULT = Registry()


def default_registry() -> Registry:
    """The process-wide registry that engines use unless they are given one."""
    return _DEFAULT


__all__ = [
    "AttentionRecord",
    "AttentionTilePlan",
    "CapabilityRule",
    "KERNEL_PACKAGES",
    "MergeProblem",
    "MergeRecord",
    "Registry",
    "default_registry",
]
