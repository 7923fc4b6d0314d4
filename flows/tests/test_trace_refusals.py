"""What a trace refuses: each rule by one flow that breaks it, and the message read."""

import re

import pytest
import torch

from stream_attention.flows import (
    Abs,
    Add,
    CMax,
    CMean,
    Field,
    Fill,
    Flow,
    GeMM,
    GeMV,
    Load,
    Max,
    Mean,
    Multiply,
    Reshape,
    Save,
    Softmax,
    Sum,
    TraceError,
    load_flow,
    topK,
)


class Legal(Flow):
    """A legal flow with a summary and a state, and every op that the cases below use."""

    def __init__(self):
        self.mean, self.page_mean, self.page_max = Mean(dim=1), CMean(dim=1), CMax(dim=1)
        self.mean_of_pages, self.softmax = Mean(dim=0), Softmax(dim=0)
        self.page_mean_0 = CMean(dim=0)
        self.gemv, self.gemm, self.add, self.multiply = GeMV(), GeMM(), Add(), Multiply()
        self.max, self.sum, self.abs = Max(dim=2), Sum(dim=2), Abs()
        self.load, self.save, self.top = Load(), Save(), topK()
        self.fill = Fill(0.0)

    def create_cache(self, page_size, head_dim):
        return {"c": Field((1, head_dim), kind="summary"), "r": (1, 1)}

    def forward_cache(self, cache, loc, ctx):
        self.page_mean(cache["k"], cache["c"], loc=loc, ctx=ctx)

    def score(self, q, cache, ctx):
        score = self.gemv(self.mean(q, ctx=ctx), cache["c"], ctx=ctx)
        return self.add(score, self.load(cache["r"], ctx=ctx), ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        score = self.score(q, cache, ctx)
        self.save(score, cache["r"], ctx=ctx)
        self.top(score, o, ctx=ctx)


def refused(match, page_size=16, head_dim=64, **hooks):
    """Trace `Legal` with hooks of its own; it must fail, in this file, with these words."""
    flow = type("Broken", (Legal,), hooks)()
    with pytest.raises(TraceError, match=match) as caught:
        flow.trace(page_size, head_dim)
    assert re.match(rf"flow Broken, {re.escape(__file__)}:\d+: ", str(caught.value))
    return str(caught.value)


def indexer(body):
    """A `forward_indexer` that runs `body(self, q, o, cache, ctx)` after the legal start."""
    return {"forward_indexer": body}


def test_the_flow_that_the_cases_change_is_legal():
    graph = Legal().trace(16, 64)
    assert [field.kind for field in graph.declared] == ["summary", "state"]


def test_an_unknown_field_names_the_nearest():
    def hook(self, q, o, cache, ctx):
        self.top(self.gemv(q, cache["cc"], ctx=ctx), o, ctx=ctx)

    refused(r"cache\['cc'\]: create_cache declares no such field; use 'c'", **indexer(hook))


def test_a_summary_is_not_saved():
    def hook(self, q, o, cache, ctx):
        self.save(self.load(cache["c"], ctx=ctx), cache["c"], ctx=ctx)

    refused(
        r"Save\(%1 ragged \[1, D\] of line \d+, cache\['c'\] paged \[1, D\]\): .* is a summary, "
        r"which only forward_cache writes; use Field",
        **indexer(hook),
    )


def test_a_field_that_forward_cache_writes_is_no_state():
    def hook(self, cache, loc, ctx):
        self.page_mean(cache["k"], cache["c"], loc=loc, ctx=ctx)
        self.page_mean(self.page_max(cache["c"], loc=loc, ctx=ctx), loc=loc, ctx=ctx)
        CMax(dim=2)(cache["c"], cache["r"], loc=loc, ctx=ctx)

    refused(
        r"cache\['r'\] paged \[1, 1\] is a state, saved at .*:\d+; forward_cache",
        forward_cache=hook,
    )


def test_save_is_no_op_of_the_cache_side():
    def hook(self, cache, loc, ctx):
        self.save(cache["k"], cache["c"], ctx=ctx)

    refused(
        r"Save\(.*\): is an op of forward_indexer, not of forward_cache; use op\(x",
        forward_cache=hook,
    )


def test_forward_cache_does_not_accumulate():
    def hook(self, cache, loc, ctx):
        self.page_mean(cache["c"], cache["c"], loc=loc, ctx=ctx)

    refused(r"cache\['c'\] paged \[1, D\] is read before this step writes it", forward_cache=hook)


def test_forward_cache_reads_what_the_same_step_wrote():
    def hook(self, cache, loc, ctx):
        self.page_mean(cache["k"], cache["c"], loc=loc, ctx=ctx)
        self.page_mean(cache["c"], cache["c"], loc=loc, ctx=ctx)

    graph = type("Twice", (Legal,), {"forward_cache": hook})().trace(16, 64)
    assert [node.op for node in graph.cache.nodes] == [
        "load", "mean", "store", "load", "mean", "store",
    ]  # fmt: skip


def test_top_k_ends_a_step_once():
    def hook(self, q, o, cache, ctx):
        score = self.score(q, cache, ctx)
        self.top(score, o, ctx=ctx)
        self.top(score, o, ctx=ctx)

    refused(r"topK\(%\d+ .*\): comes after topK of .*:\d+, which ends", **indexer(hook))


def test_nothing_is_computed_after_top_k():
    def hook(self, q, o, cache, ctx):
        score = self.score(q, cache, ctx)
        self.top(score, o, ctx=ctx)
        self.save(score, cache["r"], ctx=ctx)

    refused(r"Save\(.*\): comes after topK .*; use it before topK", **indexer(hook))


def test_a_step_without_top_k_has_no_end():
    refused(
        r"forward_indexer has no topK, which must end it; use topK\(\)\(score, o, ctx=ctx\)",
        **indexer(lambda self, q, o, cache, ctx: self.score(q, cache, ctx)),
    )


@pytest.mark.parametrize(
    ("use", "match"),
    [
        (
            lambda f, q, o, c, x: f.softmax(q, ctx=x),
            r"Softmax\(%0 batched \[G, D\].*must be ragged",
        ),
        (
            lambda f, q, o, c, x: f.mean_of_pages(q, ctx=x),
            r"Mean\(%0 batched .*must be ragged, not",
        ),
        (
            lambda f, q, o, c, x: f.top(f.max(f.mean(q, ctx=x), ctx=x), o, ctx=x),
            r"topK.*not batched",
        ),
        (
            lambda f, q, o, c, x: f.save(f.max(f.mean(q, ctx=x), ctx=x), c["r"], ctx=x),
            r"Save\(%2 batched \[1, 1\] of line \d+, cache\['r'\].*must be ragged",
        ),
    ],
)
def test_formats_that_do_not_fit_are_refused(use, match):
    refused(match, forward_indexer=lambda self, q, o, cache, ctx: use(self, q, o, cache, ctx))


@pytest.mark.parametrize(
    ("use", "match"),
    [
        (
            lambda f, q, o, c, x: f.multiply(q, f.gemm(q, c["c"], ctx=x), ctx=x),
            r"Multiply\(%0 batched \[G, D\] of line \d+, %2 ragged \[1, G\] of line \d+\): "
            r"cols D and G must be equal, or one of them 1",
        ),
        (
            lambda f, q, o, c, x: f.gemm(q, c["r"], ctx=x),
            r"GeMM\(%0 .*, cache\['r'\] paged \[1, 1\]\): cols D and 1 must be equal",
        ),
        (lambda f, q, o, c, x: f.gemv(q, c["c"], ctx=x), r"x has G rows, must have 1; use GeMM"),
        (lambda f, q, o, c, x: f.top(c["c"], o, ctx=x), r"a score is one number a page, \[1, 1\]"),
        (lambda f, q, o, c, x: f.save(c["c"], c["r"], ctx=x), r"must have one shape; use r="),
        (
            lambda f, q, o, c, x: Reshape(2, 3)(c["c"], ctx=x),
            r"Reshape\(cache\['c'\] .*\): 1 x 64 elements do not fill 2 x 3",
        ),
        (lambda f, q, o, c, x: Reshape(1, 64)(q, ctx=x), r"\[G, D\] has G heads"),
        (lambda f, q, o, c, x: Reshape(32, 32)(c["k"], ctx=x), r"tokens may not be mixed"),
        (lambda f, q, o, c, x: f.add(q, ctx=x), r"Add\(%0 .*\): takes 2 operands, not 1"),
        (lambda f, q, o, c, x: f.add(q, 1.0, ctx=x), r"float 1.0 is nothing to compute with"),
        (lambda f, q, o, c, x: f.add(q, o, ctx=x), r"o, where topK puts .* is nothing to compute"),
        (lambda f, q, o, c, x: f.load(q, ctx=x), r"Load\(%0 .*\): %0 .* must be a field"),
        (lambda f, q, o, c, x: f.top(q, q, ctx=x), r"topK\(.*\): %0 .* must be o"),
    ],
)
def test_shapes_and_operands_that_do_not_fit_are_refused(use, match):
    refused(match, forward_indexer=lambda self, q, o, cache, ctx: use(self, q, o, cache, ctx))


@pytest.mark.parametrize(
    ("field", "match"),
    [
        (lambda: Field((1, 1), dtype=torch.int32), r"dtype=torch.int32: must be one of bfloat16"),
        (lambda: Field((1, 1), dtype="float32"), r"dtype='float32': must be one of"),
        (lambda: Field((1, 1), torch.float8_e4m3fn, "state"), r"must be one of float32, bfloat16"),
        (lambda: Field((1, 1), kind="cache"), r"kind='cache': must be one of summary, state"),
        (lambda: Field((1, 0)), r"shape=\(1, 0\): must be \(rows, cols\), two ints >= 1"),
        (lambda: Field((1, 1), init=float("nan")), r"init=nan: must be a number; use 0.0"),
    ],
)
def test_a_field_of_a_wrong_dtype_kind_or_shape_is_refused(field, match):
    with pytest.raises(ValueError, match=match):
        field()


def test_a_state_is_not_kept_in_eight_bits():
    refused(
        r"Save\(.*\): a state accumulates, so its dtype=float8_e4m3fn must .*; use float32",
        create_cache=lambda self, page_size, head_dim: {
            "c": (1, head_dim),
            "r": Field((1, 1), torch.float8_e4m3fn),
        },
    )


@pytest.mark.parametrize("name", ["k", "v"])
def test_k_and_v_are_reserved(name):
    refused(
        rf"field='{name}': is reserved: every pool has k and v; use 'page_{name}'",
        create_cache=lambda self, page_size, head_dim: {name: (1, 1), "c": (1, 64), "r": (1, 1)},
    )


def test_nobody_writes_keys():
    def hook(self, cache, loc, ctx):
        self.fill(cache["k"], loc=loc, ctx=ctx)

    refused(
        r"Fill\(cache\['k'\] .*\): .* is K or V itself, which no flow writes", forward_cache=hook
    )


@pytest.mark.parametrize("name", ["h2o_token_sparse_attention", "gqa_h2o_token_sparse_attention"])
@pytest.mark.parametrize("page_size", [2, 16])
def test_a_token_flow_has_pages_of_one_token(name, page_size):
    match = rf"flow {name}: page_size={page_size}: must be one of 1; use 1"
    with pytest.raises(ValueError, match=match):
        load_flow(name).create_cache(page_size, 64)
    with pytest.raises(ValueError, match=match):
        load_flow(name).trace(page_size, 64)


def test_a_value_does_not_outlive_its_trace():
    kept = []

    def hook(self, q, o, cache, ctx):
        if kept:
            self.add(q, kept[0], ctx=ctx)
        kept.append(q)
        Legal.forward_indexer(self, q, o, cache, ctx)

    broken = type("Broken", (Legal,), indexer(hook))
    broken().trace(16, 64)
    with pytest.raises(TraceError, match=r"Add\(%0 .*, %0 .*\): %0 .* is of another trace"):
        broken().trace(16, 64)


def test_the_indexers_values_are_not_the_cache_sides():
    kept = []

    def hook(self, q, o, cache, ctx):
        kept.append(q)
        Legal.forward_indexer(self, q, o, cache, ctx)

    def fill(self, cache, loc, ctx):
        self.page_mean(kept[0], cache["c"], loc=loc, ctx=ctx)

    refused(r"is of another trace \(forward_indexer\)", forward_indexer=hook, forward_cache=fill)


def test_each_side_has_ops_of_its_own():
    refused(
        r"CMax\(%0 .*\): is an op of forward_cache, not of forward_indexer; use Max",
        **indexer(lambda self, q, o, cache, ctx: self.page_max(q, ctx=ctx)),
    )
    refused(
        r"Max\(cache\['k'\] paged \[P, D\]\): is an op of forward_indexer, .*; use CMax",
        forward_cache=lambda self, cache, loc, ctx: self.max(cache["k"], loc=loc, ctx=ctx),
    )
    refused(
        r"Fill\(.*\): is an op of forward_cache, .*; use Field\(..., init=...\)",
        **indexer(lambda self, q, o, cache, ctx: self.fill(cache["r"], ctx=ctx)),
    )
    refused(
        r"Softmax\(.*\): is an op of forward_indexer, .*; use it in forward_indexer",
        forward_cache=lambda self, cache, loc, ctx: self.softmax(cache["k"], loc=loc, ctx=ctx),
    )
    refused(
        r"CMean\(.*\): dim=0 runs over candidate pages, which forward_cache does not know",
        forward_cache=lambda self, cache, loc, ctx: self.page_mean_0(cache["k"], ctx=ctx),
    )


@pytest.mark.parametrize(
    ("use", "match"),
    [
        (lambda q: 1 if q else 2, r"truth of %0 batched \[G, D\] of line \d+: has no numbers"),
        (lambda q: q > 0, r"comparison of %0 .* and int 0: has no numbers"),
        (lambda q: q == 0, r"comparison of %0"),
        (lambda q: float(q), r"a number of %0"),
        (lambda q: list(q), r"iteration of %0"),
        (lambda q: q[0], r"\[\] of %0"),
        (lambda q: q + q, r"\+ of %0 .* and %0 .*; use Add\(\)"),
        (lambda q: 2 * q, r"\* of %0 .*; use Multiply\(\)"),
        (lambda q: q @ q, r"@ of %0 .*; use GeMM\(\)"),
        (lambda q: q.sum(1), r"%0 batched .* has no .sum; use an op"),
        (lambda q: torch.relu(q), r"torch's relu of %0 .*: is no op of a flow"),
    ],
)
def test_python_sees_no_numbers_and_says_which_line_asked(use, match):
    refused(match, **indexer(lambda self, q, o, cache, ctx: use(q)))


def test_an_assignment_to_the_cache_is_no_write():
    def hook(self, q, o, cache, ctx):
        cache["r"] = q

    refused(r"cache\['r'\] = %0 .*: fields are written by ops", **indexer(hook))


def test_a_state_is_saved_once_a_step():
    def hook(self, q, o, cache, ctx):
        score = self.score(q, cache, ctx)
        self.save(score, cache["r"], ctx=ctx)
        self.save(score, cache["r"], ctx=ctx)

    refused(r"Save\(.*\): the field was saved at .*:\d+, a step saves once", **indexer(hook))


def test_what_is_read_is_written_somewhere():
    refused(
        r"field c=.*: is read, and nothing writes it",
        forward_cache=lambda self, cache, loc, ctx: None,
    )


def test_an_op_is_called_while_a_flow_is_traced():
    with pytest.raises(
        TraceError, match=r"test_trace_refusals.py:\d+: Add\(int 1, int 2, NoneType"
    ):
        Add()(1, 2)


def test_attributes_are_checked_when_built_and_when_traced():
    with pytest.raises(ValueError, match=r"Mean: dim=3: must be one of 0, 1, 2; use 1"):
        Mean(dim=3)
    with pytest.raises(ValueError, match=r"Softmax: dim=1: must be one of 0; use 0"):
        Softmax(dim=1)
    with pytest.raises(
        ValueError, match=r"Add: got an unexpected keyword argument 'gamma'; use Add"
    ):
        Add(gamma=1)
    refused(
        r"Softmax: scale=None: must be a finite number; use 1.0, by create_cache",
        **indexer(lambda self, q, o, cache, ctx: Softmax(scale=None)(cache["c"], ctx=ctx)),
    )


@pytest.mark.parametrize(
    ("page_size", "head_dim", "name"), [(0, 64, "page_size"), (16, -1, "head_dim")]
)
def test_sizes_are_at_least_one(page_size, head_dim, name):
    with pytest.raises(ValueError, match=rf"flow Legal: {name}=-?\d: must be >= 1; use"):
        Legal().trace(page_size, head_dim)
