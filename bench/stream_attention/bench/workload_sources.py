"""Where batches come from: traces, strata that cover what is served, and boundaries of regimes.

Each source gives `SourcedBatch`es, every content once. Traces say what happens, strata that nothing
is left out, boundaries where a kernel's schedule changes.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stream_attention.bench.batching import Batching, simulate
from stream_attention.bench.traces import Trace
from stream_attention.core.errors import Faults
from stream_attention.core.ir import is_int
from stream_attention.core.routes.triton_config import MIN_SPLIT_TOKENS, MIN_SPLIT_TOKENS_BATCHED
from stream_attention.planner.token_trees import tree_of
from stream_attention.planner.workloads import WorkloadBatch, WorkloadRequest

SOURCES = ("trace", "stratified", "boundary")
TILE_TOKENS = 64
"""KV tokens that our kernels multiply at once."""


@dataclass(frozen=True, slots=True)
class SourcedBatch:
    """A batch and the source it is from: one of `SOURCES`, and what of it."""

    source: str
    origin: str
    batch: WorkloadBatch


@dataclass(frozen=True, slots=True)
class Stratum:
    """A cell of the cover: a phase, ranges of length and batch (inclusive), and a geometry.

    heads: (query heads, KV heads, head dim).
    """

    phase: str
    lengths: tuple[int, int]
    batches: tuple[int, int]
    heads: tuple[int, int, int]

    @property
    def name(self) -> str:
        """`decode N513-4096 B2-8 32/8 D128`."""
        low, high = self.lengths
        few, many = self.batches
        qo_heads, kv_heads, dim = self.heads
        return f"{self.phase} N{low}-{high} B{few}-{many} {qo_heads}/{kv_heads} D{dim}"

    @property
    def least_kv_bytes(self) -> int:
        """K and V, in two bytes an element, of the smallest batch of the stratum."""
        return self.lengths[0] * self.batches[0] * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """K and V of one token of one request, in two bytes an element."""
        return 4 * self.heads[1] * self.heads[2]


STRATUM_PHASES = ("decode", "verify", "append", "prefill", "mixed", "train")
STRATUM_LENGTHS = ((1, 512), (513, 4096), (4097, 32768), (32769, 131072))
STRATUM_BATCHES = ((1, 1), (2, 8), (9, 64), (65, 256))
STRATUM_HEADS = ((32, 8, 128), (64, 8, 128), (32, 32, 128), (14, 2, 64), (16, 2, 256), (16, 1, 128))
_VERIFY_LENS = (2, 4, 8, 16)
_CHUNKS = (64, 256, 512, 2048)


def from_traces(
    traces: Iterable[Trace],
    batching: Batching,
    like: WorkloadBatch,
    *,
    every: int = 1,
    most_steps: int | None = None,
) -> Iterator[SourcedBatch]:
    """Batches of every `every`-th step over each trace, of at most `most_steps` steps a trace."""
    faults = Faults()
    faults.require(is_int(every) and every >= 1, "every", every, "must be an int >= 1", 1)
    faults.require(
        most_steps is None or (is_int(most_steps) and most_steps >= 0),
        "most_steps",
        most_steps,
        "must be None or an int >= 0",
        "None",
    )
    faults.raise_if_any("from_traces")
    return deduplicated(
        SourcedBatch("trace", batch.label, batch)
        for trace in traces
        for batch in itertools.islice(simulate(trace, batching, like), 0, most_steps, every)
    )


def strata(most_kv_bytes: int = 16 << 30) -> tuple[tuple[Stratum, ...], tuple[Stratum, ...]]:
    """`(those whose smallest batch fits, the rest)` of the strata, by the bytes of K and V."""
    rows = itertools.product(STRATUM_PHASES, STRATUM_LENGTHS, STRATUM_BATCHES, STRATUM_HEADS)
    # One request is not mixed.
    every = [Stratum(*row) for row in rows if row[0] != "mixed" or row[2][1] > 1]
    fit = tuple(stratum for stratum in every if stratum.least_kv_bytes <= most_kv_bytes)
    return fit, tuple(stratum for stratum in every if stratum.least_kv_bytes > most_kv_bytes)


def stratified(
    seed: int, per_stratum: int = 1, most_kv_bytes: int = 16 << 30
) -> Iterator[SourcedBatch]:
    """`per_stratum` draws of every stratum that fits `most_kv_bytes` of K and V.

    A draw is a function of (seed, stratum, its number) alone: more draws or other strata change
    none. What does not fit is the second part of `strata(most_kv_bytes)`.
    """
    faults = Faults()
    faults.require(is_int(seed), "seed", seed, "must be an int", 0)
    whole = is_int(per_stratum) and per_stratum >= 1
    faults.require(whole, "per_stratum", per_stratum, "must be an int >= 1", 1)
    whole = is_int(most_kv_bytes) and most_kv_bytes >= 1
    faults.require(whole, "most_kv_bytes", most_kv_bytes, "must be an int >= 1", 16 << 30)
    faults.raise_if_any("stratified")
    return deduplicated(
        SourcedBatch("stratified", stratum.name, _draw(stratum, seed, number, most_kv_bytes))
        for stratum in strata(most_kv_bytes)[0]
        for number in range(per_stratum)
    )


def _draw(stratum: Stratum, seed: int, number: int, most_kv_bytes: int) -> WorkloadBatch:
    name = f"{seed}:{number}:{stratum.name}".encode()
    rng = random.Random(int.from_bytes(hashlib.sha256(name).digest(), "big"))
    few, many = stratum.batches
    low, high = stratum.lengths
    most_tokens = most_kv_bytes // stratum.token_bytes
    batch = rng.randint(few, max(few, min(many, most_tokens // low)))
    high = max(low, min(high, most_tokens // batch))
    train = stratum.phase == "train"
    low = low if stratum.phase in ("decode", "prefill", "train") else max(low, 2)
    high = max(low, high)
    same = _length(rng, low, high)
    lens = [same if train else _length(rng, low, high) for _ in range(batch)]
    phases = _phases(stratum.phase, batch, rng)
    asked = {"verify": rng.choice(_VERIFY_LENS), "append": rng.choice(_CHUNKS)}
    rows = tuple(_request(phase, n, asked) for phase, n in zip(phases, lens, strict=True))
    qo_heads, kv_heads, dim = stratum.heads
    return WorkloadBatch(
        requests=rows,
        num_qo_heads=qo_heads,
        num_kv_heads=kv_heads,
        head_dim_qk=dim,
        q_dtype=rng.choice(("bfloat16", "float16")),
        cache_kind="contiguous" if train else rng.choice(("paged", "contiguous")),
        layout="NHD" if train else rng.choice(("NHD", "HND")),
        label=f"{stratum.name} #{number}",
    )


def _length(rng: random.Random, low: int, high: int) -> int:
    """An int in low … high, each halving of the range's ends as likely as the others."""
    top = rng.randint(low.bit_length(), high.bit_length())
    return rng.randint(max(low, 1 << (top - 1)), min(high, (1 << top) - 1))


