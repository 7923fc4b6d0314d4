"""sm90_decode on its GPU: contract, hostile list, random problems, graphs, streams."""

import dataclasses
import random

import pytest
import torch

from stream_attention.core.device import device_facts
from stream_attention.core.errors import UnsupportedProblem
from stream_attention.core.routes import triton_route
from stream_attention.core.testing import contract
from stream_attention.core.testing.checks import bind, check_route, launch
from stream_attention.core.testing.hostile import HOSTILE
from stream_attention.core.testing.native_library import require
from stream_attention.core.testing.problems import Case, build, random_case
from stream_attention.kernels_sm90 import decode
from stream_attention.kernels_sm90.library import LIBRARY

DEVICE = "cuda"
RECORD = decode.RECORD


@pytest.fixture(autouse=True)
def library():
    require(LIBRARY)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def served(case: Case, head_dim: int = 64) -> Case:
    """The case in a dtype, a head_dim and with equal numbers of queries, as the route takes it."""
    dtype = "bfloat16" if case.dtype == "float32" else case.dtype
    changes = {"head_dim_qk": head_dim, "head_dim_vo": None, "kv_dtype": None, "kv_scales": None}
    if case.call == "ragged" and case.qo_lens:
        most = min(max(case.qo_lens), 8)
        changes["qo_lens"] = (most,) * len(case.qo_lens)
        changes["call"] = ("ragged", "batch", "block")[min(most, 2)]
    return dataclasses.replace(case, dtype=dtype, **changes)


def is_served(case: Case) -> bool:
    built = build(case, 0, DEVICE)
    device = device_facts(torch.device(DEVICE, 0))
    return built.cache.key.numel() > 0 and not RECORD.reasons(bind(built).problem, device)


@pytest.mark.parametrize("head_dim", decode.HEAD_DIMS)
@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case.name)
def test_hostile_list(case, head_dim):
    case = served(case, head_dim)
    if not is_served(case):
        pytest.skip("refused by a rule; the portable route has it")
    check_route(RECORD, case, DEVICE)


def test_most_of_the_hostile_list_is_served():
    assert sum(is_served(served(case)) for case in HOSTILE) > 3 * len(HOSTILE) // 4


def _or_portable():
    """The route where it is legal, the portable one elsewhere, as the engine would choose."""

    def build_launch(problem, tile_plan, device, bound):
        if RECORD.reasons(problem, device) or bound.kv.key.numel() == 0:
            return triton_route.TritonLaunch(problem, device, bound)
        return decode.build(problem, tile_plan, device, bound)

    return dataclasses.replace(RECORD, rules=(), build=build_launch)


# Line 12 asks for batch_invariant, which the route refuses.
@pytest.mark.parametrize("head_dim", decode.HEAD_DIMS)
@pytest.mark.parametrize("line", [n for n in sorted(contract.LINES) if n != 12])
def test_contract_line(line, head_dim, monkeypatch):
    original = Case.__init__

    def as_served(self, *args, **kwargs):
        kwargs["head_dim_qk"], kwargs["head_dim_vo"] = head_dim, None
        if kwargs.get("dtype") == "float32":
            kwargs["dtype"] = "bfloat16"
        original(self, *args, **kwargs)

    monkeypatch.setattr(Case, "__init__", as_served)
    contract.LINES[line](_or_portable(), DEVICE)


@pytest.mark.parametrize("group", range(20))
def test_random_problems(group):
    rng = random.Random(group)
    for index in range(25):
        case = served(random_case(rng), rng.choice(decode.HEAD_DIMS))
        queries = rng.choice((1, 1, 2, 5))
        lens = tuple(rng.choice((rng.randrange(40), rng.randrange(4000))) for _ in case.kv_lens)
        case = dataclasses.replace(
            case, qo_lens=(queries,) * len(lens), call="block", window_right=None, kv_lens=lens,
            has_lengths=True,
        )  # fmt: skip
        if is_served(case):
            check_route(RECORD, case, DEVICE, seed=index)


