"""Flows on a GPU: equal to the interpreter, captured once, replayed while everything changes."""

import pytest
import torch

from stream_attention.flows.fused import FusedScores
from stream_attention.flows.interpreter import interpret_indexer
from stream_attention.flows.pool import FlowPool
from stream_attention.flows.registry import load_flow, registered_flows
from stream_attention.flows.runtime import FlowRuntime
from stream_attention.flows.selection import select
from stream_attention.flows.top_k import TopK
from stream_attention.flows.window import Budget, Window, pages_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
TOKEN_FLOWS = ("h2o_token_sparse_attention", "gqa_h2o_token_sparse_attention")
HEADS, GROUP, DIM = 4, 4, 128


def made(name, batch=4, max_pages=None, dtype=torch.bfloat16, budget=None, **options):
    page_size = 1 if name in TOKEN_FLOWS else 16
    max_pages = max_pages or (2048 if page_size == 1 else 128)
    pool = FlowPool(load_flow(name), batch * max_pages, page_size, HEADS, DIM, dtype, device="cuda")
    order = torch.randperm(pool.num_pages, device="cuda").to(torch.int32)
    return FlowRuntime(
        pool,
        torch.zeros(batch, HEADS * GROUP, DIM, dtype=dtype, device="cuda"),
        order.view(batch, max_pages),
        torch.zeros(batch, dtype=torch.int32, device="cuda"),
        budget=budget or Budget(64 if page_size == 1 else 8),
        window=Window(1, 1),
        **options,
    )


def append(runtime, counts):
    for count in sorted(set(counts) - {0}):
        active = torch.tensor([int(n == count) for n in counts], dtype=torch.int32, device="cuda")
        runtime.sequence_lengths.add_(active * count)
        shape = (2, len(counts), count, HEADS, DIM)
        new = torch.randn(shape, device="cuda", dtype=runtime.q.dtype)
        runtime.append(new[0], new[1], active)


@pytest.mark.parametrize("name", registered_flows())
def test_scores_states_and_selections_are_the_interpreters(name):
    torch.manual_seed(0)
    runtime = made(name)
    append(runtime, (1900, 0, 333, 1))
    for _ in range(3):
        append(runtime, (1, 0, 1, 1))
        runtime.q.normal_()
        fields = dict(runtime.pool.fields)
        fields |= {s.name: fields[s.name].clone() for s in runtime.graph.states}
        runtime.step()
        args = (runtime.page_table, runtime.sequence_lengths, runtime.window, runtime.budget)
        found = interpret_indexer(runtime.graph, runtime.q, fields, *args)
        inside = ~torch.isneginf(found.scores)
        largest = float(found.scores[inside].abs().max())
        got = runtime.scores[inside].double()
        torch.testing.assert_close(got, found.scores[inside], atol=1e-5 * largest, rtol=1e-5)
        for state in runtime.graph.states:
            held = runtime.pool.fields[state.name].double()
            wanted = fields[state.name].double()
            torch.testing.assert_close(held, wanted, atol=1e-5 * largest, rtol=1e-5)
        # The selection of the scores as they are on the device is exact.
        n = found.num_pages
        masked = torch.where(inside, runtime.scores, -torch.inf)
        selection = select(masked, n, runtime.budget.pages(n), runtime.window)
        pages = selection.pages(runtime.page_table[:, None].expand_as(masked).contiguous())
        pages = torch.where(pages < 0, 0, pages).int()
        assert torch.equal(runtime.pages[..., : pages.shape[-1]], pages)


@pytest.mark.parametrize(
    "name", ["gqa_quest_sparse_attention", "running_average_block", "h2o_token_sparse_attention"]
)
def test_a_replayed_graph_is_the_eager_step_bit_for_bit(name):
    torch.manual_seed(1)
    one, two = made(name), made(name)
    for runtime in (one, two):
        runtime.page_table.copy_(one.page_table)
    new = torch.zeros(2, 4, 1, HEADS, DIM, device="cuda", dtype=one.q.dtype)
    active = torch.zeros(4, dtype=torch.int32, device="cuda")

    def step(runtime):
        runtime.append(new[0], new[1], active)
        runtime.step()

    step(one)  # compiled before it is captured; nobody is active, and rows are empty
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(one)
    for turn in range(30):
        torch.manual_seed(turn)
        counts = [40 if turn == 0 else int(n) for n in torch.randint(0, 2, (4,))]
        if turn == 7:  # a request ends, another one begins on other pages
            for runtime in (one, two):
                runtime.sequence_lengths[1] = 0
                runtime.page_table[1] = runtime.page_table[1].flip(0).clone()
        if turn == 0:
            for runtime in (one, two):
                torch.manual_seed(99)
                append(runtime, (40, 700, 0, 1500))
            continue
        new.normal_()
        active.copy_(torch.tensor(counts, dtype=torch.int32))
        for runtime in (one, two):
            torch.manual_seed(turn + 50)
            runtime.sequence_lengths.add_(active)
            runtime.q.normal_()
        graph.replay()
        step(two)
        for name_of in ("out", "pages", "page_lengths", "scores"):
            assert torch.equal(getattr(one, name_of), getattr(two, name_of)), (turn, name_of)
        for field in one.pool.fields:
            held, wanted = one.pool.fields[field], two.pool.fields[field]
            assert torch.equal(held.view(torch.uint8), wanted.view(torch.uint8)), (turn, field)


