"""A lower bound on the time of a candidate, from bytes, flops and launches, and what it rules out.

    bound = max((read_bytes - l2_bytes) / memory rate, flops / tensor rate, launches · launch_us)

A candidate whose bound exceeds what another one needs cannot win, so it need not be built or
measured. What is not known bounds nothing: a device that is not in `PEAKS` rules out no candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stream_attention.core.backend_plan import Rejection
from stream_attention.core.device import DeviceFacts
from stream_attention.core.dtypes import dtype_bytes
from stream_attention.core.formulas import (
    MIB,
    index_bytes,
    qo_bytes,
    window_pairs,
    window_tokens,
)
from stream_attention.core.ir import Rule, check_rules, evaluable_repr, is_int, is_name
from stream_attention.core.problem import AttentionProblem

MARGIN = 1.03
"""Data sheets round: the memory of an H200 is 2 % faster by its clock and width than by its sheet.
A bound must not be too high for that."""


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class DevicePeaks:
    """The most that a device can do, and where that is from.

    memory_gbps: bytes a nanosecond from DRAM. l2_mib: what may lie in L2 already.
    tensor_tflops: dense products of 16-bit operands at the highest clock, tensor8_tflops: of 8-bit
    ones. launch_us: a kernel that does nothing, in a captured graph; 0 where it was not measured.
    """

    memory_gbps: float
    l2_mib: int
    tensor_tflops: float
    tensor8_tflops: float
    launch_us: float = 0.0
    source: str

    __repr__ = evaluable_repr


_A100 = "NVIDIA A100 data sheet and white paper: 108 SMs, 1410 MHz, 2048 flops a clock and SM"
_H100 = "NVIDIA H100 data sheet and white paper: 4096 flops a clock and SM"
_B200 = "NVIDIA HGX B200 data sheet: 8 TB/s; 8192 flops a clock and SM of 148, 1965 MHz"


def _a100(memory_gbps: float) -> DevicePeaks:
    return DevicePeaks(
        memory_gbps=memory_gbps, l2_mib=40, tensor_tflops=312, tensor8_tflops=624, source=_A100
    )


PEAKS: dict[str, DevicePeaks] = {
    "NVIDIA A100-PCIE-40GB": _a100(1555),
    "NVIDIA A100-SXM4-40GB": _a100(1555),
    "NVIDIA A100 80GB PCIe": _a100(1935),
    "NVIDIA A100-SXM4-80GB": _a100(2039),
    "NVIDIA H100 PCIe": DevicePeaks(
        memory_gbps=2039,
        l2_mib=50,
        tensor_tflops=819,
        tensor8_tflops=1639,
        source=f"{_H100} of 114, 1755 MHz",
    ),
    "NVIDIA H100 80GB HBM3": DevicePeaks(
        memory_gbps=3352,
        l2_mib=50,
        tensor_tflops=1071,
        tensor8_tflops=2142,
        source=f"{_H100} of 132, 1980 MHz",
    ),
    "NVIDIA H200": DevicePeaks(
        memory_gbps=4800,
        l2_mib=60,
        tensor_tflops=1071,
        tensor8_tflops=2142,
        launch_us=0.91,
        source=f"{_H100} of 132, 1980 MHz; H200 data sheet: 4.8 TB/s; launch measured in a graph",
    ),
    "NVIDIA B200": DevicePeaks(
        memory_gbps=8000,
        l2_mib=126,
        tensor_tflops=2383,
        tensor8_tflops=4765,
        source=_B200,
    ),
}
"""By the name that the driver gives the device, as in `DeviceFacts.name`."""


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Work:
    """What a candidate must do at least.

    read_bytes: distinct bytes that it reads; what it writes may stay in L2 and is not counted.
    flops: of tensor cores. eight_bit: some operand has 8 bits, so products may run at that rate.
    num_launches: those that begin when their predecessor has ended; dependent ones overlap it.
    """

    read_bytes: int
    flops: int = 0
    eight_bit: bool = False
    num_launches: int = 0

    def __post_init__(self) -> None:
        check_rules(self, _WORK_RULES)

    __repr__ = evaluable_repr


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class TimedCandidate:
    """A candidate by name, its work, and its time: measured, else estimated, else `None`."""

    name: str
    work: Work
    time_us: float | None = None

    def __post_init__(self) -> None:
        check_rules(self, _CANDIDATE_RULES)

    __repr__ = evaluable_repr


def _count(name: str) -> Rule:
    return Rule(
        name,
        "must be an int >= 0",
        lambda w: is_int(getattr(w, name)) and getattr(w, name) >= 0,
        lambda w: 0,
    )


_WORK_RULES = (
    *(_count(name) for name in ("read_bytes", "flops", "num_launches")),
    Rule("eight_bit", "must be a bool", lambda w: isinstance(w.eight_bit, bool), lambda w: "True"),
)
_CANDIDATE_RULES = (
    Rule("name", "must be a non-empty string", lambda c: is_name(c.name)),
    Rule("work", "must be Work", lambda c: isinstance(c.work, Work)),
    Rule(
        "time_us",
        "must be None (not known) or a number > 0",
        lambda c: c.time_us is None or 0 < c.time_us < float("inf"),
        lambda c: "None",
    ),
)


def attention_work(
    problem: AttentionProblem,
    kv_lens: Sequence[int],
    q_lens: Sequence[int] | None = None,
    *,
    num_launches: int = 0,
) -> Work:
    """What any kernel must do for `problem` where request i has `kv_lens[i]` tokens in every head.

    q_lens: queries of each request; `None` for as many as the problem says. Where that is not known
    (they differ) or a mask may hide any token, reading q is all that is counted.
    """
    _require_lens("kv_lens", kv_lens, problem.batch, problem.kv_capacity)
    if q_lens is None and problem.uniform:
        q_lens = [problem.max_qo_len] * problem.batch
    read_bytes = qo_bytes(
        problem.total_qo_len,
        problem.num_qo_heads,
        problem.head_dim_qk,
        dtype_bytes(problem.q_dtype),
    )
    if q_lens is None or problem.mask is not None:
        return Work(read_bytes=read_bytes, num_launches=num_launches)
    _require_lens("q_lens", q_lens, problem.batch, problem.max_qo_len)
    left = problem.window_left
    asked = [(n, q) for n, q in zip(kv_lens, q_lens, strict=True) if q]
    seen = [window_tokens(n, q, left) for n, q in asked]
    read_bytes += sum(seen) * problem.kv_token_bytes
    if problem.cache_kind == "paged":
        read_bytes += index_bytes(seen, problem.page_size)
    # What a query sees to its right, where it does, is left out.
    pairs = sum(window_pairs([n], q, left) for n, q in asked)
    return Work(
        read_bytes=read_bytes,
        flops=2 * pairs * problem.num_qo_heads * (problem.head_dim_qk + problem.head_dim_vo),
        eight_bit=dtype_bytes(problem.kv_dtype) == 1,
        num_launches=num_launches,
    )


def _require_lens(name: str, lens: Sequence[int], count: int, most: int) -> None:
    if len(lens) != count or not all(is_int(n) and 0 <= n <= most for n in lens):
        raise ValueError(f"{name}={list(lens)}: must be {count} ints in 0..{most}")


def bounds_us(work: Work, name: str, l2_bytes: int = 0) -> dict[str, float] | None:
    """Resource → the least time that it takes; `None` for a device that is not in `PEAKS`.

    name, l2_bytes: of the device.
    """
    peaks = PEAKS.get(name)
    if peaks is None:
        return None
    from_memory = max(0, work.read_bytes - max(l2_bytes, peaks.l2_mib * MIB))
    tensor_tflops = peaks.tensor8_tflops if work.eight_bit else peaks.tensor_tflops
    return {
        "memory": from_memory / (1e3 * MARGIN * peaks.memory_gbps),
        "tensor cores": work.flops / (1e6 * MARGIN * tensor_tflops),
        "launches": work.num_launches * peaks.launch_us / MARGIN,
    }


def lower_bound_us(work: Work, device: DeviceFacts) -> float | None:
    """The least time that the work takes on the device; `None` for one that is not in `PEAKS`."""
    bounds = bounds_us(work, device.name, device.l2_bytes)
    return None if bounds is None else max(bounds.values())


def prune(
    candidates: Iterable[TimedCandidate], device: DeviceFacts
) -> tuple[tuple[TimedCandidate, ...], tuple[Rejection, ...]]:
    """`(kept, dropped with the reason)`, both in the order given.

    Dropped is what takes longer by its bound than the best known time of all. The best one itself
    is kept even where its time is below its bound, which then is wrong.
    """
    every = tuple(candidates)
    timed = [(each.time_us, each.name) for each in every if each.time_us is not None]
    if not timed:
        return every, ()
    best_us, best = min(timed)
    kept, dropped = [], []
    for each in every:
        bounds = bounds_us(each.work, device.name, device.l2_bytes)
        if bounds is None or max(bounds.values()) <= best_us or each.time_us == best_us:
            kept.append(each)
            continue
        limit = max(bounds, key=lambda name: bounds[name])
        reason = (
            f"lower bound {bounds[limit]:.2f} us by {limit} of {device.name}: "
            f"{best} takes {best_us:.2f} us"
        )
        dropped.append(Rejection(each.name, (reason,)))
    return tuple(kept), tuple(dropped)
