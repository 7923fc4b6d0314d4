"""Rules of numbers: that what ran was timed as kernels are, and compared with the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from stream_attention.core.errors import Fault
from stream_attention.planner.evidence import Correctness, EvidenceRow, PairRow, Row, Samples
from stream_attention.planner.evidence_finding import (
    Context,
    RefusalRule,
    device_type,
    is_time,
    of_checks,
    of_ok,
    of_sides,
    of_timings,
    sides_of,
    unless,
)
from stream_attention.planner.roofline import attention_work, bounds_us

# The one method of each device that times kernels, and kernels that read from memory.
KERNEL_METHODS = {"cpu": "cpu_cold", "cuda": "cuda_graph_cold"}
# A cold time below this share of the floor did not read the bytes. The floor is the same read by
# the same method, so on a GPU 0.5 leaves room for any honest kernel. On a CPU the floor is torch's
# best reduction, and the machine may be twice as fast a second later.
LEAST_OF_FLOOR = {"cpu": 0.1, "cuda": 0.5}
# The order statistics of 15 samples hold the median with 99.9 %, those of 5 with 94 %: so many a
# slow cell of a CPU gets before its time is up.
MIN_SAMPLES = {"cpu": 5, "cuda": 15}
# Microseconds that anything measured takes: a clock of the device on one side, a quarter of an hour
# on the other. Beyond them ratios and models of times stop being numbers.
LEAST_US, MOST_US = 1e-3, 1e9
# Cells of some KB would need thousands of sets of inputs to exceed a cache; their time is launch.
COLD_POOLS = 128


def least_plausible_us(device: str, floor_us: float) -> float:
    """Microseconds that a cold call cannot stay below on a device of this type."""
    return LEAST_OF_FLOOR.get(device, 0.0) * floor_us


def are_times(samples: Samples) -> bool:
    """Whether there are samples and all are finite and positive."""
    return bool(samples.samples_us) and all(map(is_time, samples.samples_us))


def _method(timing: Samples, row: Row, _: Context) -> Fault | None:
    want = KERNEL_METHODS[device_type(row.environment.arch)]
    is_of = {"warm": "times data in the cache", "eager": "times launches from Python"}
    why = "; ".join(text for word, text in is_of.items() if word in timing.method.split("_"))
    if timing.method == "host":
        why = "times the host, not the kernel"
    rule = f"{why or 'is not how kernels are timed there'}: only {want} counts"
    return unless(timing.method == want, "method", timing.method, rule, want)


def _samples(timing: Samples, *_: Any) -> Fault | None:
    bad = [each for each in timing.samples_us if not is_time(each)]
    rule = f"must be finite and above 0; {len(bad)} of {len(timing.samples_us)} are not"
    return unless(not bad, "samples_us", bad[:3], rule)


def _in_range(row: Row, _: Context) -> Iterator[Fault]:
    """What is no number of microseconds at all is said by `samples` and `floor`."""
    rule = f"must be in {LEAST_US:g}..{MOST_US:g} microseconds"
    for side in sides_of(row) if row.outcome == "ok" else ():
        times = () if side.timing is None else side.timing.samples_us
        bad = [each for each in times if is_time(each) and not LEAST_US <= each <= MOST_US]
        if bad:
            yield Fault(f"{side.prefix}timing.samples_us", bad[:3], rule)
    floor = row.floor_us if isinstance(row, EvidenceRow) else None
    if floor is None or (row.outcome == "ok" and not is_time(floor)):
        return
    if not LEAST_US <= floor <= MOST_US:
        yield Fault("floor_us", floor, rule)


def _few(timing: Samples, row: Row, context: Context) -> Fault | None:
    least = context.min_samples or MIN_SAMPLES[device_type(row.environment.arch)]
    count = len(timing.samples_us)
    return unless(count >= least, "num_samples", count, f"must be >= {least}", least)


def _warm_rotation(timing: Samples, row: Row, _: Context) -> Fault | None:
    read = timing.num_pools * row.cell.kv_tokens * row.cell.problem.kv_token_bytes
    # An L2 that is not known may be of any size.
    cold = timing.num_pools >= COLD_POOLS or read > row.environment.l2_bytes > 0
    held = cold or device_type(row.environment.arch) == "cpu"
    rule = f"their {read} bytes of K and V fit into {row.environment.l2_bytes} of L2"
    return unless(held, "num_pools", timing.num_pools, rule, COLD_POOLS)


def _lengths(row: PairRow, _: Context) -> Fault | None:
    counts = tuple(len(side.timing.samples_us) for side in sides_of(row) if side.timing is not None)
    held = len(set(counts)) <= 1
    return unless(held, "num_samples", counts, "sample i of both is one pair: must be as many")


def _unlike(row: PairRow, _: Context) -> Fault | None:
    ways = [
        (t.method, t.calls_per_sample, t.num_pools) for t in (s.timing for s in sides_of(row)) if t
    ]
    rule = "method, calls a sample and pools must be the same for both"
    return unless(len(set(ways)) <= 1, "first_timing, second_timing", ways, rule)


def _implausible(row: EvidenceRow, _: Context) -> Fault | None:
    if row.timing is None or not is_time(row.floor_us) or not are_times(row.timing):
        return None
    return too_fast("timing.p50_us", row.timing, row, row.floor_us)


def too_fast(parameter: str, timing: Samples, row: Row, floor_us: float) -> Fault | None:
    """A fault where the median is below what reading the cell takes by its floor."""
    least = least_plausible_us(device_type(row.environment.arch), floor_us)
    rule = f"reading the bytes of the cell takes more than {least:.4g}, its floor is {floor_us:.4g}"
    return unless(not timing.p50_us < least, parameter, round(timing.p50_us, 4), rule)


def _beyond_roofline(timing: Samples, row: Row, _: Context) -> Fault | None:
    """A fault where the median is below what the device's own data sheet allows for the cell."""
    if not are_times(timing):
        return None
    here, cell = row.environment, row.cell
    work = attention_work(cell.problem, cell.kv_lens, cell.qo_lens)
    limits = bounds_us(work, here.device)  # L2 too is that of the sheet, not what the row says
    if limits is None:
        return None
    limit = max(limits, key=lambda name: limits[name])
    rule = f"{limit} of {here.device} alone takes {limits[limit]:.4g} us"
    held = timing.p50_us >= limits[limit]
    return unless(held, "p50_us", round(timing.p50_us, 4), rule)


