"""sm90_decode on its GPU: contract, hostile list, random cases with all checks of a route.

The many random problems are in test_decode_random.py, graphs in test_decode_graphs.py, other work
at the same time in test_decode_streams.py.
"""

import dataclasses
import random

import pytest
import torch

from stream_attention.core.device import device_facts
from stream_attention.core.errors import UnsupportedProblem
from stream_attention.core.routes import triton_route
from stream_attention.core.testing import contract
from stream_attention.core.testing.checks import (
    H200,
    bind,
    check_built,
    check_route,
    launch,
    serves,
)
from stream_attention.core.testing.hostile import HOSTILE
from stream_attention.core.testing.native_library import require
from stream_attention.core.testing.problems import FP8, Case, build, random_case
from stream_attention.kernels_sm90 import decode
from stream_attention.kernels_sm90.library import LIBRARY

DEVICE = "cuda"
RECORD = decode.RECORD


@pytest.fixture(autouse=True)
def library():
    require(LIBRARY)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def served(case: Case, head_dim: int = 64, group: int | None = None) -> Case:
    """The case in a dtype, a head_dim and with equal numbers of queries, as the route takes it.

    `group`: query heads of a KV head; `None`: as the case has.
    """
    dtype = "bfloat16" if case.dtype == "float32" else case.dtype
    changes = {"head_dim_qk": head_dim, "head_dim_vo": None}
    if group is not None:
        changes["num_qo_heads"] = group * case.num_kv_heads
    if case.kv_dtype == FP8 and not serves(RECORD, H200, kv_dtype=FP8):
        changes |= {"kv_dtype": None, "kv_scales": None}
    if case.call == "ragged" and case.qo_lens:
        most = min(max(case.qo_lens), 8)
        changes["qo_lens"] = (most,) * len(case.qo_lens)
        changes["call"] = ("ragged", "batch", "block")[min(most, 2)]
    return dataclasses.replace(case, dtype=dtype, **changes)


def is_served(case: Case) -> bool:
    built = build(case, 0, DEVICE)
    device = device_facts(torch.device(DEVICE, 0))
    return built.cache.key.numel() > 0 and not RECORD.reasons(bind(built).problem, device)


def invariant(built):
    """The route with `batch_invariant`, as `check_route` takes a function."""
    step, described = launch(RECORD, built, batch_invariant=True)
    step.run()
    return described.result(), described.result_lse()


ROUTES = pytest.mark.parametrize("route", [RECORD, invariant], ids=["plain", "invariant"])
# Every head_dim, and in 128 the rows that warpgroups multiply.
FORMS = pytest.mark.parametrize(
    ("head_dim", "group"), [*((dim, None) for dim in decode.HEAD_DIMS), (128, 12), (128, 32)]
)


@FORMS
@ROUTES
@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case.name)
def test_hostile_list(case, route, head_dim, group):
    case = served(case, head_dim, group)
    if not is_served(case):
        pytest.skip("refused by a rule; the portable route has it")
    check_route(route, case, DEVICE)


def test_most_of_the_hostile_list_is_served():
    assert sum(is_served(served(case)) for case in HOSTILE) > 3 * len(HOSTILE) // 4


def _or_portable():
    """The route where it is legal, the portable one elsewhere, as the engine would choose."""

    def build_launch(problem, tile_plan, device, bound):
        if not RECORD.reasons(problem, device):
            try:
                return decode.build(problem, tile_plan, device, bound)
            except UnsupportedProblem:
                pass
        return triton_route.TritonLaunch(problem, device, bound)

    return dataclasses.replace(RECORD, rules=(), build=build_launch)


@pytest.mark.parametrize("head_dim", decode.HEAD_DIMS)
@pytest.mark.parametrize("line", sorted(contract.LINES))
def test_contract_line(line, head_dim, monkeypatch):
    original = Case.__init__

    def as_served(self, *args, **kwargs):
        kwargs["head_dim_qk"], kwargs["head_dim_vo"] = head_dim, None
        if kwargs.get("dtype") == "float32":
            kwargs["dtype"] = "bfloat16"
        original(self, *args, **kwargs)

    monkeypatch.setattr(Case, "__init__", as_served)
    contract.LINES[line](_or_portable(), DEVICE)


