"""Runs contenders on a case: support, probe, check, timing, check again. Always one row each.

A contender that raises, or that is wrong, loses its row and gives the reason; the run goes on.
Wrong is also a cold time that reading the bytes cannot take.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from stream_attention.bench import golden_file
from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.check import Check, Expected, expect, judge_timed
from stream_attention.bench.contenders import Contender, Work
from stream_attention.bench.floor import ReadCurve
from stream_attention.bench.machine import cold_rotation_bytes
from stream_attention.bench.memory import held_bytes, num_allocations, peak_extra
from stream_attention.bench.paired_timing import DEFAULT_PAIRS
from stream_attention.bench.pools import NotEnoughMemory, Pool, build_pools, num_pools
from stream_attention.bench.provenance import facts_of_row
from stream_attention.bench.results import CaseResult, Row
from stream_attention.bench.spent import Spent
from stream_attention.bench.timing import Timing, measure
from stream_attention.planner import evidence_rules

# What says that a case does not fit the memory.
TOO_LARGE = (NotEnoughMemory, torch.OutOfMemoryError)


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run measures. replays: samples a contender. cold: rotate pools beyond the cache.
    graph: CUDA graph replay (else eager). check: oracle check. seed: of the first pool.
    max_seconds: time limit of one contender's samples on a CPU. pairs: samples of a pair.
    """

    replays: int = 25
    cold: bool = True
    graph: bool = True
    check: bool = True
    seed: int = 0
    max_seconds: float = 2.0
    pairs: int = DEFAULT_PAIRS


Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """What all contenders of a case share. expected: of the first pool and the last, or none.

    least_us: a cold time below it did not read the bytes. spent: where the time goes.
    """

    case: AttentionCase
    pools: Sequence[Pool]
    expected: Sequence[Expected]
    device: torch.device
    settings: Settings
    least_us: float
    spent: Spent = field(default_factory=Spent)


def run_case(
    case: AttentionCase,
    contenders: Sequence[Contender],
    device: torch.device,
    settings: Settings,
    curve: ReadCurve,
    progress: Progress = lambda message: None,
) -> CaseResult:
    """Every contender on `case`. A case that does not fit the memory is skipped with the reason."""
    try:
        setting = prepare(case, device, settings, curve, progress)
    except TOO_LARGE as error:
        return replace(case_facts(case, None, settings, curve), skipped=str(error))
    rows = []
    for contender in contenders:
        progress(contender.name)
        rows.append(run_row(contender, setting))
    return replace(case_facts(case, device, settings, curve), rows=tuple(rows))


def case_facts(
    case: AttentionCase, device: torch.device | None, settings: Settings, curve: ReadCurve
) -> CaseResult:
    """The result of a case without rows. device: `None` where it has no pools on any."""
    rotation, cold = 0, False
    if device is not None:
        rotation = case.kv_bytes * num_pools(case, device, settings.cold)
        cold = settings.cold and rotation >= cold_rotation_bytes(device)
    return CaseResult(
        case=case,
        kv_bytes=case.kv_bytes,
        moved_bytes=case.moved_bytes,
        flops=case.flops,
        floor_us=curve.floor_us(case.moved_bytes),
        rotation_bytes=rotation,
        cold=cold,
    )


def prepare(
    case: AttentionCase,
    device: torch.device,
    settings: Settings,
    curve: ReadCurve,
    progress: Progress = lambda message: None,
    answers: Path | None = None,
    spent: Spent | None = None,
) -> Setting:
    """Inputs and right answers. answers: a file of `golden_file` to take them from if it fits.

    Raises one of `TOO_LARGE` where the pools do not fit the memory.
    """
    spent = Spent() if spent is None else spent
    progress("inputs")
    with spent.on("inputs"):
        pools = build_pools(case, device, seed=settings.seed, cold=settings.cold)
    expected: list[Expected] = []
    if settings.check:
        progress("oracle")
        # The first pool and the last: a plan bound to the wrong pool would pass a check of one.
        ends = list(dict.fromkeys((pools[0], pools[-1])))
        with spent.on("oracle"):
            known = None if answers is None else golden_file.load(ends, answers)
            expected = [expect(pool) for pool in ends] if known is None else known
    facts = case_facts(case, device, settings, curve)
    least_us = least_plausible_us(case, curve, device) if facts.cold else 0.0
    return Setting(case, pools, expected, device, settings, least_us, spent)


def least_plausible_us(case: AttentionCase, curve: ReadCurve, device: torch.device) -> float:
    """Microseconds that a cold call on `case` cannot stay below; 0 where the floor is no measure.

    That is below the smallest size of the curve, whose time is then mostly launch.
    """
    if case.moved_bytes < curve.points[0].num_bytes:
        return 0.0
    return evidence_rules.least_plausible_us(device.type, curve.floor_us(case.moved_bytes))


