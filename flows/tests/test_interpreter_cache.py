"""Summaries, envelopes, storage dtypes, padded lanes, and arguments that are refused."""

import math

import pytest
import torch

from stream_attention.flows import (
    CExp,
    CMax,
    CMean,
    CMin,
    CMultiply,
    CSum,
    CTranspose,
    Fill,
    Flow,
    GeMM,
    Load,
    Max,
    Maximum,
    Mean,
    Min,
    Minimum,
    Normalize,
    Relu,
    Save,
    Sigmoid,
    Silu,
    Softmax,
    Sum,
    load_flow,
    topK,
)
from stream_attention.flows.interpreter import interpret_cache, interpret_indexer
from stream_attention.flows.interpreter_ops import COMPUTE
from stream_attention.flows.op_table import OPS
from stream_attention.flows.pool_fields import allocate_fields
from stream_attention.flows.testing.cases import flow_case
from stream_attention.flows.window import Budget, Window

ALL = Window(0, 0)


def run(case, window=ALL, budget=None, **kwargs):
    return interpret_indexer(
        case.graph, case.q, case.fields, case.page_table, case.lengths, window, budget, **kwargs
    )


def test_every_op_of_the_table_is_computed():
    memory = {"query", "load", "fill", "store", "save"}
    assert set(COMPUTE) == set(OPS) - memory


@pytest.mark.parametrize("page_size", [1, 5, 16, 40])
def test_the_envelope_bounds_every_key_and_the_largest_key_alone_does_not(page_size):
    graph = load_flow("gqa_quest_sparse_attention").trace(page_size, 64)
    case = flow_case(graph, 4, (7 * page_size, 6 * page_size + 1), field_dtype=torch.float64)
    scores, violated = run(case).scores, 0
    for request in range(2):
        page_ids, _ = case.page_counts(request)
        for head in range(2):
            q = case.queries(request, head)
            for at, (keys, _) in enumerate(case.page_rows(request, head)):
                logit = float((q @ keys.T).max())
                assert scores[request, head, at] >= logit - 1e-12
                largest = case.fields["M"][page_ids[at], head, 0]
                violated += float((q @ largest).max()) < logit - 1e-6
    # For signed queries `Σ q_d M_d` is no bound; with one key a page all three are the same.
    assert (violated > 0) == (page_size > 1)


@pytest.mark.parametrize("page_size", [1, 2, 16, 33])
def test_summaries_of_an_unfinished_page_are_those_of_its_tokens(page_size):
    graph = load_flow("gqa_h2o_sparse_attention").trace(page_size, 64)
    for count in range(1, page_size + 1):
        fields = allocate_fields(graph, 3, 2, torch.float64)
        k = torch.full((3, page_size, 2, 64), math.nan)
        k[1, :count] = torch.randn(count, 2, 64)
        interpret_cache(graph, fields, k, k, torch.tensor([1]), torch.tensor([count]))
        tokens = k[1, :count].double()
        torch.testing.assert_close(fields["c"][1, :, 0], tokens.mean(0))
        assert torch.equal(fields["M"][1, :, 0], tokens.amax(0))
        assert torch.equal(fields["m"][1, :, 0], tokens.amin(0))