@pytest.mark.parametrize("group", range(6))
def test_random_cases(group):
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
            check_route(rng.choice((RECORD, RECORD, invariant)), case, DEVICE, seed=index)


@FORMS
@ROUTES
@pytest.mark.parametrize("batch", [1, 3, 32, 33, 60, 127])
def test_requests_of_fewer_tiles_than_blocks(batch, route, head_dim, group):
    """One KV head has 128 blocks: most find no tile, and must touch nothing."""
    lens = tuple((16, 0, 1, 13)[i % 4] for i in range(batch))
    case = Case(qo_lens=(1,) * batch, kv_lens=lens, num_qo_heads=4, num_kv_heads=1, call="batch")
    check_route(route, served(case, head_dim, group), DEVICE)


@pytest.mark.parametrize("parts", [2, 3, 5, 16])
@pytest.mark.parametrize(
    ("head_dim", "group", "tile"),
    [(64, 32, 256), (80, 32, 128), (96, 24, 128), (128, 12, 64), (128, 32, 64), (192, 16, 64)],
)
@ROUTES
def test_many_rows_of_few_parts(route, head_dim, group, tile, parts):
    """One KV head's 128 blocks have a tile each, so that so many share a request."""
    batch = 128 // parts
    case = Case(
        qo_lens=(1,) * batch, kv_lens=(parts * tile,) * batch, call="batch", head_dim_qk=head_dim,
        num_qo_heads=group, num_kv_heads=1, dtype="bfloat16", page_size=16,
    )  # fmt: skip
    check_route(route, case, DEVICE)


@FORMS
@ROUTES
def test_requests_of_a_tile_or_two_beside_long_ones(route, head_dim, group):
    """Ids of the tiles that follow are asked for while others of as few tiles are read."""
    lens = tuple((5, 70, 900, 1, 300, 0, 20, 1500)[i % 8] for i in range(150))
    case = Case(
        qo_lens=(1,) * 150, kv_lens=lens, call="batch", num_qo_heads=4, num_kv_heads=2,
        dtype="bfloat16", page_size=16,
    )  # fmt: skip
    check_route(route, served(case, head_dim, group), DEVICE)


# Scores of the tokens of one request, for a query of one. In 64 tokens they rise by 12.8 or by 5.1
# (less than the 5.5 by which weights may exceed what they are relative to), or fall.
SCORES = {
    "rises": lambda t: 0.2 * t,
    "creeps": lambda t: 0.08 * t,
    "falls": lambda t: -0.2 * t,
    "leaps": lambda t: torch.where(t < 1000, 0.0, torch.where(t < 1500, 300.0, -300.0)),
    "begins_far_below": lambda t: torch.where(t < 200, -6e4, 0.05 * t),
    "once": lambda t: torch.where(t == 777, 40.0, 0.0),
}


@FORMS
@ROUTES
@pytest.mark.parametrize("dtype", decode.DTYPES)
@pytest.mark.parametrize("name", sorted(SCORES))
def test_scores_that_grow_or_fall_from_tile_to_tile(name, dtype, route, head_dim, group):
    """Of rows that differ: scores are multiples, from 1 to -1, of what the name says.

    12 KV heads leave a block so many tiles of a request that scores grow inside it.
    """
    case = Case(
        qo_lens=(2, 2), kv_lens=(2000, 1111), cache_kind="contiguous", call="block", dtype=dtype,
        num_qo_heads=48, num_kv_heads=12, sm_scale=1.0,
    )  # fmt: skip
    built = build(served(case, head_dim, group), 0, DEVICE)
    built.q.mul_(0.05)
    heads = built.q.shape[-2] // case.num_kv_heads  # of a block
    factors = torch.linspace(1, -1, heads, device=DEVICE)
    built.q[..., 0] = factors.repeat(case.num_kv_heads)
    scores = SCORES[name](torch.arange(built.cache.key.shape[1], device=DEVICE))
    built.cache.key[..., 0] = scores[None, :, None]
    check_built(route, built)