def _phases(phase: str, batch: int, rng: random.Random) -> list[str]:
    """A phase a request; a mixed batch decodes and appends at least once."""
    if phase != "mixed":
        return [phase] * batch
    return ["decode", "append", *rng.choices(("decode", "append", "prefill"), k=batch - 2)]


def _request(phase: str, kv_len: int, asked: dict[str, int]) -> WorkloadRequest:
    """A request with the query tokens that its phase asks for, and that it has."""
    qo_len = 1 if phase == "decode" else min(kv_len, asked.get(phase, kv_len))
    return WorkloadRequest(phase=phase, qo_len=qo_len, kv_len=kv_len)


def boundary() -> tuple[SourcedBatch, ...]:
    """Batches around every mark where a schedule, a tile or an offset changes."""
    parts: Sequence[Callable[[], Iterator[tuple[str, WorkloadBatch]]]] = (
        _length_marks,
        _page_marks,
        _split_marks,
        _group_marks,
        _query_marks,
        _batch_marks,
    )
    found = (
        SourcedBatch("boundary", origin, replace(batch, label=origin))
        for part in parts
        for origin, batch in part()
    )
    return tuple(deduplicated(found))


def _around(mark: int) -> tuple[int, ...]:
    return (mark - 1, mark, mark + 1)


