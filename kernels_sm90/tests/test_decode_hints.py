"""sm90_decode over lengths and page tables that the launch before it writes.

A launch reads lengths and page ids as hints while its producer may still run. Here the producer is
a launch of our own, which lets its consumer come early, and its answer is the consumer's lengths
or page table: another content lies there until it ends, so that hints are wrong. An answer can be
any bits that bf16 holds as finite numbers: queries of zeros over values that are all alike.
"""

import dataclasses

import pytest
import torch

from stream_attention.core.testing.checks import capture, launch, wait_for_device
from stream_attention.core.testing.golden import golden
from stream_attention.core.testing.native_library import require
from stream_attention.core.testing.problems import FP8, Case, build
from stream_attention.kernels_sm90 import decode
from stream_attention.kernels_sm90.library import LIBRARY

DEVICE = "cuda"
RECORD = decode.RECORD
LEAST = 128  # the least int32 above 0 whose lower half is a normal bf16
HUGE = 1 << 30

WITH_FP8 = {"kv_dtype": FP8, "kv_scales": "head"}
MANY_ROWS = {"num_qo_heads": 32, "num_kv_heads": 1, "head_dim_qk": 128}
# More requests than a head has blocks, so that a block has several; few enough for warps to search.
IN_SHARED_BLOCKS = Case(
    qo_lens=(1,) * 30, kv_lens=(500,) * 30, num_qo_heads=128, num_kv_heads=8, head_dim_qk=128
)

# By what is written: the consumer. `many` has more requests than a warp has lanes.
LENGTHS = {
    "one": Case(qo_lens=(1,), kv_lens=(6000,), num_qo_heads=16),
    "some": Case(
        qo_lens=(5,) * 7, kv_lens=(1200,) * 7, num_qo_heads=8, call="block", head_dim_qk=128
    ),
    "many": Case(qo_lens=(1,) * 200, kv_lens=(300,) * 200, num_qo_heads=8),
    "fp8": Case(
        qo_lens=(1,) * 5, kv_lens=(2000,) * 5, num_qo_heads=16, head_dim_qk=128, **WITH_FP8
    ),
    "too_many": Case(qo_lens=(1,) * 300, kv_lens=(200,) * 300, num_qo_heads=8),
    "many_rows_of_one": Case(qo_lens=(1,), kv_lens=(6000,), **MANY_ROWS),
    "many_rows_of_some": Case(qo_lens=(1,) * 9, kv_lens=(900,) * 9, **MANY_ROWS),
    "many_rows": Case(qo_lens=(1,) * 50, kv_lens=(500,) * 50, **MANY_ROWS),
    "many_rows_in_shared_blocks": IN_SHARED_BLOCKS,
    "many_rows_contiguous": Case(
        qo_lens=(1,) * 9, kv_lens=(700,) * 9, cache_kind="contiguous", **MANY_ROWS
    ),
    "many_rows_of_too_many": Case(qo_lens=(1,) * 300, kv_lens=(200,) * 300, **MANY_ROWS),
    "contiguous": Case(
        qo_lens=(1,) * 40, kv_lens=(600,) * 40, cache_kind="contiguous", num_kv_heads=1
    ),
}
TABLES = {
    "one": Case(qo_lens=(1,), kv_lens=(4000,), num_qo_heads=16),
    "some": Case(qo_lens=(1,) * 20, kv_lens=(400,) * 20, head_dim_qk=128),
    "many": Case(qo_lens=(1,) * 50, kv_lens=(160,) * 50, num_qo_heads=8),
    "fp8": Case(
        qo_lens=(1,) * 3, kv_lens=(1600,) * 3, num_qo_heads=16, head_dim_qk=128, **WITH_FP8
    ),
    "many_rows": Case(qo_lens=(1,) * 20, kv_lens=(400,) * 20, **MANY_ROWS),
    "many_rows_in_shared_blocks": IN_SHARED_BLOCKS,
    "many_rows_of_small_pages": Case(
        qo_lens=(1,) * 3, kv_lens=(300,) * 3, page_size=3, **MANY_ROWS
    ),
    "small_pages": Case(qo_lens=(4,) * 3, kv_lens=(300,) * 3, page_size=3, call="block"),
}
PRODUCERS = {"one_tile": 1, "long": 8192}


@pytest.fixture(autouse=True)
def library():
    require(LIBRARY)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def _behind_poison(pool):
    """The pool behind LEAST more pages that are as its first one, which is never used."""
    raw = pool.view(torch.uint8) if pool.element_size() == 1 else pool
    return torch.cat([raw[:1].expand(LEAST, *raw.shape[1:]), raw]).view(pool.dtype)


