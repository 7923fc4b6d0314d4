"""Runs contenders on a case: support, probe, check, timing, check again. Always one row each.

A contender that raises, or that is wrong, loses its row and gives the reason; the run goes on.
Wrong is also a cold time that reading the bytes cannot take.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stream_attention.bench.cases import DecodeCase
from stream_attention.bench.check import Check, Expected, expect, judge_timed
from stream_attention.bench.contenders import Contender
from stream_attention.bench.floor import ReadCurve
from stream_attention.bench.machine import cold_rotation_bytes
from stream_attention.bench.memory import peak_extra
from stream_attention.bench.pools import NotEnoughMemory, Pool, build_pools
from stream_attention.bench.results import CaseResult, Row
from stream_attention.bench.timing import Timing, measure

# A cold time below this share of the floor did not read the bytes. The floor is the same read by
# the same method, so on a GPU 0.5 leaves room for any honest kernel. On a CPU the floor is torch's
# best reduction, and the machine may be twice as fast a second later.
LEAST_OF_FLOOR = {"cpu": 0.1, "cuda": 0.5}


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run measures. replays: samples a contender. cold: rotate pools beyond the cache.
    graph: CUDA graph replay (else eager). check: oracle check. seed: of the first pool.
    max_seconds: time limit of one contender's samples on a CPU.
    """

    replays: int = 25
    cold: bool = True
    graph: bool = True
    check: bool = True
    seed: int = 0
    max_seconds: float = 2.0


Progress = Callable[[str], None]


def run_case(
    case: DecodeCase,
    contenders: Sequence[Contender],
    device: torch.device,
    settings: Settings,
    curve: ReadCurve,
    progress: Progress = lambda message: None,
) -> CaseResult:
    """Every contender on `case`. A case that does not fit the memory is skipped with the reason."""
    facts: dict[str, Any] = {
        "case": case,
        "kv_bytes": case.kv_bytes,
        "moved_bytes": case.moved_bytes,
        "flops": case.flops,
        "floor_us": curve.floor_us(case.moved_bytes),
    }
    progress("inputs")
    try:
        pools = build_pools(case, device, seed=settings.seed, cold=settings.cold)
    except (NotEnoughMemory, torch.OutOfMemoryError) as error:
        return CaseResult(**facts, rotation_bytes=0, cold=False, skipped=str(error))
    rotation = case.kv_bytes * len(pools)
    cold = settings.cold and rotation >= cold_rotation_bytes(device)
    expected: list[Expected] = []
    if settings.check:
        progress("oracle")
        # The first pool and the last: a plan bound to the wrong pool would pass a check of one.
        expected = [expect(pool) for pool in dict.fromkeys((pools[0], pools[-1]))]
    setting = _Setting(case, pools, expected, device, settings)
    least_us = least_plausible_us(case, curve, device) if cold else 0.0
    rows = []
    for contender in contenders:
        progress(contender.name)
        rows.append(_one(contender, setting, least_us))
        gc.collect()
    return CaseResult(**facts, rotation_bytes=rotation, cold=cold, rows=tuple(rows))


@dataclass(frozen=True, slots=True, eq=False)
class _Setting:
    """What all contenders of a case share. expected: of the first pool and the last, or none."""

    case: DecodeCase
    pools: Sequence[Pool]
    expected: Sequence[Expected]
    device: torch.device
    settings: Settings


def least_plausible_us(case: DecodeCase, curve: ReadCurve, device: torch.device) -> float:
    """Microseconds that a cold call on `case` cannot stay below; 0 where the floor is no measure.

    That is below the smallest size of the curve, whose time is then mostly launch.
    """
    if case.moved_bytes < curve.points[0].num_bytes:
        return 0.0
    return LEAST_OF_FLOOR.get(device.type, 0.0) * curve.floor_us(case.moved_bytes)


def _one(contender: Contender, setting: _Setting, least_us: float) -> Row:
    name, kind = contender.name, contender.kind
    case, device = setting.case, setting.device
    try:
        reasons = contender.reasons(case, device)
        if setting.settings.graph and device.type == "cuda" and not contender.graph_safe:
            reasons += ("graph: cannot be captured in a CUDA graph; use --eager",)
        if reasons:
            return Row(name, kind, "unsupported", reasons)
        for pool in setting.pools:
            pool.fill_unused(contender.unused_fill)
        row = _probe_and_time(contender, setting)
    except (Exception, SystemExit) as error:  # whatever a contender raises is its own outcome
        reason = _one_line(error)
        # A route says by its rules what it does not serve: one that had none promised the case.
        refused = isinstance(error, NotImplementedError) and kind == "peer"
        del error
        gc.collect()
        if refused:
            return Row(name, kind, "unsupported", (reason,))
        return Row(name, kind, "failed", (reason, *_lost_device(device)))
    if row.timing is None or row.timing.p50_us >= least_us:
        return row
    # The samples stay in the row, for whoever looks for what went wrong.
    return replace(row, outcome="wrong", reasons=(_too_fast(row.timing, least_us),))


def _too_fast(timing: Timing, least_us: float) -> str:
    return (
        f"implausible: a median of {timing.p50_us:.3g} us, and reading the bytes of the case takes "
        f"more than {least_us:.3g} us by the read curve of this run"
    )


def _probe_and_time(contender: Contender, setting: _Setting) -> Row:
    name, kind = contender.name, contender.kind
    case, pools, device = setting.case, setting.pools, setting.device
    expected, settings = setting.expected, setting.settings

    def probe() -> torch.Tensor:
        (work,) = contender.build(case, pools[:1], device)
        work.poison()
        work.run()
        return work.result()

    out, peak = peak_extra(device, probe)
    extra = None if peak is None else max(0, peak - out.nbytes)
    if expected:
        verdict = expected[0].verdict(out)
        if not verdict.ok:
            return Row(name, kind, "wrong", (verdict.message,), check=verdict, extra_bytes=extra)
    del out
    works = list(contender.build(case, pools, device))
    if len(works) != len(pools):
        raise ValueError(f"build gave {len(works)} works for {len(pools)} pools")

    def poison() -> None:
        for work in works:
            work.poison()

    timing = measure(
        [work.run for work in works],
        device=device,
        cold=settings.cold,
        graph=settings.graph,
        replays=settings.replays,
        max_seconds=settings.max_seconds,
        before_samples=poison,
    )
    check: Check | None = None
    if expected:
        # What is judged was written by the timed replays: poison() ran just before them.
        check = judge_timed(works, pools, expected)
        if not check.ok:
            reasons = (f"after the timed runs: {check.message}",)
            return Row(name, kind, "wrong", reasons, check=check, extra_bytes=extra)
    return Row(name, kind, "ok", (), timing, check, extra, works[0].note)


def _one_line(error: BaseException) -> str:
    """`Type: first lines of the message`, short enough for a table."""
    text = " ".join(str(error).split())
    shown = text if len(text) <= 300 else text[:297] + "..."
    return f"{type(error).__name__}: {shown}"


def _lost_device(device: torch.device) -> tuple[str, ...]:
    """A reason to add when the failure took the CUDA context with it, so later rows fail too."""
    if device.type != "cuda":
        return ()
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except Exception as error:
        return (f"the CUDA context is lost, later rows fail too ({type(error).__name__})",)
    return ()
