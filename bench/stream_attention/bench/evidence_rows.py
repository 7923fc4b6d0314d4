"""Runs of the bench as rows of evidence: what ran where, how long, and how it was judged."""

from __future__ import annotations

from collections.abc import Iterator

from stream_attention.bench import results
from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.check import Check
from stream_attention.bench.machine import Environment
from stream_attention.bench.results import CaseResult, Run
from stream_attention.bench.routes import ENGINE, problem_of
from stream_attention.bench.timing import Timing
from stream_attention.core.registry import Registry, default_registry
from stream_attention.planner.cells import Cell
from stream_attention.planner.evidence import (
    Correctness,
    EvidenceRow,
    Fingerprint,
    PairRow,
    Row,
    Samples,
)

TOLERANCE = "core.testing.tolerance"


def cell_of(case: AttentionCase) -> Cell:
    """The cell that a case measures."""
    return Cell(problem=problem_of(case), qo_lens=case.q_lens, kv_lens=case.kv_lens)


def fingerprint_of(environment: Environment) -> Fingerprint:
    """The facts of a run's environment that all its rows share."""
    return Fingerprint(
        device=environment.device,
        arch=environment.arch,
        num_sms=environment.num_sms,
        l2_bytes=environment.cache_bytes,
        driver=environment.driver,
        cuda=environment.cuda,
        sm_clock_mhz=environment.sm_clock_mhz,
        memory_clock_mhz=environment.memory_clock_mhz,
        cpu=environment.cpu,
        python=environment.python,
        torch=environment.torch,
        triton=environment.triton,
    )


def evidence_of(run: Run, registry: Registry | None = None) -> tuple[Row, ...]:
    """A row for each outcome of `run` that says something of a contender, then one for each pair.

    Left out: what was not run, and the engine, which is no route of its own: it has its time under
    the name of what it chose. Raises `ValueError` for a route that no record here speaks of:
    whether it is native is not in the run, and its rows would be lost.
    """
    roles = _roles(registry)
    strange = {
        row.contender: None
        for case in run.cases
        for row in case.rows
        if row.kind == "route" and row.contender not in (*roles, ENGINE)
    }
    if strange:
        raise ValueError(
            f"route={', '.join(strange)}: must be registered here, so that its role is known; "
            "install the packages that the run was made with"
        )
    rows: list[Row] = []
    for case in run.cases:
        rows += _rows(run, case, roles)
    rows += [_pair(run, pair) for pair in run.pairs if pair.outcome != "not_run"]
    return tuple(rows)


def _roles(registry: Registry | None) -> dict[str, str]:
    registry = default_registry() if registry is None else registry
    records = registry.attention_records()
    return {record.route: "native" if record.native else "portable" for record in records}


def _rows(run: Run, result: CaseResult, roles: dict[str, str]) -> Iterator[EvidenceRow]:
    environment = run.environment
    cell = cell_of(result.case)
    for row in result.rows:
        if row.outcome == "not_run" or row.contender == ENGINE:
            continue
        yield EvidenceRow(
            cell=cell,
            requested=row.contender,
            resolved=row.resolved,
            role="external" if row.kind == "peer" else roles[row.contender],
            outcome=row.outcome,
            reasons=row.reasons,
            environment=fingerprint_of(environment),
            versions=row.versions,
            correctness=_correctness(row.check),
            timing=_samples(row.timing),
            floor_us=result.floor_us or None,
            timed_allocations=row.timed_allocations,
            workspace_bytes=row.workspace_bytes,
            supports=row.supports,
            kernel=row.kernel,
            clocks=row.clocks,
            commit=environment.commit,
            command=environment.command,
            taken_at=environment.started_at,
        )


def _pair(run: Run, pair: results.PairRow) -> PairRow:
    first, second = pair.checks
    timing = pair.timing
    return PairRow(
        cell=cell_of(pair.case),
        first=pair.first,
        second=pair.second,
        outcome=pair.outcome,
        reasons=pair.reasons,
        environment=fingerprint_of(run.environment),
        versions=pair.versions,
        first_correctness=_correctness(first),
        second_correctness=_correctness(second),
        first_timing=_samples(timing.first) if timing else None,
        second_timing=_samples(timing.second) if timing else None,
        commit=run.environment.commit,
        command=run.environment.command,
        taken_at=run.environment.started_at,
    )


def _samples(timing: Timing | None) -> Samples | None:
    if timing is None:
        return None
    return Samples(
        samples_us=timing.samples_us,
        method=timing.method,
        calls_per_sample=timing.calls_per_sample,
        num_pools=timing.num_pools,
    )


def _correctness(check: Check | None) -> Correctness | None:
    """The numbers of a check; `None` where a fault was found before there were any."""
    if check is None or check.max_error is None or check.rms_error is None:
        return None
    if check.max_bound is None or check.rms_bound is None:
        raise ValueError(
            f"check={check!r}: must have bounds beside its errors; use what the bench wrote"
        )
    return Correctness(
        max_error=check.max_error,
        max_bound=check.max_bound,
        rms_error=check.rms_error,
        rms_bound=check.rms_bound,
        rows_checked=check.rows_checked,
        rows=check.rows,
        tolerance=TOLERANCE,
    )
