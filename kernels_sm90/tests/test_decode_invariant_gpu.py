"""sm90_decode with `batch_invariant` on its GPU: the bits of a request, alone and among others.

A request is its own q, K, V and length. Its answer alone must be, bit for bit, its answer in
batches of any size, at any place, beside any lengths, over other pages, capacities and numbers of
SMs, eager and from a graph; and the oracle's.
"""

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from stream_attention.core.cache import PagedKVCache
from stream_attention.core.device import device_facts
from stream_attention.core.dtypes import torch_dtype
from stream_attention.core.testing.checks import bind, capture
from stream_attention.core.testing.golden import golden
from stream_attention.core.testing.native_library import require
from stream_attention.core.testing.problems import FP8, BuiltCase
from stream_attention.kernels_sm90 import decode
from stream_attention.kernels_sm90.library import LIBRARY

DEVICE = "cuda"
PAGE = 16
# Lengths as (tiles, tokens more): around tiles, spans of 8 tiles and pairs of them.
MARKS = (
    (0, 0), (0, 1), (1, -1), (1, 1), (7, 3), (8, -1), (8, 0), (8, 1), (9, 0), (16, 0), (16, 5),
    (17, 0), (24, 1), (33, 1), (40, -1), (64, 0), (65, -1),
)  # fmt: skip
# Around 64 spans of 8 tiles, beyond which spans are longer.
LONG_MARKS = ((257, 0), (505, 0), (511, 3), (512, -1), (512, 0), (512, 1), (513, 0), (560, 7))
MOST_BYTES = 400 << 20  # of K of a request


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What defines a problem, and so may change bits. options: those of `attention`."""

    heads: int = 2
    group: int = 8
    queries: int = 1
    dim: int = 128
    dtype: str = "bfloat16"
    fp8: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def kv_dtype(self) -> torch.dtype:
        return torch_dtype(FP8 if self.fp8 else self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """q: `[queries, num_qo_heads, head_dim]`; key, value: `[tokens, num_kv_heads, head_dim]`."""

    q: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def __len__(self) -> int:
        return self.key.shape[0]

    def first(self, tokens: int) -> "Request":
        """The same request when it had fewer tokens."""
        return Request(self.q, self.key[:tokens], self.value[:tokens])


SHAPES = {
    "two_heads": Shape(),
    "one_head": Shape(heads=1, group=7, dim=64),
    "eight_heads": Shape(heads=8, group=4, dtype="float16"),
    "forty_heads": Shape(heads=40, group=1, dim=64),
    "one_block_a_head": Shape(heads=128, group=1, dim=64),
    "verify_5x4": Shape(heads=8, group=4, queries=5),
    "verify_8x8": Shape(heads=2, group=8, queries=8, dim=64),
    "verify_2x8": Shape(heads=2, group=8, queries=2, dim=96),
    "fp8": Shape(heads=8, group=4, fp8=True),
    "fp8_verify": Shape(heads=2, group=8, queries=4, dim=64, dtype="float16", fp8=True),
    "dim80": Shape(heads=4, group=4, dim=80, dtype="float16"),
    "dim96": Shape(heads=2, group=4, dim=96),
    "dim192": Shape(heads=2, group=16, dim=192),
    "dim256": Shape(heads=2, group=4, dim=256),
    "dim256_verify": Shape(heads=1, group=8, queries=3, dim=256, dtype="float16"),
    "short_window": Shape(options={"window_left": 300}),
    "long_window": Shape(heads=4, queries=4, group=2, options={"window_left": 3000}),
    "not_causal": Shape(heads=1, queries=3, group=4, options={"causal": False}),
    "sink_and_cap": Shape(heads=8, options={"logits_soft_cap": 20.0, "attn_sink": "random"}),
}


@pytest.fixture(autouse=True)
def library():
    require(LIBRARY)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def draw(shape: Shape, tokens: int, seed: int) -> Request:
    fill = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=fill, device=DEVICE)

    q = normal(shape.queries, shape.heads * shape.group, shape.dim).to(torch_dtype(shape.dtype))
    # A mean makes sums that grow, which show each rounding on the way.
    key = normal(tokens, shape.heads, shape.dim).to(shape.kv_dtype)
    value = (normal(tokens, shape.heads, shape.dim) + 1).to(shape.kv_dtype)
    return Request(q, key, value)


def assemble(shape: Shape, requests: list[Request], spare: int, seed: int) -> BuiltCase:
    """A paged problem of the requests: pages in random order, `spare` unused columns."""
    used = [-(-len(request) // PAGE) for request in requests]
    columns = max(max(used) + spare, 1)
    fill = torch.Generator(DEVICE).manual_seed(seed)
    order = torch.randperm(sum(used) + 3, generator=fill, device=DEVICE)
    table = torch.full((len(requests), columns), 1 << 30, dtype=torch.int32, device=DEVICE)
    pools = []
    for name in ("key", "value"):
        size = (len(order) * PAGE, shape.heads, shape.dim)
        bits, poison = (torch.uint8, 0x7F) if shape.fp8 else (torch.int16, 0x7FFF)  # NaN
        pool = torch.full(size, poison, dtype=bits, device=DEVICE)
        start = 0
        for row, (request, pages) in enumerate(zip(requests, used, strict=True)):
            ids = order[start : start + pages]
            start += pages
            table[row, :pages] = ids.to(torch.int32)
            slots = (ids[:, None] * PAGE + torch.arange(PAGE, device=DEVICE)).flatten()
            pool[slots[: len(request)]] = getattr(request, name).view(bits)
        pools.append(pool.view(shape.kv_dtype).unflatten(0, (-1, PAGE)))
    lens = torch.tensor([len(r) for r in requests], dtype=torch.int32, device=DEVICE)
    cache = PagedKVCache(
        key=pools[0], value=pools[1], page_table=table, sequence_lengths=lens,
        key_scale=0.5 if shape.fp8 else None, value_scale=1.75 if shape.fp8 else None,
    )  # fmt: skip
    options = {
        "sm_scale": None, "causal": True, "window_left": None, "logits_soft_cap": None,
        "attn_sink": None, **shape.options,
    }  # fmt: skip
    if options["attn_sink"] is not None:
        options["attn_sink"] = torch.linspace(-2, 9, shape.heads * shape.group, device=DEVICE)
    q = torch.stack([request.q for request in requests])
    label = f"{shape} of {[len(request) for request in requests]}"
    return BuiltCase(label, q[:, 0] if shape.queries == 1 else q, cache, None, options)


def plan(built: BuiltCase, num_sms: int | None = None) -> tuple[Any, Any]:
    described = bind(built, batch_invariant=True)
    device = device_facts(built.q.device)
    assert decode.RECORD.reasons(described.problem, device) == ()
    if num_sms is not None:
        device = dataclasses.replace(device, num_sms=num_sms)
    return decode.build(described.problem, None, device, described.bound), described


def bits_of(described: Any, batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(out, lse) of every request as integers; NaN compares equal to itself."""
    out, lse = described.bound.out.view(torch.int16), described.bound.lse.view(torch.int32)
    return list(zip(out.clone().chunk(batch), lse.clone().chunk(batch), strict=True))


