"""States: the recurrence, its mass, its window, and pages that change hands."""

import pytest
import torch

from stream_attention.flows import Field, load_flow
from stream_attention.flows.interpreter import interpret_cache, interpret_indexer
from stream_attention.flows.library.running_average_block import RunningAverageBlock
from stream_attention.flows.pool_fields import allocate_fields
from stream_attention.flows.testing.cases import flow_case
from stream_attention.flows.testing.formulas import TOKEN_FLOWS
from stream_attention.flows.window import Budget, Window

SEQ, GROUP, DIM, TOP, BOS, EOS = 128, 4, 128, 32, 4, 8
WINDOW, BUDGET = Window(BOS, EOS), Budget(TOP)
INSIDE = slice(BOS, SEQ - EOS)


def heavy_hitters(seed, name="h2o_token_sparse_attention", steps=1, **kwargs):
    """A token flow on one row whose keys and queries share a direction, so some keys are heavy.

    Gives (graph, fields, page table, lengths, queries [steps, G, D] bf16, keys [SEQ, D]).
    """
    rng = torch.Generator().manual_seed(seed)
    graph = load_flow(name, **kwargs).trace(1, DIM)
    shared = torch.randn(DIM, generator=rng)
    shared /= shared.norm()
    affinity = 2.0 * torch.randn(SEQ, 1, generator=rng)
    keys = (torch.randn(SEQ, DIM, generator=rng) + affinity * shared).bfloat16()
    queries = (0.3 * torch.randn(steps, GROUP, DIM, generator=rng) + shared).bfloat16()
    fields = allocate_fields(graph, SEQ, 1, torch.bfloat16)
    fields["k"] = fields["v"] = keys[:, None, None]
    table = torch.randperm(SEQ, generator=rng).to(torch.int32)[None]
    return graph, fields, table, torch.tensor([SEQ]), queries, keys[table[0].long()]


def attention(queries, keys, window=INSIDE):
    """[steps, SEQ] float64: `softmax(⟨q̄, k⟩ / √D)` over the window, 0 outside."""
    logits = queries.double().mean(1) @ keys.double().T * DIM**-0.5
    mass = torch.zeros_like(logits)
    mass[:, window] = logits[:, window].softmax(-1)
    return mass


def recurrence(mass, decay):
    total = torch.zeros(mass.shape[1], dtype=torch.float64)
    for step in mass:
        total = step + decay * total
    return total


def run_steps(graph, fields, table, lengths, queries, dtype=torch.float32):
    """All steps; gives the last step's positions and the state in table order."""
    for q in queries:
        result = interpret_indexer(graph, q[None], fields, table, lengths, WINDOW, BUDGET, dtype)
    return result.selection.positions[0, 0], fields["hh"][table[0].long(), 0, 0, 0].double()


def relative_error(got, want):
    return float((got - want).abs().max() / want.abs().max())


def reference_selection(total):
    window = total[INSIDE].topk(TOP).indices.sort().values + BOS
    return [*range(BOS), *window.tolist(), *range(SEQ - EOS, SEQ)]


@pytest.mark.parametrize("decay", [0.984375, 1.0])
@pytest.mark.parametrize("seed", range(16))
def test_the_recurrence_of_600_steps_is_that_of_float64(seed, decay):
    graph, fields, table, lengths, queries, keys = heavy_hitters(seed, steps=600, decay=decay)
    positions, state = run_steps(graph, fields, table, lengths, queries)
    want = recurrence(attention(queries, keys), decay)
    assert fields["hh"].dtype == torch.float32
    assert relative_error(state, want) < 1e-5
    assert positions.tolist() == reference_selection(want)


@pytest.mark.parametrize("decay", [0.984375, 1.0])
@pytest.mark.parametrize("round_to", [torch.float32, torch.bfloat16])
def test_800_steps_of_128_tokens_stay_near_whatever_probabilities_are_rounded_to(decay, round_to):
    # The recurrence alone: float32 state, probabilities rounded before they are added.
    rng = torch.Generator().manual_seed(0)
    affinity = 1.5 * torch.randn(128, generator=rng)
    noise = 0.5 * torch.randn(800, 128, generator=rng)
    mass = (affinity + noise).double().softmax(-1)
    state = torch.zeros(128)
    for step in mass:
        state = step.to(round_to).float() + decay * state
    bound = 1e-5 if round_to is torch.float32 else 1e-3
    want = recurrence(mass, decay)
    assert relative_error(state.double(), want) < bound
    assert set(state.topk(32).indices.tolist()) == set(want.topk(32).indices.tolist())


