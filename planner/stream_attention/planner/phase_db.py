"""The phase database of one architecture: which route won each measured cell, and models of time.

Cells say what was measured and decided; models carry each route's time from the measured cells to
problems between them. `phase_compiler` makes a database, dispatch asks one through `lookup`.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stream_attention.core.atomic_files import read_file, replace_file
from stream_attention.core.errors import shown
from stream_attention.core.ir import Rule, check_rules, evaluable_repr, is_name, is_tuple_of
from stream_attention.core.json_text import parse_json
from stream_attention.core.problem import AttentionProblem
from stream_attention.planner.cells import Cell
from stream_attention.planner.cost_model import RouteModel
from stream_attention.planner.evidence import OUTCOMES, ROLES, Fingerprint
from stream_attention.planner.model_index import ModelIndex, RouteEstimate
from stream_attention.planner.plain import digest_of, from_plain, to_plain

SCHEMA = "stream_attention.phase_db/1"
ARCHS = ("sm_80", "sm_90", "sm_100")
"""Architectures whose databases are shipped; users may have others of their own."""
_ARCH = re.compile(r"sm_[1-9][0-9]{1,2}")
STATUSES = ("native", "portable", "external", "unresolved")


def is_arch(node: Any) -> bool:
    """Whether `node.arch` names a CUDA architecture, as `"sm_90"`."""
    return isinstance(node.arch, str) and _ARCH.fullmatch(node.arch) is not None


def _is_time(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class CandidateOutcome:
    """What one contender did on a cell; `row` is the id of the row that says it.

    p50_us: median time of a correct one. allocation_free: no allocator call in a timed run; `None`
    = not counted.
    """

    route: str
    role: str
    outcome: str
    reasons: tuple[str, ...] = ()
    p50_us: float | None = None
    row: str = ""
    allocation_free: bool | None = None

    def __post_init__(self) -> None:
        check_rules(self, _CANDIDATE_RULES)

    __repr__ = evaluable_repr

    @property
    def us(self) -> float:
        """`p50_us` of a correct candidate."""
        assert self.p50_us is not None
        return self.p50_us


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Ratio:
    """Median of `first / second` over `num_pairs` pairs, with its interval at `level`.

    Below 1 the first is faster. row: id of the pair row.
    """

    first: str
    second: str
    p50: float
    low: float
    high: float
    level: float
    num_pairs: int
    row: str

    __repr__ = evaluable_repr


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class CellDecision:
    """What was decided on a cell, and by what.

    status: of `chosen`: native, portable, external; or unresolved, with what is `missing`.
    chosen: contender that the rules pick, peers among them, "" when unresolved. own: fastest
    correct route of ours, "" when none. baseline: best eligible peer, "" when none is known.
    ratio: native against `baseline`. regret: time of chosen over that of the fastest correct
    contender, less 1; own_regret: of own.
    """

    cell: Cell
    name: str
    status: str
    chosen: str = ""
    own: str = ""
    baseline: str = ""
    ratio: Ratio | None = None
    regret: float | None = None
    own_regret: float | None = None
    missing: tuple[str, ...] = ()
    reason: str
    hold_out: bool = False
    candidates: tuple[CandidateOutcome, ...] = ()

    def __post_init__(self) -> None:
        check_rules(self, _DECISION_RULES)

    __repr__ = evaluable_repr


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Regret:
    """Time of the route that dispatch takes by the models, over the fastest measured, less 1.

    Over the `num_cells` cells where routes compete and models choose: weighted geometric mean, and
    worst with the cell's name; `None` where there is no cell. num_outside: cells where no model is
    inside of its measured range, so dispatch goes by no model; not in the means.
    """

    num_cells: int = 0
    num_outside: int = 0
    geometric_mean: float | None = None
    worst: float | None = None
    worst_cell: str = ""

    __repr__ = evaluable_repr


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class RegretSummary:
    """Regret of the choice by models among one set of routes.

    calibration: cells that models are fitted on. hold_out: the others. leave_one_out: each cell by
    models fitted without it and its equals. Cells outside of what models know are only counted.
    """

    calibration: Regret = Regret()
    hold_out: Regret = Regret()
    leave_one_out: Regret = Regret()

    __repr__ = evaluable_repr


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class RefusedRow:
    """A row that did not count, and by which rules."""

    row: str
    contender: str
    cell: str
    reasons: tuple[str, ...]

    __repr__ = evaluable_repr


@dataclass(frozen=True, repr=False, kw_only=True)
class PhaseDatabase:
    """All decisions and models of one architecture, with where they come from.

    environment: of every row that counts; `None` without rows. evidence: (file, SHA-256),
    ascending. commit: of the measured source; several are joined by commas. compiled_at: UTC of
    the newest row that counts, so that the same evidence gives the same bytes. own_regret:
    choice among our routes, as dispatch chooses by default; all_regret: peers too. refused: rows
    that did not count.

    Not slotted: the index over the models is made once, at the first look-up.
    """

    arch: str
    environment: Fingerprint | None = None
    cells: tuple[CellDecision, ...] = ()
    models: tuple[RouteModel, ...] = ()
    evidence: tuple[tuple[str, str], ...] = ()
    commit: str = ""
    compiled_at: str = ""
    own_regret: RegretSummary = RegretSummary()
    all_regret: RegretSummary = RegretSummary()
    refused: tuple[RefusedRow, ...] = ()

    def __post_init__(self) -> None:
        check_rules(self, _DATABASE_RULES)

    __repr__ = evaluable_repr

    def lookup(
        self,
        problem: AttentionProblem,
        routes: Collection[str] | None = None,
        family_name: str | None = None,
    ) -> tuple[RouteEstimate, ...]:
        """The models' estimates for `problem`, fastest first, each with whether it is measured
        there; `()` where nothing like it was measured. routes: those to ask for; `None` = all.
        family_name: `family_of(problem)` where it is known.
        """
        return self.index.lookup(problem, routes, family_name)

    @functools.cached_property
    def index(self) -> ModelIndex:
        """The models by family, ready to be asked."""
        return ModelIndex(self.models)

    @property
    def digest(self) -> str:
        """SHA-256 of the content, as its file names it."""
        return digest_of(self._content())

    def dumps(self) -> str:
        """The text of its file: one text a content."""
        plain = {**self._content(), "sha256": self.digest}
        return json.dumps(plain, indent=1, sort_keys=True, allow_nan=False) + "\n"

    def _content(self) -> dict[str, Any]:
        return {**to_plain(self), "schema": SCHEMA}

    def save(self, path: str | Path) -> None:
        """Write the file whole, or leave what was there. Raises `OSError`."""
        replace_file(Path(path), self.dumps().encode())


def loads(text: str | bytes, source: str = "phase database") -> PhaseDatabase:
    """The database that `dumps` wrote.

    Raises `ValueError` with `source` for text that is no JSON, another schema, a hash that is not
    of the content (an edit by hand), and what a record refuses.
    """
    plain = parse_json(text, source, "compile it again")
    if not isinstance(plain, dict):
        raise ValueError(f"{source}: must be a JSON object; compile it again")
    schema = plain.get("schema")
    if schema != SCHEMA:
        raise ValueError(f"{source}: schema={shown(schema)}: must be {SCHEMA!r}; compile it again")
    stated = plain.pop("sha256", None)
    try:
        found = digest_of(plain)
    except ValueError as error:  # NaN and infinity, which JSON has not
        raise ValueError(f"{source}: {error}; compile it again") from None
    if stated != found:
        raise ValueError(
            f"{source}: sha256={shown(stated)}: must be {found!r}, of its content: it was edited "
            "or cut off; compile it again"
        )
    try:
        fields = {key: value for key, value in plain.items() if key != "schema"}
        return from_plain(PhaseDatabase, fields)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def load(path: str | Path) -> PhaseDatabase:
    """The database in a file. Raises `OSError`, and `ValueError` as `loads` does."""
    return loads(read_file(Path(path)), str(path))


def file_of(arch: str) -> str:
    """`"sm_90"` → `"sm90.json"`."""
    return arch.replace("_", "") + ".json"


@functools.cache
def shipped(arch: str) -> PhaseDatabase | None:
    """The database inside the wheel; `None` where there is none for `arch`.

    Raises `ValueError` for a file that is there and damaged.
    """
    if arch not in ARCHS:
        return None
    file = importlib.resources.files("stream_attention.planner") / "phase_db" / file_of(arch)
    if not file.is_file():
        return None
    database = loads(file.read_bytes(), str(file))
    if database.arch != arch:
        raise ValueError(f"{file}: arch={shown(database.arch)}: must be {arch!r}; compile it again")
    return database


def _one_of(name: str, choices: tuple[str, ...]) -> Rule:
    return Rule(
        name,
        f"must be one of {', '.join(choices)}",
        lambda node: getattr(node, name) in choices,
    )


def _route_of(name: str) -> Rule:
    return Rule(
        name,
        "must be '' or a correct candidate of the cell",
        lambda d: (
            getattr(d, name) == ""
            or any(c.route == getattr(d, name) and c.outcome == "ok" for c in d.candidates)
        ),
    )


_CANDIDATE_RULES = (
    Rule("route", "must be a non-empty string", lambda c: is_name(c.route)),
    _one_of("role", ROLES),
    _one_of("outcome", OUTCOMES),
    Rule(
        "p50_us",
        "must be a finite number > 0 where the outcome is ok, else None",
        lambda c: _is_time(c.p50_us) if c.outcome == "ok" else c.p50_us is None,
    ),
    Rule(
        "reasons",
        "must be a tuple of strings, none where the outcome is ok",
        lambda c: is_tuple_of(c.reasons, str) and (c.outcome == "ok") == (not c.reasons),
    ),
)
_DECISION_RULES = (
    Rule("cell", "must be a Cell", lambda d: isinstance(d.cell, Cell)),
    Rule("name", "must be a non-empty string", lambda d: is_name(d.name)),
    _one_of("status", STATUSES),
    Rule(
        "candidates",
        "must be CandidateOutcomes, a route once",
        lambda d: (
            is_tuple_of(d.candidates, CandidateOutcome)
            and len({c.route for c in d.candidates}) == len(d.candidates)
        ),
    ),
    *(_route_of(name) for name in ("chosen", "own", "baseline")),
    Rule(
        "chosen",
        "must be '' where the cell is unresolved, else of the role that status names",
        lambda d: (
            d.chosen == ""
            if d.status == "unresolved"
            else [c.role for c in d.candidates if c.route == d.chosen] == [d.status]
        ),
    ),
    Rule(
        "missing",
        "must name what is missing where the cell is unresolved, else be ()",
        lambda d: (
            is_tuple_of(d.missing, str) and (d.status == "unresolved") == (len(d.missing) > 0)
        ),
    ),
    Rule("reason", "must be a non-empty string", lambda d: is_name(d.reason)),
)
_DATABASE_RULES = (
    Rule("arch", "must be a CUDA architecture", is_arch, lambda d: "'sm_90'"),
    Rule(
        "environment",
        "must be of the same arch, and there where cells have candidates",
        lambda d: (
            not any(each.candidates for each in d.cells)
            if d.environment is None
            else d.environment.arch == d.arch
        ),
    ),
    Rule(
        "cells",
        "must be CellDecisions of distinct cells, ascending by name",
        lambda d: (
            is_tuple_of(d.cells, CellDecision)
            and len({each.cell.digest for each in d.cells}) == len(d.cells)
            and [each.name for each in d.cells] == sorted(each.name for each in d.cells)
        ),
        value=lambda d: f"{len(d.cells)} cells",
    ),
    Rule(
        "models",
        "must be RouteModels, one a route and family",
        lambda d: (
            is_tuple_of(d.models, RouteModel)
            and len({(m.route, m.family) for m in d.models}) == len(d.models)
        ),
        value=lambda d: f"{len(d.models)} models",
    ),
    Rule(
        "evidence",
        "must be (file, SHA-256) pairs, ascending",
        lambda d: is_tuple_of(d.evidence, tuple) and list(d.evidence) == sorted(set(d.evidence)),
    ),
)