def test_a_pool_without_pages_is_refused():
    built = build(Case(kv_lens=(0,), spare=2, call="batch"), 0, DEVICE)
    cache = dataclasses.replace(built.cache, key=built.cache.key[:0], value=built.cache.value[:0])
    empty = dataclasses.replace(built, cache=cache)
    with pytest.raises(UnsupportedProblem, match="the pool holds no page"):
        launch(RECORD, empty)


@pytest.mark.parametrize("head_dim", decode.HEAD_DIMS)
@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (9, 1), (64, 8), (32, 2), (64, 1)])
def test_what_a_plan_says_of_its_launches_fits_an_sm(head_dim, heads):
    """Threads and shared memory of a block, and a workspace that a plan can afford."""
    num_qo_heads, num_kv_heads = heads
    case = Case(
        qo_lens=(1,) * 3, kv_lens=(500, 0, 20), call="batch", head_dim_qk=head_dim,
        num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads,
    )  # fmt: skip
    step, _ = launch(RECORD, build(case, 0, DEVICE))
    plan = step.backend_plan
    assert plan.route == decode.ROUTE
    for spec in plan.launches:
        assert 0 < spec.threads <= 1024 and spec.shared_bytes <= 227 << 10
    assert 0 <= plan.workspace_bytes <= 64 << 20


@pytest.mark.parametrize("group", [1, 8])
def test_small_query_elements_beside_a_large_one_meet_fp8_keys(group):
    """A row of q is scaled as a whole before it meets fp8 K; K is 0 where q is large."""
    case = Case(
        qo_lens=(1, 1), kv_lens=(300, 17), call="batch", head_dim_qk=128, num_qo_heads=group,
        num_kv_heads=1, dtype="bfloat16", kv_dtype=FP8,
    )  # fmt: skip
    built = build(case, 0, DEVICE)
    built.q.mul_(1e-3)
    built.q[..., 0] = torch.tensor([32768.0, 256.0], device=DEVICE).view(
        2, *(1,) * (built.q.dim() - 2)
    )
    built.cache.key[..., 0] = 0
    check_built(RECORD, built)


@ROUTES
def test_rows_of_every_instance_in_more_requests_than_a_warp_scans(route):
    """33 requests and more are searched through shared memory that query rows lie beside."""
    for head_dim in decode.HEAD_DIMS:
        for queries in (1, 3, 6, 8, 16):
            lens = tuple(40 * i % 700 for i in range(40))
            case = Case(
                qo_lens=(queries,) * 40, kv_lens=lens, call="block" if queries > 1 else "batch",
                head_dim_qk=head_dim, num_qo_heads=4, num_kv_heads=1, dtype="bfloat16",
            )  # fmt: skip
            check_route(route, case, DEVICE, seed=queries)


def test_a_plan_made_during_a_capture_runs_before_the_first_replay():
    built = build(Case(qo_lens=(1,) * 2, kv_lens=(3000, 500), call="batch"), 0, DEVICE)
    want, wanted = launch(RECORD, built)
    want.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step, described = launch(RECORD, built)
        step.run()
    for run in (step.run, graph.replay, step.run, graph.replay):
        described.bound.out.fill_(float("nan"))
        run()
        assert torch.equal(described.bound.out, wanted.bound.out)


@pytest.mark.parametrize("head_dim", decode.HEAD_DIMS)
def test_a_contiguous_cache_of_one_token_whose_view_has_any_token_stride(head_dim):
    case = Case(
        qo_lens=(1,) * 3, kv_lens=(1, 1, 0), cache_kind="contiguous", layout="HND", spare=0,
        call="batch", head_dim_qk=head_dim, dtype="bfloat16",
    )  # fmt: skip
    built = build(case, 0, DEVICE)
    pools = {}
    for name in ("key", "value"):
        pool = getattr(built.cache, name)  # [batch, heads, 1, head_dim]
        batch, heads, tokens, dim = pool.shape
        pools[name] = pool.new_empty(batch, heads, dim, tokens).transpose(2, 3).copy_(pool)
        assert pools[name].stride(2) == 1
    odd = dataclasses.replace(built, cache=dataclasses.replace(built.cache, **pools))
    check_built(RECORD, odd)
