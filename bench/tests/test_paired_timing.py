"""Pairs on a clock that only advances when a call says so: drift has no side, ratios are exact."""

import math

import pytest
import torch

from stream_attention.bench import timing
from stream_attention.bench.paired_timing import LEAST_PAIRS, PairedTiming, measure_pairs

CPU = torch.device("cpu")


class Clock:
    """Seconds that calls spend by hand; `drift` makes everything slower as time goes on."""

    def __init__(self, drift=0.0):
        self.now, self.drift = 100.0, drift

    def __call__(self):
        return self.now

    def spender(self, microseconds, log=None, name=""):
        def call():
            if log is not None:
                log.append(name)
            self.now += microseconds * 1e-6 * (1 + self.drift * (self.now - 100.0))

        return call


def pairs_of(first, second, clock=None, **options):
    return measure_pairs(first, second, device=CPU, clock=clock or Clock(), **options)


def test_the_ratio_is_the_first_over_the_second():
    clock = Clock()
    found = pairs_of([clock.spender(30)], [clock.spender(40)], clock, pairs=8, cold=False)
    assert found.first.samples_us == pytest.approx((30,) * 8)
    assert found.second.samples_us == pytest.approx((40,) * 8)
    assert found.ratios == pytest.approx((0.75,) * 8) and found.ratio_p50 == pytest.approx(0.75)
    assert (found.n, found.method) == (8, "cpu_warm")
    assert found.confidence_interval() == pytest.approx((0.75, 0.75))


def test_a_sample_is_the_mean_of_a_round_over_all_pools():
    clock = Clock()
    first = [clock.spender(us) for us in (10, 20, 30)]
    second = [clock.spender(us) for us in (2, 4, 6)]
    found = pairs_of(first, second, clock, pairs=6)
    assert found.first.samples_us == pytest.approx((20,) * 6)
    assert found.second.samples_us == pytest.approx((4,) * 6)
    assert (found.first.calls_per_sample, found.first.num_pools) == (3, 3)
    assert found.method == "cpu_cold"


def test_the_side_that_goes_first_changes_and_every_pool_is_read_between():
    clock, log = Clock(), []
    first = [clock.spender(1, log, f"a{pool}") for pool in range(2)]
    second = [clock.spender(1, log, f"b{pool}") for pool in range(2)]
    pairs_of(first, second, clock, pairs=4, before_samples=lambda: log.append("poison"))
    begin = log.index("poison") + 1
    assert log[:begin] == ["a1", "b1", "poison"]
    once, turned = ["a0", "a1", "b0", "b1"], ["b0", "b1", "a0", "a1"]
    assert log[begin:] == [*once, *turned, *once, *turned]


def test_drift_cancels():
    clock = Clock(drift=2e3)  # a clock that is twice as slow every half millisecond
    found = pairs_of([clock.spender(30)], [clock.spender(40)], clock, pairs=10, cold=False)
    slowdown = found.first.samples_us[-1] / found.first.samples_us[0]
    one_sided = found.ratios[::2]  # where the first side always goes first
    assert slowdown > 2 and max(one_sided) < 0.72
    assert found.ratio_p50 == pytest.approx(0.75, rel=0.02)


def test_few_pairs_say_nothing_of_the_median():
    clock = Clock()
    found = pairs_of([clock.spender(1)], [clock.spender(1)], clock, pairs=LEAST_PAIRS - 1)
    assert found.confidence_interval() == (0.0, math.inf)
    found = pairs_of([clock.spender(1)], [clock.spender(1)], clock, pairs=LEAST_PAIRS)
    assert found.confidence_interval() == pytest.approx((1.0, 1.0))


def test_the_time_limit_keeps_the_pairs_that_an_interval_needs():
    clock = Clock()
    found = pairs_of([clock.spender(1e6)], [clock.spender(1e6)], clock, pairs=50, max_seconds=3)
    assert found.n == LEAST_PAIRS
    found = pairs_of([clock.spender(1e6)], [clock.spender(1e6)], clock, pairs=50, max_seconds=19)
    assert found.n == 10


@pytest.mark.parametrize(
    ("first", "second", "options", "message"),
    [
        ([], [print], {}, "first=0: needs at least one call; use 1"),
        ([print], [print, print], {}, "second=2: must have a call a pool, as first has"),
        ([print], [print], {"pairs": 0}, "pairs=0: must be an int >= 1; use 50"),
        ([print], [print], {"max_seconds": "1"}, "max_seconds='1': must be None or a number"),
        ([print], [], {"pairs": True}, "3 faults"),
    ],
)
def test_what_is_no_pair_is_refused(first, second, options, message):
    with pytest.raises(ValueError, match=message):
        pairs_of(first, second, **options)


def test_a_device_by_name_is_refused():
    with pytest.raises(ValueError, match=r"device=.cpu.: must be a torch.device; use torch"):
        measure_pairs([print], [print], device="cpu")


def test_two_timings_of_different_kind_are_no_pair():
    with pytest.raises(ValueError, match="2 faults"):
        PairedTiming(timing.Timing((1.0,), "cpu_cold"), timing.Timing((1.0, 2.0), "cpu_warm"))