def _decode(*kv_lens: int, **fields: Any) -> WorkloadBatch:
    return WorkloadBatch(requests=tuple(WorkloadRequest(kv_len=n) for n in kv_lens), **fields)


def _length_marks() -> Iterator[tuple[str, WorkloadBatch]]:
    marks = (0, 1, *_around(TILE_TOKENS), *_around(2 * TILE_TOKENS))
    for kind in ("paged", "contiguous"):
        for n in marks:
            yield f"length {n} {kind}", _decode(n, cache_kind=kind)
        yield f"an empty request beside others {kind}", _decode(33, 0, 17, cache_kind=kind)


def _page_marks() -> Iterator[tuple[str, WorkloadBatch]]:
    for page in (1, 16, 64):
        for n in _around(page):
            yield f"page {page}, length {n}", _decode(n, page_size=page, layout="HND")


def _split_marks() -> Iterator[tuple[str, WorkloadBatch]]:
    for n in _around(MIN_SPLIT_TOKENS):
        yield f"first split, one request of {n}", _decode(n)
    for n in _around(MIN_SPLIT_TOKENS_BATCHED):
        yield f"first split, four requests of {n}", _decode(n, n, n, n)
    yield "more splits than tiles", _decode(TILE_TOKENS, 131072, num_kv_heads=32)
    yield "one tile in a table of 128K", _decode(TILE_TOKENS, num_kv_heads=1, capacity=131072)


def _group_marks() -> Iterator[tuple[str, WorkloadBatch]]:
    for group in (1, 3, 16):
        for n in (TILE_TOKENS + 1, 4096):
            heads = {"num_qo_heads": 2 * group, "num_kv_heads": 2}
            yield f"group {group}, length {n}", _decode(n, **heads)


def _query_marks() -> Iterator[tuple[str, WorkloadBatch]]:
    for m in (2, 16, 17, *_around(TILE_TOKENS)):
        phase = "verify" if m <= 16 else "append"
        row = WorkloadRequest(phase=phase, qo_len=m, kv_len=1024)
        yield f"{m} queries", WorkloadBatch(requests=(row,))
    for n in _around(TILE_TOKENS):
        row = WorkloadRequest(phase="prefill", qo_len=n, kv_len=n)
        yield f"prefill of {n}", WorkloadBatch(requests=(row,), cache_kind="contiguous")
        train = replace(row, phase="train")
        yield f"training on {n}", WorkloadBatch(requests=(train,), cache_kind="contiguous")
    tree = tree_of((2, 2, 2))
    row = WorkloadRequest(phase="verify", qo_len=len(tree), kv_len=1024, tree=tree)
    yield "a tree of 15 tokens", WorkloadBatch(requests=(row,))
    row = WorkloadRequest(phase="append", qo_len=0, kv_len=100)
    yield "no queries beside one", WorkloadBatch(requests=(row, WorkloadRequest(kv_len=100)))


def _batch_marks() -> Iterator[tuple[str, WorkloadBatch]]:
    """65,536 requests are one object, and one entry of JSON."""
    for batch in (1, 65535, 65536):
        for n in (1, 17):
            rows = (WorkloadRequest(kv_len=n),) * batch
            geometry: dict[str, Any] = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim_qk": 64}
            yield f"{batch} requests of {n}", WorkloadBatch(requests=rows, **geometry)
    shared = WorkloadRequest(kv_len=1025, prefix_group=0, prefix_len=1024)
    yield "64 requests share 64 pages", WorkloadBatch(requests=(shared,) * 64)
    alone = replace(shared, prefix_group=None, prefix_len=0)
    yield "64 requests share none", WorkloadBatch(requests=(alone,) * 64)


def deduplicated(batches: Iterable[SourcedBatch]) -> Iterator[SourcedBatch]:
    """Every content once, the first of it, also across sources that are chained."""
    seen: set[str] = set()
    for sourced in batches:
        digest = sourced.batch.content_digest
        if digest not in seen:
            seen.add(digest)
            yield sourced
