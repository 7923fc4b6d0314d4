"""The fused executor's scores and states are the interpreter's, through Triton's interpreter."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import pytest
import torch

from stream_attention.flows.fused import FusedScores
from stream_attention.flows.interpreter import interpret_indexer
from stream_attention.flows.registry import load_flow, registered_flows
from stream_attention.flows.testing.cases import flow_case, hostile_lengths
from stream_attention.flows.window import Window

GROUPS, DIMS, PAGES = (1, 3, 4, 5, 7, 8, 16), (64, 80, 96, 128, 256), (1, 16, 32)
TOKEN_FLOWS = ("h2o_token_sparse_attention", "gqa_h2o_token_sparse_attention")


def both(case, group_size, window, dtype, steps=1, table=None, lengths=None):
    """(fused scores, the interpreter's) after `steps`, with states of each in fields of its own."""
    graph = case.graph
    table = case.page_table if table is None else table
    lengths = case.lengths if lengths is None else lengths
    expected = {name: each.clone() for name, each in case.fields.items()}
    shape = (len(case.lengths), case.num_kv_heads, table.shape[-1])
    fused = FusedScores(
        graph, group_size, case.fields, shape[0], shape[2], dtype, window, num_sms=1
    )
    for buffer in fused._buffers.values():
        buffer.fill_(torch.nan)  # whatever it held before
    scores = torch.full(shape, torch.nan)
    for _ in range(steps):
        fused.run(case.q, table, lengths, scores)
        found = interpret_indexer(graph, case.q, expected, table, lengths, window)
    assert fused.num_launches == graph.requirements.phases
    return scores, found.scores, expected


def assert_equal(case, scores, wanted, expected):
    inside = ~torch.isneginf(wanted)
    assert torch.isnan(scores[~inside]).all()  # what is no candidate is not written
    wanted = wanted[inside]
    tolerance = 3e-6 * max(1.0, float(wanted.abs().max())) if len(wanted) else 0.0
    torch.testing.assert_close(scores[inside].double(), wanted, atol=tolerance, rtol=3e-6)
    for name, field in case.fields.items():
        held = expected[name].double()
        torch.testing.assert_close(field.double(), held, atol=3e-6, rtol=3e-6, equal_nan=True)


def run(name, group_size, head_dim, page_size, dtype=torch.float32, window=None, **options):
    graph = load_flow(name).trace(page_size, head_dim)
    case = flow_case(
        graph,
        group_size,
        dtype=dtype,
        field_dtype=dtype,
        **{"seed": group_size + head_dim, **options},
    )
    window = window or Window(1, 1)
    assert_equal(case, *both(case, group_size, window, dtype))


def sizes_of(name):
    return (1,) if name in TOKEN_FLOWS else PAGES


@pytest.mark.parametrize(
    ("name", "page_size", "head_dim"),
    [(n, p, d) for n in registered_flows() for p in sizes_of(n) for d in DIMS],
)
def test_every_group_size(name, page_size, head_dim):
    for group_size in GROUPS:
        lengths = (0, 1, page_size + 1, 3 * page_size + 2) if group_size != 4 else None
        run(name, group_size, head_dim, page_size, lengths=lengths)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", registered_flows())
def test_sixteen_bit_storage(name, dtype):
    for group_size, head_dim in ((3, 80), (8, 128)):
        run(name, group_size, head_dim, sizes_of(name)[-1], dtype)


@pytest.mark.parametrize("name", registered_flows())
def test_more_pages_than_a_chunk_and_ends_of_chunks(name):
    page_size = 1 if 1 in sizes_of(name) else sizes_of(name)[0]
    for pages in (257, 258, 259, 130):  # 2 pages are reserved
        lengths = (pages * page_size, 0, 3)
        run(name, 2, 16, page_size, lengths=lengths, num_kv_heads=1)


@pytest.mark.parametrize(
    "window", [Window(0, 0), Window(4, 8), Window(0, 3), Window(2, 0)], ids=str
)
@pytest.mark.parametrize("name", ["gqa_h2o_token_sparse_attention", "gqa_block_sparse_attention"])
def test_windows(name, window):
    run(name, 4, 32, sizes_of(name)[0], window=window)


@pytest.mark.parametrize("name", [*TOKEN_FLOWS, "running_average_block"])
def test_states_add_up_over_steps(name):
    page_size = sizes_of(name)[-1]
    graph = load_flow(name).trace(page_size, 64)
    case = flow_case(graph, 4, dtype=torch.float32, field_dtype=torch.float32)
    assert_equal(case, *both(case, 4, Window(1, 1), torch.float32, steps=5))


@pytest.mark.parametrize("name", ["gqa_quest_sparse_attention", "gqa_block_sparse_attention"])
def test_a_page_list_for_each_head(name):
    graph = load_flow(name).trace(16, 64)
    case = flow_case(graph, 4, dtype=torch.float32, field_dtype=torch.float32)
    order = torch.stack([case.page_table, case.page_table], 1).contiguous()
    lengths = torch.stack([case.lengths, (case.lengths - 5).clamp(min=0)], 1).contiguous()
    found = both(case, 4, Window(1, 1), torch.float32, table=order, lengths=lengths)
    assert_equal(case, *found)


def test_nan_and_infinities_are_what_the_interpreter_makes_of_them():
    for name in ("gqa_quest_sparse_attention", "gqa_h2o_token_sparse_attention"):
        page_size = sizes_of(name)[-1]
        graph = load_flow(name).trace(page_size, 32)
        case = flow_case(graph, 2, lengths=hostile_lengths(page_size), field_dtype=torch.float32)
        case.keys[case.page_table[7, 2].long(), 0, 0, 3] = torch.nan
        case.keys[case.page_table[5, 1].long(), 0, 1, 3] = torch.inf
        case.write_all()
        scores, wanted, _ = both(case, 2, Window(1, 1), torch.float32)
        inside = ~torch.isnan(scores) | torch.isnan(wanted)
        assert torch.isnan(wanted).any()
        assert torch.equal(
            torch.isnan(scores[~torch.isneginf(wanted)]),
            torch.isnan(wanted[~torch.isneginf(wanted)]),
        )
        assert inside.any()


def test_summaries_in_eight_bits_are_read_as_they_are_stored():
    graph = load_flow("gqa_quest_sparse_attention").trace(16, 64)
    case = flow_case(graph, 4, dtype=torch.bfloat16, field_dtype=torch.float8_e4m3fn)
    assert_equal(case, *both(case, 4, Window(1, 1), torch.bfloat16))
    graph = load_flow("h2o_token_sparse_attention").trace(1, 64)
    case = flow_case(graph, 4, dtype=torch.bfloat16, field_dtype=torch.bfloat16)
    fields = {**case.fields, "k": case.fields["k"].to(torch.float8_e4m3fn)}
    with pytest.raises(
        ValueError, match=r"k\.dtype=torch\.float8_e4m3fn: scores read k, which has"
    ):
        FusedScores(graph, 4, fields, 8, case.page_table.shape[1], torch.bfloat16)


def test_what_a_plan_is_not_for_is_refused_by_name():
    graph = load_flow("gqa_quest_sparse_attention").trace(16, 64)
    case = flow_case(graph, 4, dtype=torch.float32, field_dtype=torch.float32)
    fused = FusedScores(graph, 4, case.fields, 8, case.page_table.shape[1], torch.float32)
    scores = torch.zeros(8, 2, case.page_table.shape[1])
    good = {"q": case.q, "page_table": case.page_table, "sequence_lengths": case.lengths}
    for name, value, said in (
        ("q", case.q[:, :4], r"q.shape=\(8, 4, 64\): must be \(8, 8, 64\)"),
        ("q", case.q.double(), "q.dtype=torch.float64: must be torch.float32"),
        ("page_table", case.page_table.long(), "page_table.dtype=torch.int64"),
        ("sequence_lengths", case.lengths[:3], "sequence_lengths.shape"),
    ):
        with pytest.raises(ValueError, match=f"flow gqa_quest_sparse_attention: {said}"):
            fused.run(**{**good, name: value}, scores=scores)
    fields = {**case.fields, "M": case.fields["M"].double()}
    with pytest.raises(ValueError, match=r"M\.dtype=torch\.float64: must be one of bfloat16"):
        FusedScores(graph, 4, fields, 8, case.page_table.shape[1], torch.float32)
