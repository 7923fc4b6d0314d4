"""Two rotations of calls timed in turns, so that what drifts meets both alike.

Two medians that were taken one after the other differ by the machine's clocks too. Here a sample of
one side and a sample of the other make a pair, taken back to back, and the side that goes first
changes from pair to pair; the ratio is that of a pair. Its median comes with the exact interval of
order statistics, which assumes no shape of the noise.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from stream_attention.bench.timing import (
    Call,
    Timing,
    capture,
    event_pair,
    method_name,
    require_count,
    require_device_and_limit,
)
from stream_attention.core.errors import Faults
from stream_attention.core.statistics import median_interval

DEFAULT_PAIRS = 50
# Fewer say nothing of the median at 95 %.
LEAST_PAIRS = 6
_WARM_REPLAYS = 2


@dataclass(frozen=True, slots=True)
class PairedTiming:
    """Samples of two sides, taken in turns: the i-th of `first` and of `second` are a pair.

    Every sample is a mean over whole rounds of its rotation. Raises `ValueError` unless both sides
    have as many samples, by one method.
    """

    first: Timing
    second: Timing

    def __post_init__(self) -> None:
        faults = Faults()
        counts, methods = (self.first.n, self.second.n), (self.first.method, self.second.method)
        faults.require(counts[0] == counts[1], "samples", counts, "must be as many on both sides")
        faults.require(methods[0] == methods[1], "method", methods, "must be one for both sides")
        faults.raise_if_any("PairedTiming")

    @property
    def method(self) -> str:
        """The one of `timing.METHODS` that both sides were timed by."""
        return self.first.method

    @property
    def n(self) -> int:
        """Number of pairs."""
        return self.first.n

    @property
    def ratios(self) -> tuple[float, ...]:
        """`first / second` pair by pair: below 1 where the first is faster."""
        pairs = zip(self.first.samples_us, self.second.samples_us, strict=True)
        return tuple(first / second for first, second in pairs)

    @property
    def ratio_p50(self) -> float:
        """The median of the ratios."""
        return statistics.median(self.ratios)

    def confidence_interval(self, level: float = 0.95) -> tuple[float, float]:
        """The exact interval of the median ratio, `(0, inf)` where there are too few pairs."""
        return median_interval(self.ratios, level)


def measure_pairs(
    first: Sequence[Call],
    second: Sequence[Call],
    *,
    device: torch.device,
    cold: bool = True,
    graph: bool = True,
    pairs: int = DEFAULT_PAIRS,
    max_seconds: float | None = None,
    before_samples: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> PairedTiming:
    """`pairs` samples of `first` and of `second`, in the order 1 2, 2 1, 1 2, …

    first, second: one call a pool, over the same pools in the same order; the rest as `measure`
    takes it. A sample is a round over all pools (graph: whole rounds), so each side reads its first
    pool when the other has just gone through all of them: cold stays cold. On a CPU no more than
    `max_seconds` are spent, but for `LEAST_PAIRS`.
    Synchronizes the device. Raises `ValueError` for what `measure` refuses, and for sides of
    different length.
    """
    faults = Faults()
    for name, calls in (("first", first), ("second", second)):
        faults.require(len(calls) >= 1, name, len(calls), "needs at least one call", 1)
    faults.require(
        len(first) == len(second), "second", len(second), "must have a call a pool, as first has"
    )
    require_count(faults, "pairs", pairs, DEFAULT_PAIRS)
    require_device_and_limit(faults, device, max_seconds)
    faults.raise_if_any("measure_pairs")
    sides = [list(calls) if cold else [calls[0]] for calls in (first, second)]
    count = len(sides[0])
    if device.type == "cuda" and graph:
        samples, count = _by_graph(sides, device, pairs, before_samples)
    elif device.type == "cuda":
        samples = _by_events(sides, device, pairs, before_samples)
    else:
        samples = _by_clock(sides, pairs, max_seconds, before_samples, clock)
    method = method_name(device, cold, graph)
    one, other = (Timing(tuple(taken), method, count, len(sides[0])) for taken in samples)
    return PairedTiming(one, other)


def _order(pair: int) -> tuple[int, int]:
    """The sides in the order of this pair: who goes first changes, so that drift has no side."""
    return (0, 1) if pair % 2 == 0 else (1, 0)


def _by_graph(
    sides: Sequence[Sequence[Call]],
    device: torch.device,
    pairs: int,
    before_samples: Callable[[], None] | None,
) -> tuple[list[list[float]], int]:
    with torch.cuda.device(device), contextlib.ExitStack() as stack:
        graphs = []
        for rotation in sides:
            graph, count = capture(rotation, device)
            stack.callback(graph.reset)
            graphs.append(graph)
        for index in range(_WARM_REPLAYS):
            for side in _order(index):
                graphs[side].replay()
        torch.cuda.synchronize(device)
        if before_samples is not None:
            before_samples()
        events = [[event_pair() for _ in range(pairs)] for _ in sides]
        # No sync between replays: the host runs ahead, so no launch gap is timed.
        for index in range(pairs):
            for side in _order(index):
                start, end = events[side][index]
                start.record()
                graphs[side].replay()
                end.record()
        torch.cuda.synchronize(device)
        return [[a.elapsed_time(b) * 1e3 / count for a, b in taken] for taken in events], count


def _by_events(
    sides: Sequence[Sequence[Call]],
    device: torch.device,
    pairs: int,
    before_samples: Callable[[], None] | None,
) -> list[list[float]]:
    """Single launches from Python, each between two syncs; a sample is the mean of a round."""

    def timed(call: Call) -> float:
        start, end = event_pair()
        torch.cuda.synchronize(device)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) * 1e3

    with torch.cuda.device(device):
        for rotation in sides:
            for call in rotation:
                call()
        torch.cuda.synchronize(device)
        if before_samples is not None:
            before_samples()
        samples: list[list[float]] = [[], []]
        for index in range(pairs):
            for side in _order(index):
                samples[side].append(statistics.fmean(timed(call) for call in sides[side]))
    return samples


def _by_clock(
    sides: Sequence[Sequence[Call]],
    pairs: int,
    max_seconds: float | None,
    before_samples: Callable[[], None] | None,
    clock: Callable[[], float],
) -> list[list[float]]:
    def timed(call: Call) -> float:
        start = clock()
        call()
        return (clock() - start) * 1e6

    for rotation in sides:
        rotation[-1]()  # warm-up; the first sample reads what has not just been read
    if before_samples is not None:
        before_samples()
    samples: list[list[float]] = [[], []]
    begin = clock()
    for index in range(pairs):
        for side in _order(index):
            samples[side].append(statistics.fmean(timed(call) for call in sides[side]))
        enough = index + 1 >= LEAST_PAIRS
        if max_seconds is not None and enough and clock() - begin >= max_seconds:
            break
    return samples
