"""All cases of a run, one after another: rows first, then pairs, whoever executes them.

What an earlier run left is taken over and not made again. After every row the state of the whole
run is given, so that a file can be written that says of each row whether it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.contenders import Contender
from stream_attention.bench.floor import ReadCurve
from stream_attention.bench.pairs import Pairing, run_pair
from stream_attention.bench.progress import reporter
from stream_attention.bench.results import CaseResult, PairRow, Row
from stream_attention.bench.runner import (
    TOO_LARGE,
    Setting,
    Settings,
    case_facts,
    prepare,
    run_row,
)

NOT_RUN = "the run has not come to it, or was stopped before"


class Executor(Protocol):
    """Makes rows and pairs of one case at a time: `begin`, any number of them, `end`."""

    def begin(self, case: AttentionCase, step: Callable[[str], None]) -> str:
        """Prepare a case; gives why it is skipped, "" where it is not."""
        ...

    def row(self, contender: Contender) -> Row:
        """One contender on the case that was begun."""
        ...

    def pair(self, first: Contender, second: Contender) -> PairRow:
        """Two contenders in turns on the case that was begun."""
        ...

    def end(self) -> None:
        """Let go of what the case needed; does nothing where none was begun."""
        ...


@dataclass(slots=True)
class InProcess:
    """Everything in this process: the quickest start, and a crash ends the run."""

    device: torch.device
    settings: Settings
    curve: ReadCurve
    setting: Setting | None = None

    def begin(self, case: AttentionCase, step: Callable[[str], None]) -> str:
        try:
            self.setting = prepare(case, self.device, self.settings, self.curve, step)
        except TOO_LARGE as error:
            return str(error)
        return ""

    def row(self, contender: Contender) -> Row:
        assert self.setting is not None
        return run_row(contender, self.setting)

    def pair(self, first: Contender, second: Contender) -> PairRow:
        assert self.setting is not None
        return run_pair(first, second, self.setting)

    def end(self) -> None:
        self.setting = None


@dataclass(frozen=True, slots=True)
class Kept:
    """What an earlier run left: rows by case and contender, pairs by case and both names."""

    rows: Mapping[tuple[AttentionCase, str], Row] = field(default_factory=dict)
    pairs: Mapping[tuple[AttentionCase, str, str], PairRow] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class State:
    """Results so far, all cases and pairs. finished: the index of the case that this state ends,
    `None` within a case.
    """

    cases: tuple[CaseResult, ...]
    pairs: tuple[PairRow, ...]
    finished: int | None = None

    def pairs_of(self, index: int) -> tuple[PairRow, ...]:
        """The pairs of a case."""
        return tuple(pair for pair in self.pairs if pair.case == self.cases[index].case)


@dataclass(frozen=True, slots=True)
class Campaign:
    """What is to be run. known: every contender that a pair may name. native: our native routes."""

    cases: Sequence[AttentionCase]
    contenders: Sequence[Contender]
    known: Mapping[str, Contender]
    device: torch.device
    settings: Settings
    curve: ReadCurve
    pairing: Pairing = field(default_factory=Pairing)
    native: frozenset[str] = frozenset()
    kept: Kept = field(default_factory=Kept)

    def open_rows(self) -> tuple[tuple[str, ...], tuple[AttentionCase, ...]]:
        """Names of contenders that have a row to make, and the cases of those rows."""
        found = [
            (contender.name, case)
            for contender in self.contenders
            for case in self.cases
            if (case, contender.name) not in self.kept.rows
        ]
        names = tuple(dict.fromkeys(name for name, _ in found))
        return names, tuple(dict.fromkeys(case for _, case in found))


def run_campaign(campaign: Campaign, executor: Executor) -> Iterator[State]:
    """Rows and pairs in the order of cases and contenders; a state after each."""
    results = [_unmade(campaign, case) for case in campaign.cases]
    pairs: list[PairRow] = list(campaign.kept.pairs.values())
    for index, case in enumerate(campaign.cases):
        with reporter(len(campaign.cases), index) as progress:
            progress.start(case.name)
            try:
                for results[index], found in _run_one(campaign, executor, case, progress.step):
                    pairs += found
                    yield State(tuple(results), tuple(pairs))
            finally:
                executor.end()
        yield State(tuple(results), tuple(pairs), index)


def _unmade(campaign: Campaign, case: AttentionCase) -> CaseResult:
    """A case whose rows are those kept, and for the rest that they were not run."""
    facts = case_facts(case, campaign.device, campaign.settings, campaign.curve)
    rows = []
    for contender in campaign.contenders:
        missing = Row(contender.name, contender.kind, "not_run", (NOT_RUN,))
        rows.append(campaign.kept.rows.get((case, contender.name), missing))
    return replace(facts, rows=tuple(rows))


def _skip(result: CaseResult, reason: str) -> CaseResult:
    """A case that does not fit: without rows, but for those that an earlier run made."""
    if all(row.outcome == "not_run" for row in result.rows):
        return replace(result, rotation_bytes=0, cold=False, rows=(), skipped=reason)
    rows = (
        replace(row, outcome="unsupported", reasons=(reason,)) if row.outcome == "not_run" else row
        for row in result.rows
    )
    return replace(result, rows=tuple(rows))


def _run_one(
    campaign: Campaign, executor: Executor, case: AttentionCase, step: Callable[[str], None]
) -> Iterator[tuple[CaseResult, list[PairRow]]]:
    """The case as it fills, and pairs that were just made."""
    result = _unmade(campaign, case)
    open_rows = [i for i, row in enumerate(result.rows) if row.outcome == "not_run"]
    begun = False
    if open_rows:
        skipped = executor.begin(case, step)
        if skipped:
            yield _skip(result, skipped), []
            return
        begun = True
    for index in open_rows:
        contender = campaign.contenders[index]
        step(contender.name)
        rows = list(result.rows)
        rows[index] = executor.row(contender)
        result = replace(result, rows=tuple(rows))
        yield result, []
    for first, second in campaign.pairing.of(result, campaign.native):
        if (case, first, second) in campaign.kept.pairs:
            continue
        if not begun:
            skipped = executor.begin(case, step)
            if skipped:
                yield result, [PairRow(case, first, second, "unsupported", (skipped,))]
                continue
            begun = True
        step(f"{first} : {second}")
        yield result, [executor.pair(campaign.known[first], campaign.known[second])]
