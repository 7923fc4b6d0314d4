"""`AttentionInfo`: what ran, with which guarantee, and why nothing else did."""

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

AT_RUN_TIME = "decided at run time"
"""The route and the backend of a compiled call whose route depends on what tensors hold."""

GUARANTEES = ("exact", "schedule_exact", "distribution_verified")


@dataclass(frozen=True, slots=True, repr=False)
class AttentionInfo:
    """What a call ran.

    backend_used: library or language of the kernel (`"torch"`, `"triton"`, `"torch_sdpa"`, …).
    route: the route's name in the registry. In a compiled call, whose info is made while it is
        traced, `AT_RUN_TIME` (so is `backend_used`) where the contents of `qo_indptr` decide it;
        `fallback_reasons` then has every candidate, the legal ones too.
    guarantee: `"exact"`, `"schedule_exact"` (exact over a stated selection) or
        `"distribution_verified"` (a calibrated policy).
    reason: why the planner chose this route.
    policy_id: the policy cell that ran, `None` when none did.
    fallback_reasons: one line for each candidate that was rejected.
    arch: device architecture, such as `"sm_90"` or `"cpu"`.
    splits: parallel partitions of the KV sequence (1 = none).
    workspace_bytes: scratch that the plan owns, outputs not counted.
    """

    backend_used: str
    route: str
    guarantee: str = "exact"
    reason: str = ""
    policy_id: str | None = None
    fallback_reasons: tuple[str, ...] = ()
    arch: str = "cpu"
    splits: int = 1
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        check_rules(self, _RULES)

    __repr__ = evaluable_repr


_RULES = (
    Rule("backend_used", "must be a non-empty string", lambda i: is_name(i.backend_used)),
    Rule("route", "must be a non-empty string", lambda i: is_name(i.route)),
    Rule("reason", "must be a string", lambda i: isinstance(i.reason, str)),
    Rule("arch", "must be a non-empty string", lambda i: is_name(i.arch)),
    Rule(
        "fallback_reasons",
        "must be a tuple of strings",
        lambda i: is_tuple_of(i.fallback_reasons, str),
    ),
    Rule("guarantee", f"must be one of {GUARANTEES}", lambda i: i.guarantee in GUARANTEES),
    Rule("splits", "must be an int >= 1", lambda i: is_int(i.splits) and i.splits >= 1),
    Rule(
        "workspace_bytes",
        "must be an int >= 0",
        lambda i: is_int(i.workspace_bytes) and i.workspace_bytes >= 0,
    ),
    Rule(
        "policy_id",
        "only a distribution_verified result carries a policy",
        lambda i: i.policy_id is None or i.guarantee == "distribution_verified",
    ),
)