def test_sub_blocks_without_a_token_repeat_the_last_one_that_has_some():
    graph = load_flow("lserve_sparse_attention").trace(40, 64)
    for count, filled in ((1, 1), (16, 1), (17, 2), (32, 2), (33, 3), (40, 3)):
        fields = allocate_fields(graph, 1, 1, torch.float64)
        k = torch.full((1, 40, 1, 64), math.nan)
        k[0, :count] = torch.randn(count, 1, 64)
        interpret_cache(graph, fields, k, k, torch.tensor([0]), torch.tensor([count]))
        for block in range(3):
            source = min(block, filled - 1)
            tokens = k[0, 16 * source : min(16 * source + 16, count), 0].double()
            assert torch.equal(fields["M"][0, 0, block], tokens.amax(0))
            assert torch.equal(fields["m"][0, 0, block], tokens.amin(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_summaries_are_rounded_once_to_what_their_field_stores(dtype):
    graph = load_flow("block_sparse_attention").trace(16, 64)
    case = flow_case(graph, 4, (160, 33), dtype=torch.bfloat16, field_dtype=dtype)
    assert case.fields["c"].dtype == dtype
    result = run(case)
    for request in range(2):
        page_ids, _ = case.page_counts(request)
        for head in range(2):
            for at, (keys, _) in enumerate(case.page_rows(request, head)):
                mean = keys.mean(0).to(dtype)
                assert torch.equal(case.fields["c"][page_ids[at], head, 0], mean)
                want = float(case.queries(request, head).mean(0) @ mean.double())
                assert abs(float(result.scores[request, head, at]) - want) < 1e-12


class EveryPadded(Flow):
    """Reductions of every kind along the tokens of a page, after ops that unset the padding."""

    def __init__(self):
        self.exp, self.multiply, self.transpose = CExp(), CMultiply(), CTranspose()
        self.mean, self.sum, self.max = CMean(dim=1), CSum(dim=1), CMax(dim=1)
        self.mean_of_columns, self.min = CMean(dim=2), CMin(dim=1)
        self.sum_of_columns = CSum(dim=2)
        self.fill = Fill(2.0)
        self.logits, self.softmax = GeMM(), Softmax(dim=0, scale=0.5)
        self.token_mean, self.head_max = Mean(dim=1), Max(dim=2)
        self.over_pages, self.normalize, self.add = Mean(dim=0), Normalize(dim=0), Maximum()
        self.select = topK()

    def create_cache(self, page_size, head_dim):
        rows = dict.fromkeys(("mean", "sum", "max", "min", "wide"), (1, head_dim))
        return {**rows, "two": (1, 1), "tokens": (page_size, 1)}

    def forward_cache(self, cache, loc, ctx):
        grown = self.exp(cache["k"], loc=loc, ctx=ctx)
        self.mean(grown, cache["mean"], loc=loc, ctx=ctx)
        self.sum(grown, cache["sum"], loc=loc, ctx=ctx)
        self.max(grown, cache["max"], loc=loc, ctx=ctx)
        self.min(grown, cache["min"], loc=loc, ctx=ctx)
        turned = self.mean_of_columns(self.transpose(grown, loc=loc, ctx=ctx), loc=loc, ctx=ctx)
        self.transpose(turned, cache["wide"], loc=loc, ctx=ctx)
        self.fill(cache["two"], loc=loc, ctx=ctx)
        self.sum_of_columns(grown, cache["tokens"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        logits = self.logits(q, cache["k"], ctx=ctx)  # [S, P, G]
        weights = self.softmax(logits, ctx=ctx)
        share = self.normalize(cache["tokens"], ctx=ctx)  # [S, P, 1]
        mixed = self.add(weights, share, ctx=ctx)
        lifted = self.add(mixed, self.over_pages(mixed, ctx=ctx), ctx=ctx)
        score = self.token_mean(self.head_max(lifted, ctx=ctx), ctx=ctx)
        self.select(score, o, ctx=ctx)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_padded_lanes_leak_into_no_reduction(page_size):
    graph = EveryPadded().trace(page_size, 64)
    case = flow_case(graph, 3, (5 * page_size + (page_size + 1) // 2, page_size, 0, 1))
    result = run(case)
    for request in range(4):
        page_ids, counts = case.page_counts(request)
        for head in range(2):
            pages = case.page_rows(request, head)
            grown = [keys.exp() for keys, _ in pages]
            for at, page in enumerate(page_ids.tolist()):
                got = {n: case.fields[n][page, head] for n in graph.fields}
                for name, want in (
                    ("mean", grown[at].mean(0)),
                    ("wide", grown[at].mean(0)),
                    ("sum", grown[at].sum(0)),
                    ("max", grown[at].amax(0)),
                    ("min", grown[at].amin(0)),
                ):
                    torch.testing.assert_close(got[name][0], want)
                assert got["two"].item() == 2
                held = int(counts[at])
                torch.testing.assert_close(got["tokens"][:held, 0], grown[at].sum(1))
                assert (got["tokens"][held:] == 0).all()
            want = _every_padded_scores(case.queries(request, head), pages, page_size)
            torch.testing.assert_close(result.scores[request, head, : len(pages)], want)


def _every_padded_scores(q, pages, page_size):
    """Lane by lane: of every slot, only the pages that hold a token there take part."""
    totals, num_held = torch.zeros(len(pages), dtype=torch.float64), [len(k) for k, _ in pages]
    for slot in range(page_size):
        held = [at for at in range(len(pages)) if num_held[at] > slot]
        if not held:
            continue
        logits = torch.stack([pages[at][0][slot] @ q.T for at in held])
        sums = torch.stack([pages[at][0][slot].exp().sum() for at in held])
        mixed = torch.maximum((0.5 * logits).softmax(0), (sums / sums.sum())[:, None])
        lifted = torch.maximum(mixed, mixed.mean(0)).amax(1)
        for at, value in zip(held, lifted, strict=True):
            totals[at] += value
    return totals / torch.tensor(num_held, dtype=torch.float64)


class Elementwise(Flow):
    """One op on the scores; `BATCHED` values are broadcast to the pages of their row."""

    def __init__(self, op):
        self.logits, self.mean, self.op, self.select = GeMM(), Mean(dim=1), op, topK()
        self.page_mean = CMean(dim=1)

    def create_cache(self, page_size, head_dim):
        return {"c": (1, head_dim)}

    def forward_cache(self, cache, loc, ctx):
        self.page_mean(cache["k"], cache["c"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        score = self.logits(self.mean(q, ctx=ctx), cache["c"], ctx=ctx)
        self.select(self.op(score, ctx=ctx), o, ctx=ctx)


def identity_of(x):
    return x


@pytest.mark.parametrize(
    ("op", "formula"),
    [
        (Relu(), lambda x: x.clamp(min=0)),
        (Relu(alpha=0.1, beta=-3), lambda x: torch.where(x >= 0.1, x, -3.0)),
        (Sigmoid(), torch.sigmoid),
        (Sigmoid(alpha=0.5, beta=2.0), lambda x: 1 / (1 + (2 * x + 0.5).exp())),
        (Silu(), torch.nn.functional.silu),
        (Max(dim=1), identity_of),
        (Min(dim=2), identity_of),
        (Sum(dim=1), identity_of),
        (Softmax(scale=3.0), lambda x: (3 * x).softmax(-1)),
        (Normalize(), lambda x: x / x.sum()),
    ],
    ids=repr,
)
def test_ops_have_the_usual_functions_as_defaults(op, formula):
    case = flow_case(Elementwise(op).trace(16, 64), 4, (160, 16, 0), num_kv_heads=1)
    plain = flow_case(load_flow("block_sparse_attention").trace(16, 64), 4, (160, 16, 0), 1)
    got, logits = run(case).scores, run(plain).scores
    for request, n in enumerate((10, 1, 0)):
        want = formula(logits[request, 0, :n]) if n else logits[request, 0, :0]
        torch.testing.assert_close(got[request, 0, :n], want)


def test_relu_keeps_its_threshold_and_nan():
    case = flow_case(Elementwise(Relu(alpha=0.0, beta=-3.0)).trace(16, 64), 4, (48,), 1)
    case.q.fill_(0.0)
    case.fields["c"][case.page_table[0, 1].long()] = math.nan
    got = run(case).scores[0, 0, :3]
    assert got[0] == got[2] == 0.0 and got[1].isnan()


@pytest.mark.parametrize("how", [Mean, Max, Min, Sum])
def test_a_reduction_over_pages_sees_the_window_of_its_row_only(how):
    class Lifted(Elementwise):
        def __init__(self):
            super().__init__(how(dim=0))
            self.larger = Minimum()

        def forward_indexer(self, q, o, cache, ctx):
            score = self.logits(self.mean(q, ctx=ctx), cache["c"], ctx=ctx)
            row = self.op(score, ctx=ctx)  # [B, 1, 1]
            self.select(self.larger(score, row, ctx=ctx), o, ctx=ctx)

    graph = Lifted().trace(16, 64)
    assert graph.requirements.phases == 2
    case = flow_case(graph, 4, (160, 100, 0, 48), num_kv_heads=2)
    plain = flow_case(load_flow("block_sparse_attention").trace(16, 64), 4, (160, 100, 0, 48), 2)
    window = Window(2, 1)
    got, logits = run(case, window).scores, run(plain, window).scores
    reduce = {Mean: torch.mean, Max: torch.amax, Min: torch.amin, Sum: torch.sum}[how]
    for request, n in enumerate((10, 7, 0, 3)):
        inside = slice(min(2, n), max(min(2, n), n - 1))
        row = logits[request, :, inside]
        if row.shape[1]:
            want = torch.minimum(row, reduce(row, 1)[:, None])
            torch.testing.assert_close(got[request, :, inside], want)


def test_a_load_after_a_save_reads_what_the_field_holds():
    class Reread(Elementwise):
        def __init__(self):
            super().__init__(Load())
            self.save = Save()

        def create_cache(self, page_size, head_dim):
            return {"c": (1, head_dim), "r": (1, 1)}

        def forward_indexer(self, q, o, cache, ctx):
            score = self.logits(self.mean(q, ctx=ctx), cache["c"], ctx=ctx)
            self.save(score, cache["r"], ctx=ctx)
            self.select(self.op(cache["r"], ctx=ctx), o, ctx=ctx)

    case = flow_case(Reread().trace(16, 64), 4, (160,), state_dtype=torch.bfloat16)
    plain = flow_case(load_flow("block_sparse_attention").trace(16, 64), 4, (160,))
    assert torch.equal(run(case).scores, run(plain).scores.bfloat16().double())


def test_softmax_of_nothing_but_minus_infinity_has_no_mass():
    graph = load_flow("h2o_token_sparse_attention").trace(1, 64)
    case = flow_case(graph, 1, (6,), num_kv_heads=1)
    case.q.fill_(1.0)
    case.keys.fill_(-math.inf)
    result = run(case)
    assert (result.scores[0, 0, :6] == 0).all() and (case.fields["hh"] == 0).all()


def test_nan_in_a_key_ranks_its_page_last_and_is_counted():
    graph = load_flow("gqa_quest_sparse_attention").trace(16, 64)
    case = flow_case(graph, 4, (160,), num_kv_heads=1)
    case.keys[case.page_table[0, 4].long(), 3] = math.nan
    case.write_all()
    result = run(case, budget=Budget(9))
    assert int(result.selection.num_nan[0, 0]) == 1
    assert result.selection.positions[0, 0].tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"pages": [0, 0]}, r"pages=\[0, 0\]: each page is written once"),
        ({"pages": [0, 9]}, r"pages=\[0, 9\]: must be in \[0, 4\)"),
        ({"counts": [1, 17]}, r"counts=\[1, 17\]: must be in \[0, 16\]"),
        ({"counts": [1]}, r"pages, counts, first_slots=.*: must have one shape \[n\]"),
        ({"dtype": torch.bfloat16}, r"dtype=torch.bfloat16: must be float64 or float32"),
        ({"c": (4, 1, 1, 64)}, r"c.shape=\(4, 1, 1, 64\): must be \(4, 2, 1, 64\)"),
        ({"c": None}, r"c=None: flow block_sparse_attention needs this field; use allocate_fields"),
    ],
)
def test_writes_that_are_not_legal_are_refused(change, match):
    graph = load_flow("block_sparse_attention").trace(16, 64)
    fields, k = allocate_fields(graph, 4, 2), torch.zeros(4, 16, 2, 64)
    if "c" in change:
        fields.pop("c")
        if change["c"]:
            fields["c"] = torch.zeros(change["c"])
    pages, counts = (torch.tensor(change.get(n, [0, 1])) for n in ("pages", "counts"))
    with pytest.raises(ValueError, match=match):
        interpret_cache(
            graph, fields, k, k, pages, counts, dtype=change.get("dtype", torch.float64)
        )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda c: setattr(c, "q", c.q[:, :7]),
            r"q.shape=\(2, 7, 64\): must be \[batch, a multiple",
        ),
        (lambda c: setattr(c, "page_table", c.page_table[:1]), r"page_table.shape=\(1, 12\): must"),
        (lambda c: setattr(c, "lengths", c.lengths[:1]), r"sequence_lengths.shape=\(1,\): must"),
        (lambda c: c.lengths.fill_(1000), r"sequence_lengths\[0\]=1000: must be 0 to 192"),
        (lambda c: c.page_table[1].fill_(99), r"page_table\[1, 0, 0\]=99: must be in \[0, 16\)"),
    ],
)
def test_steps_that_are_not_legal_are_refused(change, match):
    case = flow_case(load_flow("block_sparse_attention").trace(16, 64), 4, (160, 33))
    change(case)
    with pytest.raises(ValueError, match=match):
        run(case)
