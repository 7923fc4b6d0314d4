"""Tile plans: legal tiles are those that the oracle's visibility reaches, and no fewer."""

import dataclasses
import itertools

import pytest
import torch

from stream_attention.core.describe import describe
from stream_attention.core.oracle import attention, visibility
from stream_attention.core.oracle_args import prepare
from stream_attention.core.testing.problems import Case, build
from stream_attention.core.tile_plan import GUARANTEE_OF_KIND, TILE_PLAN_RULES, AttentionTilePlan

KINDS = {
    "exact_contiguous": AttentionTilePlan(kind="exact_contiguous", mapping="identity"),
    "exact_paged": AttentionTilePlan(kind="exact_paged"),
    "fixed_subset": AttentionTilePlan(kind="fixed_subset", tiles=((0, 2), (1,))),
    "selected": AttentionTilePlan(kind="selected", per_head_lists=True),
    "sliding_window": AttentionTilePlan(kind="sliding_window", window_left=7, tile_tokens=8),
}

# (accepted, rejected, message)
RULES = [
    ({"kind": "exact_paged"}, {"kind": "dense"}, "kind='dense': must be one of exact_contiguous"),
    (
        {"kind": "sliding_window", "window_left": 1, "mapping": "identity"},
        {"kind": "exact_paged", "mapping": "hash"},
        "mapping='hash': must be one of identity, page_table; use 'page_table'",
    ),
    (
        {"kind": "exact_contiguous", "mapping": "identity"},
        {"kind": "exact_contiguous"},
        "mapping='page_table': exact_contiguous maps by identity",
    ),
    (
        {"kind": "exact_paged", "tile_tokens": 1},
        {"kind": "exact_paged", "tile_tokens": 0},
        "tile_tokens=0: must be an int >= 1; use 16",
    ),
    (
        {"kind": "fixed_subset", "tiles": ((0,),)},
        {"kind": "exact_paged", "tiles": ((0,),)},
        "tiles=((0,),): a fixed_subset needs at least one list of tiles; no other kind takes any",
    ),
    (
        {"kind": "fixed_subset", "tiles": ((0, 3), ())},
        {"kind": "fixed_subset", "tiles": ((3, 0, 0),)},
        "tiles=((3, 0, 0),): every list must hold ints >= 0 in strictly ascending order; "
        "use ((0, 3),)",
    ),
    (
        {"kind": "sliding_window", "window_left": 0},
        {"kind": "exact_paged", "window_left": 4},
        "window_left=4: must be None or an int >= 0, and only a sliding_window carries one",
    ),
    (
        {"kind": "sliding_window", "window_right": 2},
        {"kind": "sliding_window", "window_right": -1},
        "window_right=-1: must be None or an int >= 0",
    ),
    (
        {"kind": "sliding_window", "window_left": 3},
        {"kind": "sliding_window"},
        "kind='sliding_window': a sliding_window needs window_left or window_right",
    ),
    (
        {"kind": "selected", "per_head_lists": True},
        {"kind": "selected"},
        "per_head_lists=False: a selected schedule is a list per KV head; use True",
    ),
]


@pytest.mark.parametrize(("good", "bad", "message"), RULES, ids=[rule[2][:40] for rule in RULES])
def test_rule_accepts_and_rejects(good, bad, message):
    AttentionTilePlan(**good)
    with pytest.raises(ValueError) as caught:
        AttentionTilePlan(**bad)
    assert message in str(caught.value)


def test_every_rule_has_a_row():
    assert [row[2].partition("=")[0] for row in RULES] == [r.parameter for r in TILE_PLAN_RULES]


@pytest.mark.parametrize("kind", KINDS)
def test_repr_evaluates_back_for_every_kind(kind):
    plan = KINDS[kind]
    assert eval(repr(plan), {"AttentionTilePlan": AttentionTilePlan}) == plan
    assert plan.guarantee == GUARANTEE_OF_KIND[kind]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.kind = "exact_paged"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "exact_paged"),
        ({"cache_kind": "contiguous"}, "exact_contiguous"),
        ({"kv_lens": ((3, 5),)}, "selected"),
        ({"window_left": 4}, "sliding_window"),
        ({"window_left": 4, "cache_kind": "contiguous"}, "sliding_window"),
        ({"window_right": 4, "causal": False}, "sliding_window"),
        ({"kv_lens": ((3, 5),), "window_left": 4}, "selected"),
    ],
)
def test_plan_of_a_problem(changes, kind):
    built = build(Case(**changes))
    problem = describe(built.q, built.cache, built.qo_indptr, **built.options).problem
    plan = AttentionTilePlan.for_problem(problem)
    assert plan.kind == kind
    assert plan.mapping == ("page_table" if problem.cache_kind == "paged" else "identity")
    assert plan.tile_tokens == problem.page_size
    assert plan.per_head_lists == problem.per_head_lists
    if kind == "sliding_window":
        assert (plan.window_left, plan.window_right) == (problem.window_left, problem.window_right)


