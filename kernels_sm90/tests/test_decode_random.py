"""sm_90 decode on its GPU: 5,280 random problems against the oracle, for the price of 330.

What a request's answer depends on (its tokens and queries, the dtype, the heads, the options) is a
`Bank`: 16 requests and their `Golden`, one oracle call. What it must not depend on (the batch
around it, pages, layouts, strides, capacity, poison, garbage ids, lengths seen when the plan was
made) is a `Layout`: 16 of them a bank, each a problem of its own to the route. The answer wanted of
a problem is the rows of its requests, under the tolerance of every other test; that it is the
oracle's answer for the problem is tested here too.

A failure names `bank=B problem=P` and the layout; `TESTBRIDGE_TEST_ONLY='random and bankB-'` runs
the bank again, and `check_problem(make_bank(B), P)` the problem alone.
"""

import dataclasses
import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from stream_attention.core.cache import ContiguousKVCache, PagedKVCache
from stream_attention.core.dtypes import torch_dtype
from stream_attention.core.testing.checks import H200, launch, serves
from stream_attention.core.testing.golden import Golden, golden
from stream_attention.core.testing.native_library import require
from stream_attention.core.testing.problems import FP8, POISON, STALE_IDS, BuiltCase
from stream_attention.kernels_sm90 import decode
from stream_attention.kernels_sm90.library import LIBRARY

