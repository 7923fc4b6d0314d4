"""`CellRequest`: a cell that is to be decided, with the peers that it is to be held against."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stream_attention.core.errors import Faults, shown
from stream_attention.core.ir import Rule, check_rules, evaluable_repr, is_name, is_tuple_of
from stream_attention.core.json_text import parse_json
from stream_attention.planner.cells import Cell
from stream_attention.planner.plain import canonical_json, from_plain, to_plain

SCHEMA = "stream_attention.cell_requests/1"
TIE_MARGIN = 0.01


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class CellRequest:
    """A cell by name, and what must be known of it before a route is chosen.

    archs: whose databases it belongs into; () = those of all. baselines: eligible peers; each needs
    a row of some outcome. routes: of ours that need one too. weight: of the cell in means of
    regret. tie_margin: share by which the slow end of a paired ratio's interval may exceed 1 for a
    tie.
    """

    cell: Cell
    name: str
    baselines: tuple[str, ...]
    routes: tuple[str, ...] = ()
    weight: float = 1.0
    archs: tuple[str, ...] = ()
    tie_margin: float = TIE_MARGIN

    def __post_init__(self) -> None:
        check_rules(self, _RULES)

    __repr__ = evaluable_repr


def dumps(requests: Iterable[CellRequest]) -> str:
    """The text of a file of requests, one a line."""
    lines = [canonical_json(to_plain(each)) for each in requests]
    body = ",\n".join(lines)
    return f'{{"schema":"{SCHEMA}","cells":[\n{body}\n]}}\n'


def loads(text: str | bytes, source: str = "cells") -> tuple[CellRequest, ...]:
    """The inverse of `dumps`. Raises `ValueError` with `source` and every request that is wrong."""
    plain = parse_json(text, source)
    schema = plain.get("schema") if isinstance(plain, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{source}: schema={shown(schema)}: must be {SCHEMA!r}")
    if set(plain) != {"schema", "cells"} or not isinstance(plain["cells"], list):
        raise ValueError(f"{source}: must have the keys schema and cells, a list, alone")
    found, errors = [], []
    for index, each in enumerate(plain["cells"]):
        try:
            found.append(from_plain(CellRequest, each))
        except ValueError as error:
            errors.append(f"cells[{index}]: {error}")
    if errors:
        raise ValueError("\n  ".join([f"{source}: {len(errors)} bad cells", *errors]))
    check_distinct(found)
    return tuple(found)


def of_arch(requests: Iterable[CellRequest], arch: str) -> tuple[CellRequest, ...]:
    """The requests that belong into the database of an architecture."""
    return tuple(each for each in requests if not each.archs or arch in each.archs)


def check_distinct(requests: Sequence[CellRequest]) -> None:
    """Raise `ValueError` for every name and every cell that one database would have twice."""
    faults = Faults()
    known: dict[tuple[str, str], list[CellRequest]] = {}
    for each in requests:
        for parameter, key, rule in (
            ("name", each.name, "must be there once"),
            ("cell", each.cell.digest, "must differ from that of {}"),
        ):
            others = known.setdefault((parameter, key), [])
            other = next((one for one in others if _meet(one, each)), None)
            if other is not None:
                faults.add(parameter, each.name, rule.format(other.name))
            others.append(each)
    faults.raise_if_any("cells")


def _meet(one: CellRequest, other: CellRequest) -> bool:
    """Whether some database has both."""
    return not one.archs or not other.archs or bool(set(one.archs) & set(other.archs))


def _are_names(value: Any) -> bool:
    return is_tuple_of(value, str) and all(value) and len(set(value)) == len(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_RULES = (
    Rule("cell", "must be a Cell", lambda r: isinstance(r.cell, Cell)),
    Rule("name", "must be a non-empty string", lambda r: is_name(r.name)),
    Rule(
        "baselines",
        "must be a tuple of non-empty names, each once",
        lambda r: _are_names(r.baselines),
    ),
    Rule(
        "routes",
        "must be a tuple of non-empty names, each once, none of them a baseline",
        lambda r: _are_names(r.routes) and not set(r.routes) & set(r.baselines),
    ),
    Rule(
        "archs",
        "must be a tuple of non-empty names, each once",
        lambda r: _are_names(r.archs),
    ),
    Rule("weight", "must be a number > 0", lambda r: _is_number(r.weight) and r.weight > 0, None),
    Rule(
        "tie_margin",
        "must be a number in 0..0.1",
        lambda r: _is_number(r.tie_margin) and 0 <= r.tie_margin <= 0.1,
        lambda r: TIE_MARGIN,
    ),
)
