"""Inside and outside of what was measured, and the estimates: scenarios that mutants fail."""

import dataclasses
import math
import time
import timeit
import types

import pytest

from stream_attention.core.testing.mutants import survivors
from stream_attention.planner import model_index
from stream_attention.planner.cost_model import Measured, fit
from stream_attention.planner.evidence_testing import good_cell


def cell(batch=4, tokens=4096, **changes):
    return good_cell((tokens,) * batch, **changes)


MEASURED = [(1, 4096), (4, 4096), (64, 4096), (4, 16384), (64, 16384)]
WIDE = {"head_dim_qk": 256, "head_dim_vo": 256}


def model(route="sm90_decode", role="native", us=1.0, cells=None, prefix="row"):
    found = [cell(*each) for each in MEASURED] if cells is None else cells
    measured = [
        Measured(each, f"{prefix}{index}", us * (3 + each.kv_tokens / 1000))
        for index, each in enumerate(found)
    ]
    return fit(route, role, measured)


def one(module, cell, models=None):
    (found,) = module.ModelIndex(models or [model()]).lookup(cell.problem)
    return found


def a_measured_cell_is_inside_and_names_its_row(index):
    for number, each in enumerate(MEASURED):
        found = one(index, cell(*each))
        assert found.inside and found.why_outside == "", each
        assert found.rows[0] == f"row{number}"
        assert found.us == pytest.approx(3 + each[0] * each[1] / 1000, rel=0.05)
        assert (found.route, found.role) == ("sm90_decode", "native")


