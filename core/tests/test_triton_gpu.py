"""The Triton route on a GPU: contract, hostile list, random problems, CUDA graphs."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from stream_attention.core.device import device_facts
from stream_attention.core.routes import triton_config, triton_kernels, triton_route
from stream_attention.core.testing import contract
from stream_attention.core.testing.checks import check_route, find_record, launch
from stream_attention.core.testing.hostile import HOSTILE
from stream_attention.core.testing.neighbours import FORMS, OPTIONS, check_neighbours
from stream_attention.core.testing.problems import Case, build, random_case

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

DEVICE = "cuda"
# Without a kernel package's merge, so that the route's own is what is tested here.
RECORD = find_record("triton", triton_route.register)


def _forced(schedule: str):
    """The route with splits of a few tiles each, whatever the lengths."""

    def build_launch(problem, tile_plan, device, bound):
        config = triton_config.choose_config(problem, device)
        if config.schedule in ("direct", "scan", "even"):
            single = problem.batch == 1
            config = dataclasses.replace(
                config,
                schedule="even" if single and schedule == "even" else "scan",
                max_splits=16,
                slots=16,
                min_tiles=1,
                items=config.items + (0 if single and schedule == "even" else 16 * 4),
            )
        return triton_route.TritonLaunch(problem, device, bound, config=config)

    return dataclasses.replace(RECORD, build=build_launch)


@pytest.mark.parametrize("line", sorted(contract.LINES))
def test_contract_line(line: int) -> None:
    contract.LINES[line](RECORD, DEVICE)


def test_many_requests() -> None:
    contract.many_requests(RECORD, DEVICE)


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case.name)
def test_hostile_list(case: Case) -> None:
    check_route(RECORD, case, DEVICE)


@pytest.mark.parametrize("schedule", ["scan", "even"])
@pytest.mark.parametrize("case", HOSTILE[::3], ids=lambda case: case.name)
def test_hostile_list_with_splits(case: Case, schedule: str) -> None:
    check_route(_forced(schedule), case, DEVICE)


@pytest.mark.parametrize("seed", range(150))
def test_random_problems(seed: int) -> None:
    check_route(RECORD, random_case(random.Random(seed)), DEVICE, seed=seed)


_GRAPHS = {
    "decode": Case(qo_lens=(1,) * 8, kv_lens=(4096,) * 8, spare=0, call="batch", head_dim_qk=64),
    "one_request": Case(kv_lens=(16384,), spare=0, call="batch", head_dim_qk=64),
    "ragged": Case(qo_lens=(1, 40, 3, 0, 7), kv_lens=(2048,) * 5, spare=0, head_dim_qk=64),
    "window_sink_hnd": Case(
        qo_lens=(2,) * 4,
        kv_lens=(2048,) * 4,
        spare=0,
        call="block",
        layout="HND",
        window_left=99,
        sink=1.0,
        head_dim_qk=64,
    ),
    "per_head": Case(qo_lens=(1, 2), kv_lens=((1024, 1024),) * 2, spare=0, head_dim_qk=64),
    "contiguous": Case(qo_lens=(1,) * 4, kv_lens=(3000,) * 4, spare=0, cache_kind="contiguous"),
}


@pytest.mark.parametrize("name", sorted(_GRAPHS))
def test_graph_replays_follow_lengths_and_tables(name: str) -> None:
    """Captured once, replayed 1,000 times with contents changed between: bits of an eager run."""
    replays = 1000
    built = build(_GRAPHS[name], 0, DEVICE)
    step, described = launch(RECORD, built)
    eager, of_eager = launch(RECORD, built)
    step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    cache = built.cache
    flat = getattr(cache, "page_table", None)
    generator = torch.Generator(device=DEVICE).manual_seed(7)
    lens = cache.sequence_lengths
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for replay in range(replays):
        lens.copy_(
            torch.randint(0, cache.capacity + 1, lens.shape, generator=generator, device=DEVICE)
        )
        if replay % 10 == 0:
            lens.view(-1)[0] = (0, 1, cache.capacity)[replay // 10 % 3]
        if flat is not None:
            order = torch.randperm(flat.numel(), generator=generator, device=DEVICE)
            flat.copy_(flat.flatten()[order].view(flat.shape))
        built.q.normal_(generator=generator)
        described.bound.out.fill_(float("nan"))
        described.bound.lse.fill_(float("nan"))
        graph.replay()
        eager.run()
        for mine, other in zip(
            (described.bound.out, described.bound.lse),
            (of_eager.bound.out, of_eager.bound.lse),
            strict=True,
        ):
            raw = mine.view(torch.uint8), other.view(torch.uint8)
            differing += (raw[0] != raw[1]).sum()
    assert int(differing) == 0


def test_nothing_recompiles_when_batch_lengths_or_page_counts_change() -> None:
    kernel = triton_kernels.attention_split
    check_route(RECORD, Case(qo_lens=(1, 1), kv_lens=(3000, 5000), call="batch"), DEVICE)
    compiled = _compiled(kernel)
    for lens in ((4100, 2, 9000), (1100,) * 40, (20_000, 3)):
        case = Case(qo_lens=(1,) * len(lens), kv_lens=lens, call="batch")
        check_route(RECORD, case, DEVICE)
    assert _compiled(kernel) == compiled


def _compiled(kernel) -> int:
    return sum(len(cache[0]) for cache in kernel.device_caches.values())


def test_two_streams_with_a_launch_each() -> None:
    case = Case(qo_lens=(1,) * 4, kv_lens=(3000, 10, 700, 0), call="batch")
    pairs = [launch(RECORD, build(case, seed, DEVICE)) for seed in (1, 2)]
    want = []
    for step, described in pairs:
        step.run()
        torch.cuda.synchronize()
        want.append(described.bound.out.clone())
    streams = [torch.cuda.Stream() for _ in pairs]
    for _ in range(50):
        for stream, (step, _) in zip(streams, pairs, strict=True):
            with torch.cuda.stream(stream):
                step.run()
    torch.cuda.synchronize()
    for (_, described), expected in zip(pairs, want, strict=True):
        assert torch.equal(described.bound.out, expected)


def test_a_long_request_among_short_ones_is_split_widely() -> None:
    case = Case(qo_lens=(1,) * 32, kv_lens=(65536, *(512,) * 31), head_dim_qk=64, call="batch")
    built = build(case, 0, DEVICE)
    step, _ = launch(RECORD, built)
    step.run()
    used = (step._scratch_lse[:, 0, 0] > float("-inf")).sum()
    slots = 2 * device_facts(built.q.device).num_sms // case.num_kv_heads
    assert int(used) >= min(slots, step.config.max_splits) // 2


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_a_longer_neighbour_changes_no_bit_of_a_batch_invariant_request(option, form) -> None:
    """On both sides of a split's tokens; dtypes take turns."""
    turn = sorted(OPTIONS).index(option) + sorted(FORMS).index(form)
    fields = {"dtype": ("bfloat16", "float32")[turn % 2], **FORMS[form], **OPTIONS[option]}
    for lens in ((700, 1400), (1000, 1025), (1100, 6000)):
        check_neighbours(RECORD, Case(kv_lens=lens, **fields), DEVICE)


@pytest.mark.parametrize("form", ["append", "decode", "packed"])
def test_a_far_longer_neighbour_changes_no_bit(form) -> None:
    """On both sides of the most splits of two KV heads."""
    for lens in ((1100, 40_000), (9000, 140_000)):
        check_neighbours(RECORD, Case(kv_lens=lens, sink=1.0, **FORMS[form]), DEVICE)


def test_a_request_among_many_gives_its_bits_alone() -> None:
    lens, queries = (700, 1, 0, 64, 30_000, 2570, 16), (5, 1, 2, 700, 1, 40, 3)
    for dtype in ("bfloat16", "float32"):
        check_neighbours(RECORD, Case(qo_lens=queries, kv_lens=lens, dtype=dtype, sink=1.0), DEVICE)
