"""The device top-k through Triton's interpreter: the pages, their order and lengths of `select`."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_attention.flows.selection import budgets_of, select
from stream_attention.flows.top_k import MOST_PAGES, TopK, TopKConfig
from stream_attention.flows.window import Budget, Window, pages_of

# Tiles so small that rows of a few hundred pages are cut, sampled and searched in memory.
TINY = TopKConfig(single_pages=16, tile=16, chunk=32, sample=32, candidates=64)
FEW_CANDIDATES = TopKConfig(single_pages=16, tile=32, chunk=32, sample=64, candidates=16)
ONE_TILE = TopKConfig(single_pages=16, tile=64, chunk=64, sample=64, candidates=128)
CONFIGS = {"single": TopKConfig(), "tiny": TINY, "few": FEW_CANDIDATES, "one_tile": ONE_TILE}
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45, 1.0, 1.0, -2.5, 3.4e38, -3.4e38)
GARBAGE = 2**31 - 1


def table_of(batch, heads, max_pages, rank, rng):
    shape = (batch, max_pages) if rank == 2 else (batch, heads, max_pages)
    return torch.randint(0, 1 << 30, shape, generator=rng, dtype=torch.int32)


def expected(scores, table, lengths, page_size, window, budgets):
    """(pages, tokens, NaNs) of every row, lists of lists."""
    batch, heads, _ = scores.shape
    n = pages_of(lengths, page_size)[:, None].expand(batch, heads)
    chosen = select(scores, n, budgets, window)
    wide = table if table.ndim == 3 else table[:, None].expand(batch, heads, -1)
    pages, tokens = [], []
    for b in range(batch):
        for h in range(heads):
            at = chosen.positions[b, h, : int(chosen.counts[b, h])].tolist()
            pages.append([int(wide[b, h, i]) for i in at])
            length = int(lengths[b])
            tokens.append(sum(min(page_size, length - i * page_size) for i in at))
    return pages, tokens, chosen.num_nan.reshape(-1).tolist()


def outputs_of(plan, batch, heads, extra=0):
    fill = {"fill_value": GARBAGE, "dtype": torch.int32}
    outputs = [torch.full((batch, heads, plan.width + extra), **fill)]
    return outputs + [torch.full((batch, heads), **fill) for _ in range(2)]


def check(scores, lengths, window, budget, page_size=1, config=None, rank=2, extra=0, **options):
    """Run a plan over `scores` [batch, heads, max_pages], whose unread places are made NaN."""
    batch, heads, max_pages = scores.shape
    lengths = torch.tensor(lengths, dtype=torch.int32)
    n = pages_of(lengths, page_size)
    scores, at = scores.clone(), torch.arange(max_pages)
    first, last = window.bounds(n)
    unread = (at < first[:, None]) | (at >= last[:, None])
    scores[unread[:, None].expand_as(scores)] = math.nan
    rng = torch.Generator().manual_seed(max_pages)
    table = table_of(batch, heads, max_pages, rank, rng)
    plan = TopK(
        max_pages, batch * heads, page_size, window, budget, "cpu", config=config, **options
    )
    out, out_lengths, nan = outputs_of(plan, batch, heads, extra)
    plan.run(scores, table, lengths, out, out_lengths, nan)
    budgets = budgets_of(scores, n[:, None].expand(batch, heads), budget, window)
    if "max_budget" in options:
        budgets = budgets.clamp(max=options["max_budget"])
    pages, tokens, num_nan = expected(scores, table, lengths, page_size, window, budgets)
    for row, want in enumerate(pages):
        got = out.reshape(batch * heads, -1)[row].tolist()
        assert got[: len(want)] == want, f"row {row}"
        assert not any(got[len(want) :]), f"row {row}: not cleared"
    assert out_lengths.reshape(-1).tolist() == tokens
    assert nan.reshape(-1).tolist() == num_nan
    return plan, out


def scores_of(kind, shape, seed=0):
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randn(shape, generator=rng)
    if kind == "equal":
        scores[:] = 0.25
    elif kind == "duplicates":
        scores = torch.randint(0, 5, shape, generator=rng).float()
    elif kind == "minus_infinity":
        scores[torch.rand(shape, generator=rng) < 0.7] = -math.inf
    elif kind == "nan":
        scores[torch.rand(shape, generator=rng) < 0.7] = math.nan
    elif kind == "zeros":
        scores = torch.where(torch.rand(shape, generator=rng) < 0.5, 0.0, -0.0)
    elif kind == "subnormal":
        scores = scores * 1e-40
    elif kind == "special":
        scores = torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), shape, generator=rng)]
    elif kind == "ascending":
        scores = scores.sort(-1).values
    elif kind == "descending":
        scores = scores.sort(-1, descending=True).values
    return scores


KINDS = (
    "normal", "equal", "duplicates", "minus_infinity", "nan", "zeros", "subnormal", "special",
    "ascending", "descending",
)  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 100, 1000, 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_one_block_is_that_of_select(n, kind):
    scores = scores_of(kind, (1, 2, n), seed=n)
    plan, _ = check(scores, [n], Window(1, 1), Budget(1 + n // 7))
    assert plan.num_launches == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", ["tiny", "few", "one_tile"])
def test_a_row_of_chunks_is_that_of_select(kind, config):
    scores = scores_of(kind, (3, 1, 200))
    for topk in (1, 40):
        plan, _ = check(scores, [200, 17, 0], Window(1, 1), Budget(topk), config=CONFIGS[config])
        assert plan.num_launches == 2


@pytest.mark.parametrize(
    ("n", "topk", "kind"),
    [
        (8193, 32, "normal"),
        (65_537, 9000, "normal"),
        (131_072, 64, "normal"),
        (131_072, 13_107, "nan"),
        (131_072, 2048, "duplicates"),
    ],
)
def test_long_rows_with_the_tiles_that_ship(n, topk, kind):
    check(scores_of(kind, (1, 1, n), seed=n), [n], Window(4, 8), Budget(topk))


@pytest.mark.parametrize("config", CONFIGS)
def test_an_unlucky_sample_changes_nothing(config):
    """All large scores in one chunk; then no sampled score is large but every other one is."""
    scores = torch.randn(2, 1, 320, generator=torch.Generator().manual_seed(5))
    scores[0, 0, 64:90] += 100
    part = torch.arange(32)
    sampled = ((part << 16) + ((part * 2654435761 & 0xFFFFFFFF) >> 16)) * 320 >> 21
    scores[1] += 1000
    scores[1, 0, sampled] -= 2000
    for topk in (3, 100, 300):
        check(scores, [320, 320], Window(0, 0), Budget(topk), config=CONFIGS[config])


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rank", [2, 3])
def test_ragged_batches_page_sizes_and_ranks(config, rank):
    scores = scores_of("normal", (7, 3, 100))
    for page_size, extra in ((16, 0), (5, 3)):
        lengths = [0, 1, page_size, page_size + 1, 50 * page_size - 1, 100 * page_size, 0]
        check(scores, lengths, Window(2, 1), Budget(6), page_size, CONFIGS[config], rank, extra)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_last_page_that_is_not_selected_makes_every_page_full(config):
    scores = torch.zeros(2, 1, 40)
    scores[1, 0, 39] = 1.0
    plan, _ = check(scores, [40 * 16 - 3] * 2, Window(0, 0), Budget(3), 16, CONFIGS[config])
    assert plan.width == 3


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "budget",
    [
        Budget(0),
        Budget(10**6),
        Budget(3, 0.29),
        Budget(0, 1.0),
        Budget(per_row=torch.tensor([0, 5, 1000, -3, 60], dtype=torch.int32)),
        Budget(per_row=torch.tensor([[0, 1], [5, 10**10], [9, 7], [-(10**10), 2], [60, 61]])),
    ],
    ids=["none", "beyond", "ratio", "all", "per_request", "per_row_int64"],
)
def test_budgets_of_every_kind(budget, config):
    scores = scores_of("duplicates", (5, 2, 70))
    check(scores, [70, 69, 33, 70, 70], Window(2, 3), budget, config=CONFIGS[config])


@pytest.mark.parametrize("config", CONFIGS)
def test_budgets_per_row_are_cut_to_max_budget_and_read_every_run(config):
    per_row = torch.tensor([3, 50], dtype=torch.int32)
    scores = scores_of("normal", (2, 1, 70))
    options = {"config": CONFIGS[config], "max_budget": 9}
    plan, before = check(scores, [70, 70], Window(1, 1), Budget(per_row=per_row), **options)
    assert plan.width == 11
    per_row[0] = 7
    lengths = torch.tensor([70, 70], dtype=torch.int32)
    table = torch.arange(1, 71, dtype=torch.int32).expand(2, 70).contiguous()
    out, out_lengths, _ = outputs_of(plan, 2, 1)
    plan.run(scores, table, lengths, out, out_lengths)
    assert (before[0, 0] > 0).sum() == 5 and (out[0, 0] > 0).sum() == 9
    assert out_lengths.tolist() == [[9], [11]]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("bos", "eos"), [(0, 0), (50, 0), (0, 50), (40, 45), (10**9, 10**9)])
def test_reserved_pages_beyond_the_row(bos, eos, config):
    scores = scores_of("normal", (4, 1, 60))
    check(scores, [0, 7, 50, 60], Window(bos, eos), Budget(4), config=CONFIGS[config])


@settings(max_examples=60, deadline=None)
@given(
    config=st.sampled_from(sorted(CONFIGS)),
    rows=st.lists(st.lists(st.sampled_from(SPECIAL) | st.floats(-3, 3, width=32), max_size=150),
                  min_size=1, max_size=2),
    topk=st.integers(0, 40),
    ratio=st.sampled_from((0.0, 0.1, 0.5)),
    bos=st.integers(0, 4),
    eos=st.integers(0, 4),
    page_size=st.sampled_from((1, 3, 16)),
    tail=st.integers(0, 15),
)  # fmt: skip
def test_random_rows(config, rows, topk, ratio, bos, eos, page_size, tail):
    scores = torch.zeros(len(rows), 1, 150)
    lengths = []
    for b, row in enumerate(rows):
        scores[b, 0, : len(row)] = torch.tensor(row)
        lengths.append(max(0, len(row) * page_size - tail % page_size))
    budget = Budget(topk, ratio)
    check(scores, lengths, Window(bos, eos), budget, page_size, CONFIGS[config])


def masses(scores, scale):
    """Cumulative masses in fp64, best first."""
    numbers = scores[~scores.isnan()].double().sort(descending=True).values
    weights = torch.where(numbers == numbers[0], 1.0, (scale * (numbers - numbers[0])).exp())
    return weights.cumsum(0) / weights.sum()


def check_mass(scores, window, budget, config):
    """Device and reference take equally many, or the masses between are within 1e-5 of `mass`."""
    n = scores.shape[-1]
    table = torch.arange(n, dtype=torch.int32).expand(1, n)
    plan = TopK(n, 1, 1, window, budget, "cpu", config=config)
    out, out_lengths, _ = outputs_of(plan, 1, 1)
    plan.run(scores, table, torch.tensor([n], dtype=torch.int32), out, out_lengths)
    num = torch.tensor([[n]])
    want_k = int(budgets_of(scores, num, budget, window))
    got_k = int(out_lengths) - window.bos - window.eos
    first, last = (int(x) for x in window.bounds(torch.tensor(n)))
    if got_k != min(want_k, last - first):
        low, high = sorted((got_k, want_k))
        between = masses(scores[0, 0, first:last], budget.mass_scale)[max(low - 1, 0) : high]
        assert ((between - budget.mass).abs() < 1e-5).any(), (got_k, want_k, between)
        assert ((between - budget.mass).abs() < 1e-5)[:-1].all(), (got_k, want_k, between)
    want = select(scores, num, torch.tensor([[got_k]]), window).positions[0, 0].tolist()
    assert out[0, 0, : len(want)].tolist() == want


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_budgets_by_mass(kind, config):
    scores = scores_of(kind, (1, 1, 130), seed=3)
    for mass, scale, least, most in (
        (0.5, 1.0, 0, None),
        (0.9, 3.0, 0, 30),
        (0.99, 0.5, 4, 20),
        (0.3, 8.0, 12, 60),
        (1.0, 1.0, 0, None),
    ):
        if most is None and config in ("tiny", "few") and kind not in ("normal", "special"):
            continue  # searched in memory, which the interpreter takes many seconds for
        budget = Budget(mass=mass, mass_scale=scale, min_pages=least, max_pages=most)
        check_mass(scores, Window(1, 2), budget, CONFIGS[config])


def test_a_budget_by_mass_of_a_long_row():
    scores = scores_of("normal", (1, 1, 20_000))
    budget = Budget(mass=0.9, mass_scale=4.0, max_pages=1500)
    check_mass(scores, Window(1, 2), budget, None)


def test_mass_of_the_reference_is_that_of_a_loop():
    scores = torch.tensor([[0.0, 2.0, math.nan, 1.0, 2.0, -math.inf]])
    weights = [1.0, 1.0, math.exp(-1), math.exp(-2), 0.0]
    for mass in (0.1, 0.4, 0.5, 0.9, 0.99, 1.0):
        k = next(k for k in range(1, 6) if sum(weights[:k]) >= mass * sum(weights))
        n = torch.tensor([6])
        assert budgets_of(scores, n, Budget(mass=mass), Window(0, 0)).tolist() == [k]
    nothing = torch.full((1, 6), math.nan)
    assert budgets_of(nothing, n, Budget(mass=0.5, min_pages=2), Window(0, 0)).tolist() == [2]
    infinite = torch.tensor([[math.inf, 5.0, math.inf, 0.0, 1.0, 2.0]])
    assert budgets_of(infinite, n, Budget(mass=0.9), Window(0, 0)).tolist() == [2]
    with pytest.raises(ValueError, match=r"mass=0.5: depends on scores; use selection.budgets_of"):
        Budget(mass=0.5).pages(n)


@triton.jit
def softmax_finish(score_ptr, aux_ptr, row, row_offset, positions, live):
    logits = tl.load(score_ptr + row_offset + positions, mask=live, other=0.0)
    state = tl.load(aux_ptr + row * 400 + 2 + positions, mask=live, other=0.0)
    largest, total = tl.load(aux_ptr + row * 400), tl.load(aux_ptr + row * 400 + 1)
    return tl.exp(logits - largest) / total + 0.5 * state


@triton.jit
def save_state(score_ptr, aux_ptr, row, row_offset, positions, scores, live):
    tl.store(aux_ptr + row * 400 + 2 + positions, scores, mask=live)


@pytest.mark.parametrize("config", CONFIGS)
def test_scores_may_be_finished_and_states_saved_on_the_way(config):
    n, window = 300, Window(2, 3)
    logits = scores_of("normal", (2, 2, n))
    lengths = torch.tensor([n, 6], dtype=torch.int32)
    state = torch.rand(2, 2, n, generator=torch.Generator().manual_seed(1))
    want, aux = state.clone(), torch.zeros(2, 2, 400)
    for b, length in enumerate(lengths.tolist()):
        inside = slice(2, max(2, length - 3))
        x = logits[b, :, inside]
        aux[b, :, 0], aux[b, :, 1] = x.amax(-1), (x - x.amax(-1, True)).exp().sum(-1)
        softmax = (x - x.amax(-1, True)).exp() / aux[b, :, 1:2]
        want[b, :, inside] = softmax + 0.5 * state[b, :, inside]
    aux[:, :, 2 : 2 + n] = state
    plan = TopK(n, 4, 1, window, Budget(9), "cpu", config=CONFIGS[config],
                score=softmax_finish, save=save_state)  # fmt: skip
    out, out_lengths, _ = outputs_of(plan, 2, 2)
    table = torch.arange(n, dtype=torch.int32).expand(2, n).contiguous()
    plan.run(logits, table, lengths, out, out_lengths, aux=aux)
    got = aux[:, :, 2 : 2 + n]
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    chosen = select(got, lengths[:, None].expand(2, 2).long(), torch.full((2, 2), 9), window)
    assert out[0].tolist() == chosen.positions[0].tolist()
    assert out[1, :, :6].tolist() == [list(range(6))] * 2


@pytest.mark.parametrize("config", CONFIGS)
def test_runs_batches_and_tiles_give_the_same_bits(config):
    scores = scores_of("duplicates", (3, 1, 100))
    table = table_of(3, 1, 100, 2, torch.Generator().manual_seed(0))
    lengths = torch.tensor([100, 3, 70], dtype=torch.int32)
    plan = TopK(100, 5, 1, Window(1, 1), Budget(31), "cpu", config=CONFIGS[config])
    first, first_lengths, _ = outputs_of(plan, 3, 1)
    plan.run(scores, table, lengths, first, first_lengths)
    for order in ([0, 1, 2], [2], [1, 2, 2, 0, 1]):
        out, out_lengths, _ = outputs_of(plan, len(order), 1)
        plan.run(scores[order], table[order], lengths[order], out, out_lengths)
        assert torch.equal(out, first[order]) and torch.equal(out_lengths, first_lengths[order])


def test_lengths_out_of_range_are_cut_and_no_rows_launch_nothing():
    plan = TopK(8, 4, 16, Window(0, 0), Budget(100), "cpu")
    table = torch.arange(1, 17, dtype=torch.int32).reshape(2, 8)
    out, out_lengths, _ = outputs_of(plan, 2, 1)
    plan.run(
        torch.zeros(2, 1, 8), table, torch.tensor([-5, 999], dtype=torch.int32), out, out_lengths
    )
    assert out.tolist() == [[[0] * 8], [table[1].tolist()]] and out_lengths.tolist() == [[0], [128]]
    out, out_lengths, _ = outputs_of(plan, 0, 1)
    plan.run(torch.zeros(0, 1, 8), table[:0], torch.zeros(0, dtype=torch.int32), out, out_lengths)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: TopK(0, 1, 1, device="cpu"), rf"max_pages=0: must be an int in \[1, {MOST_PAGES}"),
        (lambda: TopK(1, 0, 1, device="cpu"), r"num_rows=0: must be an int >= 1; use 1"),
        (lambda: TopK(1, 1, 0.5, device="cpu"), r"page_size=0.5: must be an int >= 1; use 1"),
        (lambda: TopK(1, 1, 1, device="cpu", max_budget=3), r"max_budget=3: must be None or an"),
        (lambda: TopK(1, 1, 1, device="meta", budget=Budget(per_row=torch.ones(1).int())),
         r"budget.per_row.device='cpu': must be on the plan's device meta"),
        (lambda: TopKConfig(tile=24), r"tile=24: must be a power of two in \[16, 8192\]; use 16"),
        (lambda: TopKConfig(chunk=512), r"chunk=512: must be >= tile; use 4096"),
        (lambda: Budget(mass=1.5), r"Budget: mass=1.5: must be in \(0, 1\]; use 1.0"),
        (lambda: Budget(mass=0.5, per_row=torch.ones(1).int()), r"mass=0.5: must be None where"),
        (lambda: Budget(mass_scale=math.inf), r"mass_scale=inf: must be > 0; use 1.0"),
        (lambda: Budget(min_pages=-1), r"min_pages=-1: must be an int >= 0; use 0"),
        (lambda: Budget(min_pages=5, max_pages=4), r"max_pages=4: must be an int >= min_pages=5"),
    ],
)  # fmt: skip
def test_settings_that_are_not_legal_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_tensors_that_do_not_fit_are_refused_all_at_once():
    plan = TopK(8, 2, 16, budget=Budget(3), device="cpu")
    scores, lengths = torch.zeros(3, 1, 9), torch.zeros(3)
    out = torch.zeros(3, 1, 4, dtype=torch.int32)
    transposed = torch.zeros(8, 3, dtype=torch.int32).T
    with pytest.raises(ValueError) as raised:
        plan.run(scores, transposed, lengths, out, torch.zeros(3, 1).int()[:, :0])
    for text in (
        "scores.shape=(3, 1, 9): must be (3, 1, 8)",
        "page_table.stride(-1)=3: must be 1; use 1",
        "sequence_lengths.dtype=torch.float32: must be torch.int32",
        "out_page_table.shape=(3, 1, 4): must be (3, 1, 5)",
        "out_lengths.shape=(3, 0): must be (3, 1)",
        "scores.shape=(3, 1, 9): batch · num_kv_heads must be <= num_rows=2",
    ):
        assert text in str(raised.value)