def answers(
    shape: Shape,
    requests: list[Request],
    *,
    spare: int = 0,
    seed: int = 0,
    num_sms: int | None = None,
    check: bool = False,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The bits of every request's answer in one batch, which two runs agree about."""
    built = assemble(shape, requests, spare, seed)
    step, described = plan(built, num_sms)
    step.run()
    first = bits_of(described, len(requests))
    described.bound.out.fill_(float("nan"))
    described.bound.lse.fill_(float("nan"))
    step.run()
    for old, new in zip(first, bits_of(described, len(requests)), strict=True):
        assert same(old, new), f"{built.case}: a second run differs"
    if check:
        want = golden(built.q, built.cache, **built.options)
        want.check(described.result(), described.result_lse(), label=f"{built.case}: ")
    return first


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def tile_of(shape: Shape) -> int:
    """Tokens of a tile, in which spans are counted."""
    described = bind(assemble(shape, [draw(shape, 1, 0)], 0, 0), batch_invariant=True)
    return decode.geometry(described.problem, 132).tile_tokens


def probes(shape: Shape, marks: tuple[tuple[int, int], ...]) -> list[Request]:
    tile, token_bytes = tile_of(shape), shape.heads * shape.dim * shape.kv_dtype.itemsize
    lens = [tiles * tile + more for tiles, more in marks]
    fitting = [n for n in lens if n * token_bytes <= MOST_BYTES]
    assert len(fitting) > 1
    return [draw(shape, n, seed) for seed, n in enumerate(fitting)]


def mixed(
    shape: Shape, chosen: list[Request], batch: int, rng: random.Random
) -> tuple[list[Request], list[int]]:
    """`chosen` at random places among others of random lengths; their places."""
    most = tile_of(shape) * (12 if batch < 50 else 1)
    lens = [rng.choice((rng.randrange(40), rng.randrange(most))) for _ in range(batch)]
    places = rng.sample(range(batch), len(chosen))
    requests = [draw(shape, n, 1000 + rng.randrange(1 << 20)) for n in lens]
    for place, request in zip(places, chosen, strict=True):
        requests[place] = request
    return requests, places


@pytest.mark.parametrize("name", sorted(SHAPES))
@pytest.mark.parametrize("batch", [2, 7, 33, 300])
def test_bits_in_a_batch_are_those_of_the_request_alone(name, batch):
    shape, rng = SHAPES[name], random.Random(batch)
    asked = probes(shape, MARKS)
    alone = [answers(shape, [request])[0] for request in asked]
    together = {2: 1, 7: 4}.get(batch, len(asked))
    for start in range(0, len(asked), together):
        chosen = asked[start : start + together]
        requests, places = mixed(shape, chosen, batch, rng)
        found = answers(
            shape, requests, spare=rng.choice((0, 3, 5000 // batch)), seed=rng.randrange(1000),
            check=batch == 7 and start == 4,
        )  # fmt: skip
        for index, place in enumerate(places):
            tokens = len(chosen[index])
            assert same(found[place], alone[start + index]), f"{tokens} tokens at {place}"


@pytest.mark.parametrize("name", ["two_heads", "one_head", "verify_5x4", "fp8", "long_window"])
def test_bits_of_long_requests(name):
    """Up to and beyond 64 spans, which a request's blocks part at other nodes in every batch."""
    shape, rng = SHAPES[name], random.Random(5)
    for request in probes(shape, LONG_MARKS):
        alone = answers(shape, [request], check=len(request) % 2 == 1)[0]
        for batch in (2, 5, 40):
            requests, (place,) = mixed(shape, [request], batch, rng)
            found = answers(shape, requests, spare=batch, seed=batch)
            assert same(found[place], alone), f"{len(request)} tokens, batch {batch}"


@pytest.mark.parametrize("name", ["two_heads", "eight_heads", "verify_8x8", "dim256"])
def test_bits_do_not_depend_on_the_number_of_sms(name):
    """Blocks a head are as many as SMs allow, from a few to 128 in all."""
    shape = SHAPES[name]
    requests = probes(shape, MARKS[5:])
    want = answers(shape, requests)
    for num_sms in (1, 5, 20, 47, 78, 114):
        found = answers(shape, requests, num_sms=num_sms)
        for request, a, b in zip(requests, found, want, strict=True):
            assert same(a, b), f"{len(request)} tokens on {num_sms} SMs"


@pytest.mark.parametrize("name", ["two_heads", "eight_heads", "one_block_a_head"])
@pytest.mark.parametrize("copies", [2, 16, 50])
def test_equal_requests_have_equal_answers(name, copies):
    """Cuts lie elsewhere in each of them."""
    shape = SHAPES[name]
    tile = tile_of(shape)
    for tokens in (9 * tile, 20 * tile + 1, 37 * tile):
        request = draw(shape, tokens, copies)
        (alone,) = answers(shape, [request])
        for place, found in enumerate(answers(shape, [request] * copies)):
            assert same(found, alone), f"{tokens} tokens at {place} of {copies}"


@pytest.mark.parametrize("name", ["two_heads", "verify_5x4", "fp8"])
def test_replays_over_other_lengths_have_the_bits_of_the_requests_alone(name):
    shape, rng = SHAPES[name], random.Random(1)
    tile = tile_of(shape)
    requests = [draw(shape, 40 * tile, seed) for seed in range(6)]
    built = assemble(shape, requests, 7, 0)
    step, described = plan(built)
    graph = capture(step.run)
    for turn in range(12):
        lens = [rng.choice((rng.randrange(40 * tile), rng.randrange(40))) for _ in requests]
        if turn % 4 == 0:
            lens = [8 * tile * rng.randrange(6) + rng.choice((-1, 0, 1)) for _ in requests]
        lens = [min(max(0, n), 40 * tile) for n in lens]
        built.cache.sequence_lengths.copy_(torch.tensor(lens, dtype=torch.int32))
        described.bound.out.fill_(float("nan"))
        described.bound.lse.fill_(float("nan"))
        graph.replay()
        found = bits_of(described, len(requests))
        for request, tokens, bits in zip(requests, lens, found, strict=True):
            assert same(bits, answers(shape, [request.first(tokens)])[0]), f"{turn}: {tokens}"


def test_a_plan_between_others_finds_its_memory_as_it_left_it():
    """Launches of both kinds in a row over the same requests, with nothing between them."""
    shape = SHAPES["two_heads"]
    requests = probes(shape, MARKS)
    built = assemble(shape, requests, 0, 0)
    step, described = plan(built)
    other = bind(built)
    plain = decode.build(other.problem, None, device_facts(built.q.device), other.bound)
    step.run()
    want = bits_of(described, len(requests))
    for _ in range(50):
        for each in (step, plain, step, step):
            each.run()
        for old, new in zip(want, bits_of(described, len(requests)), strict=True):
            assert same(old, new)
