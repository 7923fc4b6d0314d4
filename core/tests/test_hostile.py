"""The hostile list covers what it claims, and its tensors are as hostile as they say."""

import dataclasses
import math

import pytest
import torch

from stream_attention.core.testing.hostile import HOSTILE, REQUIRED_FEATURES, SMALL, features
from stream_attention.core.testing.problems import STALE_IDS, Case, build, random_case
from stream_attention.core.testing.tolerance import assert_close, assert_lse_close, compare


def test_the_list_covers_every_required_feature():
    covered = frozenset().union(*map(features, HOSTILE))
    assert not REQUIRED_FEATURES - covered


def test_features_come_from_the_data_of_a_case():
    plain = features(Case())
    for change, feature in (
        ({"kv_lens": (0,)}, "length 0"),
        ({"kv_lens": (3,), "qo_lens": (5,)}, "negative positions"),
        ({"head_dim_vo": 8}, "unequal dims"),
        ({"window_left": 15}, "window page - 1"),
        ({"kv_lens": ((0, 5),)}, "empty list beside a full one"),
        ({"pool": "layer_axis"}, "pool layer_axis"),
    ):
        assert feature not in plain
        assert feature in features(Case(**change))


def test_names_are_unique_and_cases_evaluate_back():
    assert len({case.name for case in HOSTILE}) == len(HOSTILE)
    assert len(SMALL) == 21
    for case in HOSTILE:
        assert eval(repr(case), {"Case": Case}) == case


def _paged(case):
    return case.cache_kind == "paged" and case.batch and not case.per_head_lists


@pytest.mark.parametrize("case", list(filter(_paged, HOSTILE)), ids=lambda case: case.name)
def test_unused_slots_and_ids_are_poison(case):
    cache = build(case).cache
    pools = [p if case.layout == "NHD" else p.transpose(1, 2) for p in (cache.key, cache.value)]
    used = torch.zeros(pools[0].shape[:2], dtype=torch.bool)
    for request, length in enumerate(case.kv_lens):
        for token in range(length):
            page = int(cache.page_table[request, token // case.page_size])
            assert not used[page, token % case.page_size], "a slot serves two tokens"
            used[page, token % case.page_size] = True
        beyond = cache.page_table[request, -(-length // case.page_size) :]
        assert bool((beyond == STALE_IDS[case.ids]).all())
    for pool in pools:
        assert bool(pool[used].float().isfinite().all())
        assert not bool(pool[~used].float().isfinite().any())
    assert not bool(used[0].any()), "page 0 holds a token"


def test_poison_leaves_the_tokens_as_they_are():
    for case in (Case(), Case(cache_kind="contiguous"), Case(kv_lens=((3, 9),))):
        built = [build(dataclasses.replace(case, poison=p)) for p in ("nan", "inf", "zero")]
        rows = [b.cache.key.float().nan_to_num(nan=0.0, posinf=0.0) for b in built]
        assert torch.equal(rows[0], rows[2]) and torch.equal(rows[1], rows[2])
        assert built[0].cache.key.isnan().any() and built[1].cache.key.isinf().any()


def test_random_cases_reach_most_features():
    import random

    rng = random.Random(0)
    seen = frozenset().union(*(features(random_case(rng)) for _ in range(400)))
    for feature in ("length 0", "page + 1", "empty row", "batch 0", "group 7", "unequal dims"):
        assert feature in seen
    for feature in ("per-head lists", "fp8 head", "scale 0", "window right", "zero queries"):
        assert feature in seen


def test_cases_that_contradict_themselves_are_refused():
    with pytest.raises(ValueError, match=r"kv_lens.*one entry a request"):
        Case(qo_lens=(1, 1), kv_lens=(3,))
    with pytest.raises(ValueError, match="has_lengths"):
        Case(has_lengths=False)
    with pytest.raises(ValueError, match="call"):
        Case(qo_lens=(1, 2), kv_lens=(3, 3), call="block")
    with pytest.raises(ValueError, match="ids"):
        Case(ids="random")
    with pytest.raises(ValueError, match="poison"):
        Case(poison="none")


def test_tolerance_accepts_a_rounding_and_refuses_twice_that():
    exact = torch.tensor([1.0, 1.0], dtype=torch.float64)
    unit = 2.0**-8
    assert_close(exact + unit * torch.tensor([0.9, 0.0]), exact, torch.bfloat16)
    with pytest.raises(AssertionError, match="max error"):
        assert_close(exact + unit * torch.tensor([1.2, 0.0]), exact, torch.bfloat16)


def test_tolerance_refuses_a_small_error_everywhere_by_rms():
    exact = torch.cat([torch.tensor([100.0]), torch.ones(999)]).double()
    off = exact + 0.3  # within a rounding of the largest element, far over that of most
    result = compare(off, exact, torch.bfloat16)
    assert result.max_error <= result.max_bound and not result.ok
    with pytest.raises(AssertionError, match="RMS"):
        assert_close(off, exact, torch.bfloat16)


def test_tolerance_judges_each_row_by_its_own_size():
    exact = torch.tensor([[100.0, 100.0], [0.01, 0.01]], dtype=torch.float64)
    off = exact.clone()
    off[1, 0] += 0.005
    with pytest.raises(AssertionError, match=r"at \(1, 0\)"):
        assert_close(off, exact, torch.bfloat16)


def test_tolerance_follows_the_reference():
    exact = torch.zeros(4, 8, dtype=torch.float64)
    reference = exact + 1e-3
    assert_close(exact + 2.9e-3, exact, torch.float32, reference=reference)
    with pytest.raises(AssertionError, match="max error"):
        assert_close(exact + 3.1e-3, exact, torch.float32, reference=reference)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_tolerance_wants_what_is_not_finite_in_the_same_places(bad):
    exact = torch.tensor([1.0, bad], dtype=torch.float64)
    assert_close(exact.clone(), exact, torch.float32)
    for other in (torch.tensor([1.0, 2.0]), torch.tensor([bad, bad]), torch.tensor([bad, 1.0])):
        with pytest.raises(AssertionError, match="in the wrong places"):
            assert_close(other, exact, torch.float32)


def test_tolerance_wants_exact_zeros_in_empty_rows():
    exact, noise = torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    with pytest.raises(AssertionError, match="non-zero"):
        assert_close(torch.full((2, 2), 1e-40), exact, torch.float32, noise=noise)


def test_lse_must_be_fp32_and_close():
    want = torch.tensor([1.0, -math.inf], dtype=torch.float64)
    assert_lse_close(want.float(), want)
    with pytest.raises(AssertionError, match="dtype"):
        assert_lse_close(want, want)
    with pytest.raises(AssertionError, match="max error"):
        assert_lse_close(want.float() * 1.0001, want)
