"""Which evidence counts: tables of named rules for rows, pairs and sets, and what judges by them.

A rule finds what is wrong and says so as `parameter=value: rule; use nearest`. The numbers are
compared here, whoever measured and whatever he made of them. What has another form than a row
cannot be one: that is said where rows are made.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from stream_attention.core.errors import Fault, shown
from stream_attention.planner.evidence import EvidenceRow, Fingerprint, PairRow, Row
from stream_attention.planner.evidence_finding import (
    Context,
    Refusal,
    RefusalRule,
    device_type,
    sides_of,
    time_of,
)
from stream_attention.planner.evidence_numbers import (
    LEAST_OF_FLOOR,
    NUMBER_RULES,
    are_times,
    least_plausible_us,
    too_fast,
)
from stream_attention.planner.evidence_provenance import PROVENANCE_RULES

ROW_RULES: tuple[RefusalRule, ...] = (*PROVENANCE_RULES, *NUMBER_RULES)

# What was measured: kind, digest of the cell, contenders.
Key = tuple[str, str, frozenset[str]]
# Where: digest of the cell, environment. All rows of one have one floor.
Place = tuple[str, Fingerprint]
# Floors of one place are reads of the same bytes by the same method: they differ by no more than a
# time may be below a floor.
MOST_OF_FLOORS = {device: 1 / share for device, share in LEAST_OF_FLOOR.items()}


@dataclass(frozen=True, slots=True)
class SetRule:
    """A row of the table of sets: `find(rows)` gives what is wrong with rows that count singly."""

    name: str
    find: Callable[[tuple[Row, ...]], Iterable[Fault]]


@dataclass(frozen=True, slots=True)
class SetVerdict:
    """What counts of a set.

    accepted: rows that no rule refuses; those of the set hold for them. refused: the others, with
    why. refusals: of the set as a whole; where there are any, none of its rows count together.
    """

    accepted: tuple[Row, ...]
    refused: tuple[tuple[Row, tuple[Refusal, ...]], ...]
    refusals: tuple[Refusal, ...]

    def rows(self) -> tuple[Row, ...]:
        """The accepted rows. Raises `ValueError` where the set is refused, with every reason."""
        if self.refusals:
            raise ValueError("\n  ".join(["evidence: refused", *map(str, self.refusals)]))
        return self.accepted


def refusals(
    row: Row, context: Context | None = None, rules: Iterable[RefusalRule] | None = None
) -> tuple[Refusal, ...]:
    """Everything that is wrong with `row`, in order of the table; `()` where it counts.

    A good row of an outcome that is not ok counts too: as a contender that is out, with its reason.
    rules: `ROW_RULES` by default.
    """
    if not isinstance(row, (EvidenceRow, PairRow)):
        raise ValueError(f"row={shown(row)}: must be an EvidenceRow or a PairRow")
    context = Context() if context is None else context
    return tuple(
        Refusal(rule.name, str(fault))
        for rule in (ROW_RULES if rules is None else rules)
        for fault in rule.find(row, context)
    )


def check_set(
    rows: Iterable[Row], context: Context | None = None, rules: Iterable[SetRule] | None = None
) -> SetVerdict:
    """What counts of `rows`: each by `refusals`, and those that pass by the rules of sets.

    rules: `SET_RULES` by default.
    """
    accepted, refused = [], []
    for row in rows:
        found = refusals(row, context)
        if found:
            refused.append((row, found))
        else:
            accepted.append(row)
    return SetVerdict(
        tuple(accepted),
        tuple(refused),
        tuple(
            Refusal(rule.name, str(fault))
            for rule in (SET_RULES if rules is None else rules)
            for fault in rule.find(tuple(accepted))
        ),
    )


def latest(rows: Iterable[Row]) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """`(kept, superseded)`: of rows of the same contenders on the same cell, the one taken last.

    A set refuses to have both, since a second try until the number pleases is no measurement: that
    the later one counts is for its user to say, by this call. A row is kept once where it comes
    twice; rows whose order is unknown are all kept, for `check_set` to refuse.
    """
    groups = _by_key({row.id: row for row in rows}.values())
    kept: list[Row] = []
    superseded: list[Row] = []
    for group in groups.values():
        times = [time_of(row) for row in group]
        known = [time for time in times if time is not None]
        last = max(known) if len(known) == len(times) else None
        for row, time in zip(group, times, strict=True):
            (kept if last is None or time == last else superseded).append(row)
    return tuple(kept), tuple(superseded)


def key_of(row: Row) -> Key:
    """What was measured, whenever it was. The order of a pair says nothing new."""
    if isinstance(row, PairRow):
        return "pair", row.cell.digest, frozenset((row.first, row.second))
    return "single", row.cell.digest, frozenset((row.requested,))


def _by_key(rows: Iterable[Row]) -> dict[Key, list[Row]]:
    groups: defaultdict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key_of(row)].append(row)
    return groups


def _named(key: Key) -> str:
    return f"{' and '.join(sorted(key[2]))} on cell {key[1][:16]}"


def _empty(rows: tuple[Row, ...]) -> Iterator[Fault]:
    if not rows:
        yield Fault("rows", (), "none counts")


def _environments(rows: tuple[Row, ...]) -> Iterator[Fault]:
    found = dict.fromkeys(row.environment for row in rows)
    for other in list(found)[1:]:
        differs = "; ".join(other.differences(rows[0].environment))
        yield Fault("environment", other.digest[:16], f"is not the first row's: {differs}")


def _commits(rows: tuple[Row, ...]) -> Iterator[Fault]:
    of_route = defaultdict(set)
    for row in rows:
        if isinstance(row, EvidenceRow) and row.role == "native":
            of_route[row.requested].add(row.commit)
    for route, commits in of_route.items():
        if len(commits) > 1:
            rule = "a kernel's rows must be of one source"
            yield Fault("commit", sorted(commits), f"{route}: {rule}")


def _versions(rows: tuple[Row, ...]) -> Iterator[Fault]:
    found = defaultdict(set)
    for row in rows:
        for name, version in row.versions:
            found[name].add(version)
    for name, versions in sorted(found.items()):
        if len(versions) > 1:
            yield Fault("versions", sorted(versions), f"{name}: must be one in a set")


def _roles(rows: tuple[Row, ...]) -> Iterator[Fault]:
    found = defaultdict(set)
    for row in rows:
        if isinstance(row, EvidenceRow):
            found[row.requested].add(row.role)
    for name, roles in sorted(found.items()):
        if len(roles) > 1:
            yield Fault("role", sorted(roles), f"{name}: must be one in a set")


def _duplicate_ids(rows: tuple[Row, ...]) -> Iterator[Fault]:
    for found, count in Counter(row.id for row in rows).items():
        if count > 1:
            yield Fault("id", found, f"is there {count} times: a row counts once")


def _measured_twice(rows: tuple[Row, ...]) -> Iterator[Fault]:
    for key, group in _by_key(rows).items():
        ids = list(dict.fromkeys(row.id for row in group))
        if len(ids) > 1:
            rule = f"{_named(key)}: measured more than once, and nobody said which row counts"
            yield Fault("id", ids, rule, "evidence_rules.latest")


def _floors(rows: tuple[Row, ...]) -> dict[Place, list[EvidenceRow]]:
    """The rows of each cell in each environment that say its floor, ascending by it."""
    found: defaultdict[Place, list[EvidenceRow]] = defaultdict(list)
    for row in rows:
        if isinstance(row, EvidenceRow) and row.floor_us is not None:
            found[row.cell.digest, row.environment].append(row)
    return {place: sorted(of, key=_floor_of) for place, of in found.items()}


def _floor_of(row: EvidenceRow) -> float:
    return row.floor_us or 0.0


def _floors_differ(rows: tuple[Row, ...]) -> Iterator[Fault]:
    for (cell, environment), known in _floors(rows).items():
        least, most = known[0], known[-1]
        apart = MOST_OF_FLOORS[device_type(environment.arch)]
        if _floor_of(most) > apart * _floor_of(least):
            rule = (
                f"cell {cell[:16]}: floors of rows {least.id} and {most.id}, which are one read of "
                f"one memory, must be within {apart:g}x"
            )
            yield Fault("floor_us", [_floor_of(least), _floor_of(most)], rule, "one run of all")


def _below_largest_floor(kind: type) -> Callable[[tuple[Row, ...]], Iterator[Fault]]:
    """A rule that a row's times are held to the largest floor of its cell: its own may be wrong."""

    def find(rows: tuple[Row, ...]) -> Iterator[Fault]:
        floors = _floors(rows)
        for row in rows:
            known = floors.get((row.cell.digest, row.environment))
            if known is None or not isinstance(row, kind) or row.outcome != "ok":
                continue
            for side in sides_of(row):
                if side.timing is not None and are_times(side.timing):
                    parameter = f"{row.id}.{side.prefix}timing.p50_us"
                    fault = too_fast(parameter, side.timing, row, _floor_of(known[-1]))
                    yield from () if fault is None else (fault,)

    return find


SET_RULES = (
    SetRule("empty", _empty),
    SetRule("mixed_environments", _environments),
    SetRule("mixed_commits", _commits),
    SetRule("mixed_versions", _versions),
    SetRule("mixed_roles", _roles),
    SetRule("duplicate_ids", _duplicate_ids),
    SetRule("measured_twice", _measured_twice),
    SetRule("floors_differ", _floors_differ),
    SetRule("row_implausible", _below_largest_floor(EvidenceRow)),
    SetRule("pair_implausible", _below_largest_floor(PairRow)),
)
# Rules that a cell breaks by its own rows, whatever other cells hold.
CELL_RULES = ("measured_twice", "floors_differ", "row_implausible", "pair_implausible")

__all__ = [
    "Context",
    "ROW_RULES",
    "Refusal",
    "RefusalRule",
    "SET_RULES",
    "SetRule",
    "SetVerdict",
    "check_set",
    "key_of",
    "latest",
    "least_plausible_us",
    "refusals",
]
