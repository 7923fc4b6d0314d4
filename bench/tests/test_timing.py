"""The timing helper, on a clock that only advances when a call says so."""

import gc

import pytest
import torch

from stream_attention.bench import timing

CPU = torch.device("cpu")


class Clock:
    """Seconds that calls spend by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def spend(self, microseconds):
        self.now += microseconds * 1e-6


def spender(clock, log, name, microseconds):
    def call():
        log.append(name)
        clock.spend(microseconds)

    return call


def test_samples_are_the_time_inside_each_call():
    clock, log = Clock(), []
    calls = [spender(clock, log, name, us) for name, us in (("a", 10), ("b", 20), ("c", 30))]
    found = timing.measure(calls, device=CPU, replays=6, clock=clock)
    assert found.samples_us == pytest.approx((20, 30, 10, 20, 30, 10))
    assert found.method == "cpu_cold" and found.num_pools == 3 and found.n == 6
    assert found.p50_us == pytest.approx(20)


def test_rotation_never_repeats_a_pool_and_warm_always_does():
    clock, log = Clock(), []
    calls = [spender(clock, log, name, 1) for name in "ab"]
    timing.measure(calls, device=CPU, replays=5, clock=clock)
    assert log == list("ababab")
    log.clear()
    warm = timing.measure(calls, device=CPU, cold=False, replays=3, clock=clock)
    assert log == list("aaaa") and warm.method == "cpu_warm" and warm.num_pools == 1


def test_before_samples_runs_after_the_warm_up():
    clock, log = Clock(), []
    timing.measure(
        [spender(clock, log, "call", 1)],
        device=CPU,
        replays=2,
        before_samples=lambda: log.append("poison"),
        clock=clock,
    )
    assert log == ["call", "poison", "call", "call"]


def test_time_limit_keeps_five_samples_and_every_pool():
    clock, log = Clock(), []
    calls = [spender(clock, log, index, 1e6) for index in range(7)]
    found = timing.measure(calls, device=CPU, replays=100, max_seconds=2.0, clock=clock)
    assert found.n == 7 and set(log[1:]) == set(range(7))
    few = timing.measure(calls[:2], device=CPU, replays=100, max_seconds=2.0, clock=clock)
    assert few.n == 5


def test_every_pool_is_timed_however_few_samples_are_asked_for():
    clock, log = Clock(), []
    calls = [spender(clock, log, index, 1) for index in range(4)]
    found = timing.measure(
        calls, device=CPU, replays=2, before_samples=lambda: log.clear(), clock=clock
    )
    assert found.n == 4 and set(log) == set(range(4))


@pytest.mark.parametrize(
    ("calls", "replays", "message"),
    [([], 1, "calls=0: needs at least one call"), ([print], 0, "replays=0: must be an int >= 1")],
)
def test_nothing_to_measure_is_an_error(calls, replays, message):
    with pytest.raises(ValueError, match=message):
        timing.measure(calls, device=CPU, replays=replays)


def test_percentiles_interpolate():
    found = timing.Timing((10.0, 20.0, 30.0, 40.0, 50.0, 60.0), "cpu_cold")
    assert (found.p20_us, found.p50_us, found.p80_us) == pytest.approx((20.0, 35.0, 50.0))
    assert timing.percentile([7.0], 80) == 7.0


def test_a_timing_needs_samples_and_a_known_method():
    with pytest.raises(ValueError, match="2 faults") as caught:
        timing.Timing((), "stopwatch")
    assert "samples_us=(): must not be empty" in str(caught.value)
    assert "method='stopwatch': must be one of cuda_graph_cold" in str(caught.value)


@pytest.mark.parametrize(("pools", "calls"), [(1, 10), (3, 12), (10, 10), (34, 34)])
def test_a_graph_holds_whole_rounds_and_at_least_ten_calls(pools, calls):
    assert timing.calls_in_graph(pools) == calls


def test_host_cost_is_the_mean_of_a_burst():
    clock, log = Clock(), []
    found = timing.measure_host(spender(clock, log, "call", 3), repeats=10, samples=4, clock=clock)
    assert found.samples_us == pytest.approx((3, 3, 3, 3))
    assert found.calls_per_sample == 10 and found.method == "host"
    assert gc.isenabled()


def test_a_sync_before_a_burst_is_not_part_of_it():
    clock, log = Clock(), []
    found = timing.measure_host(
        spender(clock, log, "call", 3),
        repeats=2,
        samples=3,
        before_sample=spender(clock, log, "sync", 1000),
        clock=clock,
    )
    assert found.samples_us == pytest.approx((3, 3, 3))
    assert log[-9:] == ["sync", "call", "call"] * 3