class Producer:
    """A launch whose answer, seen as int32, is whatever `set_answer` is given."""

    def __init__(self, count, kv_len):
        heads = -(-count * 2 // 64)
        case = Case(qo_lens=(1,), kv_lens=(kv_len,), num_qo_heads=heads, num_kv_heads=heads)
        self.built = build(dataclasses.replace(case, call="batch"), 0, DEVICE)
        self.built.q.zero_()
        self.out = torch.zeros_like(self.built.q)
        self.words = self.out.view(torch.int32).flatten()[:count]
        self.step, _ = launch(RECORD, self.built, out=self.out)

    def values(self, words):
        """V of one token, all heads."""
        assert words.dtype == torch.int32
        row = torch.zeros_like(self.out)
        row.view(torch.int32).flatten()[: words.numel()] = words.flatten()
        return row[0]

    def set_answer(self, values):
        """Of the next launch: the words that `values()` was given."""
        self.built.cache.value.copy_(values)


class Chain:
    """A producer, and its consumer over memory that goes through pairs of contents, old and new."""

    def __init__(self, case, what, kv_len, **options):
        case = dataclasses.replace(
            case, spare=0, call="batch" if case.call == "ragged" else case.call
        )
        built = build(case, 1, DEVICE)
        cache = built.cache
        if what == "page_table":  # no id is below LEAST
            key, value = (_behind_poison(t) for t in (cache.key, cache.value))
            cache = dataclasses.replace(
                cache, key=key, value=value, page_table=cache.page_table + LEAST
            )
            # One token of each last page: pages in another order are another answer.
            lens = cache.sequence_lengths
            lens -= case.page_size - 1
        true = getattr(cache, what)
        self.producer = Producer(true.numel(), kv_len)
        self.memory = self.producer.words.view(true.shape)
        self.memory.copy_(true)
        self.cache = dataclasses.replace(cache, **{what: self.memory})
        self.built = dataclasses.replace(built, cache=self.cache)
        self.step, self.described = launch(RECORD, self.built, **options)
        self.outputs = (self.described.bound.out, self.described.bound.lse)
        self.differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
        news = self._lengths(true) if what == "sequence_lengths" else self._tables(true)
        olds = [*news, *(torch.full_like(true, n) for n in (0, -1, HUGE))]
        nudged = true.clone()
        nudged.view(-1)[-1] = 0  # the last request alone, or its last page
        olds.append(nudged)
        self.expected = []
        for new in news:
            self.memory.copy_(new)
            wait_for_device("writing inputs")
            self.step.run()
            wait_for_device("a launch with the device to itself")
            want = golden(self.built.q, self.cache, **self.built.options)
            want.check(self.described.result(), self.described.result_lse())
            self.expected.append([t.view(torch.uint8).clone() for t in self.outputs])
        self.turns = [(old, which) for old in olds for which in range(len(news))]
        self.news, self.values = news, [self.producer.values(new) for new in news]
        assert len({tuple(e[0].flatten().tolist()) for e in self.expected}) == len(news)

    @staticmethod
    def _lengths(true):
        """Lengths from LEAST up, and 0."""
        most = int(true.max())
        generator = torch.Generator(device=DEVICE).manual_seed(2)
        options = {"generator": generator, "device": DEVICE, "dtype": torch.int32}
        random = torch.randint(min(LEAST, most), most + 1, true.shape, **options)
        holes = random * torch.randint(0, 2, true.shape, **options)
        holes.view(-1)[0] = LEAST
        return [true.clone(), random, holes]

    @staticmethod
    def _tables(true):
        """Pages in other orders: what is read wrongly is another token, or none at all."""
        generator = torch.Generator(device=DEVICE).manual_seed(2)
        ids = true.flatten()
        orders = (torch.randperm(ids.numel(), generator=generator, device=DEVICE) for _ in range(2))
        swapped = true.clone()
        swapped.view(-1)[-2:] = true.view(-1)[-2:].flip(0)
        return [true.clone(), *(ids[order].view(true.shape) for order in orders), swapped]

    def turn(self, old, which):
        """Write the old content, then produce the new one and consume it with nothing between."""
        for output in self.outputs:
            output.fill_(torch.nan)
        self.producer.set_answer(self.values[which])
        self.memory.copy_(old)
        self.producer.step.run()
        self.step.run()
        self.differing += (self.memory != self.news[which]).sum()
        for output, expected in zip(self.outputs, self.expected[which], strict=True):
            self.differing += (output.view(torch.uint8) != expected).sum()


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("producer", sorted(PRODUCERS))
@pytest.mark.parametrize(
    ("what", "name"),
    [("sequence_lengths", name) for name in LENGTHS] + [("page_table", name) for name in TABLES],
)
def test_what_the_launch_before_writes_counts_and_not_what_lay_there(
    what, name, producer, invariant
):
    """Each pair of contents 20 times, eager and in a graph of all of them."""
    case = (LENGTHS if what == "sequence_lengths" else TABLES)[name]
    chain = Chain(case, what, PRODUCERS[producer], batch_invariant=invariant)
    for _ in range(4):
        for turn in chain.turns:
            chain.turn(*turn)
    wait_for_device("producers and launches")
    assert int(chain.differing) == 0, "eager"
    replay = capture(lambda: [chain.turn(*turn) for turn in chain.turns]).replay
    for _ in range(16):
        replay()
    wait_for_device("producers and launches in a graph")
    assert int(chain.differing) == 0, "in a graph"
