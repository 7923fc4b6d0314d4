"""The one timing helper: `measure` times a rotation of calls and keeps every sample.

A *call* is one problem bound to one KV pool. Rotating over pools that together exceed the
last-level cache makes every call read its KV from memory (cold); one pool repeated keeps it cached
(warm). On CUDA the calls are captured in one graph and CUDA events surround its replay (method
`graph`), or they are launched one by one from Python with events around each (method `eager`). On a
CPU `time.perf_counter` surrounds each call. Methods are never mixed: `Timing.method` names the one.
Two rotations side by side are `paired_timing.measure_pairs`, by the same means.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stream_attention.core.errors import Faults
from stream_attention.core.ir import is_int

Call = Callable[[], Any]

METHODS = (
    "cuda_graph_cold",
    "cuda_graph_warm",
    "cuda_eager_cold",
    "cuda_eager_warm",
    "cpu_cold",
    "cpu_warm",
    "host",
)

# In a shorter graph the launch latency of the graph itself (about 5 us) shows in the quotient.
MIN_CALLS_IN_GRAPH = 10
DEFAULT_REPLAYS = 25


@dataclass(frozen=True, slots=True)
class Timing:
    """Raw samples of one measurement, in microseconds a call.

    samples_us: one value a replay (graph) or a call (eager, cpu, host), in the order taken.
    method: one of `METHODS`. calls_per_sample: calls that each sample averages over.
    num_pools: distinct KV pools in the rotation.
    """

    samples_us: tuple[float, ...]
    method: str
    calls_per_sample: int = 1
    num_pools: int = 1

    def __post_init__(self) -> None:
        faults = Faults()
        faults.require(bool(self.samples_us), "samples_us", self.samples_us, "must not be empty")
        faults.require(
            self.method in METHODS, "method", self.method, f"must be one of {', '.join(METHODS)}"
        )
        faults.raise_if_any("Timing")

    @property
    def n(self) -> int:
        """Number of samples."""
        return len(self.samples_us)

    @property
    def p20_us(self) -> float:
        return percentile(self.samples_us, 20)

    @property
    def p50_us(self) -> float:
        """The median, which every ratio in a report is made of."""
        return statistics.median(self.samples_us)

    @property
    def p80_us(self) -> float:
        return percentile(self.samples_us, 80)


def percentile(samples: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest order statistics; `percent` in 0..100.

    Raises `ValueError` for no samples and for another percent.
    """
    faults = Faults()
    faults.require(len(samples) > 0, "samples", samples, "needs at least one", "[1.0]")
    known = is_number(percent) and 0 <= percent <= 100
    faults.require(known, "percent", percent, "must be a number in 0..100", 50)
    faults.raise_if_any("percentile")
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def measure(
    calls: Sequence[Call],
    *,
    device: torch.device,
    cold: bool = True,
    graph: bool = True,
    replays: int = DEFAULT_REPLAYS,
    max_seconds: float | None = None,
    before_samples: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Median-ready samples of `calls`, one call a pool, on `device`.

    calls: closures that enqueue (CUDA) or do (CPU) one problem each; plans and outputs exist.
    cold: rotate over all calls, whose pools exceed the cache; `False`: repeat the first only.
    graph: CUDA only; `False` times eager launches instead. Ignored on a CPU.
    replays: samples to take. On a CPU and in eager mode at least one a pool; on a CPU no more than
        that, but at least 5, when `max_seconds` runs out.
    before_samples: run once after warm-up and capture, before the first sample; used to poison
        outputs, so that what is checked afterwards was written by the timed work itself.
    clock: seconds; replaced in tests.

    Synchronizes the device. Raises `ValueError` for no calls, replays < 1, what is no
    `torch.device`, or a limit that is no number.
    """
    faults = Faults()
    faults.require(len(calls) >= 1, "calls", len(calls), "needs at least one call", 1)
    require_count(faults, "replays", replays, DEFAULT_REPLAYS)
    require_device_and_limit(faults, device, max_seconds)
    faults.raise_if_any("measure")
    rotation = list(calls) if cold else [calls[0]]
    if device.type == "cuda":
        if graph:
            return _measure_graph(rotation, device, cold, replays, before_samples)
        return _measure_eager(rotation, device, cold, replays, before_samples)
    return _measure_cpu(rotation, cold, replays, max_seconds, before_samples, clock)


def is_number(value: Any) -> bool:
    """An int or a float; `True` and `False` are flags."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def require_count(faults: Faults, name: str, value: Any, nearest: int) -> None:
    """Record a fault unless `value` is an int >= 1."""
    held = is_int(value) and value >= 1
    faults.require(held, name, value, "must be an int >= 1", nearest)


def require_device_and_limit(faults: Faults, device: Any, max_seconds: Any) -> None:
    """Record a fault for what is no `torch.device`, and for a limit that is no number."""
    faults.require(
        isinstance(device, torch.device),
        "device",
        device,
        "must be a torch.device",
        f"torch.device({device if isinstance(device, str) else 'cpu'!r})",
    )
    limit = max_seconds is None or is_number(max_seconds)
    faults.require(limit, "max_seconds", max_seconds, "must be None or a number of seconds", 2.0)


def calls_in_graph(num_pools: int) -> int:
    """Calls captured in one graph: whole rounds over the pools, at least `MIN_CALLS_IN_GRAPH`."""
    rounds = -(-MIN_CALLS_IN_GRAPH // num_pools)
    return rounds * num_pools


def _warm_up_on_side_stream(rotation: Sequence[Call], device: torch.device) -> None:
    """Run each call twice on a side stream, as capture needs: compilation happens here."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            for call in rotation:
                call()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)


def _measure_graph(
    rotation: Sequence[Call],
    device: torch.device,
    cold: bool,
    replays: int,
    before_samples: Callable[[], None] | None,
) -> Timing:
    with torch.cuda.device(device):
        graph, count = capture(rotation, device)
        if before_samples is not None:
            before_samples()
        pairs = [event_pair() for _ in range(replays)]
        # No sync between replays: the host runs ahead, so no launch gap is timed.
        for start, end in pairs:
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize(device)
        samples = tuple(start.elapsed_time(end) * 1e3 / count for start, end in pairs)
        graph.reset()
    return Timing(samples, method_name(device, cold, True), count, len(rotation))


def capture(rotation: Sequence[Call], device: torch.device) -> tuple[torch.cuda.CUDAGraph, int]:
    """A CUDA graph of whole rounds over `rotation`, warmed up, and its number of calls. Syncs."""
    _warm_up_on_side_stream(rotation, device)
    count = calls_in_graph(len(rotation))
    graph = torch.cuda.CUDAGraph()
    gc_was_on = gc.isenabled()
    gc.disable()  # a tensor freed by the collector during capture would invalidate it
    try:
        with torch.cuda.graph(graph):
            for index in range(count):
                rotation[index % len(rotation)]()
    finally:
        if gc_was_on:
            gc.enable()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize(device)
    return graph, count


def method_name(device: torch.device, cold: bool, graph: bool) -> str:
    """The one of `METHODS` that times calls on `device` so."""
    where = ("cuda_graph" if graph else "cuda_eager") if device.type == "cuda" else "cpu"
    return f"{where}_{'cold' if cold else 'warm'}"


def _measure_eager(
    rotation: Sequence[Call],
    device: torch.device,
    cold: bool,
    replays: int,
    before_samples: Callable[[], None] | None,
) -> Timing:
    """Wall time of single calls as Python launches them: host cost is part of what is timed."""
    with torch.cuda.device(device):
        _warm_up_on_side_stream(rotation, device)
        if before_samples is not None:
            before_samples()
        count = max(replays, len(rotation))
        samples = []
        for index in range(count):
            start, end = event_pair()
            torch.cuda.synchronize(device)
            start.record()
            rotation[index % len(rotation)]()
            end.record()
            torch.cuda.synchronize(device)
            samples.append(start.elapsed_time(end) * 1e3)
    return Timing(tuple(samples), method_name(device, cold, False), 1, len(rotation))


def event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Two events that surround a piece of work and tell its time."""
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _measure_cpu(
    rotation: Sequence[Call],
    cold: bool,
    replays: int,
    max_seconds: float | None,
    before_samples: Callable[[], None] | None,
    clock: Callable[[], float],
) -> Timing:
    rotation[0]()  # warm-up: thread pool, lazily built operators, page faults of scratch
    if before_samples is not None:
        before_samples()
    samples: list[float] = []
    begin = clock()
    index = 1  # the warm-up has just read pool 0
    while len(samples) < max(replays, len(rotation)):
        call = rotation[index % len(rotation)]
        start = clock()
        call()
        end = clock()
        samples.append((end - start) * 1e6)
        index += 1
        enough = len(samples) >= max(5, len(rotation))
        if max_seconds is not None and enough and end - begin >= max_seconds:
            break
    return Timing(tuple(samples), "cpu_cold" if cold else "cpu_warm", 1, len(rotation))


def measure_host(
    call: Call,
    *,
    repeats: int = 2000,
    samples: int = 25,
    before_sample: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Microseconds of host time a call takes: `samples` means over `repeats` back-to-back calls.

    For calls too short for one `clock()` pair. The collector is off while a sample is taken.
    before_sample: run before every sample, outside of what is timed; for calls that launch, a sync.
    """
    faults = Faults()
    require_count(faults, "repeats", repeats, 2000)
    require_count(faults, "samples", samples, 25)
    faults.raise_if_any("measure_host")
    for _ in range(min(repeats, 50)):
        call()
    taken = []
    gc_was_on = gc.isenabled()
    for _ in range(samples):
        if before_sample is not None:
            before_sample()
        gc.disable()
        try:
            start = clock()
            for _ in range(repeats):
                call()
            end = clock()
        finally:
            if gc_was_on:
                gc.enable()
        taken.append((end - start) * 1e6 / repeats)
    return Timing(tuple(taken), "host", repeats, 1)
