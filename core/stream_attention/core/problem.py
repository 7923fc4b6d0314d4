"""`AttentionProblem`: what is asked, apart from where it runs and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stream_attention.core.dtypes import KV_DTYPES, OUT_DTYPES, QUERY_DTYPES, dtype_bytes
from stream_attention.core.info import GUARANTEES
from stream_attention.core.ir import Rule, check_rules, evaluable_repr, is_int

PHASES = ("decode", "verify", "append", "prefill", "mixed", "train")
CACHE_KINDS = ("paged", "contiguous")
LAYOUTS = ("NHD", "HND")
SCALE_KINDS = (None, "tensor", "head")
MASK_KINDS = (None, "bool", "additive")
MAX_HEAD_DIM = 512
# Positions and lengths are int32, so a window of this size sees everything and sums fit an int64.
MAX_WINDOW = 1 << 40
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127
_FLOAT32_TINY = 2.0**-126


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class AttentionProblem:
    """`out = softmax(cap(sm_scale · QKᵀ) masked) · V` over one batch of requests.

    Query tokens of all requests are packed: `q` is `[total_qo_len, num_qo_heads, head_dim_qk]`.
    Lengths here are capacities; the lengths of a call are device data that may change under a plan.

    batch: requests. total_qo_len: query tokens of all requests. max_qo_len: most of one request.
    kv_capacity: KV tokens that one request can hold (`max_pages * page_size` when paged).
    page_size: tokens a page; a contiguous cache is one page a request.
    per_head_lists: page tables and lengths are given per KV head.
    kv_scales: `"tensor"` or `"head"` when fp8 K/V carry scales.
    sm_scale: resolved softmax scale; 0 is legal. window_left, window_right, logits_soft_cap:
    `None` = off. mask, dropout_p, differentiable: prefill and training only.
    """

    phase: str = "decode"
    batch: int
    total_qo_len: int
    max_qo_len: int
    kv_capacity: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    q_dtype: str
    kv_dtype: str
    out_dtype: str
    cache_kind: str = "paged"
    layout: str = "NHD"
    page_size: int = 16
    per_head_lists: bool = False
    causal: bool = True
    sm_scale: float
    window_left: int | None = None
    window_right: int | None = None
    logits_soft_cap: float | None = None
    has_sink: bool = False
    kv_scales: str | None = None
    return_lse: bool = False
    batch_invariant: bool = False
    mask: str | None = None
    dropout_p: float = 0.0
    differentiable: bool = False
    guarantee: str = "exact"

    def __post_init__(self) -> None:
        check_rules(self, PROBLEM_RULES)
        for name in ("sm_scale", "logits_soft_cap"):
            if is_int(getattr(self, name)):  # torch takes an int of 64 bits at most for a number
                object.__setattr__(self, name, float(getattr(self, name)))

    __repr__ = evaluable_repr

    @property
    def gqa_group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of K and V that one token of one request holds, all KV heads."""
        return (
            self.num_kv_heads * (self.head_dim_qk + self.head_dim_vo) * dtype_bytes(self.kv_dtype)
        )

    @property
    def kv_tokens_seen(self) -> int:
        """KV tokens of one request that its queries see at most: the capacity, or a window's."""
        if self.window_left is None:
            return self.kv_capacity
        return min(self.kv_capacity, self.window_left + self.max_qo_len)

    @property
    def uniform(self) -> bool:
        """Every request has the same number of query tokens."""
        return self.total_qo_len == self.batch * self.max_qo_len

    @property
    def has_window(self) -> bool:
        return self.window_left is not None or self.window_right is not None


def _count(name: str, low: int) -> Rule:
    return Rule(
        name,
        f"must be an int >= {low}",
        lambda p: is_int(getattr(p, name)) and getattr(p, name) >= low,
        lambda p: low,
    )


def _flag(name: str) -> Rule:
    return Rule(
        name, "must be a bool", lambda p: isinstance(getattr(p, name), bool), lambda p: "True"
    )


def _choice(name: str, choices: tuple[Any, ...]) -> Rule:
    return Rule(
        name,
        f"must be one of {', '.join(repr(c) for c in choices)}",
        lambda p: getattr(p, name) in choices,
        lambda p: repr(choices[0] if choices[0] is not None else choices[1]),
    )


