"""Features, families and fits; the README's table of decode as a sample of what times are like."""

import dataclasses
import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_attention.planner.cost_model import (
    FEATURES,
    PLACE,
    Measured,
    family_of,
    features_of,
    features_of_cell,
    fit,
    left_out,
)
from stream_attention.planner.evidence_testing import good_cell
from stream_attention.planner.least_squares import non_negative

# "Measured" of README.md, revision 0a332a8, one H200, bf16, pages of 16: requests, K tokens, query
# and KV heads, head_dim, layout; us of the portable route, the native one, cuDNN, fa2 tensor, XQA
# and fa2 cuda.
README = """
1 4 32 8 128 NHD 15.9 7.2 12.9 15.5 12.5 18.8
1 32 32 8 128 NHD 44.8 33.3 40.5 42.3 44.4 55.2
16 4 32 8 128 NHD 78.1 62.2 67.3 72.6 77.6 100
16 32 32 8 128 NHD 494 472 486 486 583 739
64 8 32 8 128 NHD 516 472 482 481 569 834
128 1 32 8 128 NHD 171 123 130 136 147 215
1 8 64 8 128 HND 21.2 11.1 16.7 20.1 16.5 34.0
8 8 64 8 128 HND 78.4 64.6 71.0 73.1 80.6 174
32 8 64 8 128 HND 260 240 248 251 288 745
1 16 16 2 128 HND 18.1 8.2 14.0 17.2 20.0 24.7
1 64 16 2 128 HND 34.3 18.8 26.6 29.6 33.5 62.5
4 32 16 2 128 HND 49.7 34.6 41.1 43.0 45.1 90.0
8 64 16 2 128 HND 142 124 131 134 154 329
1 32 14 2 64 HND 20.7 7.4 14.2 15.9 17.2 -
8 32 14 2 64 HND 49.6 34.3 39.9 44.8 43.8 -
1 16 16 2 64 HND 14.4 5.7 11.4 14.0 13.9 15.7
4 32 16 2 64 HND 34.1 18.5 24.9 28.9 25.6 48.5
8 64 16 2 64 HND 82.6 63.9 70.2 76.7 82.0 167
1 16 16 2 128 NHD 18.1 8.2 14.0 17.4 20.0 24.6
1 64 16 2 128 NHD 34.6 18.8 26.6 29.7 33.2 62.2
4 32 16 2 128 NHD 50.0 34.5 41.2 43.0 45.2 90.0
8 64 16 2 128 NHD 143 124 131 134 153 329
1 16 16 2 64 NHD 14.5 5.7 11.5 14.0 13.9 15.7
4 32 16 2 64 NHD 34.1 18.5 25.2 29.0 25.5 48.6
8 64 16 2 64 NHD 82.6 63.7 71.0 76.6 81.0 167
"""
ROUTES = ("triton", "native", "cudnn", "fa2_tensor", "xqa", "fa2_cuda")


def readme():
    """`(cell, {route: us})` a line."""
    for line in README.split("\n")[1:-1]:
        batch, kilo, heads, kv_heads, dim, layout, *times = line.split()
        cell = good_cell(
            (int(kilo) * 1024,) * int(batch),
            num_qo_heads=int(heads),
            num_kv_heads=int(kv_heads),
            head_dim_qk=int(dim),
            head_dim_vo=int(dim),
            layout=layout,
        )
        pairs = zip(ROUTES, times, strict=True)
        yield cell, {route: float(us) for route, us in pairs if us != "-"}


def measured_of(route, only=lambda cell: True):
    return [
        Measured(cell, f"{cell.digest[:8]}", times[route])
        for cell, times in readme()
        if route in times and only(cell)
    ]


def test_native_is_predicted_within_a_few_percent_where_it_was_left_out():
    model = fit("native", "native", measured_of("native"))
    assert len(model.points) == 25
    assert model.error_p50 < 0.04 and model.error_max < 0.15
    assert all(fit(route, "external", measured_of(route)).error_p50 < 0.12 for route in ROUTES)


