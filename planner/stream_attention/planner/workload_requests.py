"""One request of a workload, and what makes it legal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stream_attention.core.ir import Rule, check_rules, evaluable_repr, is_int
from stream_attention.core.problem import PHASES
from stream_attention.planner.token_trees import is_chain, is_tree, nearest_tree

REQUEST_PHASES = tuple(phase for phase in PHASES if phase != "mixed")
MAX_TOKENS = 2**31 - 1
"""Lengths and offsets are int32."""
_WITHIN = ("verify", "append", "prefill")  # whose queries are tokens of the cache


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class WorkloadRequest:
    """One request of a batch.

    phase: one of `REQUEST_PHASES`; a batch of unlike requests is what is mixed.
    qo_len: query tokens. kv_len: KV tokens, those of the queries counted.
    prefix_group, prefix_len: requests with the same group id hold their first `prefix_len` tokens
        in the same pages; `None` and 0 = nothing is shared.
    tree: parents of the query tokens of a verify request (see `token_trees`); `None` = a chain.
    label: where the request comes from; no part of the digest.
    Raises `ValueError` with every broken rule.
    """

    phase: str = "decode"
    qo_len: int = 1
    kv_len: int
    prefix_group: int | None = None
    prefix_len: int = 0
    tree: tuple[int, ...] | None = None
    label: str = ""

    def __post_init__(self) -> None:
        check_rules(self, REQUEST_RULES)

    __repr__ = evaluable_repr

    @property
    def branches(self) -> bool:
        """The queries form a tree that is no chain, so the causal mask is not theirs."""
        return self.tree is not None and not is_chain(self.tree)


def _length(name: str) -> Rule:
    return Rule(
        name,
        f"must be an int in 0..{MAX_TOKENS}",
        lambda r: is_int(getattr(r, name)) and 0 <= getattr(r, name) <= MAX_TOKENS,
        lambda r: min(max(int(getattr(r, name)), 0), MAX_TOKENS),
    )


def _counted(request: Any) -> bool:
    """Lengths are ints, so that they can be compared."""
    return is_int(request.qo_len) and is_int(request.kv_len) and is_int(request.prefix_len)


REQUEST_RULES = (
    Rule(
        "phase",
        f"must be one of {', '.join(REQUEST_PHASES)} (mixed is what a batch of unlike requests is)",
        lambda r: r.phase in REQUEST_PHASES,
        lambda r: "'append'" if r.phase == "mixed" else "'decode'",
    ),
    _length("qo_len"),
    _length("kv_len"),
    _length("prefix_len"),
    Rule(
        "qo_len",
        "a decode request has one query token",
        lambda r: r.phase != "decode" or not is_int(r.qo_len) or r.qo_len == 1,
        lambda r: "1, or phase='append'",
    ),
    Rule(
        "qo_len",
        "a verify, prefill or train request has at least one query token",
        lambda r: (
            r.phase not in ("verify", "prefill", "train") or not is_int(r.qo_len) or r.qo_len != 0
        ),
        lambda r: "1, or phase='append'",
    ),
    Rule(
        "kv_len",
        "must be at least qo_len in verify, append and prefill: the queries are of these tokens",
        lambda r: r.phase not in _WITHIN or not _counted(r) or r.kv_len >= r.qo_len,
        lambda r: r.qo_len,
        lambda r: f"{r.kv_len} with qo_len={r.qo_len}",
    ),
    Rule(
        "prefix_group",
        "must be None or an int >= 0",
        lambda r: r.prefix_group is None or (is_int(r.prefix_group) and r.prefix_group >= 0),
        lambda r: "None",
    ),
    Rule(
        "prefix_len",
        "a prefix group and a length >= 1 go together",
        lambda r: not is_int(r.prefix_len) or (r.prefix_group is None) == (r.prefix_len == 0),
        lambda r: "0" if r.prefix_group is None else "16, or prefix_group=None",
        lambda r: f"{r.prefix_len} with prefix_group={r.prefix_group}",
    ),
    Rule(
        "prefix_len",
        "must be at most kv_len",
        lambda r: not _counted(r) or r.prefix_len <= max(r.kv_len, 0),
        lambda r: max(r.kv_len, 0),
    ),
    Rule(
        "tree",
        "must be None or a tuple of one root, -1, at index 0 and parents that precede children",
        lambda r: r.tree is None or is_tree(r.tree),
        lambda r: nearest_tree(r.tree),
    ),
    Rule(
        "tree",
        "only a verify request has one, with a parent for each of its qo_len query tokens",
        lambda r: r.tree is None or (r.phase == "verify" and len(r.tree) == r.qo_len),
        lambda r: "None" if r.phase != "verify" else f"qo_len={len(r.tree)}",
    ),
    Rule("label", "must be a str", lambda r: isinstance(r.label, str), lambda r: repr("")),
)
