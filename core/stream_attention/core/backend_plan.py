"""`AttentionBackendPlan`: which kernel, splits, workspace and launches — and why not the others."""

from __future__ import annotations

from dataclasses import dataclass

from stream_attention.core.ir import (
    Rule,
    check_rules,
    evaluable_repr,
    is_int,
    is_name,
    is_tuple_of,
)


@dataclass(frozen=True, slots=True, repr=False)
class LaunchSpec:
    """One kernel launch: name, grid, threads a block, dynamic shared memory in bytes."""

    kernel: str
    grid: tuple[int, int, int] = (1, 1, 1)
    threads: int = 0
    shared_bytes: int = 0

    def __post_init__(self) -> None:
        check_rules(self, _LAUNCH_RULES)

    __repr__ = evaluable_repr


@dataclass(frozen=True, slots=True, repr=False)
class Rejection:
    """A candidate that was not chosen, with every reason."""

    route: str
    reasons: tuple[str, ...]

    def __post_init__(self) -> None:
        check_rules(self, _REJECTION_RULES)

    __repr__ = evaluable_repr

    def __str__(self) -> str:
        return f"{self.route}: {'; '.join(self.reasons)}"


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class AttentionBackendPlan:
    """The lowering of a tile plan on one device.

    route: registry name of the record that built it. backend: library or language (`"triton"`).
    splits: most KV partitions a row can have; split_tokens: tokens a partition, 0 when it depends
    on the lengths. workspace_bytes: scratch, without outputs. estimate_us: the expected time,
    `None` where nothing says; estimated_by: `"evidence"` or `"cost model"`. evidence: ids of the
    measured rows that the choice rests on, none where it is the cost model's. reason: why this
    route. rejections: every other candidate.
    """

    route: str
    backend: str
    arch: str
    splits: int = 1
    split_tokens: int = 0
    workspace_bytes: int = 0
    launches: tuple[LaunchSpec, ...] = ()
    estimate_us: float | None = None
    reason: str = ""
    rejections: tuple[Rejection, ...] = ()
    estimated_by: str = ""
    evidence: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_rules(self, _PLAN_RULES)

    __repr__ = evaluable_repr


_LAUNCH_RULES = (
    Rule("kernel", "must be a non-empty string", lambda s: is_name(s.kernel)),
    Rule(
        "grid",
        "must be three ints >= 0",
        lambda s: len(s.grid) == 3 and all(is_int(x) and x >= 0 for x in s.grid),
    ),
    Rule("threads", "must be an int >= 0", lambda s: is_int(s.threads) and s.threads >= 0),
    Rule(
        "shared_bytes",
        "must be an int >= 0",
        lambda s: is_int(s.shared_bytes) and s.shared_bytes >= 0,
    ),
)
_REJECTION_RULES = (
    Rule("route", "must be a non-empty string", lambda r: is_name(r.route)),
    Rule(
        "reasons",
        "must be a tuple of non-empty strings, one at least",
        lambda r: isinstance(r.reasons, tuple) and bool(r.reasons) and all(map(is_name, r.reasons)),
    ),
)
_PLAN_RULES = (
    Rule("route", "must be a non-empty string", lambda p: is_name(p.route)),
    Rule("backend", "must be a non-empty string", lambda p: is_name(p.backend)),
    Rule("arch", "must be a non-empty string", lambda p: is_name(p.arch)),
    Rule("reason", "must be a string", lambda p: isinstance(p.reason, str)),
    Rule(
        "launches", "must be a tuple of LaunchSpec", lambda p: is_tuple_of(p.launches, LaunchSpec)
    ),
    Rule(
        "rejections", "must be a tuple of Rejection", lambda p: is_tuple_of(p.rejections, Rejection)
    ),
    Rule(
        "estimate_us",
        "must be None or a number",
        lambda p: p.estimate_us is None or isinstance(p.estimate_us, (int, float)),
    ),
    Rule(
        "estimated_by",
        "must be a string, '' where there is no estimate",
        lambda p: (
            isinstance(p.estimated_by, str) and (p.estimate_us is not None or not p.estimated_by)
        ),
    ),
    Rule(
        "evidence",
        "must be a tuple of row ids",
        lambda p: isinstance(p.evidence, tuple) and all(map(is_name, p.evidence)),
    ),
    Rule("splits", "must be an int >= 1", lambda p: is_int(p.splits) and p.splits >= 1),
    Rule(
        "split_tokens",
        "must be an int >= 0",
        lambda p: is_int(p.split_tokens) and p.split_tokens >= 0,
    ),
    Rule(
        "workspace_bytes",
        "must be an int >= 0",
        lambda p: is_int(p.workspace_bytes) and p.workspace_bytes >= 0,
    ),
)
