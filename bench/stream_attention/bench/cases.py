"""Cases as data: one frozen object a cell."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate

from stream_attention.bench.lengths import Lengths, uniform
from stream_attention.core import formulas
from stream_attention.core.dtypes import QUERY_DTYPES, dtype_bytes
from stream_attention.core.ir import Rule, check_rules, evaluable_repr, is_int
from stream_attention.core.problem import CACHE_KINDS, LAYOUTS, MAX_HEAD_DIM
from stream_attention.planner.cells import MAX_REQUESTS

FP8 = "float8_e4m3fn"
_SHORT_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", FP8: "fp8"}


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class AttentionCase:
    """One exact attention problem, apart from device and data.

    batch: requests. lengths: their KV lengths in tokens. q_len: query tokens of every request (1 =
    decode, a few = verify, as many as tokens = prefill). q_lengths: query tokens of each request,
    packed beside offsets; `None` = q_len each. causal: aligned bottom-right, else every query sees
    every token. page_size: tokens a page. dtype: of q and output. label: prefix of the printed
    name; "" = none.
    kv_dtype: of K and V, `None` = dtype; float8_e4m3fn comes with a scale for K and one for V.
    cache: "paged", or "contiguous": a buffer of `capacity` tokens a request.
    capacity: tokens that a request may hold, at least the longest length. It widens the page table
    (entries past a request's pages are invalid, the pool does not grow) or the contiguous buffer.
    `None` = the longest length, rounded up to whole pages.
    batch_invariant: the plan's option: bits of a request do not depend on the rest of the batch.
    Raises `ValueError` with every broken rule.
    """

    batch: int
    lengths: Lengths
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    layout: str = "NHD"
    dtype: str = "bfloat16"
    q_len: int = 1
    label: str = ""
    kv_dtype: str | None = None
    cache: str = "paged"
    capacity: int | None = None
    batch_invariant: bool = False
    q_lengths: Lengths | None = None
    causal: bool = True

    def __post_init__(self) -> None:
        check_rules(self, CASE_RULES)
        self.lengths.draw(self.batch)
        if self.q_lengths is not None:
            self.q_lengths.draw(self.batch, "q_lengths")
        check_rules(self, _DRAWN_RULES)

    __repr__ = evaluable_repr

    @property
    def name(self) -> str:
        """`B16 N32K 32/8 D128 NHD bf16`, with what differs from a plain decode added.

        M: queries a request, or the lengths that are drawn for them. full: not causal.
        """
        parts = [self.label] if self.label else []
        parts.append(f"B{self.batch}")
        parts.append(_length_name(self.lengths))
        parts.append(f"{self.num_qo_heads}/{self.num_kv_heads}")
        parts.append(f"D{self.head_dim}")
        parts.append(self.layout)
        parts.append(_SHORT_NAMES[self.dtype])
        if self.stored_dtype != self.dtype:
            parts.append(f"kv-{_SHORT_NAMES[self.stored_dtype]}")
        if self.contiguous:
            parts.append("contiguous")
        if self.page_size != 16:
            parts.append(f"page{self.page_size}")
        if self.capacity is not None:
            parts.append(f"cap{_short_count(self.capacity)}")
        if self.q_len != 1:
            parts.append(f"M{_short_count(self.q_len)}")
        if self.q_lengths is not None:
            text = _length_text(self.q_lengths)
            parts.append(f"M={text.replace(' lengths', '-lengths')}")
        if not self.causal:
            parts.append("full")
        if self.batch_invariant:
            parts.append("invariant")
        return " ".join(parts)

    @property
    def stored_dtype(self) -> str:
        """Dtype of K and V."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def contiguous(self) -> bool:
        """K and V of a request lie in one row, without a page table."""
        return self.cache == "contiguous"

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """Tokens of each request."""
        return self.lengths.draw(self.batch)

    @property
    def q_lens(self) -> tuple[int, ...]:
        """Query tokens of each request."""
        if self.q_lengths is None:
            return (self.q_len,) * self.batch
        return self.q_lengths.draw(self.batch)

    @property
    def q_offsets(self) -> tuple[int, ...]:
        """Where the rows of each request start, and where the last end: `batch + 1` numbers."""
        return (0, *accumulate(self.q_lens))

    @property
    def max_q_len(self) -> int:
        """Most query tokens of one request."""
        return max(self.q_lens)

    @property
    def uniform_q_len(self) -> int | None:
        """Query tokens of a request where all have equally many, else `None`."""
        return self.max_q_len if len(set(self.q_lens)) == 1 else None

    @property
    def is_decode(self) -> bool:
        """One query a request."""
        return self.uniform_q_len == 1

    @property
    def num_rows(self) -> int:
        """Query tokens of the batch."""
        return sum(self.q_lens)

    @property
    def max_pages(self) -> int:
        """Width of the page table: pages of the longest request or of `capacity`, at least 1.

        A contiguous cache is one page of `max_tokens` a request.
        """
        return 1 if self.contiguous else self._capacity_pages

    @property
    def max_tokens(self) -> int:
        """Tokens that page table or buffer can hold for one request: whole pages, at least 1."""
        return self._capacity_pages * self.page_size

    @property
    def _capacity_pages(self) -> int:
        tokens = max(self.kv_lens) if self.capacity is None else self.capacity
        return max(1, -(-tokens // self.page_size))

    @property
    def kv_bytes(self) -> int:
        """Bytes of the K and V tokens in use, of requests with queries."""
        return formulas.kv_bytes(
            formulas.tokens_read(self.kv_lens, self.q_lens),
            self.num_kv_heads,
            self.head_dim,
            dtype_bytes(self.stored_dtype),
        )

    @property
    def moved_bytes(self) -> int:
        """Bytes that any exact kernel moves: the argument of the floor."""
        return formulas.moved_bytes(
            self.kv_lens,
            self.q_len if self.q_lengths is None else self.q_lens,
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim,
            None if self.contiguous else self.page_size,
            dtype_bytes(self.dtype),
            dtype_bytes(self.stored_dtype),
        )

    @property
    def flops(self) -> int:
        """Multiplies and adds of QKᵀ and PV over the visible pairs."""
        return formulas.attention_flops(
            self.kv_lens, self.q_lens, self.num_qo_heads, self.head_dim, self.causal
        )

    def tiny(self) -> AttentionCase:
        """This case with few tokens, which compiles whatever this case would compile.

        Kept: batch, heads, head_dim, dtypes, page size, layout, causality, whether lengths differ,
        and of every request whether it is empty, prefill (no more tokens than queries) or has
        tokens before its queries. Queries are as many where no tile of them is full.
        """
        queries = tuple(min(m, _TINY_QUERIES) for m in self.q_lens)
        before = [max(0, n - m) for n, m in zip(self.kv_lens, self.q_lens, strict=True)]
        most = max(*before, _TINY_TOKENS)
        tokens = tuple(
            m + max(1, extra * _TINY_TOKENS // most) if extra else min(n, m)
            for n, m, extra in zip(self.kv_lens, queries, before, strict=True)
        )
        return replace(
            self,
            lengths=_as_lengths(tokens),
            q_len=1 if self.q_lengths is not None else queries[0],
            q_lengths=None if self.q_lengths is None else _as_lengths(queries),
            capacity=None,
        )


_TINY_QUERIES = 256  # more rows than a tile of queries has
_TINY_TOKENS = 64


def _as_lengths(numbers: tuple[int, ...]) -> Lengths:
    return uniform(numbers[0]) if len(set(numbers)) == 1 else Lengths("list", numbers)


def _length_name(lengths: Lengths) -> str:
    if lengths.kind != "uniform":
        return _length_text(lengths)
    return f"N{_short_count(int(lengths.numbers[0]))}"


def _length_text(lengths: Lengths) -> str:
    text = str(lengths)
    too_long = lengths.kind == "list" and len(text) > 24
    return f"{len(lengths.numbers)} lengths" if too_long else text


def _short_count(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens and tokens % 1024 == 0 else str(tokens)


def _count(name: str, nearest: int) -> Rule:
    return Rule(
        name,
        "must be an int >= 1",
        lambda c: is_int(getattr(c, name)) and getattr(c, name) >= 1,
        lambda c: nearest,
    )


def _choice(name: str, choices: tuple[str, ...]) -> Rule:
    return Rule(
        name,
        f"must be one of {', '.join(choices)}",
        lambda c: getattr(c, name) in choices,
        lambda c: choices[0],
    )


CASE_RULES = (
    Rule(
        "batch",
        f"must be an int in 1..{MAX_REQUESTS}",  # before a number becomes as many lengths
        lambda c: is_int(c.batch) and 1 <= c.batch <= MAX_REQUESTS,
        lambda c: min(max(c.batch, 1), MAX_REQUESTS),
    ),
    Rule(
        "lengths",
        "must be a Lengths",
        lambda c: isinstance(c.lengths, Lengths),
        lambda c: f"parse_lengths({str(4096 if c.lengths is None else c.lengths)!r})",
    ),
    Rule(
        "label", "must be a str", lambda c: isinstance(c.label, str), lambda c: repr(str(c.label))
    ),
    _count("num_qo_heads", 32),
    _count("num_kv_heads", 8),
    _count("page_size", 16),
    _count("q_len", 1),
    Rule(
        "head_dim",
        f"must be an int in 1..{MAX_HEAD_DIM}",
        lambda c: is_int(c.head_dim) and 1 <= c.head_dim <= MAX_HEAD_DIM,
        lambda c: min(max(c.head_dim, 1), MAX_HEAD_DIM),
    ),
    Rule(
        "num_qo_heads",
        "must be a multiple of num_kv_heads",
        lambda c: c.num_kv_heads < 1 or c.num_qo_heads % c.num_kv_heads == 0,
        lambda c: max(c.num_qo_heads // c.num_kv_heads, 1) * c.num_kv_heads,
        lambda c: f"{c.num_qo_heads} with num_kv_heads={c.num_kv_heads}",
    ),
    _choice("layout", LAYOUTS),
    Rule(
        "q_lengths",
        "must be None or a Lengths",
        lambda c: c.q_lengths is None or isinstance(c.q_lengths, Lengths),
        lambda c: f"parse_lengths({str(c.q_lengths)!r})",
    ),
    Rule(
        "q_len",
        "must be left out where q_lengths says it",
        lambda c: c.q_lengths is None or c.q_len == 1,
        lambda c: "the default, 1",
    ),
    Rule("causal", "must be a bool", lambda c: isinstance(c.causal, bool), lambda c: "True"),
    _choice("dtype", QUERY_DTYPES),
    _choice("cache", CACHE_KINDS),
    Rule(
        "kv_dtype",
        f"must be None (dtype), dtype itself or {FP8}",
        lambda c: c.kv_dtype in (None, c.dtype, FP8),
        lambda c: c.dtype,
    ),
    Rule(
        "page_size",
        "a contiguous cache has no pages",
        lambda c: not c.contiguous or c.page_size == 16,
        lambda c: "the default, 16",
    ),
    Rule(
        "batch_invariant",
        "must be a bool",
        lambda c: isinstance(c.batch_invariant, bool),
        lambda c: "True",
    ),
)

# Judged where the others hold, because lengths are drawn for the batch.
_DRAWN_RULES = (
    Rule(
        "q_lengths",
        "must give the batch one query at least",
        lambda c: c.num_rows >= 1,
        lambda c: "parse_lengths('1')",
    ),
    Rule(
        "capacity",
        "must be None or an int >= 1, not below the longest length, in whole pages of page_size",
        lambda c: (
            c.capacity is None or (is_int(c.capacity) and c.capacity == c.max_tokens >= _longest(c))
        ),
        lambda c: -(-max(_whole(c.capacity), _longest(c), 1) // c.page_size) * c.page_size,
        lambda c: f"{c.capacity} with longest length {_longest(c)}, page_size={c.page_size}",
    ),
)


def _whole(number: object) -> int:
    """`number` rounded up; 0 for what is none."""
    return math.ceil(number) if isinstance(number, (int, float)) else 0


def _longest(case: AttentionCase) -> int:
    return max(case.kv_lens)
