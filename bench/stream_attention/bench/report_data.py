"""What a report of a phase database shows: cells with their times, losses, crossovers, outcomes."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stream_attention.planner.cost_model import family_of, features_of_cell
from stream_attention.planner.evidence import EvidenceRow
from stream_attention.planner.phase_db import CandidateOutcome, CellDecision, PhaseDatabase

OURS = ("native", "portable")


@dataclass(frozen=True, slots=True)
class CellView:
    """A cell as a report shows it. All times are medians in microseconds.

    floor_us: time to read its bytes, `None` where no row says it. own, peer: fastest correct route
    of ours and fastest correct peer, `None` without one. kv_bytes: K and V of all requests.
    """

    decision: CellDecision
    family: str
    kv_bytes: int
    floor_us: float | None
    own: CandidateOutcome | None
    peer: CandidateOutcome | None

    @property
    def name(self) -> str:
        return self.decision.name

    @property
    def speed_up(self) -> float | None:
        """Best peer's time over that of our fastest route; `None` unless both were right."""
        if self.own is None or self.peer is None:
            return None
        return time_of(self.peer) / time_of(self.own)

    @property
    def is_loss(self) -> bool:
        """Our fastest route is slower than the best peer, or we have none and a peer has."""
        speed_up = self.speed_up
        return speed_up < 1 if speed_up is not None else self.own is None and self.peer is not None

    def over_floor(self, candidate: CandidateOutcome) -> float | None:
        """`time / floor`; `None` without a floor."""
        return None if self.floor_us is None else time_of(candidate) / self.floor_us

    @property
    def timed(self) -> tuple[CandidateOutcome, ...]:
        """Correct candidates, fastest first; ties by name."""
        right = [each for each in self.decision.candidates if each.outcome == "ok"]
        return tuple(sorted(right, key=lambda each: (time_of(each), each.route)))


@dataclass(frozen=True, slots=True)
class Crossover:
    """Between two neighbours of a family, by bytes of K and V, the fastest contender changes."""

    family: str
    below: str
    above: str
    cell_below: str
    cell_above: str
    low_bytes: int
    high_bytes: int


@dataclass(frozen=True, slots=True)
class ReportData:
    """A database made ready to be shown; cells by family, then by bytes of K and V.

    over_floor, speed_up: geometric means of our fastest route, over the cells that have them.
    """

    database: PhaseDatabase
    cells: tuple[CellView, ...]
    crossovers: tuple[Crossover, ...]
    over_floor: float | None
    speed_up: float | None

    @property
    def losses(self) -> tuple[CellView, ...]:
        """Cells in which the best peer was faster."""
        return tuple(cell for cell in self.cells if cell.is_loss)

    @property
    def unresolved(self) -> tuple[CellView, ...]:
        """Cells that could not be decided, each with what is missing."""
        return tuple(cell for cell in self.cells if cell.decision.status == "unresolved")

    @property
    def families(self) -> tuple[str, ...]:
        """Families of cells that have a time, in order of first appearance."""
        return tuple(dict.fromkeys(cell.family for cell in self.cells if cell.timed))


def time_of(candidate: CandidateOutcome) -> float:
    """The median of a correct candidate."""
    assert candidate.p50_us is not None, candidate
    return candidate.p50_us


def report_data(database: PhaseDatabase, rows: Iterable[EvidenceRow] = ()) -> ReportData:
    """`database` with the floors of `rows`, which are looked up by the ids that it names."""
    floors = {row.id: row.floor_us for row in rows if row.floor_us is not None}
    views = (_view(decision, floors) for decision in database.cells)
    cells = tuple(sorted(views, key=lambda cell: (cell.family, cell.kv_bytes, cell.name)))
    over = [
        ratio
        for cell in cells
        if cell.own is not None and (ratio := cell.over_floor(cell.own)) is not None
    ]
    ups = [cell.speed_up for cell in cells if cell.speed_up is not None]
    return ReportData(database, cells, _crossovers(cells), _mean(over), _mean(ups))


def _mean(ratios: Sequence[float]) -> float | None:
    return statistics.geometric_mean(ratios) if ratios else None


def _view(decision: CellDecision, floors: dict[str, float]) -> CellView:
    right = [each for each in decision.candidates if each.outcome == "ok"]
    known = [floors[each.row] for each in decision.candidates if each.row in floors]
    return CellView(
        decision=decision,
        family=family_of(decision.cell.problem),
        kv_bytes=int(features_of_cell(decision.cell)["kv_bytes"]),
        floor_us=statistics.median(known) if known else None,
        own=_fastest(each for each in right if each.role in OURS),
        peer=_fastest(each for each in right if each.role == "external"),
    )


def _fastest(candidates: Iterable[CandidateOutcome]) -> CandidateOutcome | None:
    return min(candidates, key=lambda each: (time_of(each), each.route), default=None)


def _crossovers(cells: Sequence[CellView]) -> tuple[Crossover, ...]:
    found = []
    for low, high in itertools.pairwise(cell for cell in cells if cell.timed):
        first, second = low.timed[0].route, high.timed[0].route
        if low.family == high.family and first != second:
            found.append(
                Crossover(
                    low.family, first, second, low.name, high.name, low.kv_bytes, high.kv_bytes
                )
            )
    return tuple(found)


def format_bytes(count: float) -> str:
    """`16 MiB`, `2 GiB`: the largest unit that leaves at least 1."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def format_ratio(ratio: float | None) -> str:
    """Three digits after the point; a dash where there is none."""
    return "–" if ratio is None or not math.isfinite(ratio) else f"{ratio:.3f}"


def format_time(us: float | None) -> str:
    """Microseconds with three digits; a dash where there are none."""
    return "–" if us is None else f"{us:.3g}" if us < 100 else f"{us:.0f}"