def _seen_tiles(kv_len, qo_len, tile, **options):
    """Tiles with a token that some query sees, by the oracle."""
    key = torch.zeros(1, kv_len, 1, 1)
    call = prepare(torch.zeros(1, qo_len, 1, 1), (key, key), **options)
    tokens = visibility(call, qo_len, kv_len).any(0).nonzero().flatten()
    return set((tokens // tile).tolist())


@pytest.mark.parametrize("tile", [1, 3, 16])
@pytest.mark.parametrize("kv_len", [0, 1, 2, 15, 16, 17, 33, 50])
def test_exact_tiles_are_those_that_the_oracle_sees(kv_len, tile):
    for plan in (
        AttentionTilePlan(kind="exact_paged", tile_tokens=tile),
        AttentionTilePlan(kind="exact_contiguous", mapping="identity", tile_tokens=tile),
        AttentionTilePlan(kind="selected", per_head_lists=True, tile_tokens=tile),
    ):
        for qo_len in (1, 4):
            assert set(plan.legal_tiles(kv_len, qo_len)) == _seen_tiles(kv_len, qo_len, tile)


@pytest.mark.parametrize(
    ("tile", "window"), list(itertools.product([1, 3, 16], [0, 1, 2, 15, 16, 90]))
)
def test_window_tiles_are_those_that_the_oracle_sees(tile, window):
    plan = AttentionTilePlan(kind="sliding_window", window_left=window, tile_tokens=tile)
    for kv_len, qo_len in itertools.product([0, 1, 16, 17, 47, 64], [1, 2, 5]):
        want = _seen_tiles(kv_len, qo_len, tile, window_left=window)
        assert set(plan.legal_tiles(kv_len, qo_len)) == want, (kv_len, qo_len)


def test_fixed_tiles_are_per_head_and_stop_at_the_length():
    plan = KINDS["fixed_subset"]
    assert plan.legal_tiles(48, kv_head=0) == (0, 2)
    assert plan.legal_tiles(32, kv_head=0) == (0,)
    assert plan.legal_tiles(33, kv_head=0) == (0, 2)
    assert plan.legal_tiles(48, kv_head=1) == (1,)
    assert plan.legal_tiles(16, kv_head=1) == ()
    shared = dataclasses.replace(plan, tiles=((1,),))
    assert shared.legal_tiles(48, kv_head=5) == (1,)


def _gathered(cache, plan, request, head):
    """K and V of the subset's tokens, one by one."""
    length = int(cache.sequence_lengths[request])
    tokens = [
        token
        for tile in plan.legal_tiles(length, kv_head=head)
        for token in range(tile * plan.tile_tokens, (tile + 1) * plan.tile_tokens)
        if token < length
    ]
    view, size = cache.view(), cache.page_size
    pages = [int(cache.page_table[request, token // size]) for token in tokens]
    slots = [token % size for token in tokens]
    key, value = view.key[pages, slots, head], view.value[pages, slots, head]
    return key[None, :, None], value[None, :, None]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("tile", [8, 16])
@pytest.mark.parametrize("tiles", [((0, 2, 3),), ((1, 4), (0,)), ((), (5, 6))])
def test_page_lists_attend_exactly_to_the_subset(layout, tile, tiles):
    case = Case(qo_lens=(1, 1, 1), kv_lens=(70, 0, 33), page_size=8, layout=layout, call="batch")
    built = build(case)
    plan = AttentionTilePlan(kind="fixed_subset", tile_tokens=tile, tiles=tiles)
    lists = plan.page_lists(built.cache)
    assert lists.key.data_ptr() == built.cache.key.data_ptr()
    out, lse = attention(built.q, lists, return_lse=True)
    for request in range(3):
        for head in range(2):
            group = slice(2 * head, 2 * head + 2)
            pair = _gathered(built.cache, plan, request, head)
            q = built.q[request : request + 1, group]
            want, want_lse = attention(q, pair, return_lse=True)
            torch.testing.assert_close(out[request : request + 1, group], want, rtol=0, atol=0)
            torch.testing.assert_close(lse[request, group], want_lse[0], rtol=0, atol=0)


def test_page_lists_refuse_what_they_cannot_lower():
    cache = build(Case()).cache
    with pytest.raises(ValueError, match="kind='exact_paged': page_lists lowers a fixed_subset"):
        KINDS["exact_paged"].page_lists(cache)
    odd = dataclasses.replace(KINDS["fixed_subset"], tile_tokens=24)
    with pytest.raises(
        ValueError, match="tile_tokens=24: must be a multiple of page_size=16; use 16"
    ):
        odd.page_lists(cache)
    three = dataclasses.replace(KINDS["fixed_subset"], tiles=((0,), (1,), (2,)))
    with pytest.raises(ValueError, match="tiles=3 lists: one list, or one for each of 2 KV heads"):
        three.page_lists(cache)
    with pytest.raises(ValueError, match="over a shared page table"):
        KINDS["fixed_subset"].page_lists(build(Case(kv_lens=((3, 4),))).cache)
