"""Cases as data: one frozen object a cell, and the named suites that the command line offers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stream_attention.bench import formulas
from stream_attention.bench.lengths import Lengths, parse_lengths, uniform
from stream_attention.core.dtypes import QUERY_DTYPES, dtype_bytes
from stream_attention.core.ir import Rule, check_rules, evaluable_repr, is_int
from stream_attention.core.problem import CACHE_KINDS, LAYOUTS, MAX_HEAD_DIM

FP8 = "float8_e4m3fn"
_SHORT_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", FP8: "fp8"}


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class DecodeCase:
    """One exact decode problem, apart from device and data.

    batch: requests. lengths: their KV lengths in tokens. q_len: query tokens a request (1 = decode,
    more = verify, causal bottom-right). page_size: tokens a page. dtype: of q and output.
    label: prefix of the printed name; "" = none.
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

    def __post_init__(self) -> None:
        check_rules(self, CASE_RULES)
        self.lengths.draw(self.batch)
        check_rules(self, _CAPACITY_RULES)

    __repr__ = evaluable_repr

    @property
    def name(self) -> str:
        """`B16 N32K 32/8 D128 NHD bf16`, with what differs from a plain decode added."""
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
            parts.append(f"M{self.q_len}")
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
    def num_rows(self) -> int:
        """Query tokens of the batch."""
        return self.batch * self.q_len

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
        """Bytes of the K and V tokens in use."""
        return formulas.kv_bytes(
            self.kv_lens, self.num_kv_heads, self.head_dim, dtype_bytes(self.stored_dtype)
        )

    @property
    def moved_bytes(self) -> int:
        """Bytes that any exact kernel moves: the argument of the floor."""
        return formulas.moved_bytes(
            self.kv_lens,
            self.q_len,
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
        return formulas.attention_flops(self.kv_lens, self.q_len, self.num_qo_heads, self.head_dim)


def _length_name(lengths: Lengths) -> str:
    if lengths.kind != "uniform":
        text = str(lengths)
        too_long = lengths.kind == "list" and len(text) > 24
        return f"{len(lengths.numbers)} lengths" if too_long else text
    return f"N{_short_count(int(lengths.numbers[0]))}"


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
    _count("batch", 1),
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
_CAPACITY_RULES = (
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


def _longest(case: DecodeCase) -> int:
    return max(case.kv_lens)


# (batch, tokens, query heads, KV heads, head_dim, layout): serving shapes that decode is judged by.
_DECODE_ROWS = (
    (1, 4096, 32, 8, 128, "NHD"),
    (1, 32768, 32, 8, 128, "NHD"),
    (16, 4096, 32, 8, 128, "NHD"),
    (16, 32768, 32, 8, 128, "NHD"),
    (64, 8192, 32, 8, 128, "NHD"),
    (128, 1024, 32, 8, 128, "NHD"),
    (1, 8192, 64, 8, 128, "HND"),
    (8, 8192, 64, 8, 128, "HND"),
    (32, 8192, 64, 8, 128, "HND"),
    (1, 16384, 16, 2, 128, "HND"),
    (1, 65536, 16, 2, 128, "HND"),
    (4, 32768, 16, 2, 128, "HND"),
    (8, 65536, 16, 2, 128, "HND"),
    (1, 32768, 14, 2, 64, "HND"),
    (8, 32768, 14, 2, 64, "HND"),
    (1, 16384, 16, 2, 64, "HND"),
    (4, 32768, 16, 2, 64, "HND"),
    (8, 65536, 16, 2, 64, "HND"),
)


def _decode_case(row: tuple[int, int, int, int, int, str], dtype: str = "bfloat16") -> DecodeCase:
    batch, tokens, qo_heads, kv_heads, head_dim, layout = row
    return DecodeCase(
        batch=batch,
        lengths=uniform(tokens),
        num_qo_heads=qo_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layout=layout,
        dtype=dtype,
    )


def _performance_decode() -> tuple[DecodeCase, ...]:
    twins = [(*row[:5], "NHD") for row in _DECODE_ROWS if row[2:4] == (16, 2)]
    return tuple(_decode_case(row) for row in (*_DECODE_ROWS, *twins))


def _ragged(dtype: str = "bfloat16") -> tuple[DecodeCase, ...]:
    """Ragged decode and verify; lognormal means are set by the MiB of KV that they give."""
    return (
        DecodeCase(batch=64, lengths=parse_lengths("lognormal:4608:1.0:0"), dtype=dtype),
        DecodeCase(batch=32, lengths=parse_lengths("skewed"), dtype=dtype),
        DecodeCase(batch=32, lengths=parse_lengths("lognormal:4408:1.0:0"), q_len=5, dtype=dtype),
        DecodeCase(batch=8, lengths=parse_lengths("range:300:900:0"), dtype=dtype),
    )


def _small_cpu() -> tuple[DecodeCase, ...]:
    """A minute on two cores: a middle-sized decode, a ragged one, a long one with few heads."""
    fp32 = "float32"
    return (
        DecodeCase(batch=4, lengths=uniform(2048), dtype=fp32),
        DecodeCase(batch=8, lengths=parse_lengths("range:300:900:0"), layout="HND", dtype=fp32),
        _decode_case((1, 16384, 16, 2, 64, "HND"), fp32),
    )


def _small_cuda() -> tuple[DecodeCase, ...]:
    """Half a minute on a GPU: latency-bound, middle, bandwidth-bound and ragged."""
    return (
        _decode_case(_DECODE_ROWS[0]),
        _decode_case(_DECODE_ROWS[7]),
        _decode_case(_DECODE_ROWS[4]),
        DecodeCase(batch=8, lengths=parse_lengths("range:300:900:0")),
    )


def _decode_small() -> tuple[DecodeCase, ...]:
    """Cells whose K and V are read in a few microseconds: 4 MiB and 21 MiB."""
    return (
        _decode_case((1, 1024, 32, 8, 128, "NHD")),
        DecodeCase(batch=8, lengths=parse_lengths("range:300:900:0")),
    )


def _decode_pages() -> tuple[DecodeCase, ...]:
    """The same bytes (256 MiB, then 128 MiB) in pages of every size and without pages."""
    many = _decode_case((8, 8192, 32, 8, 128, "NHD"))
    few = _decode_case((4, 32768, 16, 2, 128, "HND"))
    return (
        *(replace(many, page_size=size) for size in (1, 2, 4, 8, 16, 32, 64, 128, 256)),
        replace(many, cache="contiguous"),
        *(replace(few, page_size=size) for size in (16, 64)),
        replace(few, cache="contiguous"),
    )


def _decode_dims() -> tuple[DecodeCase, ...]:
    """Odd groups and head dims, each with at least 128 MiB of K and V."""
    return tuple(
        _decode_case((8, tokens, qo_heads, kv_heads, head_dim, "NHD"))
        for tokens, qo_heads, kv_heads, head_dim in (
            (8192, 28, 4, 128),
            (8192, 40, 8, 128),
            (8192, 24, 8, 64),
            (32768, 32, 1, 128),
            (8192, 32, 8, 80),
            (8192, 32, 8, 96),
            (8192, 16, 8, 192),
            (8192, 16, 8, 256),
        )
    )


def _decode_fp8() -> tuple[DecodeCase, ...]:
    """bf16 K and V, then the same tokens in fp8."""
    rows = (_decode_case(_DECODE_ROWS[3]), _decode_case(_DECODE_ROWS[9]))
    return tuple(replace(case, kv_dtype=kind) for case in rows for kind in (None, FP8))


def _decode_capacity() -> tuple[DecodeCase, ...]:
    """Short requests under a plan made for their length, then under one made for 128K tokens."""
    case = _decode_case((16, 512, 32, 8, 128, "NHD"))
    return tuple(replace(case, capacity=tokens) for tokens in (512, 131072))


def _decode_invariant() -> tuple[DecodeCase, ...]:
    """Each case without and with bits that do not depend on the rest of the batch."""
    rows = (_DECODE_ROWS[index] for index in (11, 2, 10, 4, 5))
    return tuple(
        replace(_decode_case(row), batch_invariant=invariant)
        for row in rows
        for invariant in (False, True)
    )


SUITES: dict[str, tuple[DecodeCase, ...]] = {
    # 18 shapes and the NHD twins of its seven 16/2 rows.
    "performance_decode": _performance_decode(),
    "ragged": _ragged(),
    "decode_small": _decode_small(),
    "decode_pages": _decode_pages(),
    "decode_dims": _decode_dims(),
    "decode_fp8": _decode_fp8(),
    "decode_capacity": _decode_capacity(),
    "decode_invariant": _decode_invariant(),
    "small_cpu": _small_cpu(),
    "small_cuda": _small_cuda(),
    # The CPU comparison of the project's goals, with extra memory measured.
    "cpu_headline": (DecodeCase(batch=8, lengths=uniform(8192), dtype="float32"),),
}


def default_suite(device_type: str) -> str:
    """The suite that runs when no flag names one."""
    return "small_cuda" if device_type == "cuda" else "small_cpu"