NUM_BANKS = 330
PROBLEMS = 16
REQUESTS = 16
GROUPS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 32, 64)
PAGE_SIZES = (1, 1, 2, 3, 4, 5, 7, 8, 8, 12, 16, 16, 16, 16, 17, 24, 32, 48, 64, 100, 128, 256)
# Where pages and the tiles of any instance begin and end.
BORDERS = tuple(
    mark + step
    for mark in (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
    for step in (-1, 0, 1)
)
# Tokens of all KV heads of a problem; pools have at most twice as many slots a layer.
TOKENS = 160_000


@dataclass(frozen=True, slots=True, eq=False)
class Bank:
    """Requests with their answers.

    q: `[n, queries, num_qo_heads, head_dim]`. key, value: `[n, longest, num_kv_heads, head_dim]`.
    lens: tokens of each request, by KV head. want: the `Golden`, its tensors `[n, queries, ...]`.
    """

    seed: int
    q: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    lens: tuple[tuple[int, ...], ...]
    per_head: bool
    scales: tuple[Any, Any]
    options: dict[str, Any]
    want: Golden


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Requests of a bank in memory, and what the plan knows when it is made.

    picks: the requests. spare: unused columns (paged) or tokens. pool: as in `Case`. poison, ids:
    what unused slots and table entries hold. plan_lens: lengths while the plan is made: the true
    ones, all 0, or all at capacity. lengths: `False` = no `sequence_lengths`.
    """

    picks: tuple[int, ...]
    paged: bool
    hnd: bool
    page_size: int
    spare: int
    pool: str
    q_form: str
    poison: str
    ids: str
    plan_lens: str
    lengths: bool
    batch_invariant: bool


@pytest.fixture(autouse=True)
def library():
    require(LIBRARY)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def draw_len(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(BORDERS)
    if kind < 0.7:
        return rng.randrange(40)
    return rng.randrange(700 if kind < 0.88 else 5000)


def draw_lens(
    rng: random.Random, heads: int, queries: int, per_head: bool
) -> tuple[tuple[int, ...], ...]:
    """Tokens a request and KV head; the first is empty, the second has fewer than queries."""
    lens = [(0,) * heads, (rng.randrange(1, max(2, queries)),) * heads]
    while len(lens) < REQUESTS:
        same = draw_len(rng)
        lens.append(tuple(draw_len(rng) if per_head else same for _ in range(heads)))
    return tuple(lens)


def make_bank(seed: int, device: Any = "cuda") -> Bank:
    """The requests of a seed: heads and dims go round, so that every pair of them comes up."""
    rng = random.Random(seed)
    dim, group = decode.HEAD_DIMS[seed % len(decode.HEAD_DIMS)], GROUPS[seed // 2 % len(GROUPS)]
    heads = rng.choice((1, 1, 2, 2, 3, 4, 8) if group < 16 else (1, 1, 2))
    most = min(8, decode.MAX_ROWS // group)
    queries = 1 if rng.random() < 0.4 else rng.randint(1, most)
    dtype = torch_dtype(rng.choice(("bfloat16", "bfloat16", "float16")))
    fp8 = serves(decode.RECORD, H200, kv_dtype=FP8) and rng.random() < 0.25
    per_head = heads <= 4 and rng.random() < 0.25
    lens = draw_lens(rng, heads, queries, per_head)
    causal = rng.random() < 0.75
    fill = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=fill, device=device)

    q = (normal(REQUESTS, queries, heads * group, dim) * rng.choice((1.0, 1.0, 4.0))).to(dtype)
    shape = (REQUESTS, max(map(max, lens)), heads, dim)
    kv_dtype = torch_dtype(FP8) if fp8 else dtype
    key = normal(*shape).to(kv_dtype)
    # A mean makes sums that grow, which show each rounding on the way.
    value = (normal(*shape) + rng.choice((0.0, 0.0, 3.0))).to(kv_dtype)
    scales: tuple[Any, Any] = (None, None)
    if fp8:
        both = torch.rand(2, rng.choice((1, heads)), generator=fill, device=device) + 0.5
        scales = rng.choice(((None, None), (0.5, 1.75), (both[0], both[1])))
    sink = rng.choice((None, None, "random", -50.0, 20.0))
    logits = normal(heads * group) * 2 if sink == "random" else None
    if isinstance(sink, float):
        logits = torch.full((heads * group,), sink, device=device)
    options = {
        "sm_scale": rng.choice((None, None, None, 0.0, 1.0, -0.3)),
        "causal": causal,
        "window_left": rng.choice((None, None, None, 0, 1, 15, 16, 40, 127, 128, 300, 2000)),
        "logits_soft_cap": rng.choice((None, None, None, 1.0, 30.0)),
        "attn_sink": logits,
    }
    counts = torch.tensor(lens, dtype=torch.int32, device=device)
    cache = ContiguousKVCache(
        key=key, value=value, sequence_lengths=counts, key_scale=scales[0], value_scale=scales[1]
    )
    want = golden(q, cache, **options)
    rows = {
        name: getattr(want, name).unflatten(0, q.shape[:2])
        for name in ("reference_out", "reference_lse", "out_noise", "lse_noise")
    }
    want = dataclasses.replace(want, **rows)
    return Bank(seed, q, key, value, lens, per_head, scales, options, want)


def draw_picks(rng: random.Random, bank: Bank) -> tuple[int, ...]:
    """1 to 40 requests, now and then 300, of which one may be long however many there are."""
    batch = rng.choice(
        (1, 1, 2, 3, 5, 8, rng.randint(1, 40), rng.randint(1, 40), rng.randint(9, 40))
    )
    if rng.random() < 0.05:
        batch = 300
    room = TOKENS // (batch * bank.key.shape[2])
    fitting = [n for n, lens in enumerate(bank.lens) if max(lens) <= room]
    picks = [rng.choice(fitting) for _ in range(batch)]
    if rng.random() < 0.5:
        picks[rng.randrange(batch)] = rng.randrange(REQUESTS)
    return tuple(picks)


def draw_layout(rng: random.Random, bank: Bank) -> Layout:
    picks, paged = draw_picks(rng, bank), rng.random() < 0.8
    longest, heads = max(max(bank.lens[n]) for n in picks), bank.key.shape[2]
    paged |= len(picks) * (longest + 63) * heads > 2 * TOKENS
    size = rng.choice(PAGE_SIZES)
    lists = heads if bank.per_head else 1
    used = sum(-(-count // size) for n in picks for count in bank.lens[n][:lists])
    spare = rng.choice((0, 0, 1, 3, 40, 300, 4000) if paged else (0, 1, 63))
    lengths = True
    if not paged and not bank.per_head and longest and rng.random() < 0.2:
        whole = max(picks, key=lambda n: bank.lens[n])
        picks, lengths, spare = (whole,) * min(len(picks), 5), False, 0
    return Layout(
        picks=picks,
        paged=paged,
        hnd=rng.random() < 0.5,
        page_size=size if used * size * heads <= 2 * TOKENS else 16,
        spare=spare if longest else max(spare, 1),
        pool=rng.choice(("dense", "layer_axis", "interleaved")),
        q_form=rng.choice(("dense", "strided", "transposed")),
        poison=rng.choice(("nan", "nan", "inf")),
        ids=rng.choice(tuple(STALE_IDS)),
        plan_lens=rng.choice(("true", "true", "zero", "full")),
        lengths=lengths,
        batch_invariant=serves(decode.RECORD, H200, batch_invariant=True) and rng.random() < 0.15,
    )


def make_pools(bank: Bank, layout: Layout, outer: int, tokens: int) -> list[torch.Tensor]:
    """K and V as `[outer, tokens, heads, dim]` views of any strides, bits of poison all over."""
    heads, dim = bank.key.shape[2:]
    poison = "nan" if bank.key.element_size() == 1 else layout.poison
    bad = torch.tensor(POISON[poison]).to(bank.key.dtype).view(raw_type(bank.key)).item()
    planes = {"dense": 1, "layer_axis": 3, "interleaved": 2}[layout.pool]
    inner = (heads, tokens) if layout.hnd else (tokens, heads)

    def buffer() -> torch.Tensor:
        shape = (outer, planes, *inner, dim)
        return torch.full(shape, bad, dtype=raw_type(bank.key), device=bank.key.device)

    if layout.pool == "interleaved":
        both = buffer()
        pools = [both[:, 0], both[:, 1]]
    else:
        pools = [buffer()[:, planes // 2] for _ in "kv"]
    return [pool.transpose(1, 2) for pool in pools] if layout.hnd else pools


def raw_type(tensor: torch.Tensor) -> torch.dtype:
    return torch.uint8 if tensor.element_size() == 1 else torch.int16


def make_query(bank: Bank, layout: Layout, picks: torch.Tensor) -> torch.Tensor:
    """`[batch, queries, heads, dim]`, or without the queries' axis where there is one query."""
    batch, (_, queries, heads, dim) = len(picks), bank.q.shape
    values = bank.q[picks].flatten(0, 1)
    if layout.q_form == "strided":
        wide = values.new_full((batch * queries, 2 * heads, dim + 8), math.nan)[:, heads:, :dim]
        values = wide.copy_(values)
    elif layout.q_form == "transposed":
        values = values.transpose(0, 1).contiguous().transpose(0, 1)
    return values if queries == 1 else values.unflatten(0, (batch, queries))


def make_problem(bank: Bank, layout: Layout, seed: int) -> BuiltCase:
    """The layout's tensors, all made on the device."""
    device, heads = bank.key.device, bank.key.shape[2]
    picks = torch.tensor(layout.picks, device=device)
    counts = torch.tensor(bank.lens, device=device)[picks]
    lists = heads if bank.per_head else 1
    counts = counts[:, :lists]
    longest = max(max(bank.lens[n]) for n in layout.picks)
    token = torch.arange(longest, device=device)
    request, head, token = (token < counts[..., None]).nonzero().unbind(1)
    scales = dict(zip(("key_scale", "value_scale"), bank.scales, strict=True))
    common = {"layout": "HND" if layout.hnd else "NHD", **scales}
    lens = (counts if bank.per_head else counts[:, 0]).to(torch.int32).contiguous()
    size = layout.page_size
    if layout.paged:
        columns = -(-longest // size) + layout.spare
        used = -(-counts // size)
        shape, total = (*counts.shape, columns), int(used.sum())
        table = torch.full(shape, STALE_IDS[layout.ids], dtype=torch.int32, device=device)
        fill = torch.Generator(device).manual_seed(seed)
        order = torch.randperm(total + 2, generator=fill, device=device)[:total] + 1
        table[torch.arange(columns, device=device) < used[..., None]] = order.to(torch.int32)
        pools = make_pools(bank, layout, total + 3, size)
        where = (table[request, head, token // size].long(), token % size)
        common["page_table"] = table if bank.per_head else table[:, 0].contiguous()
    else:
        pools = make_pools(bank, layout, len(picks), longest + layout.spare)
        where = (request, token)
    source = (picks[request], token)
    if bank.per_head:
        where, source = (*where, head), (*source, head)
    for pool, stored in zip(pools, (bank.key, bank.value), strict=True):
        pool[where] = stored.view(pool.dtype)[source]
    pools = [pool.transpose(1, 2) if layout.hnd else pool for pool in pools]
    key, value = (pool.view(bank.key.dtype) for pool in pools)
    make = PagedKVCache if layout.paged else ContiguousKVCache
    cache = make(key=key, value=value, sequence_lengths=lens if layout.lengths else None, **common)
    return BuiltCase(layout, make_query(bank, layout, picks), cache, None, dict(bank.options))


def wanted(bank: Bank, layout: Layout) -> Golden:
    """The rows of the layout's requests."""
    picks = torch.tensor(layout.picks, device=bank.q.device)
    tensors = {
        name: getattr(bank.want, name)[picks]
        for name in (field.name for field in dataclasses.fields(Golden))
        if name != "dtype"
    }
    return Golden(dtype=bank.want.dtype, **tensors)


def check_problem(bank: Bank, index: int, record: Any = decode.RECORD) -> Layout:
    """Draw, build, plan, run into NaN, compare; every fourth runs again, to equal bits."""
    seed = bank.seed * PROBLEMS + index
    layout = draw_layout(random.Random(seed), bank)
    built = make_problem(bank, layout, seed)
    lens, true_lens = built.cache.sequence_lengths, None
    if lens is not None and layout.plan_lens != "true":
        true_lens = lens.clone()
        lens.fill_(0 if layout.plan_lens == "zero" else built.cache.capacity)
    options = {"batch_invariant": True} if layout.batch_invariant else {}
    step, described = launch(record, built, **options)
    if true_lens is not None:
        lens.copy_(true_lens)
    step.run()
    out, lse = described.result(), described.result_lse()
    label = f"bank={bank.seed} problem={index} {layout!r}, q {tuple(bank.q.shape)}: "
    wanted(bank, layout).check(out, lse, label=label)
    if index % 4 == 0:
        first = [t.view(torch.uint8).clone() for t in (out, lse)]
        out.fill_(math.nan)
        lse.fill_(math.nan)
        step.run()
        for name, old, new in zip(("out", "lse"), first, (out, lse), strict=True):
            if not torch.equal(old, new.view(torch.uint8)):
                raise AssertionError(f"{label}{name} of a second run differs")
    return layout


@pytest.mark.parametrize("seed", range(NUM_BANKS), ids=lambda seed: f"bank{seed}-")
def test_random_problems(seed):
    bank = make_bank(seed)
    for index in range(PROBLEMS):
        check_problem(bank, index)


def check_composed(seed: int, device: Any = "cuda") -> None:
    """The rows that `wanted` puts together are the oracle's answer for the problem as built."""
    bank = make_bank(seed, device)
    layout = draw_layout(random.Random(seed), bank)
    layout = dataclasses.replace(layout, picks=layout.picks[:12])
    built = make_problem(bank, layout, seed)
    mine, oracle = wanted(bank, layout), golden(built.q, built.cache, **built.options)
    for name in ("out", "lse", "out_noise", "lse_noise"):
        ours, right = getattr(mine, name).flatten(), getattr(oracle, name).flatten()
        torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-12, msg=f"{layout}: {name}")
    shape = oracle.reference_out.shape
    oracle.check(mine.reference_out.reshape(shape), mine.reference_lse.reshape(shape[:-1]))


@pytest.mark.parametrize("seed", range(30))
def test_the_answer_wanted_is_the_oracles(seed):
    check_composed(seed)


def test_the_check_finds_a_wrong_request():
    """Two requests that change places must not pass."""
    bank = make_bank(0)
    layout = dataclasses.replace(draw_layout(random.Random(0), bank), picks=(1, 2))
    swapped = wanted(bank, dataclasses.replace(layout, picks=(2, 1)))
    with pytest.raises(AssertionError, match=r"max error|wrong places"):
        wanted(bank, layout).check(swapped.reference_out, swapped.reference_lse)
