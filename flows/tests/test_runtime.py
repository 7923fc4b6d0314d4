"""A flow in a decode loop: what is selected is the interpreter's, what is attended the oracle's."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import pytest
import torch

from stream_attention.flows.interpreter import interpret_indexer
from stream_attention.flows.pool import FlowPool
from stream_attention.flows.registry import load_flow, registered_flows
from stream_attention.flows.runtime import FlowRuntime
from stream_attention.flows.window import Budget, Window

HEADS, GROUP, DIM, BATCH = 2, 4, 32, 3
TOKEN_FLOWS = ("h2o_token_sparse_attention", "gqa_h2o_token_sparse_attention")


def made(name, budget=None, window=None, max_pages=None, page_size=None, **options):
    """A runtime over an empty pool, its bound tensors by name."""
    page_size = page_size or (1 if name in TOKEN_FLOWS else 8)
    max_pages = max_pages or (96 if page_size == 1 else 16)
    pool = FlowPool(load_flow(name), BATCH * max_pages, page_size, HEADS, DIM, torch.float32)
    bound = {
        "q": torch.zeros(BATCH, HEADS * GROUP, DIM),
        "page_table": torch.randperm(pool.num_pages).to(torch.int32).view(BATCH, max_pages),
        "sequence_lengths": torch.zeros(BATCH, dtype=torch.int32),
    }
    return FlowRuntime(
        pool,
        **bound,
        budget=budget or Budget(20 if page_size == 1 else 3),
        window=window or Window(1, 1),
        **options,
    )


def append(runtime, counts):
    """Every request holds `counts` more tokens, random ones."""
    for count in sorted(set(counts) - {0}):
        active = torch.tensor([int(each == count) for each in counts], dtype=torch.int32)
        runtime.sequence_lengths.add_(active * count)
        new = torch.randn(2, BATCH, count, HEADS, DIM)
        runtime.append(new[0], new[1], active)
        for row in active.nonzero().flatten().tolist():
            assert_appended(runtime, row, new[:, row])


def assert_appended(runtime, row, new):
    """The last tokens of a request's pages are those of `new`, [2, n, HEADS, DIM]."""
    size, length = runtime.pool.page_size, int(runtime.sequence_lengths[row])
    places = torch.arange(length - new.shape[1], length)
    pages = runtime.page_table[row, places // size].long()
    for name, tokens in zip(("k", "v"), new, strict=True):
        assert torch.equal(runtime.pool.fields[name][pages, :, places % size], tokens)


def attended(runtime, row, head, pages, tokens):
    """[G, D] float64: exact attention of a row to the first `tokens` of `pages`."""
    fields, q = runtime.pool.fields, runtime.q[row, head * GROUP : (head + 1) * GROUP].double()
    k, v = (fields[n][pages.long(), head].reshape(-1, DIM)[:tokens].double() for n in ("k", "v"))
    return torch.softmax(q @ k.T * DIM**-0.5, -1) @ v


def assert_step(runtime):
    """One step, its states, its selection and its output compared."""
    graph, pool = runtime.graph, runtime.pool
    fields = {**pool.fields, **{s.name: pool.fields[s.name].clone() for s in graph.states}}
    out, info = runtime.step()
    args = (runtime.page_table, runtime.sequence_lengths, runtime.window, runtime.budget)
    expected = interpret_indexer(graph, runtime.q, fields, *args)
    for state in graph.states:
        held, wanted = pool.fields[state.name], fields[state.name]
        torch.testing.assert_close(held.double(), wanted.double(), atol=3e-6, rtol=3e-6)
    for row in range(BATCH):
        for head in range(HEADS):
            pages = expected.pages[row, head]
            pages = pages[pages >= 0].int()
            tokens = int(runtime.page_lengths[row, head])
            read = -(-tokens // pool.page_size)
            assert torch.equal(runtime.pages[row, head, :read], pages)
            heads = slice(head * GROUP, (head + 1) * GROUP)
            if not tokens:
                assert not out[row, heads].any()
                continue
            wanted = attended(runtime, row, head, pages, tokens)
            torch.testing.assert_close(out[row, heads].double(), wanted, atol=1e-5, rtol=1e-5)
    return info


@pytest.mark.parametrize("name", registered_flows())
def test_a_decode_loop_of_every_flow(name):
    torch.manual_seed(3)
    runtime = made(name)
    append(runtime, (33, 0, 60))
    for counts in ((1, 0, 1), (1, 1, 1), (3, 1, 0)):
        append(runtime, counts)
        runtime.q.normal_()
        info = assert_step(runtime)
    assert info.guarantee == "schedule_exact"
    assert info.reason.startswith(f"flow {name} selects, {runtime.plan.route} attends exactly")
    assert runtime.num_launches == 2 + runtime.graph.requirements.phases


def test_requests_come_and_go_in_place():
    torch.manual_seed(4)
    runtime = made("running_average_block")
    append(runtime, (50, 20, 90))
    assert_step(runtime)
    # The second request ends, and another takes its pages: its states start at their init.
    states = runtime.pool.fields["r"]
    others = torch.cat([runtime.page_table[0, :7], runtime.page_table[2, :12]]).long()
    kept = states[others].clone()
    runtime.sequence_lengths[1] = 0
    append(runtime, (0, 17, 0))
    fresh = runtime.page_table[1, :3].long()
    assert not states[fresh].any()
    assert torch.equal(states[others], kept)
    runtime.q.normal_()
    assert_step(runtime)


def test_a_short_batch_is_attended_in_full_and_keeps_its_states():
    torch.manual_seed(5)
    for name in ("gqa_quest_sparse_attention", "running_average_block"):
        runtime = made(name, dense_below=128)
        append(runtime, (50, 0, 90))
        runtime.q.normal_()
        out, info = runtime.step()
        assert info.guarantee == "exact"
        assert "128 tokens a request at most, dense_below=128: all are read" in info.reason
        for row, tokens in ((0, 50), (2, 90)):
            pages = runtime.page_table[row]
            for head in range(HEADS):
                wanted = attended(runtime, row, head, pages, tokens)
                heads = slice(head * GROUP, (head + 1) * GROUP)
                torch.testing.assert_close(out[row, heads].double(), wanted, atol=1e-5, rtol=1e-5)
        if runtime.graph.states:
            assert runtime.pool.fields["r"][runtime.page_table[0, 1].long()].all()
    assert not made("gqa_quest_sparse_attention", dense_below=127).is_dense


def test_budgets_on_the_device_change_in_place():
    torch.manual_seed(6)
    per_row = torch.tensor([[1, 2], [0, 0], [5, 0]], dtype=torch.int32)
    runtime = made("gqa_quest_sparse_attention", Budget(per_row=per_row), max_budget=9)
    append(runtime, (100, 0, 90))
    for _ in range(2):
        runtime.q.normal_()
        assert_step(runtime)
        per_row.copy_(torch.tensor([[0, 9], [1, 1], [2, 3]], dtype=torch.int32))


def test_what_does_not_fit_is_refused_by_name():
    pool = FlowPool(load_flow("gqa_quest_sparse_attention"), 8, 8, HEADS, DIM, torch.float32)
    good = {
        "q": torch.zeros(2, 8, DIM),
        "page_table": torch.zeros(2, 4, dtype=torch.int32),
        "sequence_lengths": torch.zeros(2, dtype=torch.int32),
    }
    for name, value, said in (
        ("q", torch.zeros(2, 7, DIM), r"q.shape=\(2, 7, 32\): must be \[batch, a multiple of 2"),
        ("page_table", torch.zeros(3, 4, dtype=torch.int32), "page_table.shape"),
        ("page_table", torch.zeros(2, 4), "page_table.dtype=torch.float32: must be torch.int32"),
        ("sequence_lengths", torch.zeros(3, dtype=torch.int32), "sequence_lengths.shape"),
        ("dense_below", -1, "dense_below=-1: must be an int >= 0"),
    ):
        with pytest.raises(ValueError, match=f"FlowRuntime.*{said}"):
            FlowRuntime(pool, **{**good, name: value})
