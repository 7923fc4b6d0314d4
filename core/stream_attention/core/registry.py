"""Capability records: what each route supports, as data with reasons.

Kernel packages are discovered, never imported by the planner: every `stream_attention.kernels_*`
package found on the namespace path is asked once for `capabilities.register(registry)`. A package
that is not installed, or that fails to import, is a reason in `plan.explain()`, not an error.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import os
import pkgutil
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stream_attention.core.backend_plan import Rejection
from stream_attention.core.device import DeviceFacts
from stream_attention.core.ir import Rule, check_rules, is_int
from stream_attention.core.problem import MAX_HEAD_DIM, AttentionProblem
from stream_attention.core.schedule import KernelSchedule
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
    schedules: `(problem, device) -> records` of the kernels that a plan of the problem launches;
    `None` for a route without records.
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
    schedules: Callable[[AttentionProblem, DeviceFacts], tuple[KernelSchedule, ...]] | None = None

    def reasons(self, problem: AttentionProblem, device: DeviceFacts) -> tuple[str, ...]:
        """Every reason why this route cannot serve the problem; empty when it can."""
        # Lists: every route is asked for every plan, and generators take half as long again.
        found = [rule.reason(problem, device) for rule in self.rules]
        return tuple([reason for reason in found if reason is not None])


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


@dataclass(frozen=True, slots=True)
class _Records:
    """What a registry knows at one moment."""

    attention: Mapping[str, AttentionRecord] = field(default_factory=dict)
    merge: Mapping[str, MergeRecord] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    discovered: bool = False
    version: int = 0


class Registry:
    """The records known to this process. Reading discovers packages once; adding is thread-safe.

    discover: `False` for a registry that holds only what is added to it.

    A change is one assignment of new tables, so that what interrupts it, at any point, leaves the
    registry as it was before or as it is after. What is discovered is drafted first: a package's
    `register` adds to a draft, and is done with it when it returns.
    """

    __slots__ = ("__weakref__", "_draft", "_drafting", "_known", "_lock", "_versions")

    def __init__(self, *, discover: bool = True) -> None:
        self._known = _Records(discovered=not discover)
        self._versions = itertools.count(1)
        self._draft: Registry | None = None
        self._renew_locks()
        _EVERY.add(self)

    def _renew_locks(self) -> None:
        self._lock = threading.RLock()
        self._drafting = threading.Lock()  # held by the thread that holds the other

    def register_attention(self, record: AttentionRecord) -> None:
        """Add a route; a name that is taken raises `ValueError`."""
        _require_record(record, AttentionRecord)
        self._change(lambda known: {"attention": _with(known.attention, record.route, record)})

    def register_merge(self, record: MergeRecord) -> None:
        """Add a merge kernel; a name that is taken raises `ValueError`."""
        _require_record(record, MergeRecord)
        self._change(lambda known: {"merge": _with(known.merge, record.name, record)})

    def unregister(self, name: str) -> None:
        """Remove a route or merge kernel by name; an unknown name raises `KeyError`."""

        def without(known: _Records) -> dict[str, Any]:
            if name not in known.attention and name not in known.merge:
                raise KeyError(f"{name!r} is not registered")
            return {
                "attention": {key: of for key, of in known.attention.items() if key != name},
                "merge": {key: of for key, of in known.merge.items() if key != name},
            }

        self._change(without)

    def attention_records(self) -> tuple[AttentionRecord, ...]:
        """All routes, in order of registration."""
        return tuple(self._discovered().attention.values())

    def merge_records(self) -> tuple[MergeRecord, ...]:
        """All merge kernels, in order of registration."""
        return tuple(self._discovered().merge.values())

    def missing(self) -> tuple[Rejection, ...]:
        """Kernel packages that are not there or failed to load, with the reason."""
        found = self._discovered().missing
        return tuple([_missing(name, reason) for name, reason in found.items()])

    @property
    def version(self) -> int:
        """Grows with every change, so that caches of decisions can tell they are stale."""
        return self._known.version

    def _change(self, edit: Callable[[_Records], dict[str, Any]]) -> None:
        """Assign what `edit` makes of the records; anew if a handler's change came between."""
        with self._lock:
            while True:
                known = self._known
                changes = edit(known)
                changed = dataclasses.replace(known, version=next(self._versions), **changes)
                if self._known is known:
                    self._known = changed
                    return

    def _discovered(self) -> _Records:
        if self._known.discovered:
            return self._known
        with self._lock:
            if self._drafting.locked():  # by this thread: a handler, or a package that reads
                return self._draft._known if self._draft is not None else self._known
            if not self._known.discovered:
                with self._drafting:
                    self._draft = None  # one that was not finished
                    start = self._known
                    found = self._draft_all()
                    self._change(lambda known: _published(found, start, known))
            return self._known

    def _draft_all(self) -> _Records:
        """What can be discovered, behind what is registered already."""
        self._draft = self._copy()
        from stream_attention.core import routes

        routes.register(self._draft)
        missing, packages = {}, _kernel_packages()
        for name in packages:
            try:
                module = importlib.import_module(f"stream_attention.{name}.capabilities")
                of_package = self._draft._copy()  # all records of a package or none
                module.register(of_package)
                self._draft = of_package
            except (
                Exception,
                SystemExit,
            ) as error:  # a broken package must not take the others with it
                missing[name] = f"failed to load: {type(error).__name__}: {error}"
        for name in KERNEL_PACKAGES:
            if name not in packages:
                wheel = f"stream-attention-{name.replace('_', '-')}"
                missing[name] = f"package {wheel} is not installed"
        return dataclasses.replace(self._draft._known, missing=missing)

    def _copy(self) -> Registry:
        """The same records in a registry that discovers nothing."""
        copied = Registry(discover=False)
        copied._versions = itertools.count(self._known.version + 1)
        copied._known = dataclasses.replace(self._known, discovered=True)
        return copied


@functools.lru_cache(maxsize=64)
def _missing(name: str, reason: str) -> Rejection:
    return Rejection(name, (reason,))


def _published(found: _Records, start: _Records, known: _Records) -> dict[str, Any]:
    """What was found beside what is known; `start`: what was known when the search began."""
    tables: dict[str, Any] = {"missing": found.missing, "discovered": True}
    for kind in ("attention", "merge"):
        before, now = getattr(start, kind), getattr(known, kind)
        every = {**getattr(found, kind), **now}
        gone = before.keys() - now.keys()
        tables[kind] = {name: record for name, record in every.items() if name not in gone}
    return tables


def _with(table: Mapping[str, Any], name: str, record: Any) -> dict[str, Any]:
    if name in table:
        raise ValueError(f"name={name!r}: a record of that name is registered; rename it")
    return {**table, name: record}


def _require_record(record: Any, of: type) -> None:
    if not isinstance(record, of):
        raise ValueError(f"record={record!r}: must be of class {of.__name__}")


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


def _renew_every_lock() -> None:
    """In a forked process: other threads, which are not there, may have held them."""
    for registry in list(_EVERY):
        registry._renew_locks()


_EVERY: weakref.WeakSet[Registry] = weakref.WeakSet()
_DEFAULT = Registry()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_every_lock)


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