@pytest.mark.parametrize("among", [ROUTES, [r for r in ROUTES if r != "native"]])
def test_the_route_chosen_without_having_seen_the_cell_is_close_to_the_fastest(among):
    predicted: dict = {}
    for route in among:
        measured = measured_of(route)
        asked = [features_of(each.cell.problem) for each in measured]
        for each, us in zip(measured, left_out(measured, asked), strict=True):
            predicted.setdefault(each.cell.digest, {})[route] = us
    regrets = []
    for cell, times in readme():
        estimates = predicted[cell.digest]
        chosen = min(estimates, key=estimates.get)
        regrets.append(times[chosen] / min(times[route] for route in estimates))
    assert statistics.geometric_mean(regrets) < 1.03 and max(regrets) < 1.1


def test_a_layout_apart_is_left_out_too():
    # Else its twin of the other layout, in equal terms, would tell a cell's time.
    measured = measured_of("native", lambda cell: cell.problem.num_kv_heads == 2)
    at = [features_of_cell(each.cell) for each in measured]
    changed = [
        dataclasses.replace(each, us=each.us * 100)
        if features_of_cell(each.cell)["bytes"] == at[0]["bytes"]
        and features_of_cell(each.cell)["longest"] == at[0]["longest"]
        else each
        for each in measured
    ]
    assert sum(new is not old for new, old in zip(changed, measured, strict=True)) == 2
    assert left_out(changed, at)[0] == left_out(measured, at)[0]


def test_features_of_a_full_cell_are_those_of_its_problem():
    for cell, _ in readme():
        assert features_of_cell(cell) == features_of(cell.problem)


def test_features_of_shorter_requests_are_of_their_lengths():
    cell = good_cell((1000, 3000), kv_capacity=4096)
    found, capacity = features_of_cell(cell), features_of(cell.problem)
    assert found["kv_bytes"] == 4000 * 2 * 8 * 128 * 2 and found["longest"] == 3000
    assert found["bytes"] == found["kv_bytes"] + 2 * 32 * 2 * 128 * 2
    assert found["head_tokens"] == 32000 and found["flops"] == 2 * 4000 * 32 * 256
    assert capacity["longest"] == 4096 and capacity["head_tokens"] == 2 * 4096 * 8
    assert {n: found[n] for n in ("batch", "items", "rows", "item_rows")} == {
        "batch": 2,
        "items": 16,
        "rows": 64,
        "item_rows": 4,
    }
    assert found["log2_splits"] == 3.0 and found["launch"] == 1.0


def test_what_a_mask_leaves_out_is_not_counted():
    causal = good_cell((100,), (10,), phase="append")
    full = good_cell((100,), (10,), phase="append", causal=False)
    assert features_of_cell(full)["flops"] == 2 * 1000 * 32 * 256
    assert features_of_cell(causal)["flops"] == 2 * (1000 - 45) * 32 * 256
    window = good_cell((4096,), window_left=127)
    assert features_of_cell(window)["longest"] == 128
    assert features_of_cell(window)["flops"] == 2 * 128 * 32 * 256
    assert features_of_cell(window) == features_of(window.problem)


def test_a_family_tells_kernels_apart_and_sizes_not():
    base = good_cell()
    same = (
        good_cell((4096,) * 8),
        good_cell((8192,), num_qo_heads=8),
        good_cell((8192,), head_dim_qk=64, head_dim_vo=64),
        good_cell((64,), page_size=1, layout="HND"),
        good_cell(causal=False),
        good_cell(sm_scale=1.0, return_lse=True),
    )
    for other in same:
        assert family_of(other.problem) == family_of(base.problem)
    apart = [
        good_cell(q_dtype="float16", kv_dtype="float16"),
        good_cell(kv_dtype="float8_e4m3fn"),
        good_cell(kv_dtype="float8_e4m3fn", kv_scales="head"),
        good_cell(out_dtype="float32"),
        good_cell(cache_kind="contiguous"),
        good_cell(batch_invariant=True),
        good_cell(window_left=127),
        good_cell(logits_soft_cap=30.0),
        good_cell(has_sink=True),
        good_cell(per_head_lists=True),
        good_cell(phase="verify"),
        good_cell((64, 64), (2, 1)),
        good_cell((64,), (2,), causal=False),
        good_cell((64,), (2,), mask="bool"),
        good_cell(differentiable=True),
        good_cell(differentiable=True, dropout_p=0.1),
    ]
    families = [family_of(each.problem) for each in (base, *apart)]
    assert len(set(families)) == len(families)