def test_a_bfloat16_state_loses_a_quarter_of_the_mass():
    graph, fields, table, lengths, queries, keys = heavy_hitters(0, steps=600, decay=1.0)
    fields["hh"] = fields["hh"].bfloat16()
    _, state = run_steps(graph, fields, table, lengths, queries)
    want = recurrence(attention(queries, keys), 1.0)
    lost = 1 - float(state.sum() / want.sum())
    assert 0.2 < lost < 0.3
    assert relative_error(state, want) > 0.1


@pytest.mark.parametrize("steps", [1, 10, 100, 600])
def test_the_mass_is_the_geometric_series(steps):
    decay = 0.984375
    graph, fields, table, lengths, queries, _ = heavy_hitters(1, steps=steps)
    _, state = run_steps(graph, fields, table, lengths, queries)
    expected = (1 - decay**steps) / (1 - decay)
    assert abs(float(state.sum()) - expected) / expected < 1e-3


def test_the_gqa_flow_adds_between_one_and_the_group_a_step():
    name = "gqa_h2o_token_sparse_attention"
    graph, fields, table, lengths, queries, _ = heavy_hitters(2, name, steps=20, decay=1.0)
    before = 0.0
    for q in queries:
        _, state = run_steps(graph, fields, table, lengths, q[None])
        added, before = float(state.sum()) - before, float(state.sum())
        assert 1 - 1e-5 <= added <= GROUP + 1e-5
    assert added > 1.0 + 1e-3  # heads do differ here


def test_exactly_the_window_gathers_mass():
    graph, fields, table, lengths, queries, keys = heavy_hitters(3, steps=3)
    _, state = run_steps(graph, fields, table, lengths, queries)
    inside = torch.zeros(SEQ, dtype=torch.bool)
    inside[INSIDE] = True
    assert torch.equal(state != 0, inside)
    assert int(inside.sum()) == 116
    assert relative_error(state, recurrence(attention(queries, keys), 0.984375)) < 1e-5
    # The negative control: a reference over the whole sequence is far away.
    whole = recurrence(attention(queries, keys, slice(None)), 0.984375)
    assert relative_error(state, whole) > 1e-2


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("name", TOKEN_FLOWS)
def test_a_short_row_gathers_like_any_other_and_is_read_whole(name, extra):
    n = BOS + EOS + TOP + extra
    graph = load_flow(name).trace(1, 64)
    case = flow_case(graph, 4, (n,), num_kv_heads=2)
    result = interpret_indexer(
        graph, case.q, case.fields, case.page_table, case.lengths, WINDOW, BUDGET
    )
    state = case.fields["hh"][case.page_table[0, :n].long()][:, :, 0, 0]
    for head in range(2):
        assert (state[:, head] != 0).nonzero()[:, 0].tolist() == list(range(BOS, n - EOS))
        count = int(result.selection.counts[0, head])
        assert count == min(n, BOS + EOS + TOP)
    assert (state.sum(0) >= 1 - 1e-6).all()


@pytest.mark.parametrize("num_kv_heads", [1, 8])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_reset_touches_exactly_the_pages_written(num_kv_heads, page_size):
    graph = load_flow("running_average_block").trace(page_size, 64)
    fields = allocate_fields(graph, 64, num_kv_heads, torch.float32)
    for name in ("r", "c"):
        fields[name].fill_(7.5)
    written = torch.tensor([3, 5, 11, 40])
    k = torch.randn(64, page_size, num_kv_heads, 64)
    interpret_cache(graph, fields, k, k, written, torch.full((4,), page_size))
    touched = torch.zeros(64, dtype=torch.bool)
    touched[written] = True
    assert (fields["r"][touched] == 0).all()
    for name in ("r", "c"):
        assert (fields[name][~touched] == 7.5).all(), name  # the last page is the guard
    want = k[written].double().mean(1)[:, :, None]
    torch.testing.assert_close(fields["c"][written].double(), want, rtol=1e-6, atol=1e-6)


