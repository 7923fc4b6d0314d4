"""The named suites of cases that the command line offers, as data."""

from __future__ import annotations

from dataclasses import replace

from stream_attention.bench.cases import FP8, AttentionCase
from stream_attention.bench.lengths import parse_lengths, uniform

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


def _decode_case(
    row: tuple[int, int, int, int, int, str], dtype: str = "bfloat16"
) -> AttentionCase:
    batch, tokens, qo_heads, kv_heads, head_dim, layout = row
    return AttentionCase(
        batch=batch,
        lengths=uniform(tokens),
        num_qo_heads=qo_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layout=layout,
        dtype=dtype,
    )


def _performance_decode() -> tuple[AttentionCase, ...]:
    twins = [(*row[:5], "NHD") for row in _DECODE_ROWS if row[2:4] == (16, 2)]
    return tuple(_decode_case(row) for row in (*_DECODE_ROWS, *twins))


def _ragged(dtype: str = "bfloat16") -> tuple[AttentionCase, ...]:
    """Ragged decode and verify; lognormal means are set by the MiB of KV that they give."""
    return (
        AttentionCase(batch=64, lengths=parse_lengths("lognormal:4608:1.0:0"), dtype=dtype),
        AttentionCase(batch=32, lengths=parse_lengths("skewed"), dtype=dtype),
        AttentionCase(
            batch=32, lengths=parse_lengths("lognormal:4408:1.0:0"), q_len=5, dtype=dtype
        ),
        AttentionCase(batch=8, lengths=parse_lengths("range:300:900:0"), dtype=dtype),
    )


def _small_cpu() -> tuple[AttentionCase, ...]:
    """A minute on two cores: a middle-sized decode, a ragged one, a long one with few heads."""
    fp32 = "float32"
    return (
        AttentionCase(batch=4, lengths=uniform(2048), dtype=fp32),
        AttentionCase(batch=8, lengths=parse_lengths("range:300:900:0"), layout="HND", dtype=fp32),
        _decode_case((1, 16384, 16, 2, 64, "HND"), fp32),
    )


def _small_cuda() -> tuple[AttentionCase, ...]:
    """Half a minute on a GPU: latency-bound, middle, bandwidth-bound and ragged."""
    return (
        _decode_case(_DECODE_ROWS[0]),
        _decode_case(_DECODE_ROWS[7]),
        _decode_case(_DECODE_ROWS[4]),
        AttentionCase(batch=8, lengths=parse_lengths("range:300:900:0")),
    )


def _decode_small() -> tuple[AttentionCase, ...]:
    """Cells whose K and V are read in a few microseconds: 4 MiB and 21 MiB."""
    return (
        _decode_case((1, 1024, 32, 8, 128, "NHD")),
        AttentionCase(batch=8, lengths=parse_lengths("range:300:900:0")),
    )


def _decode_pages() -> tuple[AttentionCase, ...]:
    """The same bytes (256 MiB, then 128 MiB) in pages of every size and without pages."""
    many = _decode_case((8, 8192, 32, 8, 128, "NHD"))
    few = _decode_case((4, 32768, 16, 2, 128, "HND"))
    return (
        *(replace(many, page_size=size) for size in (1, 2, 4, 8, 16, 32, 64, 128, 256)),
        replace(many, cache="contiguous"),
        *(replace(few, page_size=size) for size in (16, 64)),
        replace(few, cache="contiguous"),
    )


def _decode_dims() -> tuple[AttentionCase, ...]:
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


def _decode_fp8() -> tuple[AttentionCase, ...]:
    """bf16 K and V, then the same tokens in fp8."""
    rows = (_decode_case(_DECODE_ROWS[3]), _decode_case(_DECODE_ROWS[9]))
    return tuple(replace(case, kv_dtype=kind) for case in rows for kind in (None, FP8))


def _decode_capacity() -> tuple[AttentionCase, ...]:
    """Short requests under a plan made for their length, then under one made for 128K tokens."""
    case = _decode_case((16, 512, 32, 8, 128, "NHD"))
    return tuple(replace(case, capacity=tokens) for tokens in (512, 131072))


def _decode_invariant() -> tuple[AttentionCase, ...]:
    """Each case without and with bits that do not depend on the rest of the batch."""
    rows = (_DECODE_ROWS[index] for index in (11, 2, 10, 4, 5))
    return tuple(
        replace(_decode_case(row), batch_invariant=invariant)
        for row in rows
        for invariant in (False, True)
    )


def _mixed() -> tuple[AttentionCase, ...]:
    """A chunked prefill beside decodes in one call; its chunk starts at the tokens named.

    Lognormal means are set by the MiB of KV that they give.
    """
    return (
        # A chunk of 2048 at 6144, so that it ends at 8192, and 63 decodes: 1177 MiB.
        AttentionCase(
            batch=64,
            lengths=parse_lengths("mixed:1:8192:4653:1.0:0"),
            q_lengths=parse_lengths("mixed:1:2048:1:0:0"),
        ),
        # Four chunks of 512 at 2048 and 60 decodes: 1162 MiB.
        AttentionCase(
            batch=64,
            lengths=parse_lengths("mixed:4:2560:4787:1.0:0"),
            q_lengths=parse_lengths("mixed:4:512:1:0:0"),
        ),
    )


def _mixed_split() -> tuple[AttentionCase, ...]:
    """The parts of `mixed`, each a call of its own: chunks, then the very decodes."""
    return (
        AttentionCase(batch=1, lengths=uniform(8192), q_len=2048),
        AttentionCase(batch=63, lengths=parse_lengths("lognormal:4653:1.0:0")),
        AttentionCase(batch=4, lengths=uniform(2560), q_len=512),
        AttentionCase(batch=60, lengths=parse_lengths("lognormal:4787:1.0:0")),
    )


