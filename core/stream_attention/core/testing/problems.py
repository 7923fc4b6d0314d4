"""Problems as data: `build` makes the tensors of a `Case`, with poison in every unused slot."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stream_attention.core.cache import ContiguousKVCache, PagedKVCache
from stream_attention.core.dtypes import torch_dtype
from stream_attention.core.ir import Rule, check_rules, evaluable_repr

FP8 = "float8_e4m3fn"
POISON = {"nan": math.nan, "inf": math.inf, "zero": 0.0}
STALE_IDS = {"negative": -1, "huge": 1 << 30, "stale": 0}


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Case:
    """One attention problem as data; `repr` evaluates back.

    qo_lens: query tokens a request. kv_lens: KV tokens a request, or a tuple a request with one
        count a KV head (`per_head_lists`).
    head_dim_vo: `None` = head_dim_qk. kv_dtype: `None` = dtype. kv_scales: `None`, `"tensor"`,
        `"head"`; "number" gives Python floats.
    spare: unused page columns beyond the longest request (paged) or unused tokens (contiguous).
    has_lengths: contiguous only; `False` = no `sequence_lengths`, all requests at capacity.
    pool: memory form of K/V: `"dense"`, `"layer_axis"` (layer 1 of 3 inside the pool) or
        `"interleaved"` (K and V in one buffer). q_form: `"dense"`, `"strided"` (every second head
        block of a wider buffer), `"transposed"` (heads outermost in memory).
    call: `"ragged"` (`qo_indptr`), `"batch"` (`[batch, Hq, D]`) or `"block"` (`[batch, M, Hq, D]`).
    poison: what unused K/V slots hold; e4m3 has no Inf, NaN stands in.
    ids: what page-table entries beyond the used ones hold.
    sink: `None`, `"random"`, or for all heads a number or the string of one (`"-inf"`, so that
        `repr` evaluates back).
    spread: factor on q, which sharpens the softmax. value_mean: added to V.
    """

    name: str = ""
    qo_lens: tuple[int, ...] = (1,)
    kv_lens: tuple[Any, ...] = (17,)
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim_qk: int = 64
    head_dim_vo: int | None = None
    cache_kind: str = "paged"
    layout: str = "NHD"
    page_size: int = 16
    spare: int = 2
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    kv_scales: str | None = None
    has_lengths: bool = True
    causal: bool = True
    sm_scale: float | None = None
    window_left: int | None = None
    window_right: int | None = None
    logits_soft_cap: float | None = None
    sink: Any = None
    pool: str = "dense"
    q_form: str = "dense"
    call: str = "ragged"
    ids: str = "huge"
    poison: str = "nan"
    spread: float = 1.0
    value_mean: float = 0.0

    def __post_init__(self) -> None:
        check_rules(self, _CASE_RULES)

    __repr__ = evaluable_repr

    @property
    def batch(self) -> int:
        return len(self.qo_lens)

    @property
    def per_head_lists(self) -> bool:
        return any(isinstance(n, tuple) for n in self.kv_lens)

    @property
    def dim_vo(self) -> int:
        return self.head_dim_qk if self.head_dim_vo is None else self.head_dim_vo

    @property
    def group(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    def lens_of(self, request: int) -> tuple[int, ...]:
        """Token counts of a request, one a KV head."""
        lens = self.kv_lens[request]
        return lens if isinstance(lens, tuple) else (lens,) * self.num_kv_heads

    @property
    def max_kv_len(self) -> int:
        return max((max(self.lens_of(b)) for b in range(self.batch)), default=0)


_CASE_RULES = (
    Rule("kv_lens", "one entry a request", lambda c: len(c.kv_lens) == len(c.qo_lens)),
    Rule("ids", f"one of {tuple(STALE_IDS)}", lambda c: c.ids in STALE_IDS),
    Rule("poison", f"one of {tuple(POISON)}", lambda c: c.poison in POISON),
    Rule(
        "has_lengths",
        "only a contiguous cache with equal lengths and no spare tokens goes without",
        lambda c: (
            c.has_lengths
            or (c.cache_kind == "contiguous" and c.spare == 0 and len(set(c.kv_lens)) <= 1)
        ),
    ),
    Rule(
        "call",
        "batch needs one query a request, block equally many",
        lambda c: (
            c.call == "ragged"
            or (c.call == "batch" and set(c.qo_lens) <= {1})
            or (c.call == "block" and len(set(c.qo_lens)) <= 1)
        ),
    ),
)


@dataclass(frozen=True, slots=True, eq=False)
class BuiltCase:
    """A case as tensors: `oracle.attention(q, cache, qo_indptr, **options)` is its answer.

    q: form by `case.call`. options: `sm_scale, causal, window_left, window_right, logits_soft_cap,
    attn_sink`, as the public API names them.
    """

    case: Case
    q: torch.Tensor
    cache: PagedKVCache | ContiguousKVCache
    qo_indptr: torch.Tensor | None
    options: dict[str, Any]


def build(case: Case, seed: int = 0, device: Any = "cpu") -> BuiltCase:
    """Make the tensors of `case`, the same for the same seed on every device.

    Every K/V slot that holds no token of a request is poison (NaN or Inf), page 0 is never used,
    pages are in random order, and page-table entries beyond the used ones hold `case.ids`.
    """
    rng = torch.Generator().manual_seed(seed)
    q = _query(case, rng, device)
    make = _paged if case.cache_kind == "paged" else _contiguous
    cache = make(case, rng, device)
    options: dict[str, Any] = {
        "sm_scale": case.sm_scale,
        "causal": case.causal,
        "window_left": case.window_left,
        "window_right": case.window_right,
        "logits_soft_cap": case.logits_soft_cap,
        "attn_sink": _sink(case, rng, device),
    }
    indptr = None
    if case.call == "ragged":
        offsets = torch.tensor([0, *case.qo_lens]).cumsum(0)
        indptr = offsets.to(torch.int32).to(device)
    return BuiltCase(case, q, cache, indptr, options)


def _query(case: Case, rng: torch.Generator, device: Any) -> torch.Tensor:
    total, heads, dim = sum(case.qo_lens), case.num_qo_heads, case.head_dim_qk
    values = torch.randn(total, heads, dim, generator=rng) * case.spread
    values = values.to(torch_dtype(case.dtype)).to(device)
    pad = 16 // values.element_size()  # keeps rows aligned as the stride rule asks
    width = -(-dim // pad) * pad
    if case.q_form == "strided":
        wide = torch.full((total, 2 * heads, width + pad), math.nan, dtype=values.dtype)
        wide = wide.to(device)[:, heads:, :dim]
        wide.copy_(values)
        values = wide
    elif case.q_form == "transposed":
        values = values.transpose(0, 1).contiguous().transpose(0, 1)
    if case.call == "block":
        rows = case.qo_lens[0] if case.batch else 1
        values = values.unflatten(0, (case.batch, rows))
    return values


def _sink(case: Case, rng: torch.Generator, device: Any) -> torch.Tensor | None:
    if case.sink is None:
        return None
    if case.sink == "random":
        return torch.randn(case.num_qo_heads, generator=rng).to(device) * 2
    return torch.full((case.num_qo_heads,), float(case.sink)).to(device)


def _storage(
    case: Case, rng: torch.Generator, slots: tuple[int, int], device: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned K and V pools as `[outer, tokens, num_kv_heads, head_dim]` views of their layout."""
    dtype = torch_dtype(case.kv_dtype or case.dtype)
    bad = POISON["nan" if case.poison == "inf" and case.kv_dtype == FP8 else case.poison]
    outer, tokens = slots
    dims = (case.head_dim_qk, case.dim_vo)
    layers, layer = (3, 1) if case.pool == "layer_axis" else (1, 0)
    pools = []
    both = None
    for index, dim in enumerate(dims):
        inner = (tokens, case.num_kv_heads) if case.layout == "NHD" else (case.num_kv_heads, tokens)
        if case.pool == "interleaved" and dims[0] == dims[1]:
            if both is None:
                both = torch.full((outer, 2, *inner, dim), bad).to(dtype).to(device)
            pool = both[:, index]
        else:
            pool = torch.full((outer, layers, *inner, dim), bad).to(dtype).to(device)[:, layer]
        pools.append(pool if case.layout == "NHD" else pool.transpose(1, 2))
    return pools[0], pools[1]