def test_a_fit_finds_the_terms_that_made_the_times():
    terms = {"launch": 3.0, "bytes": 2e-7, "items": 0.05, "log2_splits": 0.7}
    measured = [
        Measured(cell, "row", sum(c * features_of_cell(cell)[n] for n, c in terms.items()))
        for cell, _ in readme()
    ]
    model = fit("sm90_decode", "native", measured)
    for name, coefficient in zip(model.features, model.coefficients, strict=True):
        scale = statistics.median(features_of_cell(m.cell)[name] / m.us for m in measured)
        assert coefficient * scale == pytest.approx(terms.get(name, 0.0) * scale, abs=2e-3)
    assert model.error_max < 1e-3
    held = good_cell((4096,) * 2)
    assert model.us(features_of_cell(held)) == pytest.approx(
        sum(c * features_of_cell(held)[n] for n, c in terms.items()), rel=1e-3
    )


def test_the_order_of_the_measurements_does_not_count():
    measured = measured_of("xqa")
    model = fit("xqa", "external", measured)
    assert fit("xqa", "external", measured[::-1]) == model
    assert fit("xqa", "external", measured[7:] + measured[:7]) == model


def test_few_places_make_no_model():
    measured = measured_of("native")
    assert fit("native", "native", measured[:2]) is None
    twins = [measured[9], measured[18]]  # of two layouts: one place
    assert fit("native", "native", [*measured[:1], *twins]) is None
    exact = fit("native", "native", measured[:3])
    assert exact.error_p50 is None and exact.error_max is None
    assert fit("native", "native", []) is None


def test_ranges_are_of_what_was_measured():
    model = fit("native", "native", measured_of("native"))
    ranges = {each.feature: (each.low, each.high) for each in model.ranges}
    assert ranges["kv_bytes"] == (8 << 20, 2 << 30) and ranges["batch"] == (1, 128)
    assert ranges["longest"] == (1024, 65536) and ranges["is_hnd"] == (0, 1)
    assert set(PLACE) <= set(ranges)


def test_a_model_refuses_what_no_fit_gives():
    model = fit("native", "native", measured_of("native"))
    for name, value, words in (
        ("coefficients", (-1.0,) * len(FEATURES), "finite numbers >= 0"),
        ("coefficients", (0.0,) * len(FEATURES), "not all 0"),
        ("coefficients", (math.nan,) * len(FEATURES), "finite numbers >= 0"),
        ("coefficients", (1.0,), "one a feature"),
        ("features", ("speed",) * len(FEATURES), "must be of launch"),
        ("role", "peer", "must be one of native"),
        ("points", (), "must be in the ranges"),
        ("points", (dataclasses.replace(model.points[0], us=0.0),), "a time > 0"),
        ("points", (dataclasses.replace(model.points[0], ratio=0.0),), "a ratio > 0"),
        ("ranges", model.ranges[1:], "in that order"),
        ("route", "", "non-empty"),
        ("family", "", "non-empty"),
    ):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(model, **{name: value})


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.integers(1, 12),
    st.booleans(),
)
def test_non_negative_least_squares_meet_the_conditions_of_a_minimum(seed, columns, rows, twins):
    numbers = np.random.default_rng(seed)
    matrix = numbers.uniform(0, 1, (rows, columns)) * 10.0 ** numbers.integers(-4, 4, columns)
    if twins:
        matrix[:, -1] = matrix[:, 0] * 3
    targets = numbers.uniform(0, 1, rows)
    found = np.array(non_negative(matrix.tolist(), targets.tolist()))
    assert (found >= 0).all() and np.isfinite(found).all()
    scaled = matrix / np.linalg.norm(matrix, axis=0)
    gains = scaled.T @ (targets - matrix @ found)
    # No column that is out would lower the squares, and those that are in have no slope left.
    assert gains.max() < 1e-5
    assert abs(gains[found > 0]).max(initial=0) < 1e-5


def test_no_model_says_that_what_was_measured_takes_no_time():
    # Only `log2_splits` lowers the squares, which is 0 with 64 requests.
    times = {1: 100.0, 64: 1000.0, 4: 1.0}
    measured = [Measured(good_cell((1024,) * n), f"row{n}", us) for n, us in times.items()]
    assert fit("triton", "portable", measured) is None