def _is_size(value: float | None) -> bool:
    """Whether an error is known: not NaN, not negative. Infinite is known."""
    return value is not None and value >= 0


def _errors_and_bounds(
    holds: Callable[[float | None, float | None], bool], shown: str, rule: str
) -> Callable[[Correctness], Iterator[Fault]]:
    def find(check: Correctness) -> Iterator[Fault]:
        for kind in ("max", "rms"):
            error, bound = getattr(check, f"{kind}_error"), getattr(check, f"{kind}_bound")
            if not holds(error, bound):
                parameter = f"{kind}_{shown}"
                yield Fault(parameter, getattr(check, parameter), rule.format(bound=bound))

    return find


def _rows_checked(check: Correctness) -> Iterator[Fault]:
    if not 0 < check.rows_checked <= check.rows:
        rule = f"must be in 1..rows, which are {check.rows}"
        yield Fault("rows_checked", check.rows_checked, rule)


def _tolerance(check: Correctness) -> Iterator[Fault]:
    if not check.tolerance.strip():
        yield Fault("tolerance", check.tolerance, "must name the rule that made the bounds")


NUMBER_RULES = (
    RefusalRule(
        "untimed",
        of_sides(
            lambda side, *_: unless(
                side.timing is not None, f"{side.prefix}timing", None, "what is ok must be timed"
            )
        ),
    ),
    RefusalRule(
        "unchecked",
        of_sides(
            lambda side, *_: unless(
                side.correctness is not None,
                f"{side.prefix}correctness",
                None,
                "what is ok must be compared with the oracle",
            )
        ),
    ),
    RefusalRule("method", of_timings(_method)),
    RefusalRule("samples", of_timings(_samples)),
    RefusalRule("too_few_samples", of_timings(_few)),
    RefusalRule("warm_rotation", of_timings(_warm_rotation)),
    RefusalRule("pair_lengths", of_ok(PairRow, _lengths)),
    RefusalRule("pair_unlike", of_ok(PairRow, _unlike)),
    RefusalRule(
        "floor",
        of_ok(
            EvidenceRow,
            lambda row, _: unless(
                is_time(row.floor_us),
                "floor_us",
                row.floor_us,
                "must be the time to read the cell's bytes, finite and above 0",
            ),
        ),
    ),
    RefusalRule("time_range", _in_range),
    RefusalRule("implausible", of_ok(EvidenceRow, _implausible)),
    RefusalRule("beyond_roofline", of_timings(_beyond_roofline)),
    RefusalRule(
        "bound_missing",
        of_checks(
            _errors_and_bounds(
                lambda _, bound: bound is not None and math.isfinite(bound) and bound >= 0,
                "bound",
                "must be finite and >= 0",
            )
        ),
    ),
    RefusalRule(
        "error_missing",
        of_checks(
            _errors_and_bounds(
                lambda error, _: _is_size(error), "error", "must be a number >= 0, not NaN"
            )
        ),
    ),
    RefusalRule(
        "error_above_bound",
        of_checks(
            _errors_and_bounds(
                lambda error, bound: error is None or bound is None or not error > bound,
                "error",
                "must be at most {bound}",
            )
        ),
    ),
    RefusalRule("rows_unchecked", of_checks(_rows_checked)),
    RefusalRule("tolerance", of_checks(_tolerance)),
    RefusalRule(
        "allocations",
        of_ok(
            EvidenceRow,
            lambda row, _: unless(
                device_type(row.environment.arch) == "cpu" or row.timed_allocations is not None,
                "timed_allocations",
                None,
                "must be counted on a GPU",
            ),
        ),
    ),
    RefusalRule(
        "kernel",
        of_ok(
            EvidenceRow,
            lambda row, _: unless(
                row.role != "native" or bool(row.kernel),
                "kernel",
                row.kernel,
                "a native kernel's registers, spills and shared memory must be known",
            ),
        ),
    ),
)
