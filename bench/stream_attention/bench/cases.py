"""Cases as data: one frozen object a cell, and the named suites that the command line offers."""

from __future__ import annotations

from dataclasses import dataclass

from stream_attention.bench import formulas
from stream_attention.bench.lengths import Lengths, parse_lengths, uniform
from stream_attention.core.dtypes import QUERY_DTYPES, dtype_bytes
from stream_attention.core.ir import Rule, check_rules, evaluable_repr, is_int
from stream_attention.core.problem import LAYOUTS, MAX_HEAD_DIM


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class DecodeCase:
    """One exact paged decode problem, apart from device and data.

    batch: requests. lengths: their KV lengths in tokens. q_len: query tokens a request (1 = decode,
    more = verify, causal bottom-right). page_size: tokens a page. dtype: of q, K, V and output.
    label: prefix of the printed name; "" = none. Raises `ValueError` with every broken rule.
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

    def __post_init__(self) -> None:
        check_rules(self, CASE_RULES)
        self.lengths.draw(self.batch)

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
        parts.append({"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[self.dtype])
        if self.page_size != 16:
            parts.append(f"page{self.page_size}")
        if self.q_len != 1:
            parts.append(f"M{self.q_len}")
        return " ".join(parts)

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
        """Width of the page table: pages of the longest request, at least 1."""
        return max(1, -(-max(self.kv_lens) // self.page_size))

    @property
    def kv_bytes(self) -> int:
        """Bytes of the K and V tokens in use."""
        return formulas.kv_bytes(
            self.kv_lens, self.num_kv_heads, self.head_dim, dtype_bytes(self.dtype)
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
            self.page_size,
            dtype_bytes(self.dtype),
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
    tokens = int(lengths.numbers[0])
    return f"N{tokens // 1024}K" if tokens and tokens % 1024 == 0 else f"N{tokens}"


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
)

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
    """Ragged decode and verify ; lognormal means are set by the MiB of KV that they give."""
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


SUITES: dict[str, tuple[DecodeCase, ...]] = {
    # 18 shapes and the NHD twins of its seven 16/2 rows.
    "performance_decode": _performance_decode(),
    "ragged": _ragged(),
    "small_cpu": _small_cpu(),
    "small_cuda": _small_cuda(),
    # The CPU comparison of the project's goals, with extra memory measured.
    "cpu_headline": (DecodeCase(batch=8, lengths=uniform(8192), dtype="float32"),),
}


def default_suite(device_type: str) -> str:
    """The suite that runs when no flag names one."""
    return "small_cuda" if device_type == "cuda" else "small_cpu"