def test_a_token_more_in_a_page_leaves_its_state_and_renews_its_summary():
    graph = load_flow("running_average_block").trace(16, 64)
    fields = allocate_fields(graph, 4, 1, torch.float32)
    fields["r"].fill_(7.5)
    k = torch.randn(4, 16, 1, 64)
    pages, counts, slots = torch.tensor([1, 2, 3]), torch.tensor([5, 1, 0]), torch.tensor([4, 0, 0])
    interpret_cache(graph, fields, k, k, pages, counts, first_slots=slots)
    assert fields["r"][:, 0, 0, 0].tolist() == [7.5, 7.5, 0, 7.5]
    torch.testing.assert_close(fields["c"][1, 0, 0], k[1, :5, 0].mean(0))
    assert (fields["c"][3] == 0).all()  # a page without a token keeps what it has


@pytest.mark.parametrize("name", [*TOKEN_FLOWS, "running_average_block"])
def test_a_recycled_page_starts_anew_and_its_neighbours_keep_what_they_have(name):
    page_size = 1 if name in TOKEN_FLOWS else 16
    graph = load_flow(name).trace(page_size, 64)
    state = graph.states[0].name
    case = flow_case(graph, 4, (40 * page_size, 40 * page_size), num_kv_heads=2)
    table = case.page_table.clone()
    table[:, :40] = torch.arange(80).reshape(40, 2).T  # A and C hold pages in turn
    pages_a, pages_c = table[0, :40].long(), table[1, :40].long()
    case.keys.copy_(torch.randn_like(case.keys))

    def write(pages):
        full = torch.full_like(pages, page_size)
        interpret_cache(graph, case.fields, case.keys, case.values, pages, full)

    def step(row, page_ids):
        n = torch.tensor([len(page_ids) * page_size])
        interpret_indexer(graph, case.q[row, None], case.fields, page_ids[None], n)

    write(torch.arange(80))
    step(0, pages_a)
    step(1, pages_c)
    kept = case.fields[state][pages_c].clone()
    assert (case.fields[state][pages_a][1:-1] != 0).all() and (kept[1:-1] != 0).all()
    # A is freed; B takes every other of its pages, all of them between C's.
    pages_b = pages_a[::2]
    case.keys[pages_b] = torch.randn_like(case.keys[pages_b])
    write(pages_b)
    assert (case.fields[state][pages_b] == graph.states[0].init).all()
    step(0, pages_b)
    first_step = case.fields[state][pages_b].clone()
    assert torch.equal(case.fields[state][pages_c], kept)
    case.fields[state].zero_()  # what B's first step gives where nobody was before
    step(0, pages_b)
    assert torch.equal(case.fields[state][pages_b], first_step)


def test_a_state_starts_where_its_declaration_says():
    class Started(RunningAverageBlock):
        def create_cache(self, page_size, head_dim):
            return {"c": (1, head_dim), "r": Field((1, 1), torch.float32, "state", -2.0)}

    case = flow_case(Started().trace(16, 64), 4, (160,))
    assert (case.fields["r"] == -2).all()


@pytest.mark.parametrize("name", [*TOKEN_FLOWS, "running_average_block"])
def test_a_padded_row_adds_nothing_and_a_dry_run_neither(name):
    graph = load_flow(name).trace(1 if name in TOKEN_FLOWS else 16, 64)
    case = flow_case(graph, 4, (0, 0, 0))
    state = case.fields[graph.states[0].name]
    interpret_indexer(graph, case.q, case.fields, case.page_table, case.lengths)
    assert (state == 0).all()
    case = flow_case(graph, 4, (100, 0, 300))
    state = case.fields[graph.states[0].name]
    dry = interpret_indexer(
        graph, case.q, case.fields, case.page_table, case.lengths, update_state=False
    )
    assert (state == 0).all()
    real = interpret_indexer(graph, case.q, case.fields, case.page_table, case.lengths)
    assert (state != 0).any()
    assert torch.equal(dry.scores, real.scores)


def test_requests_may_not_share_pages_of_a_flow_with_state():
    graph = load_flow("running_average_block").trace(16, 64)
    case = flow_case(graph, 4, (160, 160))
    case.page_table[1, 3] = case.page_table[0, 3]
    with pytest.raises(ValueError, match="requests share pages, but the flow has state"):
        interpret_indexer(graph, case.q, case.fields, case.page_table, case.lengths)
    stateless = load_flow("block_sparse_attention").trace(16, 64)
    interpret_indexer(stateless, case.q, case.fields, case.page_table, case.lengths)