@pytest.mark.parametrize("name", registered_flows())
def test_launches_before_attention_are_counted(name):
    runtime = made(name, max_pages=64)
    append(runtime, (60, 0, 33, 1))
    runtime.step()
    new = torch.randn(2, 4, 1, HEADS, DIM, device="cuda", dtype=runtime.q.dtype)
    torch.cuda.synchronize()
    kernels = []
    for run in (lambda: (runtime.append(new[0], new[1]), runtime.step()), runtime.plan.run):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            run()
            torch.cuda.synchronize()
        kernels.append(sum(each.device_type.name == "CUDA" for each in seen.events()))
    assert kernels[0] - kernels[1] == runtime.num_launches
    assert runtime.num_launches <= 4


def test_bits_do_not_depend_on_the_run_the_batch_or_the_number_of_programs():
    torch.manual_seed(2)
    runtime = made("gqa_h2o_token_sparse_attention")
    append(runtime, (1900, 0, 333, 1))
    runtime.q.normal_()
    first = None
    for num_sms in (1, 7, 132, 500):
        fields = dict(runtime.pool.fields)
        fields["hh"] = fields["hh"].clone()
        shape = runtime.scores.shape
        fused = FusedScores(
            runtime.graph, GROUP, fields, 4, shape[2], runtime.q.dtype, runtime.window, num_sms
        )
        scores = torch.zeros_like(runtime.scores)
        fused.run(runtime.q, runtime.page_table, runtime.sequence_lengths, scores)
        first = scores if first is None else first
        assert torch.equal(first, scores)
    alone = FusedScores(
        runtime.graph, GROUP, dict(runtime.pool.fields), 1, shape[2], runtime.q.dtype
    )
    scores = torch.zeros_like(runtime.scores[:1])
    alone.run(
        runtime.q[2:3], runtime.page_table[2:3], runtime.sequence_lengths[2:3].clone(), scores
    )
    assert torch.equal(scores[0, :, 1:332], first[2, :, 1:332])


@pytest.mark.parametrize("n", [1, 17, 2048, 8192, 32768, 131072])
@pytest.mark.parametrize("kind", ["random", "equal", "few", "nan"])
def test_top_k_is_exact_and_the_same_25_times(n, kind):
    torch.manual_seed(n)
    rows, k = (2, 3), min(n, 2048 if n > 8192 else 100)
    scores = torch.randn(*rows, n, device="cuda")
    if kind == "equal":
        scores.fill_(3.0)
    elif kind == "few":
        scores = scores.round()
    elif kind == "nan":
        scores[..., ::7] = torch.nan
        scores[..., 3::11] = -torch.inf
    lengths = torch.full((2,), n, dtype=torch.int32, device="cuda")
    lengths[1] = max(n - 5, 0)
    table = torch.randperm(2 * n, device="cuda").to(torch.int32).view(2, n)
    plan = TopK(n, 6, 1, Window(1, 1), Budget(k), "cuda")
    out = torch.zeros(*rows, plan.width, dtype=torch.int32, device="cuda")
    sizes, nans = (torch.zeros(*rows, dtype=torch.int32, device="cuda") for _ in range(2))
    num_pages = pages_of(lengths, 1)[:, None].expand(rows)
    selection = select(scores, num_pages, Budget(k).pages(num_pages), Window(1, 1))
    pages = selection.pages(table[:, None].expand(*rows, n).contiguous())
    wanted = torch.where(pages < 0, 0, pages).int()
    for _ in range(25):
        out.fill_(-7)
        plan.run(scores, table, lengths, out, sizes, nans)
        width = min(out.shape[-1], wanted.shape[-1])
        assert torch.equal(out[..., :width], wanted[..., :width])
        assert not out[..., width:].any()
