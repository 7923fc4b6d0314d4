"""sm90_decode in CUDA graphs: 18,000 replays over changing lengths, tables and queries.

A replay must give the bits of an eager run over the same memory, and the oracle's answer, whatever
the launch before it left behind; over plans made at a capacity far above the lengths too.
"""

import dataclasses
import math

import pytest
import torch

from stream_attention.core.cache import PagedKVCache
from stream_attention.core.testing.checks import capture, launch
from stream_attention.core.testing.golden import golden
from stream_attention.core.testing.native_library import require
from stream_attention.core.testing.problems import Case, build
from stream_attention.kernels_sm90 import decode
from stream_attention.kernels_sm90.library import LIBRARY

DEVICE = "cuda"
RECORD = decode.RECORD
NUM_REPLAYS = 1500
GROUP_16 = {"num_qo_heads": 32, "num_kv_heads": 2}


def case(batch, most, queries=1, **changes):
    """A case whose pages are all full: lengths and tables may change within them at will."""
    fields = {"qo_lens": (queries,) * batch, "kv_lens": (most,) * batch, "spare": 0}
    fields["call"] = "block" if queries > 1 else "batch"
    return Case(**{**fields, **changes})


CASES = {
    "one_request": case(1, 8192),
    "decode": case(7, 4096, head_dim_qk=decode.HEAD_DIMS[-1], **GROUP_16),
    "many_rows": case(9, 2048, head_dim_qk=128, **GROUP_16),
    "verify_of_many_rows": case(3, 3000, queries=5, head_dim_qk=128, num_qo_heads=12, page_size=1),
    "verify": case(4, 2049, queries=5, num_qo_heads=8, page_size=3),
    "many": case(300, 304),
    "contiguous": case(3, 3000, cache_kind="contiguous", sink="random"),
    "lists_per_head": case(4, 1024, kv_lens=((1024, 1024),) * 4, layout="HND", window_left=200),
    # Capacity 131,664 and 66,128 tokens a request, of which at most 592 are ever there.
    "far_capacity": case(6, 592, spare=8192, ids="negative", head_dim_qk=decode.HEAD_DIMS[-1]),
    "far_capacity_of_one": case(1, 592, spare=4096, num_qo_heads=16, queries=2),
}


@pytest.fixture(autouse=True)
def library():
    require(LIBRARY)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


class Scrambler:
    """Changes the contents of a built case in place; every token that a length reaches is real."""

    def __init__(self, built, seed=3):
        self.built = built
        self.most = built.case.max_kv_len
        self.generator = torch.Generator(device=built.q.device).manual_seed(seed)

    def __call__(self, turn):
        """Other lengths, pages in another order, other queries; now and then all rows alike."""
        cache, lens = self.built.cache, self.built.cache.sequence_lengths
        options = {"generator": self.generator, "device": lens.device}
        most = (self.most, 40, self.most, 300)[turn % 4]
        lens.copy_(torch.randint(0, min(most, self.most) + 1, lens.shape, **options))
        if turn % 5 == 0:
            lens[0] = (0, 1, self.most)[turn // 5 % 3]
        if turn % 50 == 0:
            lens.fill_((0, self.most, 1, 17)[turn // 50 % 4])
        if isinstance(cache, PagedKVCache):
            table = cache.page_table[..., : self.most // cache.page_size]
            # A page of a list per head holds tokens of that head alone, and poison for the others.
            for ids in table.unbind(1) if cache.per_head_lists else (table,):
                order = torch.randperm(ids.numel(), **options)
                ids.copy_(ids.flatten()[order].view(ids.shape))
        self.built.q.normal_(generator=self.generator)


def poison(described):
    described.bound.out.fill_(math.nan)
    described.bound.lse.fill_(math.nan)


def count_differing(mine, other):
    """Bytes of out and lse that differ, on the device."""
    pairs = ((b.bound.out, b.bound.lse) for b in (mine, other))
    return sum(
        (a.view(torch.uint8) != b.view(torch.uint8)).sum() for a, b in zip(*pairs, strict=True)
    )


def replays_follow(record, asked, num_replays, make_graph, **options):
    """Replay and compare; every hundredth answer (of small batches) is the oracle's, and finite."""
    built = build(asked, 0, DEVICE)
    step, described = launch(record, built, **options)
    eager, of_eager = launch(record, built, **options)
    replay = make_graph(step.run)
    scramble = Scrambler(built)
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
    period = max(100, 2 * asked.batch)
    for turn in range(num_replays):
        scramble(turn)
        poison(described)
        poison(of_eager)
        replay()
        eager.run()
        differing += count_differing(described, of_eager)
        if turn % period == 7:
            assert int(differing) == 0, f"by replay {turn}"
            want = golden(built.q, built.cache, **built.options)
            assert want.out.isfinite().all()
            want.check(described.result(), described.result_lse(), label=f"replay {turn}: ")
    assert int(differing) == 0, f"the last of {num_replays} replays"


@pytest.mark.parametrize("name", sorted(CASES))
def test_replays_follow_lengths_tables_and_queries(name):
    replays_follow(RECORD, CASES[name], NUM_REPLAYS, lambda run: capture(run).replay)


@pytest.mark.parametrize("name", sorted(CASES))
def test_replays_of_batch_invariant_plans(name):
    replays_follow(
        RECORD,
        CASES[name],
        NUM_REPLAYS // 5,
        lambda run: capture(run).replay,
        batch_invariant=True,
    )


@pytest.mark.parametrize("dim", decode.HEAD_DIMS)
@pytest.mark.parametrize("queries", [1, 4])
def test_replays_of_every_head_dim(dim, queries):
    asked = case(5, 1536, queries, head_dim_qk=dim, num_qo_heads=8, dtype="float16")
    replays_follow(RECORD, asked, 100, lambda run: capture(run).replay)


def test_one_graph_of_many_launches_of_two_plans():
    """Launches in a row with nothing between them, of the same plan and of another."""
    builts = [build(asked, 0, DEVICE) for asked in (CASES["decode"], CASES["verify"])]
    plans = [launch(RECORD, built) for built in builts]
    order = [0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0]
    graph = capture(lambda: [plans[which][0].run() for which in order])
    eager = [launch(RECORD, built) for built in builts]
    scramblers = [Scrambler(built) for built in builts]
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for turn in range(200):
        for scramble, (_, described) in zip(scramblers, plans, strict=True):
            scramble(turn)
            poison(described)
        graph.replay()
        for (step, of_eager), (_, described) in zip(eager, plans, strict=True):
            step.run()
            differing += count_differing(described, of_eager)
    assert int(differing) == 0


def test_a_rebound_plan_is_captured_where_it_is_bound_then():
    """A graph keeps the memory it was captured over; the plan goes on over another."""
    asked = CASES["verify"]
    first, second = (build(asked, seed, DEVICE) for seed in (1, 2))
    step, described = launch(RECORD, first)
    graph = capture(step.run)
    other, of_other = launch(RECORD, second)
    other.run()
    step.unbind()
    step.rebind(dataclasses.replace(of_other.bound, out=torch.empty_like(of_other.bound.out)))
    step.run()
    poison(described)
    graph.replay()
    want = golden(first.q, first.cache, **first.options)
    want.check(described.result(), described.result_lse())
    step.rebind(of_other.bound)
    poison(of_other)
    step.run()
    want = golden(second.q, second.cache, **second.options)
    want.check(of_other.result(), of_other.result_lse())
