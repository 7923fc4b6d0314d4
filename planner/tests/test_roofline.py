"""Lower bounds against values worked out by hand, and what pruning may and may not drop."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_attention.core.device import DeviceFacts
from stream_attention.core.problem import AttentionProblem
from stream_attention.planner import roofline
from stream_attention.planner.roofline import PEAKS, TimedCandidate, Work

H200 = DeviceFacts(
    type="cuda",
    name="NVIDIA H200",
    compute_capability=(9, 0),
    num_sms=132,
    l2_bytes=60 << 20,
)
UNKNOWN = dataclasses.replace(H200, name="NVIDIA H300")


def problem(**changes):
    fields = {"batch": 2, "total_qo_len": 2, "max_qo_len": 1, "kv_capacity": 1 << 20}
    fields |= {"num_qo_heads": 8, "num_kv_heads": 2, "sm_scale": 0.1}
    fields |= {"head_dim_qk": 64, "head_dim_vo": 32}
    fields |= dict.fromkeys(("q_dtype", "kv_dtype", "out_dtype"), "bfloat16")
    return AttentionProblem(**{**fields, **changes})


def test_memory_bound_is_what_l2_cannot_hold_at_the_rate_of_memory():
    read = 2 << 30
    bound = roofline.bounds_us(Work(read_bytes=read), H200.name, H200.l2_bytes)["memory"]
    assert math.isclose(bound, (read - (60 << 20)) / (4800e3 * roofline.MARGIN))
    assert roofline.lower_bound_us(Work(read_bytes=60 << 20), H200) == 0


def test_a_larger_cache_of_the_device_than_of_the_table_counts():
    larger = dataclasses.replace(H200, l2_bytes=1 << 40)
    assert roofline.lower_bound_us(Work(read_bytes=2 << 30), larger) == 0


def test_flops_bound_by_the_rate_of_their_operands():
    sixteen = roofline.lower_bound_us(Work(read_bytes=0, flops=10**12), H200)
    eight = roofline.lower_bound_us(Work(read_bytes=0, flops=10**12, eight_bit=True), H200)
    assert math.isclose(sixteen, 1e6 / (1071 * roofline.MARGIN))
    assert math.isclose(eight, sixteen / 2)


def test_launches_bound_where_one_was_measured_and_nowhere_else():
    work = Work(read_bytes=0, num_launches=3)
    assert math.isclose(roofline.lower_bound_us(work, H200), 3 * 0.91 / roofline.MARGIN)
    other = dataclasses.replace(H200, name="NVIDIA B200")
    assert roofline.lower_bound_us(work, other) == 0


def test_the_bound_is_the_largest_of_the_three():
    work = Work(read_bytes=2 << 30, flops=10**9, num_launches=1)
    bounds = roofline.bounds_us(work, H200.name, H200.l2_bytes)
    assert roofline.lower_bound_us(work, H200) == bounds["memory"] == max(bounds.values())


def test_an_unknown_device_has_no_bound_and_prunes_nothing():
    slow = TimedCandidate(name="slow", work=Work(read_bytes=1 << 40))
    fast = TimedCandidate(name="fast", work=Work(read_bytes=1), time_us=1.0)
    assert roofline.lower_bound_us(slow.work, UNKNOWN) is None
    assert roofline.prune([slow, fast], UNKNOWN) == ((slow, fast), ())
    assert roofline.prune([slow, fast], H200)[0] == (fast,)


def test_no_measured_rate_of_the_decode_tables_is_below_its_bound():
    # 16 requests of 32K, 32/8 heads of 128, 2 GiB: 458.4 us plainly read, 472 by the kernel.
    asked = problem(
        batch=16, total_qo_len=16, num_qo_heads=32, num_kv_heads=8, head_dim_qk=128, head_dim_vo=128
    )
    work = roofline.attention_work(asked, [1 << 15] * 16, num_launches=1)
    bound = roofline.lower_bound_us(work, H200)
    assert 400 < bound < 458.4


def test_work_counts_tokens_ids_and_pairs_by_hand():
    work = roofline.attention_work(problem(page_size=16), [17, 0], num_launches=2)
    q = 2 * 8 * 64 * 2
    tokens = 17 * 2 * (64 + 32) * 2
    ids = 4 * (2 + 0 + 2)
    assert work == Work(read_bytes=q + tokens + ids, flops=2 * 17 * 8 * (64 + 32), num_launches=2)


def test_work_of_a_window_counts_what_it_shows():
    asked = problem(
        max_qo_len=3, total_qo_len=6, window_left=4, cache_kind="contiguous", page_size=100
    )
    work = roofline.attention_work(asked, [20, 2])
    # Queries at 17, 18, 19 see five tokens each, 13 .. 19 in all; at -1, 0, 1: 0, 1 and 2.
    assert work.flops == 2 * (5 * 3 + 3) * 8 * 96
    assert work.read_bytes == 6 * 8 * 64 * 2 + (7 + 2) * 2 * 96 * 2


def test_work_of_requests_without_queries_is_not_counted():
    asked = problem(batch=3, total_qo_len=4, max_qo_len=4, cache_kind="contiguous", page_size=100)
    unknown = roofline.attention_work(asked, [50, 60, 70])
    assert unknown == Work(read_bytes=4 * 8 * 64 * 2)
    known = roofline.attention_work(asked, [50, 60, 70], [4, 0, 0])
    assert known.read_bytes == unknown.read_bytes + 50 * 2 * 96 * 2
    assert known.flops == 2 * (47 + 48 + 49 + 50) * 8 * 96


def test_work_with_a_mask_is_reading_q():
    asked = problem(phase="prefill", mask="bool", cache_kind="contiguous", page_size=100)
    assert roofline.attention_work(asked, [50, 60]) == Work(read_bytes=2 * 8 * 64 * 2)


def test_work_in_eight_bits_says_so():
    asked = problem(kv_dtype="float8_e4m3fn")
    assert roofline.attention_work(asked, [5, 5]).eight_bit


@pytest.mark.parametrize(
    ("name", "lens"),
    [
        ("kv_lens", [1]),
        ("kv_lens", [1, -1]),
        ("kv_lens", [1, (1 << 20) + 1]),
        ("kv_lens", [1, True]),
        ("q_lens", [1, 2]),
    ],
)
def test_lens_that_the_problem_cannot_have_are_refused(name, lens):
    arguments = {"kv_lens": [1, 1], name: lens}
    with pytest.raises(ValueError, match=rf"{name}=.*must be 2 ints in 0\.\."):
        roofline.attention_work(problem(), **arguments)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Work(read_bytes=-1), "read_bytes=-1: must be an int >= 0; use 0"),
        (lambda: Work(read_bytes=0, flops=1.5), "flops=1.5"),
        (lambda: Work(read_bytes=0, num_launches=True), "num_launches=True"),
        (lambda: Work(read_bytes=0, eight_bit=1), "eight_bit=1: must be a bool"),
        (lambda: TimedCandidate(name="", work=Work(read_bytes=0)), "name=''"),
        (lambda: TimedCandidate(name="a", work=3), "work=3"),
        (
            lambda: TimedCandidate(name="a", work=Work(read_bytes=0), time_us=math.nan),
            r"time_us=nan: must be None \(not known\)",
        ),
    ],
)
def test_bad_work_and_candidates_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_what_is_dropped_says_the_bound_its_resource_and_the_better_time():
    slow = TimedCandidate(name="slow", work=Work(read_bytes=2 << 30))
    fast = TimedCandidate(name="fast", work=Work(read_bytes=1 << 20), time_us=9.5)
    _, (dropped,) = roofline.prune([slow, fast], H200)
    assert dropped.route == "slow"
    (reason,) = dropped.reasons
    assert reason.startswith("lower bound 421.64 us by memory of NVIDIA H200: fast takes 9.50 us")


def test_the_best_is_kept_even_below_its_bound():
    best = TimedCandidate(name="best", work=Work(read_bytes=2 << 30), time_us=1.0)
    assert roofline.prune([best], H200) == ((best,), ())


CANDIDATES = st.lists(
    st.builds(
        TimedCandidate,
        name=st.text(min_size=1, max_size=3),
        work=st.builds(
            Work,
            read_bytes=st.integers(0, 1 << 36),
            flops=st.integers(0, 1 << 50),
            eight_bit=st.booleans(),
            num_launches=st.integers(0, 9),
        ),
        time_us=st.none() | st.floats(0.01, 1e5),
    ),
    max_size=8,
)


@given(CANDIDATES, st.sampled_from([*sorted(PEAKS), "", "no such device"]))
def test_only_what_cannot_win_is_dropped_and_order_is_kept(candidates, name):
    device = dataclasses.replace(H200, name=name)
    kept, dropped = roofline.prune(candidates, device)
    assert len(kept) + len(dropped) == len(candidates)
    times = [each.time_us for each in candidates if each.time_us is not None]
    must_stay = [
        each
        for each in candidates
        if not times
        or each.time_us == min(times)
        or (roofline.lower_bound_us(each.work, device) or 0.0) <= min(times)
    ]
    assert list(kept) == must_stay
    assert [each.route for each in dropped] == [
        each.name for each in candidates if each not in must_stay
    ]


def test_peaks_are_positive_and_have_sources():
    for peaks in PEAKS.values():
        numbers = (peaks.memory_gbps, peaks.l2_mib, peaks.tensor_tflops, peaks.tensor8_tflops)
        assert min(numbers) > 0
        assert peaks.launch_us >= 0
        assert peaks.source
        assert eval(repr(peaks), {"DevicePeaks": roofline.DevicePeaks}) == peaks
