"""The interpreter is each flow's formula: ragged batches, empty rows, unfinished pages."""

import pytest
import torch

from stream_attention.flows import load_flow, registered_flows
from stream_attention.flows.interpreter import interpret_indexer
from stream_attention.flows.testing.cases import flow_case
from stream_attention.flows.testing.formulas import SCORES, TOKEN_FLOWS, selected
from stream_attention.flows.window import Budget, Window

GROUPS, HEAD_DIMS, PAGE_SIZES = (1, 3, 4, 5, 7, 8, 16), (64, 80, 96, 128, 256), (1, 16, 32)
WINDOW, BUDGET = Window(bos=1, eos=1), Budget(topk=2)
TOKEN_LENGTHS = (0, 1, 2, 3, 4, 5, 41, 0, 17)


def page_sizes(name):
    return (1,) if name in TOKEN_FLOWS else PAGE_SIZES


GRID = [
    (name, page_size, group)
    for name in SCORES
    for page_size in page_sizes(name)
    for group in GROUPS
]


def check_rows(case, name, result, before, rtol):
    """Scores, states and selections of every row against the formula; returns rows that chose."""
    chose, states = 0, case.graph.requirements.writes
    for request in range(len(case.lengths)):
        page_ids, _ = case.page_counts(request)
        for head in range(case.num_kv_heads):
            rows = case.page_rows(request, head)
            first = min(WINDOW.bos, len(rows))
            window = range(first, max(first, len(rows) - WINDOW.eos))
            state = [float(before[page, head]) for page in page_ids] if states else []
            want = SCORES[name](case.queries(request, head), rows, window, state)
            got = result.scores[request, head]
            expected = torch.full_like(got, -torch.inf)
            for at, score in want.items():
                expected[at] = score
            torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol)
            count = int(result.selection.counts[request, head])
            positions = result.selection.positions[request, head]
            assert positions[:count].tolist() == selected(want, len(rows), 2, 1, 1)
            assert (positions[count:] == -1).all()
            taken = result.pages[request, head]
            assert taken[:count].tolist() == page_ids[positions[:count].long()].tolist()
            assert (taken[count:] == -1).all()
            chose += len(rows) > 4
            for name_of_state in states:
                now = case.fields[name_of_state][page_ids, head, 0, 0].double()
                for at, score in want.items():
                    state[at] = score
                torch.testing.assert_close(
                    now, torch.tensor(state, dtype=torch.float64), rtol=rtol, atol=rtol
                )
    return chose


@pytest.mark.parametrize(("name", "page_size", "group"), GRID)
def test_scores_states_and_selections_are_the_formulas(name, page_size, group):
    # Every head dim, group and page size meet; heads and lengths are the same throughout.
    for head_dim in HEAD_DIMS:
        graph = load_flow(name).trace(page_size, head_dim)
        lengths = TOKEN_LENGTHS if page_size == 1 else None
        case = flow_case(
            graph, group, lengths, field_dtype=torch.float64, state_dtype=torch.float64, seed=group
        )
        before = None
        for _ in range(2 if graph.states else 1):
            if graph.states:
                before = case.fields[graph.states[0].name][:, :, 0, 0].double().clone()
            result = interpret_indexer(
                graph, case.q, case.fields, case.page_table, case.lengths, WINDOW, BUDGET
            )
            assert check_rows(case, name, result, before, 1e-10) >= 4


@pytest.mark.parametrize("name", SCORES)
def test_float32_is_as_near_as_float32_is(name):
    page_size = 1 if name in TOKEN_FLOWS else 16
    graph = load_flow(name).trace(page_size, 128)
    cases = [
        flow_case(graph, 4, field_dtype=torch.float64, state_dtype=torch.float64) for _ in range(2)
    ]
    exact, single = (
        interpret_indexer(
            graph, case.q, case.fields, case.page_table, case.lengths, dtype=dtype
        ).scores
        for case, dtype in zip(cases, (torch.float64, torch.float32), strict=True)
    )
    assert single.dtype == torch.float32
    scale = exact[exact.isfinite()].abs().max()
    torch.testing.assert_close(single.double() / scale, exact / scale, rtol=0, atol=1e-6)


def test_the_library_is_what_the_formulas_are_of():
    library = {n for n, flow in registered_flows().items() if ".flows.library." in flow.__module__}
    assert library == set(SCORES) and len(library) == 11


def test_a_per_head_table_selects_for_each_head_by_its_own_pages():
    graph = load_flow("gqa_quest_sparse_attention").trace(16, 64)
    case = flow_case(graph, 4, (160, 90), num_kv_heads=2)
    wide = case.page_table[:, None].repeat(1, 2, 1)
    wide[0, 1, :10] = wide[0, 1, :10].flip(0)
    lengths = torch.tensor([[160, 160], [90, 90]], dtype=torch.int32)
    budget = Budget(topk=3)
    flat = interpret_indexer(
        graph, case.q, case.fields, case.page_table, case.lengths, Window(0, 0), budget
    )
    each = interpret_indexer(graph, case.q, case.fields, wide, lengths, Window(0, 0), budget)
    assert each.pages[0, 0].tolist() == flat.pages[0, 0].tolist()
    assert sorted(each.pages[0, 1].tolist()) == sorted(flat.pages[0, 1].tolist())
    assert each.selection.positions[0, 1].tolist() == sorted(
        9 - at for at in flat.selection.positions[0, 1].tolist()
    )


def test_a_rows_bits_do_not_depend_on_who_is_in_the_batch():
    graph = load_flow("gqa_block_sparse_attention").trace(16, 64)
    case = flow_case(graph, 4, (160, 90, 300, 33))
    together = interpret_indexer(graph, case.q, case.fields, case.page_table, case.lengths)
    for request in range(4):
        only = slice(request, request + 1)
        alone = interpret_indexer(
            graph, case.q[only], case.fields, case.page_table[only], case.lengths[only]
        )
        assert torch.equal(alone.scores[0], together.scores[request])