def _micro_prefill() -> tuple[AttentionCase, ...]:
    """A few queries over a long cache: 16 MiB for one request, 256 MiB for eight."""
    one = _decode_case((1, 16384, 16, 2, 128, "NHD"))
    eight = _decode_case((8, 8192, 32, 8, 128, "NHD"))
    return (
        *(replace(one, q_len=queries) for queries in (2, 4, 8, 16, 32, 64)),
        *(replace(eight, q_len=queries) for queries in (4, 16, 64)),
    )


def _prefill() -> tuple[AttentionCase, ...]:
    """Whole prompts in contiguous caches, as many queries as tokens."""
    return tuple(
        replace(
            _decode_case((batch, tokens, qo_heads, kv_heads, head_dim, "NHD")),
            q_len=tokens,
            cache="contiguous",
            causal=causal,
        )
        for batch, tokens, qo_heads, kv_heads, head_dim, causal in (
            (1, 4096, 32, 8, 128, True),
            (1, 16384, 32, 8, 128, True),
            (4, 4096, 32, 8, 128, True),
            (1, 8192, 32, 8, 128, False),
            (1, 8192, 16, 2, 128, True),
            (2, 8192, 16, 16, 64, True),
            (1, 8192, 16, 4, 256, True),
            (1, 1024, 32, 8, 128, True),
        )
    )


# Cells of the grid hold 2^19 tokens at most: 2 GiB of K and V in bf16, 8 heads of 128. And 4 MiB at
# least: a rotation of smaller ones stays in a cache.
_GRID_TOKENS, _GRID_BYTES = 19, 4 << 20


def _grid_uniform(
    heads: tuple[int, int, int], layout: str, batches: range, tokens: range, parity: int
) -> list[AttentionCase]:
    """Powers of two in batch and length, every other one, as the fields of one colour of a chess
    board: each has neighbours of the same bytes, half as long and twice as many, and the reverse.
    """
    cases = [
        _decode_case((2**batch, 2**length, *heads, layout))
        for batch in batches
        for length in tokens
        if (batch + length) % 2 == parity and batch + length <= _GRID_TOKENS
    ]
    return [case for case in cases if case.kv_bytes >= _GRID_BYTES]


def _grid_ragged() -> list[AttentionCase]:
    """Lengths drawn three ways, for decode and for verifying four drafted tokens."""
    drawn = [
        *((batch, f"lognormal:{mean}:1:1", 1) for batch in (8, 16, 32, 64, 128)
          for mean in (512, 1024, 2048, 4096)),
        *((batch, f"range:{mean // 2}:{3 * mean // 2}:1", 1) for batch in (4, 8, 16, 32, 64)
          for mean in (600, 1200, 2400)),
        *((batch, f"skewed:{longest}:512", 1) for batch in (8, 16, 32, 64)
          for longest in (16384, 32768, 65536)),
        *((batch, f"lognormal:{mean}:1:1", 5) for batch in (8, 16, 32, 64)
          for mean in (1024, 2048, 4096)),
    ]  # fmt: skip
    return [
        AttentionCase(batch=batch, lengths=parse_lengths(lengths), q_len=q_len)
        for batch, lengths, q_len in drawn
    ]


def _evidence_grid(evidence: tuple[AttentionCase, ...]) -> tuple[AttentionCase, ...]:
    """Cells between and around those of `evidence`, for models of our routes and their ranges."""
    every = [
        *_grid_uniform((32, 8, 128), "NHD", range(9), range(9, 18), 0),
        *_grid_uniform((64, 8, 128), "HND", range(6), range(10, 17), 1),
        *_grid_uniform((16, 2, 128), "HND", range(6), range(10, 17), 0),
        *_grid_uniform((16, 2, 128), "NHD", range(6), range(10, 17), 1),
        *_grid_uniform((16, 2, 64), "HND", range(6), range(10, 17), 0),
        *_grid_uniform((16, 2, 64), "NHD", range(6), range(10, 17), 1),
        *_grid_ragged(),
    ]
    return tuple(case for case in every if case not in evidence)


_EVIDENCE = (*_performance_decode(), *_ragged(), _decode_small()[0])
SUITES: dict[str, tuple[AttentionCase, ...]] = {
    # 18 shapes and the NHD twins of its seven 16/2 rows.
    "performance_decode": _performance_decode(),
    "ragged": _ragged(),
    "decode_small": _decode_small(),
    # What phase databases are compiled from: all cells above.
    "evidence": _EVIDENCE,
    # More cells for the models of our routes, without peers.
    "evidence_grid": _evidence_grid(_EVIDENCE),
    "decode_pages": _decode_pages(),
    "decode_dims": _decode_dims(),
    "decode_fp8": _decode_fp8(),
    "decode_capacity": _decode_capacity(),
    "decode_invariant": _decode_invariant(),
    "mixed": _mixed(),
    "mixed_split": _mixed_split(),
    "micro_prefill": _micro_prefill(),
    "prefill": _prefill(),
    "small_cpu": _small_cpu(),
    "small_cuda": _small_cuda(),
    # The CPU comparison of the project's goals, with extra memory measured.
    "cpu_headline": (AttentionCase(batch=8, lengths=uniform(8192), dtype="float32"),),
}


def default_suite(device_type: str) -> str:
    """The suite that runs when no flag names one."""
    return "small_cuda" if device_type == "cuda" else "small_cpu"
