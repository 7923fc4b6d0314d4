"""The read curve: interpolation, monotony, sizes; and one small curve measured here."""

import pytest
import torch

from stream_attention.bench import floor
from stream_attention.bench.floor import ReadCurve, ReadPoint
from stream_attention.bench.timing import Timing
from stream_attention.core.formulas import MIB

CURVE = ReadCurve(
    (ReadPoint(100, 2.0, "a"), ReadPoint(200, 3.0, "b"), ReadPoint(400, 7.0, "c")), "x"
)


@pytest.mark.parametrize(
    ("num_bytes", "us"),
    [(1, 2.0), (100, 2.0), (150, 2.5), (200, 3.0), (300, 5.0), (400, 7.0), (500, 9.0)],
)
def test_floor_is_linear_between_points_and_beyond_the_last(num_bytes, us):
    assert CURVE.floor_us(num_bytes) == pytest.approx(us)


def test_a_flat_end_extrapolates_at_the_mean_rate():
    flat = ReadCurve((ReadPoint(100, 2.0, "a"), ReadPoint(200, 2.0, "b")), "x")
    assert flat.floor_us(400) == pytest.approx(4.0)
    assert ReadCurve((ReadPoint(100, 2.0, "a"),), "x").floor_us(400) == pytest.approx(8.0)


def test_best_rate_is_in_1e9_bytes_a_second():
    curve = ReadCurve((ReadPoint(4_610_000, 1.0, "a"), ReadPoint(4_620_000, 2.0, "b")), "x")
    assert curve.best_gb_per_s == pytest.approx(4610)


def test_points_must_ascend():
    with pytest.raises(ValueError, match="sizes must be ascending and distinct"):
        ReadCurve((ReadPoint(2, 1.0, "a"), ReadPoint(1, 1.0, "b")), "x")


def test_no_size_is_slower_than_a_larger_one():
    noisy = [ReadPoint(1, 5.0, "a"), ReadPoint(2, 3.0, "b"), ReadPoint(4, 4.0, "c")]
    assert [point.us for point in floor.monotone(noisy)] == [3.0, 3.0, 4.0]


def test_floor_takes_the_median_on_cuda_and_the_fastest_sample_on_a_cpu():
    samples = (1.0, 2.0, 9.0)
    assert floor.floor_of(Timing(samples, "cuda_graph_cold")) == 2.0
    assert floor.floor_of(Timing(samples, "cpu_cold")) == 1.0


@pytest.mark.parametrize(
    ("case_mib", "step", "largest", "sizes"),
    [
        ([16], 2, 2048, (16,)),
        ([20], 2, 2048, (16, 32)),
        ([16, 200], 4, 256, (16, 64, 256)),
        ([16.1, 64.2], 4, 256, (16, 64)),
        ([4096], 2, 2048, (2048,)),
        ([0.5], 2, 2048, (1,)),
    ],
)
def test_sizes_bracket_the_cases(case_mib, step, largest, sizes):
    found = floor.curve_sizes(
        [int(mib * MIB) for mib in case_mib], step=step, largest=largest * MIB
    )
    assert tuple(size // MIB for size in found) == sizes


def test_a_measured_curve_has_times_for_its_sizes():
    seen = []
    curve = floor.measure_read_curve([MIB], torch.device("cpu"), replays=3, on_size=seen.append)
    assert seen == [MIB] and [point.num_bytes for point in curve.points] == [MIB]
    assert curve.method == "cpu_cold" and curve.points[0].us > 0
    assert 0.1 < curve.best_gb_per_s < 2000


@pytest.mark.parametrize("names", [("slow", "fast"), ("fast", "slow")])
def test_the_best_launch_shape_at_each_size_makes_the_curve(monkeypatch, names):
    us = {"slow": (9.0, 8.0, 9.5), "fast": (5.0, 3.0, 6.0)}
    made = []

    def time_shapes(slices, device, replays):
        made.append((slices[0].numel() * 4, replays))
        return {name: Timing(us[name], "cuda_graph_cold") for name in names}

    monkeypatch.setattr(floor, "_time_shapes", time_shapes)
    curve = floor.measure_read_curve([MIB], torch.device("cpu"), replays=7)
    assert curve.points == (ReadPoint(MIB, 5.0, "fast"),)
    assert made == [(MIB, 7)] and curve.method == "cuda_graph_cold"
