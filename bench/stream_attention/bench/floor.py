"""The floor of a memory-bound call: a plain streaming read of its bytes, measured in the same run.

`measure_read_curve` times reads of several sizes by the same method as the contenders (cold, graph
replay on CUDA) and keeps the best launch shape at each; `ReadCurve.floor_us` interpolates between
sizes and extrapolates beyond them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from stream_attention.bench.machine import cold_rotation_bytes
from stream_attention.bench.timing import Timing, measure
from stream_attention.core.errors import Faults
from stream_attention.core.formulas import MIB

# A case may be this much larger than the largest size: q and tables lie beside its KV.
_REACH = 1.1
_UNIT_BYTES = 16384 * 4  # every launch shape of the read kernel divides this


@dataclass(frozen=True, slots=True)
class ReadPoint:
    """One size of the curve: `floor_of` the best launch shape, and the shape's name."""

    num_bytes: int
    us: float
    shape: str


@dataclass(frozen=True, slots=True)
class ReadCurve:
    """Time of a streaming read as a function of bytes.

    points: ascending in bytes. method: the timing method.
    """

    points: tuple[ReadPoint, ...]
    method: str

    def __post_init__(self) -> None:
        faults = Faults()
        faults.require(bool(self.points), "points", self.points, "needs at least one point")
        sizes = [point.num_bytes for point in self.points]
        faults.require(
            sizes == sorted(set(sizes)), "points", sizes, "sizes must be ascending and distinct"
        )
        faults.raise_if_any("ReadCurve")

    def floor_us(self, num_bytes: int) -> float:
        """Microseconds to read `num_bytes`: linear between the two nearest sizes measured.

        Above the largest size: at the marginal rate of the last two sizes (the mean rate where the
        curve has one). Below the smallest: the smallest size's time, which is mostly launch.
        """
        points = self.points
        if num_bytes <= points[0].num_bytes:
            return points[0].us
        for low, high in zip(points, points[1:], strict=False):
            if num_bytes <= high.num_bytes:
                return _line(low, high, num_bytes)
        last = points[-1]
        if len(points) == 1 or points[-2].us >= last.us:
            return last.us * num_bytes / last.num_bytes
        return _line(points[-2], last, num_bytes)

    @property
    def best_gb_per_s(self) -> float:
        """The fastest rate on the curve, in 1e9 bytes a second."""
        return max(point.num_bytes / point.us / 1e3 for point in self.points)


def _line(low: ReadPoint, high: ReadPoint, num_bytes: int) -> float:
    slope = (high.us - low.us) / (high.num_bytes - low.num_bytes)
    return low.us + slope * (num_bytes - low.num_bytes)


def curve_sizes(case_bytes: Sequence[int], *, step: int, largest: int) -> tuple[int, ...]:
    """Sizes to measure: powers of `step` times 1 MiB around the cases, up to `largest` bytes."""
    low, high = min(case_bytes), max(case_bytes)
    sizes = []
    size = MIB
    while size <= largest:
        if size * step > low:
            sizes.append(size)
        if size * _REACH >= high:
            break
        size *= step
    return tuple(sizes) or (largest // _UNIT_BYTES * _UNIT_BYTES,)


def measure_read_curve(
    case_bytes: Sequence[int],
    device: torch.device,
    *,
    replays: int = 20,
    on_size: Callable[[int], None] | None = None,
) -> ReadCurve:
    """The curve around the sizes in `case_bytes`, on `device`; allocates up to 2 GiB + 4.5 × L2."""
    cuda = device.type == "cuda"
    sizes = curve_sizes(case_bytes, step=2 if cuda else 4, largest=(2048 if cuda else 256) * MIB)
    rotation = cold_rotation_bytes(device)
    total = -(-max(rotation + sizes[-1], 2 * sizes[-1]) // _UNIT_BYTES) * _UNIT_BYTES
    words = torch.randint(-(2**31), 2**31 - 1, (total // 4,), dtype=torch.int32, device=device)
    points, method = [], ""
    for size in sizes:
        if on_size is not None:
            on_size(size)
        per_slice = size // 4
        count = min(words.numel() // per_slice, max(1, -(-rotation // size)))
        slices = [words[i * per_slice : (i + 1) * per_slice] for i in range(count)]
        timings = _time_shapes(slices, device, replays)
        times = {shape: floor_of(timing) for shape, timing in timings.items()}
        shape = min(times, key=lambda name: times[name])
        points.append(ReadPoint(size, times[shape], shape))
        method = timings[shape].method
    return ReadCurve(monotone(points), method)


def floor_of(timing: Timing) -> float:
    """The median on CUDA. On a CPU the fastest sample: other processes take time slices of
    milliseconds from it, and a floor that includes them would flatter the contenders.
    """
    return min(timing.samples_us) if timing.method.startswith("cpu") else timing.p50_us


def monotone(points: Sequence[ReadPoint]) -> tuple[ReadPoint, ...]:
    """No size slower than a larger one: the larger read contains it, so the rest is noise."""
    best = math.inf
    result = []
    for point in reversed(points):
        best = min(best, point.us)
        result.append(ReadPoint(point.num_bytes, best, point.shape))
    return tuple(reversed(result))


def _time_shapes(
    slices: Sequence[torch.Tensor], device: torch.device, replays: int
) -> dict[str, Timing]:
    if device.type == "cuda":
        from stream_attention.bench import read_kernel

        sms = torch.cuda.get_device_properties(device).multi_processor_count
        sink = torch.empty(slices[0].numel() // 4096, dtype=torch.int32, device=device)
        return {
            f"block{shape[0]}x{shape[1] or 'all'}": measure(
                [read_kernel.read_call(part, sink, shape, sms) for part in slices],
                device=device,
                replays=replays,
            )
            for shape in read_kernel.LAUNCH_SHAPES
        }
    return {
        name: measure(
            [_cpu_read(read, part) for part in slices],
            device=device,
            replays=replays,
            max_seconds=0.4,
        )
        for name, read in _CPU_READS.items()
    }


def _cpu_read(read: Callable[[torch.Tensor], object], part: torch.Tensor) -> Callable[[], object]:
    floats = part.view(torch.float32)
    words = part.view(torch.int32)
    return lambda: read(words if read is _max_words else floats)


def _max_words(words: torch.Tensor) -> torch.Tensor:
    return words.max()


def _sum_floats(floats: torch.Tensor) -> torch.Tensor:
    return floats.sum()


# torch's multi-threaded reductions; which of them streams fastest depends on the CPU and the build.
_CPU_READS: dict[str, Callable[[torch.Tensor], object]] = {
    "sum": _sum_floats,
    "max": _max_words,
}