def a_factor_of_two_is_near_and_more_is_not(index):
    near = one(index, cell(8, 4096))
    assert near.inside and near.rows == ("row1",)
    assert one(index, cell(128 // 4, 4096)).inside
    assert one(index, cell(4, 8192)).rows == ("row1", "row3")
    between = one(index, cell(12, 4096))
    assert not between.inside and between.rows == ()
    assert "no measurement is within a factor of 2" in between.why_outside
    assert "nothing of another" not in between.why_outside


def an_empty_corner_of_the_box_is_outside(index):
    corner = one(index, cell(1, 16384))
    assert not corner.inside and "within the measured ranges" in corner.why_outside


def beyond_a_range_it_is_outside_however_near(index):
    for beyond, feature, words in (
        (cell(65, 16384), "batch", "measured 1 to 64"),
        (cell(4, 4080), "longest", "measured 4096 to 16384"),
        (cell(4, 4096, num_qo_heads=64), "item_rows", "item_rows=8: measured 4 to 4"),
    ):
        found = one(index, beyond)
        assert not found.inside and found.rows == ()
        assert feature in found.why_outside and words in found.why_outside
        assert "page_size" not in found.why_outside


def ends_of_a_range_are_inside(index):
    assert one(index, cell(1, 4096)).inside and one(index, cell(64, 16384)).inside


def head_dims_and_layout_must_be_those_of_a_measured_cell(index):
    both = [model(cells=[cell(*each) for each in MEASURED] + [cell(64, 16384, **WIDE)])]
    assert one(index, cell(64, 16384, **WIDE), both).rows == ("row5",)
    assert one(index, cell(64, 16384), both).rows == ("row4",)
    assert not one(index, cell(4, 4096, head_dim_qk=192, head_dim_vo=192), both).inside
    mixed = [model(cells=[cell(*each) for each in MEASURED] + [cell(64, 16384, layout="HND")])]
    assert not one(index, cell(4, 4096, layout="HND"), mixed).inside
    assert one(index, cell(64, 16384, layout="HND"), mixed).inside


def the_nearest_rows_come_first_and_are_few(index):
    cells = [cell(batch, tokens) for batch in (4, 5, 6, 7, 8) for tokens in (4096, 8192)]
    found = one(index, cell(6, 4096), [model(cells=cells)])
    assert len(found.rows) == 3 and found.rows[0] == "row4"
    assert set(found.rows[1:]) == {"row2", "row6"}
    # Two octaves in sum are farther than one, whatever the largest of them is.
    cells = [cell(4, 8192), cell(8, 4096), cell(5, 8192), cell(16, 16384), cell(2, 2048)]
    assert one(index, cell(5, 4096), [model(cells=cells)]).rows[0] == "row1"


def places_that_differ_in_a_shared_feature_alone_are_ordered_by_it(index):
    cells = [cell(4, 4096), cell(6, 4096), cell(5, 4096), cell(3, 4096), cell(16, 4096)]
    found = one(index, cell(5, 4096), [model(cells=cells)])
    assert found.rows == ("row2", "row1", "row0")


def near_in_one_shared_feature_and_far_in_another_is_not_near(index):
    few, many = (cell(4, 4096, num_qo_heads=heads) for heads in (32, 256))
    found = one(index, cell(4, 4096, num_qo_heads=96), [model(cells=[few, many, cell(8, 4096)])])
    assert not found.inside and "within the measured ranges" in found.why_outside


def no_more_than_the_nearest_four_correct(index):
    known = model(cells=[cell(4, each) for each in (4096, 4352, 4608, 4864, 5120, 5376)])

    def asked(**ratios):
        points = [
            dataclasses.replace(p, ratio=ratios.get(f"of_{p.features[1]:.0f}", 1.0))
            for p in known.points
        ]
        return one(index, cell(4, 4096), [dataclasses.replace(known, points=tuple(points))]).us

    plain = asked()
    assert asked(of_4864=5.0) > plain * 1.001  # the fourth
    assert asked(of_5120=5.0) == asked(of_5376=5.0) == plain


def the_fastest_comes_first_and_ties_go_by_role_and_name(index):
    models = [
        model("torch", "portable", 1.0),
        model("flashinfer_xqa", "external", 0.5),
        model("sm90_b", "native", 1.0),
        model("sm90_a", "native", 1.0),
        model("flashinfer_fa3", "external", 1.0),
    ]
    for order in (models, models[::-1]):
        found = index.ModelIndex(order).lookup(cell().problem)
        assert [each.route for each in found] == [
            *("flashinfer_xqa", "sm90_a", "sm90_b", "torch"),
            "flashinfer_fa3",
        ]


def what_was_measured_nearby_corrects_the_model(index):
    cells = [cell(4, 4096), cell(4, 8192), cell(64, 65536)]
    known = model(cells=cells)
    ratios = {4096.0: 2.0, 8192.0: 0.5, 65536.0: 9.0}  # by the longest request
    points = [dataclasses.replace(p, ratio=ratios[p.features[1]]) for p in known.points]
    off = [dataclasses.replace(known, points=tuple(points))]
    # Twice the bytes and twice the longest: two octaves.
    for asked, near, far in ((cells[0], 2.0, 0.5), (cells[1], 0.5, 2.0)):
        plain = one(index, asked, [dataclasses.replace(known, points=_all_right(known))]).us
        here, there = 1 / 1e-3, 1 / (2.0**2 + 1e-3)
        want = plain * (here * near + there * far) / (here + there)
        assert one(index, asked, off).us == pytest.approx(want, rel=1e-12)
    between = cell(4, 6144)
    first, second = math.log2(1.5), math.log2(8192 / 6144)
    weights = [1 / ((2 * each) ** 2 + 1e-3) for each in (first, second)]
    plain = one(index, between, [dataclasses.replace(known, points=_all_right(known))]).us
    want = plain * (2.0 * weights[0] + 0.5 * weights[1]) / sum(weights)
    assert one(index, between, off).us == pytest.approx(want, rel=1e-12)


def _all_right(known):
    return tuple(dataclasses.replace(point, ratio=1.0) for point in known.points)


def routes_may_be_asked_for_by_name(index):
    known = index.ModelIndex([model(), model("triton", "portable", 2.0)])
    problem = cell().problem
    assert [each.route for each in known.lookup(problem, {"triton"})] == ["triton"]
    assert known.lookup(problem, ()) == ()
    assert len(known.lookup(problem)) == 2


def another_family_has_no_estimate(index):
    assert index.ModelIndex([model()]).lookup(cell(batch_invariant=True).problem) == ()
    assert index.ModelIndex([]).lookup(cell().problem) == ()


def each_route_is_near_its_own_rows_alone(index):
    few = [cell(*each) for each in (MEASURED[0], MEASURED[2], MEASURED[4])]
    models = [model(), model("triton", "portable", 2.0, few, "other")]
    native, portable = index.ModelIndex(models).lookup(cell(4, 4096).problem)
    assert native.inside and native.rows == ("row1",)
    assert not portable.inside and portable.rows == ()
    native, portable = index.ModelIndex(models).lookup(cell(1, 4096).problem)
    assert (native.rows, portable.rows) == (("row0",), ("other0",))


def what_is_no_time_is_no_estimate(index):
    known, asked = model(), cell(4, 4096)
    for coefficient, us in ((1e308, "inf"), (5e-324, "0")):
        coefficients = (coefficient, *[0.0] * (len(known.features) - 1))
        points = [dataclasses.replace(p, ratio=max(coefficient, 0.1)) for p in known.points]
        off = dataclasses.replace(known, coefficients=coefficients, points=tuple(points))
        found = one(index, asked, [off])
        assert not found.inside and found.rows == ()
        assert found.why_outside == f"its model says {us} us there, which is no time"


def places_of_other_routes_do_not_crowd_out_its_own(index):
    tokens = (4096, 4352, 4608, 4864, 5120, 5376)
    many = model(cells=[cell(4, each) for each in tokens])
    cells = [cell(4, 2048), cell(4, 5376), cell(4, 65536)]
    few = model("triton", "portable", 2.0, cells, "other")
    alone = one(index, cell(4, 4096), [few])
    assert alone.inside and alone.rows == ("other1", "other0")
    _, beside = index.ModelIndex([many, few]).lookup(cell(4, 4096).problem)
    assert beside == alone


SCENARIOS = [
    each
    for each in list(globals().values())
    if isinstance(each, types.FunctionType) and each.__code__.co_varnames[:1] == ("index",)
]
EQUIVALENT = {
    "1024": "how many groups are remembered changes no estimate",
    "len(self._known) >= MOST_KNOWN": "nor does when they are forgotten",
    "0.0": "an offset of all distances",
    "1.0": "only an empty cell has a size below 1, and it has no time to be fitted",
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_rule(scenario):
    scenario(model_index)


def test_every_mutant_is_noticed():
    alive, num_mutants = survivors(model_index, SCENARIOS, EQUIVALENT)
    assert num_mutants >= 15
    assert not alive


def test_a_lookup_costs_a_plan_little():
    roles = ["native", "portable", *["external"] * 4]
    cells = [cell(b, t) for b in (1, 2, 4, 8, 16, 32, 64) for t in (1024, 4096, 16384, 65536)]
    index = model_index.ModelIndex(
        [model(f"{role}{n}", role, n + 1.0, cells) for n, role in enumerate(roles)]
    )
    problem = cell(4, 8192).problem
    assert all(each.inside for each in index.lookup(problem))
    asked = {"native0", "portable1"}
    assert {each.route for each in index.lookup(problem, asked)} == asked

    def seconds(**options):
        # Of this process alone: others on the machine do not count.
        timer = timeit.Timer(lambda: index.lookup(problem, **options), timer=time.process_time)
        return min(timer.repeat(repeat=7, number=200)) / 200

    # 20 us on a core alone; the bound leaves room for caches that others empty.
    assert seconds() < 80e-6
    assert seconds(routes=asked) < seconds()


def test_models_are_not_asked_of_capacity_zero():
    empty = dataclasses.replace(cell().problem, kv_capacity=0)
    (found,) = model_index.ModelIndex([model()]).lookup(empty)
    assert not found.inside and found.us > 0
