"""The op-by-op executor's scores and states are the interpreter's, through Triton's interpreter."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import pytest
import torch

from stream_attention.flows import (
    Abs,
    Add,
    CMax,
    CMean,
    CMin,
    CSum,
    Exp,
    Field,
    Flow,
    GeMM,
    L2Norm,
    Load,
    Log,
    Max,
    Maximum,
    Mean,
    Min,
    Minimum,
    Multiply,
    Normalize,
    Relu,
    Reshape,
    Save,
    Sigmoid,
    Silu,
    Softmax,
    Sum,
    Transpose,
    topK,
)
from stream_attention.flows.interpreter import interpret_indexer
from stream_attention.flows.op_by_op import OpByOpScores
from stream_attention.flows.registry import load_flow, registered_flows
from stream_attention.flows.testing.cases import flow_case, hostile_lengths
from stream_attention.flows.window import Window

TOKEN_FLOWS = ("h2o_token_sparse_attention", "gqa_h2o_token_sparse_attention")
SIZES = ((1, 64), (3, 80), (4, 128), (5, 96), (7, 64), (8, 256), (16, 80))
"""(group size, head dim): each of the acceptance grid once."""


def both(case, group_size, window, dtype, steps=1, table=None, lengths=None):
    """(op by op scores, the interpreter's, its states) after `steps`, with states of each alone."""
    graph = case.graph
    table = case.page_table if table is None else table
    lengths = case.lengths if lengths is None else lengths
    expected = {name: each.clone() for name, each in case.fields.items()}
    shape = (len(case.lengths), case.num_kv_heads, table.shape[-1])
    made = OpByOpScores(graph, group_size, case.fields, shape[0], shape[2], dtype, window)
    for buffer in made._buffers.values():
        buffer.fill_(torch.nan)  # whatever it held before
    scores = torch.full(shape, torch.nan)
    for _ in range(steps):
        made.run(case.q, table, lengths, scores)
        found = interpret_indexer(graph, case.q, expected, table, lengths, window)
    return scores, found.scores, expected


def assert_equal(case, scores, wanted, expected, tolerance=3e-6):
    inside = ~torch.isneginf(wanted)
    assert torch.isnan(scores[~inside]).all()  # what is no candidate is not written
    wanted = wanted[inside]
    largest = tolerance * max(1.0, float(wanted.abs().max())) if len(wanted) else 0.0
    torch.testing.assert_close(scores[inside].double(), wanted, atol=largest, rtol=tolerance)
    for name, field in case.fields.items():
        held = expected[name].double()
        torch.testing.assert_close(
            field.double(), held, atol=tolerance, rtol=tolerance, equal_nan=True
        )


def case_of(name, group_size, head_dim, page_size, dtype=torch.float32, **options):
    flow = name() if isinstance(name, type) else load_flow(name)
    options = {"seed": group_size + head_dim, "field_dtype": dtype, **options}
    return flow_case(flow.trace(page_size, head_dim), group_size, dtype=dtype, **options)


def run(name, group_size, head_dim, page_size, dtype=torch.float32, window=None, **options):
    case = case_of(name, group_size, head_dim, page_size, dtype, **options)
    assert_equal(case, *both(case, group_size, window or Window(1, 1), dtype))


def sizes_of(name):
    return (1,) if name in TOKEN_FLOWS else (1, 16, 32)


@pytest.mark.parametrize(
    ("name", "page_size"), [(n, p) for n in registered_flows() for p in sizes_of(n)]
)
def test_every_group_size_and_head_dim(name, page_size):
    # Pages of 16 meet all sizes, others every third; two heads and more lengths are below.
    for group_size, head_dim in SIZES if page_size == sizes_of(name)[-2:][0] else SIZES[::3]:
        lengths = (0, 1, 4 * page_size + 2, page_size + 1)
        run(name, group_size, head_dim, page_size, lengths=lengths, num_kv_heads=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", registered_flows())
def test_sixteen_bit_storage(name, dtype):
    run(name, 3, 80, sizes_of(name)[-1], dtype)


@pytest.mark.parametrize("name", [*TOKEN_FLOWS, "gqa_block_sparse_attention"])
def test_more_pages_than_a_chunk_and_ends_of_chunks(name):
    lengths = (1025, 1026, 1027, 2051)  # 2 pages are reserved
    run(name, 2, 16, 1, lengths=lengths, num_kv_heads=1)


@pytest.mark.parametrize(
    "window", [Window(0, 0), Window(4, 8), Window(0, 3), Window(2, 0)], ids=str
)
@pytest.mark.parametrize("name", ["gqa_h2o_token_sparse_attention", "gqa_quest_sparse_attention"])
def test_windows(name, window):
    run(name, 4, 32, sizes_of(name)[-1], window=window)


@pytest.mark.parametrize("name", [*TOKEN_FLOWS, "running_average_block"])
def test_states_add_up_over_steps(name):
    case = case_of(name, 4, 64, sizes_of(name)[-1])
    assert_equal(case, *both(case, 4, Window(1, 1), torch.float32, steps=5))


@pytest.mark.parametrize("name", ["gqa_quest_sparse_attention", "gqa_h2o_token_sparse_attention"])
def test_a_page_list_for_each_head(name):
    case = case_of(name, 4, 64, sizes_of(name)[-1])
    order = torch.stack([case.page_table, case.page_table], 1).contiguous()
    order[5, 1, :3] = order[5, 1, :3].flip(0)
    lengths = torch.stack([case.lengths, (case.lengths - 5).clamp(min=0)], 1).contiguous()
    found = both(case, 4, Window(1, 1), torch.float32, table=order, lengths=lengths)
    assert_equal(case, *found)


def test_strided_queries_tables_and_lengths():
    case = case_of("gqa_quest_sparse_attention", 4, 64, 16)
    batch, heads, head_dim = case.q.shape
    packed = torch.full((batch, heads + 4, head_dim + 16), torch.nan)
    packed[:, :heads, :head_dim] = case.q
    case.q = packed[:, :heads, :head_dim]
    table = torch.full((batch, 3, case.page_table.shape[1]), -1, dtype=torch.int32)
    table[:, 1] = case.page_table
    lengths = torch.stack([case.lengths, -case.lengths], 1)[:, 0]
    found = both(case, 4, Window(1, 1), torch.float32, table=table[:, 1], lengths=lengths)
    assert_equal(case, *found)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy's, which interprets
def test_nan_and_infinities_are_what_the_interpreter_makes_of_them():
    for name in ("gqa_quest_sparse_attention", "gqa_h2o_token_sparse_attention"):
        page_size = sizes_of(name)[-1]
        case = case_of(name, 2, 32, page_size, lengths=hostile_lengths(page_size), seed=0)
        case.keys[case.page_table[7, 2].long(), 0, 0, 3] = torch.nan
        case.keys[case.page_table[5, 1].long(), 0, 1, 3] = torch.inf
        case.write_all()
        scores, wanted, _ = both(case, 2, Window(1, 1), torch.float32)
        inside = ~torch.isneginf(wanted)
        assert torch.isnan(wanted).any() and torch.isfinite(wanted).any()
        torch.testing.assert_close(
            scores[inside].double(), wanted[inside], atol=1e-4, rtol=3e-6, equal_nan=True
        )


class Elementwise(Flow):
    """Every elementwise op, transposes and reshapes, of a page's parts."""

    def __init__(self):
        self.parts = [
            op(alpha=0.25, beta=beta)
            for op, beta in ((Relu, -0.5), (Sigmoid, -1.0), (Silu, -2.0), (Abs, 0.5), (Exp, 0.25))
        ]
        self.log, self.square = Log(alpha=1.0), Multiply()
        self.smaller, self.larger, self.add = Minimum(), Maximum(), Add(0.5, -1.5)
        self.fold, self.turn = Reshape(4, 8), Transpose()
        self.rows, self.norm, self.cols = Mean(dim=1), L2Norm(dim=2), Min(dim=2)
        self.product, self.select, self.summary = GeMM(), topK(), CMean(dim=1)

    def create_cache(self, page_size, head_dim):
        return {"c": (1, 32)}

    def forward_cache(self, cache, loc, ctx):
        self.summary(cache["k"], cache["c"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        c = self.add(cache["c"], self.rows(q, ctx=ctx), ctx=ctx)
        for op in self.parts:
            c = self.larger(op(c, ctx=ctx), self.smaller(c, cache["c"], ctx=ctx), ctx=ctx)
        c = self.log(self.square(c, c, ctx=ctx), ctx=ctx)
        folded = self.fold(c, ctx=ctx)  # [S, 4, 8]
        turned = self.turn(folded, ctx=ctx)  # [S, 8, 4]
        gram = self.product(turned, turned, ctx=ctx)  # [S, 8, 8]
        heads = self.product(self.turn(self.turn(q, ctx=ctx), ctx=ctx), q, ctx=ctx)  # [B, G, G]
        spread = self.norm(self.rows(heads, ctx=ctx), ctx=ctx)  # [B, 1, 1]
        norms = self.rows(self.norm(gram, ctx=ctx), ctx=ctx)  # [S, 1, 1]
        score = self.add(norms, self.cols(self.rows(folded, ctx=ctx), ctx=ctx), ctx=ctx)
        self.select(Reshape(1, 1)(self.add(score, spread, ctx=ctx), ctx=ctx), o, ctx=ctx)


class OverWindow(Flow):
    """Every op over the window, of values that tokens are lanes of, and blocks of a page's rows."""

    reduce = Sum

    def __init__(self):
        self.over_pages = type(self).reduce(dim=0)
        self.normalize, self.softmax = Normalize(), Softmax(scale=0.125)
        self.blocks = [op(dim=1, block=6) for op in (Mean, Max, Sum)]
        self.logits, self.turn, self.abs, self.exp = GeMM(), Transpose(), Abs(), Exp()
        self.rows, self.cols, self.best = Mean(dim=1), L2Norm(dim=2), Max(dim=1)
        self.add, self.load, self.save, self.select = Add(), Load(), Save(), topK()
        self.summary = CSum(dim=1)

    def create_cache(self, page_size, head_dim):
        return {"c": (1, head_dim), "s": Field((page_size, 1), kind="state")}

    def forward_cache(self, cache, loc, ctx):
        self.summary(cache["k"], cache["c"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        logits = self.logits(self.rows(q, ctx=ctx), cache["k"], ctx=ctx)  # [S, P, 1]
        shares = self.normalize(self.abs(logits, ctx=ctx), ctx=ctx)
        kept = self.add(shares, self.load(cache["s"], ctx=ctx), ctx=ctx)
        self.save(kept, cache["s"], ctx=ctx)
        again = self.softmax(self.load(cache["s"], ctx=ctx), ctx=ctx)
        values = self.turn(self.exp(cache["v"], ctx=ctx), ctx=ctx)  # 1 where there is no token
        values = self.logits(values, self.turn(again, ctx=ctx), ctx=ctx)
        score = self.cols(values, ctx=ctx)  # [S, 1, 1], of products over tokens
        for op in self.blocks:
            block = self.cols(op(cache["k"], ctx=ctx), ctx=ctx)  # [S, blocks, 1]
            score = self.add(score, self.best(block, ctx=ctx), ctx=ctx)
        over_pages = self.over_pages(logits, ctx=ctx)  # [B, P, 1]
        score = self.add(score, self.rows(over_pages, ctx=ctx), ctx=ctx)
        centre = self.over_pages(cache["c"], ctx=ctx)  # [B, 1, D]
        centre = self.cols(centre, ctx=ctx)
        self.select(self.add(score, centre, ctx=ctx), o, ctx=ctx)


class OverWindowMean(OverWindow):
    reduce = Mean


class OverWindowMax(OverWindow):
    reduce = Max


class OverWindowMin(OverWindow):
    reduce = Min


class OverWindowNorm(OverWindow):
    reduce = L2Norm


@pytest.mark.parametrize("group_size", [1, 5])
def test_every_elementwise_op_and_rearrangement(group_size):
    case = case_of(Elementwise, group_size, 32, 16)
    assert_equal(case, *both(case, group_size, Window(1, 1), torch.float32), tolerance=3e-5)


@pytest.mark.parametrize("page_size", [1, 16, 20])
@pytest.mark.parametrize(
    "flow", [OverWindow, OverWindowMean, OverWindowMax, OverWindowMin, OverWindowNorm]
)
def test_every_op_over_the_window_and_blocks(flow, page_size):
    lengths = (0, 1, 5 * page_size + 2, 3 * page_size)
    case = case_of(flow, 3, 24, page_size, lengths=lengths, num_kv_heads=1)
    window = Window(1, 1) if page_size == 1 else Window(0, 0)  # the unfinished page is in it
    assert_equal(case, *both(case, 3, window, torch.float32, steps=2), tolerance=1e-5)


class StateItself(Flow):
    """Its score is a field as it is, and memory of K's envelope is used twice."""

    def __init__(self):
        self.select, self.largest, self.smallest = topK(), CMax(dim=1), CMin(dim=1)
        self.top = CMax(dim=2)

    def create_cache(self, page_size, head_dim):
        return {"M": (1, head_dim), "s": (1, 1)}

    def forward_cache(self, cache, loc, ctx):
        largest = self.largest(cache["k"], cache["M"], loc=loc, ctx=ctx)
        self.top(largest, cache["s"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        self.select(cache["s"], o, ctx=ctx)


def test_a_score_that_is_a_field():
    run(StateItself, 2, 32, 16)


@pytest.mark.parametrize(
    ("name", "launches", "values"),
    [
        ("block_sparse_attention", 3, 1),  # mean, c, their product
        ("gqa_quest_sparse_attention", 7, 1 + 4 + 4 + 4),  # m where M was, and three [G, D]
        ("gqa_h2o_token_sparse_attention", 8, None),  # of its softmax two
    ],
)
def test_an_op_is_a_launch_and_memory_is_used_again(name, launches, values):
    case = case_of(name, 4, 128, sizes_of(name)[-1], lengths=(99, 50))
    batch, max_pages = case.page_table.shape
    made = OpByOpScores(case.graph, 4, case.fields, batch, max_pages, torch.float32)
    assert made.num_launches == launches
    assert len(made.launches(case.q, case.page_table, case.lengths, torch.zeros(1))) == launches
    if values is not None:  # pages' values of D elements that are held at once; and a row's q̄
        smaller = batch * 2 * 4 * 128 * 4
        most = values * batch * 2 * max_pages * 128 * 4
        assert most <= made.workspace_bytes <= most + smaller


def test_what_a_plan_is_not_for_is_refused_by_name():
    case = case_of("gqa_quest_sparse_attention", 4, 64, 16)
    max_pages = case.page_table.shape[1]
    made = OpByOpScores(case.graph, 4, case.fields, 8, max_pages, torch.float32)
    scores = torch.zeros(8, 2, max_pages)
    good = {"q": case.q, "page_table": case.page_table, "sequence_lengths": case.lengths}
    good["scores"] = scores
    for name, value, said in (
        ("q", case.q[:, :4], r"q.shape=\(8, 4, 64\): must be \(8, 8, 64\)"),
        ("q", case.q.double(), "q.dtype=torch.float64: must be torch.float32"),
        ("page_table", case.page_table.long(), "page_table.dtype=torch.int64"),
        ("sequence_lengths", case.lengths[:3], "sequence_lengths.shape"),
        ("scores", scores.transpose(1, 2), "scores.shape"),
        ("scores", scores.double(), "scores.dtype=torch.float64: must be torch.float32"),
    ):
        with pytest.raises(ValueError, match=f"flow gqa_quest_sparse_attention: {said}"):
            made.run(**{**good, name: value})
    fields = {**case.fields, "M": case.fields["M"].double()}
    with pytest.raises(ValueError, match=r"M\.dtype=torch\.float64: must be one of bfloat16"):
        OpByOpScores(case.graph, 4, fields, 8, max_pages, torch.float32)
    fields["M"] = (
        case.fields["M"].transpose(2, 3).contiguous().transpose(2, 3).expand_as(fields["M"])
    )
    fields["M"] = fields["M"].repeat(1, 1, 1, 2)[..., ::2]
    with pytest.raises(ValueError, match=r"M\.stride\(\)=.* rows must be contiguous"):
        OpByOpScores(case.graph, 4, fields, 8, max_pages, torch.float32)