_GRAPHS = {
    "one_request": Case(kv_lens=(8192,), spare=0, call="batch"),
    "decode": Case(qo_lens=(1,) * 7, kv_lens=(4096,) * 7, spare=0, call="batch", head_dim_qk=128),
    "verify": Case(
        qo_lens=(5,) * 4, kv_lens=(2048,) * 4, spare=0, call="block", num_qo_heads=8, page_size=3
    ),
    "many": Case(qo_lens=(1,) * 300, kv_lens=(300,) * 300, spare=0, call="batch"),
    "contiguous": Case(qo_lens=(1,) * 3, kv_lens=(3000,) * 3, spare=0, cache_kind="contiguous"),
}


@pytest.mark.parametrize("name", sorted(_GRAPHS))
def test_graph_replays_follow_lengths_and_tables(name):
    """2,000 replays with contents changed between: bits of an eager run, counters left at zero."""
    case = _GRAPHS[name]
    built = build(dataclasses.replace(case, call="block" if case.qo_lens[0] > 1 else "batch"), 0,
                  DEVICE)  # fmt: skip
    step, described = launch(RECORD, built)
    eager, of_eager = launch(RECORD, built)
    step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    cache, lens = built.cache, built.cache.sequence_lengths
    table = getattr(cache, "page_table", None)
    generator = torch.Generator(device=DEVICE).manual_seed(3)
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for replay in range(2000):
        lens.copy_(
            torch.randint(0, cache.capacity + 1, lens.shape, generator=generator, device=DEVICE)
        )
        if replay % 10 == 0:
            lens.view(-1)[0] = (0, 1, cache.capacity)[replay // 10 % 3]
        if table is not None:
            order = torch.randperm(table.numel(), generator=generator, device=DEVICE)
            table.copy_(table.flatten()[order].view(table.shape))
        built.q.normal_(generator=generator)
        described.bound.out.fill_(float("nan"))
        described.bound.lse.fill_(float("nan"))
        graph.replay()
        eager.run()
        pairs = ((b.bound.out, b.bound.lse) for b in (described, of_eager))
        for mine, other in zip(*pairs, strict=True):
            differing += (mine.view(torch.uint8) != other.view(torch.uint8)).sum()
    assert int(differing) == 0
    assert int(step._counters.abs().sum()) == 0


def test_a_pool_without_pages_is_refused():
    built = build(Case(kv_lens=(0,), spare=2, call="batch"), 0, DEVICE)
    cache = dataclasses.replace(built.cache, key=built.cache.key[:0], value=built.cache.value[:0])
    empty = dataclasses.replace(built, cache=cache)
    with pytest.raises(UnsupportedProblem, match="the pool holds no page"):
        launch(RECORD, empty)


def test_reset_after_an_aborted_launch():
    built = build(Case(qo_lens=(1, 1), kv_lens=(5000, 40), call="batch"), 0, DEVICE)
    step, described = launch(RECORD, built)
    step.run()
    want = described.bound.out.clone()
    step._counters.fill_(1)  # as blocks leave them that never finished
    step.reset()
    described.bound.out.fill_(float("nan"))
    step.run()
    assert torch.equal(described.bound.out, want)


def test_two_streams_with_a_launch_each():
    case = Case(qo_lens=(1,) * 4, kv_lens=(9000, 10, 700, 0), call="batch")
    pairs = [launch(RECORD, build(case, seed, DEVICE)) for seed in (1, 2)]
    for step, _ in pairs:
        step.run()
    torch.cuda.synchronize()
    want = [described.bound.out.clone() for _, described in pairs]
    streams = [torch.cuda.Stream() for _ in pairs]
    for _ in range(200):
        for stream, (step, _) in zip(streams, pairs, strict=True):
            with torch.cuda.stream(stream):
                step.run()
    torch.cuda.synchronize()
    for (_, described), expected in zip(pairs, want, strict=True):
        assert torch.equal(described.bound.out, expected)
