"""Which column of a trace holds what: the formats that people have, and names that say it alone."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from stream_attention.core.errors import Faults

UNITS = ("datetime", "s", "ms", "us")
_UNIT_WORDS = {"s": "s", "sec": "s", "secs": "s", "seconds": "s", "ms": "ms", "us": "us"}


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of the columns of a trace.

    unit: of the arrivals, one of `UNITS`; `None` = nothing says it. hashes: the ids of the prompt's
    blocks of `block_tokens` tokens, equal where prompts are equal so far; `None` = no such column.
    """

    format: str
    arrival: str
    prompt: str
    output: str
    unit: str | None
    hashes: str | None = None
    block_tokens: int = 0


FORMATS = (
    Columns("azure_llm_inference", "TIMESTAMP", "ContextTokens", "GeneratedTokens", "datetime"),
    Columns("burstgpt", "Timestamp", "Request tokens", "Response tokens", "s"),
    Columns("mooncake", "timestamp", "input_length", "output_length", "ms", "hash_ids", 512),
)
# Columns of these formats that say nothing about lengths or arrivals.
_KNOWN = frozenset(["Model", "Total tokens", "Log Type", "Session ID", "Elapsed time"])

# Letters and digits of names in lower case, without a unit at the end.
ALIASES = {
    "arrival": frozenset(
        [
            *("arrival", "arrivaltime", "arrivaltimestamp", "arrivedat", "timestamp", "time"),
            *("requesttime", "requesttimestamp", "starttime", "senttime"),
        ]
    ),
    "prompt": frozenset(
        [
            *("prompt", "prompttokens", "promptlen", "promptlength", "numprompttokens"),
            *("input", "inputtokens", "inputlen", "inputlength", "contexttokens", "contextlength"),
            *("numprefilltokens", "prefilltokens", "requesttokens", "isl"),
        ]
    ),
    "output": frozenset(
        [
            *("output", "outputtokens", "outputlen", "outputlength", "numoutputtokens"),
            *("generatedtokens", "completiontokens", "responsetokens", "responselength"),
            *("numdecodetokens", "decodetokens", "osl"),
        ]
    ),
}
_EXAMPLE = {"arrival": "arrival_s", "prompt": "prompt_tokens", "output": "output_tokens"}


def find_columns(names: Sequence[str], where: str) -> tuple[Columns, tuple[str, ...]]:
    """`(columns, notes)` for the column names of a file.

    where: the file and line that messages name. Raises `ValueError` with every role that no column
    or more than one has, and every name given twice.
    """
    faults = Faults()
    for name in sorted({name for name in names if names.count(name) > 1}):
        faults.add(f"{where}: {name}", names.count(name), "columns of one name", "1")
    for known in FORMATS:
        if {known.arrival, known.prompt, known.output} <= set(names):
            faults.raise_if_any("trace")
            hashes = known.hashes if known.hashes in names else None
            found = Columns(
                known.format,
                known.arrival,
                known.prompt,
                known.output,
                known.unit,
                hashes,
                known.block_tokens if hashes else 0,
            )
            return found, _ignored(names, found)
    roles = {role: _columns_of(role, names) for role in ALIASES}
    for role, matches in roles.items():
        if not matches:
            _add_missing(faults, role, names, where)
        elif len(matches) > 1:
            rule = f"only one column may be the {role}"
            faults.add(f"{where}: columns", matches, rule, f"{matches[0]!r} alone")
    faults.raise_if_any("trace")
    (arrival,), (prompt,), (output,) = roles.values()
    found = Columns("generic", arrival, prompt, output, _unit_of(arrival)[1])
    return found, _ignored(names, found)


def _ignored(names: Sequence[str], found: Columns) -> tuple[str, ...]:
    used = {found.arrival, found.prompt, found.output, found.hashes}
    rest = [name for name in names if name not in used and name not in _KNOWN]
    return (f"columns ignored: {', '.join(map(repr, rest))}",) if rest else ()


def _columns_of(role: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if _plain(name, role) in ALIASES[role]]


def _plain(name: str, role: str) -> str:
    stem = _unit_of(name)[0] if role == "arrival" else name
    return re.sub(r"[^a-z0-9]", "", stem.lower())


def _unit_of(name: str) -> tuple[str, str | None]:
    """A name without the unit at its end, and the unit: `arrival_ms`, `timestamp (s)`."""
    match = re.fullmatch(r"(.+?)[\s_\-.(\[]+([A-Za-z]+)[)\]]?", name)
    unit = _UNIT_WORDS.get(match[2].lower()) if match else None
    return (match[1], unit) if match and unit else (name, None)


def _add_missing(faults: Faults, role: str, names: Sequence[str], where: str) -> None:
    wanted = sorted(ALIASES[role])
    close = [n for n in names if difflib.get_close_matches(_plain(n, role), wanted, 1, 0.75)]
    nearest = f"{_EXAMPLE[role]!r}" + (f" for {close[0]!r}" if close else "")
    faults.add(f"{where}: columns", list(names), f"no column is the {role}", nearest)