def _fill(
    case: Case,
    rng: torch.Generator,
    pools: tuple[torch.Tensor, torch.Tensor],
    where: tuple,
    count: int,
) -> None:
    """Write `count` random tokens, of one head or of all heads, at `pool[where]`."""
    heads = () if len(where) == 3 else (case.num_kv_heads,)
    for pool, mean in zip(pools, (0.0, case.value_mean), strict=True):
        values = torch.randn(count, *heads, pool.shape[-1], generator=rng) + mean
        values = values.to(pool.dtype)
        raw = pool.view(torch.uint8) if pool.element_size() == 1 else pool
        raw[where] = values.view(raw.dtype).to(pool.device)


def _paged(case: Case, rng: torch.Generator, device: Any) -> PagedKVCache:
    size, heads, batch = case.page_size, case.num_kv_heads, case.batch
    columns = -(-case.max_kv_len // size) + case.spare
    lists = heads if case.per_head_lists else 1
    used = [[-(-n // size) for n in case.lens_of(b)[:lists]] for b in range(batch)]
    count = sum(map(sum, used)) + 3  # page 0 and two more stay unused
    free = (torch.randperm(count - 1, generator=rng) + 1).tolist()
    key, value = _storage(case, rng, (count, size), device)
    table = torch.full((batch, lists, columns), STALE_IDS[case.ids], dtype=torch.int32)
    for request in range(batch):
        for head in range(lists):
            ids = torch.tensor([free.pop() for _ in range(used[request][head])], dtype=torch.long)
            table[request, head, : len(ids)] = ids
            length = case.lens_of(request)[head]
            token = torch.arange(length)
            where: tuple = (ids[token // size].to(device), (token % size).to(device))
            where = (*where, head) if lists > 1 else where
            _fill(case, rng, (key, value), where, length)
    rows = [case.lens_of(b) if case.per_head_lists else case.kv_lens[b] for b in range(batch)]
    shape = (batch, heads) if case.per_head_lists else (batch,)
    scales = _scales(case, rng, device)
    return PagedKVCache(
        key=_own_layout(key, case),
        value=_own_layout(value, case),
        page_table=(table if case.per_head_lists else table[:, 0]).contiguous().to(device),
        sequence_lengths=torch.tensor(rows, dtype=torch.int32).reshape(shape).to(device),
        layout=case.layout,
        key_scale=scales[0],
        value_scale=scales[1],
    )


def _contiguous(case: Case, rng: torch.Generator, device: Any) -> ContiguousKVCache:
    key, value = _storage(case, rng, (case.batch, case.max_kv_len + case.spare), device)
    for request in range(case.batch):
        for head, length in enumerate(case.lens_of(request)):
            token = torch.arange(length, device=device)
            outer = torch.full_like(token, request)
            _fill(case, rng, (key, value), (outer, token, head), length)
    rows = [case.lens_of(b) if case.per_head_lists else case.kv_lens[b] for b in range(case.batch)]
    shape = (case.batch, case.num_kv_heads) if case.per_head_lists else (case.batch,)
    lens = torch.tensor(rows, dtype=torch.int32).reshape(shape).to(device)
    scales = _scales(case, rng, device)
    return ContiguousKVCache(
        key=_own_layout(key, case),
        value=_own_layout(value, case),
        sequence_lengths=lens if case.has_lengths else None,
        layout=case.layout,
        key_scale=scales[0],
        value_scale=scales[1],
    )


def _own_layout(pool: torch.Tensor, case: Case) -> torch.Tensor:
    return pool if case.layout == "NHD" else pool.transpose(1, 2)


def _scales(case: Case, rng: torch.Generator, device: Any) -> tuple[Any, Any]:
    if case.kv_scales is None:
        return None, None
    if case.kv_scales == "number":
        return 0.5, 1.75
    count = case.num_kv_heads if case.kv_scales == "head" else 1
    both = torch.rand(2, count, generator=rng) + 0.5
    return both[0].to(device), both[1].to(device)


Pick = Callable[[str, Sequence[Any]], Any]

_DIMS = (1, 2, 8, 16, 24, 32, 64, 80, 96, 112, 128)
_SMALL = (0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 40, 63, 64, 65)


def draw_case(pick: Pick) -> Case:
    """A small legal case from choices: `pick(what, options)` returns one of `options`."""
    paged = pick("paged", (True, True, True, False))
    batch = pick("batch", (1, 1, 2, 3, 4, 0))
    kv_heads = pick("num_kv_heads", (1, 2, 3))
    group = pick("group", (1, 2, 3, 4, 5, 7, 8))
    dtype = pick("dtype", ("bfloat16", "float16", "float32"))
    fp8 = pick("fp8", (False, False, False, True))
    per_head = pick("per_head_lists", (False, False, False, True)) and batch > 0
    phase = pick("phase", ("decode", "decode", "block", "ragged"))
    if phase == "ragged":
        qo_lens = tuple(pick("qo_len", (0, 1, 2, 3, 5, 9, 17)) for _ in range(batch))
    else:
        qo_lens = (1 if phase == "decode" else pick("qo_len", (1, 2, 4, 7)),) * batch
    lengthless = not paged and not per_head and pick("no_lengths", (False, True))
    if per_head:
        kv_lens: tuple = tuple(
            tuple(pick("kv_len", _SMALL) for _ in range(kv_heads)) for _ in range(batch)
        )
    elif lengthless:
        kv_lens = (pick("kv_len", _SMALL),) * batch
    else:
        kv_lens = tuple(pick("kv_len", _SMALL) for _ in range(batch))
    causal = pick("causal", (True, True, False))
    windows = (None, None, 0, 1, 7, 15, 40)
    dim = pick("head_dim_qk", _DIMS)
    return Case(
        name="random",
        qo_lens=qo_lens,
        kv_lens=kv_lens,
        num_qo_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim_qk=dim,
        head_dim_vo=pick("head_dim_vo", (None, None, None, *_DIMS)),
        cache_kind="paged" if paged else "contiguous",
        layout=pick("layout", ("NHD", "HND")),
        page_size=pick("page_size", (1, 3, 8, 16, 24, 64)),
        spare=0 if lengthless else pick("spare", (0, 1, 3)),
        dtype=dtype,
        kv_dtype=FP8 if fp8 else None,
        kv_scales=pick("kv_scales", (None, "tensor", "head", "number")) if fp8 else None,
        has_lengths=not lengthless,
        causal=causal,
        sm_scale=pick("sm_scale", (None, None, None, 0.0, 1.0, -0.3)),
        window_left=pick("window_left", windows),
        window_right=None if causal else pick("window_right", windows),
        logits_soft_cap=pick("logits_soft_cap", (None, None, 1.0, 30.0)),
        sink=pick("sink", (None, None, "random", -50.0, 20.0)),
        pool=pick("pool", ("dense", "layer_axis", "interleaved")),
        q_form=pick("q_form", ("dense", "strided", "transposed")),
        call={"decode": pick("call", ("batch", "ragged")), "block": "block"}.get(phase, "ragged"),
        ids=pick("ids", tuple(STALE_IDS)),
        poison=pick("poison", ("nan", "inf")),
        spread=pick("spread", (1.0, 1.0, 4.0)),
    )


def random_case(rng: random.Random) -> Case:
    """A small random case; the same for the same state of `rng`."""
    return draw_case(lambda what, options: rng.choice(options))


def cases() -> Any:
    """A hypothesis strategy of small cases; it shrinks towards the first option of every choice."""
    from hypothesis import strategies as st

    @st.composite
    def strategy(draw: Any) -> Case:
        return draw_case(lambda what, options: draw(st.sampled_from(options), label=what))

    return strategy()


__all__ = ["FP8", "BuiltCase", "Case", "build", "cases", "draw_case", "random_case"]