def refusals(
    contender: Contender, case: AttentionCase, device: torch.device, graph: bool
) -> tuple[str, ...]:
    """Every reason why a contender cannot be timed on `case`, before any input is made."""
    reasons = contender.reasons(case, device)
    if graph and device.type == "cuda" and not contender.graph_safe:
        reasons += ("graph: cannot be captured in a CUDA graph; use --eager",)
    return reasons


def run_row(contender: Contender, setting: Setting) -> Row:
    """Support, probe, check, timing, check again: always a row, with the seconds it took."""
    begin = time.monotonic()
    with setting.spent.on("timing"):
        row = _one(contender, setting)
        gc.collect()
    facts = facts_of_row(contender, setting.case, setting.device, row.timing is not None)
    return replace(row, seconds=time.monotonic() - begin, **facts)


def _one(contender: Contender, setting: Setting) -> Row:
    name, kind = contender.name, contender.kind
    case, device = setting.case, setting.device
    try:
        reasons = refusals(contender, case, device, setting.settings.graph)
        if reasons:
            return Row(name, kind, "unsupported", reasons)
        for pool in setting.pools:
            pool.fill_unused(contender.unused_fill)
        row = _probe_and_time(contender, setting)
    except (Exception, SystemExit) as error:  # whatever a contender raises is its own outcome
        reason = one_line(error)
        # A route says by its rules what it does not serve: one that had none promised the case.
        refused = isinstance(error, NotImplementedError) and kind == "peer"
        del error
        gc.collect()
        if refused:
            return Row(name, kind, "unsupported", (reason,))
        return Row(name, kind, "failed", (reason, *lost_device(device)))
    if row.timing is None or row.timing.p50_us >= setting.least_us:
        return row
    # The samples stay in the row, for whoever looks for what went wrong.
    return replace(row, outcome="wrong", reasons=(too_fast(row.timing, setting.least_us),))


def too_fast(timing: Timing, least_us: float) -> str:
    """Why a median below `least_plausible_us` is not believed."""
    return (
        f"implausible: a median of {timing.p50_us:.3g} us, and reading the bytes of the case takes "
        f"more than {least_us:.3g} us by the read curve of this run"
    )


def _probe_and_time(contender: Contender, setting: Setting) -> Row:
    row = _probe(contender, setting)
    if row.outcome != "ok":
        return row
    settings, device = setting.settings, setting.device
    works = build_works(contender, setting)

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
    if setting.expected:
        # What is judged was written by the timed replays: poison() ran just before them.
        check = judge_timed(works, setting.pools, setting.expected)
        if not check.ok:
            reasons = (f"after the timed runs: {check.message}",)
            return replace(row, outcome="wrong", reasons=reasons, check=check)
    resolved = works[0].resolved or contender.name
    return replace(row, timing=timing, check=check, note=works[0].note, resolved=resolved)


def _probe(contender: Contender, setting: Setting) -> Row:
    """One plan on the first pool: whether its first run is right, and the memory that it takes."""
    device, pools = setting.device, setting.pools

    def first_run() -> tuple[Work, torch.Tensor, int | None]:
        before = held_bytes(device)
        (work,) = contender.build(setting.case, pools[:1], device)
        work.poison()
        work.run()
        after = held_bytes(device)
        return work, work.result(), None if after is None or before is None else after - before

    (work, out, held), peak = peak_extra(device, first_run)
    row = Row(
        contender.name,
        contender.kind,
        "ok",
        extra_bytes=None if peak is None else max(0, peak - out.nbytes),
        workspace_bytes=None if held is None else max(0, held - out.nbytes),
    )
    if setting.expected:
        verdict = setting.expected[0].verdict(out)
        if not verdict.ok:
            return replace(row, outcome="wrong", reasons=(verdict.message,), check=verdict)
    return replace(row, timed_allocations=num_allocations(device, work.run))


def build_works(contender: Contender, setting: Setting) -> list[Work]:
    """One work a pool. Raises `ValueError` where the contender builds another number."""
    works = list(contender.build(setting.case, setting.pools, setting.device))
    if len(works) != len(setting.pools):
        raise ValueError(f"build gave {len(works)} works for {len(setting.pools)} pools")
    return works


def one_line(error: BaseException) -> str:
    """`Type: first lines of the message`, short enough for a table."""
    text = " ".join(str(error).split())
    shown = text if len(text) <= 300 else text[:297] + "..."
    return f"{type(error).__name__}: {shown}"


def lost_device(device: torch.device) -> tuple[str, ...]:
    """A reason to add when a failure took the CUDA context of this process with it."""
    if device.type != "cuda":
        return ()
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except Exception as error:
        why = "the CUDA context is lost, and with it every later row of the process"
        return (f"{why} ({type(error).__name__})",)
    return ()