def _nearest_group(p: AttentionProblem) -> str:
    below = p.num_qo_heads // p.num_kv_heads * p.num_kv_heads
    return str(max(below, p.num_kv_heads))


def _finite(value: Any) -> bool:
    """A number, no flag, that float32 can hold: kernels compute in it."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) <= _FLOAT32_MAX  # also False for NaN


def _window(name: str) -> Rule:
    return Rule(
        name,
        "must be None (off) or an int >= 0, inclusive",
        lambda p: getattr(p, name) is None or (is_int(getattr(p, name)) and getattr(p, name) >= 0),
        lambda p: "None",
    )


def _head_dim(name: str) -> Rule:
    return Rule(
        name,
        f"must be an int in 1..{MAX_HEAD_DIM}",
        lambda p: is_int(getattr(p, name)) and 1 <= getattr(p, name) <= MAX_HEAD_DIM,
        lambda p: min(max(getattr(p, name), 1), MAX_HEAD_DIM),
    )


PROBLEM_RULES: tuple[Rule, ...] = (
    _choice("phase", PHASES),
    _count("batch", 0),
    _count("total_qo_len", 0),
    _count("max_qo_len", 0),
    _count("kv_capacity", 0),
    _count("num_qo_heads", 1),
    _count("num_kv_heads", 1),
    _head_dim("head_dim_qk"),
    _head_dim("head_dim_vo"),
    _count("page_size", 1),
    _choice("q_dtype", QUERY_DTYPES),
    _choice("kv_dtype", KV_DTYPES),
    _choice("out_dtype", OUT_DTYPES),
    _choice("cache_kind", CACHE_KINDS),
    _choice("layout", LAYOUTS),
    _choice("kv_scales", SCALE_KINDS),
    _choice("mask", MASK_KINDS),
    _choice("guarantee", GUARANTEES),
    _flag("causal"),
    _flag("per_head_lists"),
    _flag("has_sink"),
    _flag("return_lse"),
    _flag("batch_invariant"),
    _flag("differentiable"),
    Rule(
        "num_qo_heads",
        "must be a multiple of num_kv_heads",
        lambda p: p.num_kv_heads < 1 or p.num_qo_heads % p.num_kv_heads == 0,
        _nearest_group,
        lambda p: (p.num_qo_heads, p.num_kv_heads),
    ),
    Rule(
        "max_qo_len",
        "must be at most total_qo_len, and batch * max_qo_len at least total_qo_len",
        lambda p: p.max_qo_len <= p.total_qo_len <= p.batch * p.max_qo_len,
        lambda p: p.total_qo_len,
    ),
    Rule(
        "sm_scale",
        "must be a finite number (0 is legal) that float32 can hold",
        lambda p: _finite(p.sm_scale),
        lambda p: p.head_dim_qk**-0.5,
    ),
    _window("window_left"),
    _window("window_right"),
    Rule(
        "window_right",
        "a causal problem sees nothing to the right of its query",
        lambda p: not (p.causal is True and is_int(p.window_right) and p.window_right > 0),
        lambda p: "None, or causal=False",
    ),
    Rule(
        "logits_soft_cap",
        "must be None (off) or a finite number > 0 that float32 can hold",
        lambda p: (
            p.logits_soft_cap is None
            or (_finite(p.logits_soft_cap) and p.logits_soft_cap >= _FLOAT32_TINY)
        ),
        lambda p: "None",
    ),
    Rule(
        "dropout_p",
        "must be in [0, 1), and 0 unless the problem is differentiable",
        lambda p: (
            _finite(p.dropout_p) and 0 <= p.dropout_p < 1 and (p.dropout_p == 0 or p.differentiable)
        ),
        lambda p: "0.0",
    ),
    Rule(
        "kv_scales",
        "scales belong to float8_e4m3fn K/V only",
        lambda p: p.kv_scales is None or p.kv_dtype == "float8_e4m3fn",
        lambda p: "None",
    ),
    Rule(
        "kv_dtype",
        "must equal q_dtype, or be float8_e4m3fn",
        lambda p: p.kv_dtype in (p.q_dtype, "float8_e4m3fn"),
        lambda p: repr(p.q_dtype),
    ),
)
