"""Traces of requests: when each came, how long its prompt and its output were.

Reads CSV (a header, commas) and JSONL (an object a line), gzipped or not, by the column names of
the Azure LLM inference traces, BurstGPT and Mooncake, or names that say what they hold, such as
`arrival_s, prompt_tokens, output_tokens`. What is odd and has one meaning is handled and noted in
`Trace.notes`; what has none is an error that names file, line, column, rule and nearest choice.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from stream_attention.bench.trace_columns import UNITS, Columns, find_columns
from stream_attention.bench.trace_values import (
    MAX_BLOCK,
    MAX_TOKENS,
    BadCell,
    has_zone,
    is_number,
    microseconds,
    tokens,
)
from stream_attention.core.errors import Fault, Faults
from stream_attention.core.ir import Rule, check_rules, is_int, is_tuple_of

_MOST_FAULTS = 20  # shown; the rest are counted
_MOST_BYTES = 2 << 30  # a text of this size has tens of millions of requests
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. arrival_us: since the first of its trace. Lengths in tokens; output may be 0.

    block_ids: ids in 0 … 2^63 - 1 of the prompt's blocks of `Trace.block_tokens` tokens, () where
    unknown. Prompts whose first n ids are equal are equal in their first n blocks.
    """

    arrival_us: int
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival.

    name: where it comes from. format: one of `trace_columns.FORMATS` by name, `"generic"`, or what
    made it. notes: what was odd and how it was taken. Raises `ValueError` with every broken rule.
    """

    name: str
    format: str
    requests: tuple[TraceRequest, ...]
    block_tokens: int = 0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_rules(self, _TRACE_RULES)


def _sound(trace: Trace) -> bool:
    return is_tuple_of(trace.requests, TraceRequest) and bool(trace.requests)


def _bad_requests(trace: Trace) -> list[TraceRequest]:
    return [
        request
        for request in trace.requests
        if not (
            is_int(request.arrival_us)
            and request.arrival_us >= 0
            and is_int(request.prompt_tokens)
            and 1 <= request.prompt_tokens <= MAX_TOKENS
            and is_int(request.output_tokens)
            and 0 <= request.output_tokens <= MAX_TOKENS
        )
    ]


def _is_block(block: Any) -> bool:
    return is_int(block) and 0 <= block <= MAX_BLOCK


def _bad_blocks(trace: Trace) -> list[Any]:
    """Ids that are none, or what is no tuple of them."""
    found = []
    for request in trace.requests:
        if not isinstance(request.block_ids, tuple):
            found.append(request.block_ids)
        else:
            found.extend(block for block in request.block_ids if not _is_block(block))
    return found


def _ordered(trace: Trace) -> bool:
    arrivals = [request.arrival_us for request in trace.requests]
    return arrivals == sorted(arrivals)


_TRACE_RULES = (
    Rule("name", "must be a str", lambda t: isinstance(t.name, str), lambda t: "'trace.csv'"),
    Rule(
        "requests",
        "must be a tuple of one TraceRequest or more",
        _sound,
        None,
        lambda t: type(t.requests).__name__ if t.requests else t.requests,
    ),
    Rule(
        "requests",
        "arrivals and outputs must be ints >= 0, prompts ints >= 1, lengths below 2^31",
        lambda t: not _sound(t) or not _bad_requests(t),
        None,
        lambda t: _bad_requests(t)[0],
    ),
    Rule(
        "requests",
        f"block_ids must be tuples of ints in 0..{MAX_BLOCK}",
        lambda t: not _sound(t) or not _bad_blocks(t),
        lambda t: "()",
        lambda t: _bad_blocks(t)[0],
    ),
    Rule(
        "requests",
        "must be in the order of arrival",
        lambda t: not _sound(t) or bool(_bad_requests(t)) or _ordered(t),
        lambda t: "sorted(requests, key=lambda r: r.arrival_us)",
        lambda t: f"{len(t.requests)} requests",
    ),
    Rule(
        "block_tokens",
        "must be an int >= 0, and >= 1 beside block_ids",
        lambda t: (
            is_int(t.block_tokens)
            and t.block_tokens >= (1 if _sound(t) and any(r.block_ids for r in t.requests) else 0)
        ),
        lambda t: 512,
    ),
)


def read_trace(path: str | Path, arrival_unit: str | None = None) -> Trace:
    """The trace in a file.

    arrival_unit: one of `UNITS`; needed where neither format nor column name says the unit of
    numbers, and it has the last word where given. Raises `ValueError` with every fault (the first
    20, and how many more), `OSError` where the file cannot be read.
    """
    path = Path(path)
    if arrival_unit is not None and arrival_unit not in UNITS:
        rule = f"must be None or one of {', '.join(UNITS)}"
        raise ValueError(f"arrival_unit={arrival_unit!r}: {rule}; use 's'")
    text, notes = _text_of(path)
    first = text.lstrip()[:1]
    if not first:
        raise ValueError(f"{path.name}:1: the file is empty; use one with a header and requests")
    if first == "[":
        raise ValueError(f"{path.name}:1: is a JSON array; use one object a line (JSONL)")
    records = _json_records(text, path.name) if first == "{" else _csv_records(text, path.name)
    return _Reader(path.name, arrival_unit, notes).read(records)


def _text_of(path: Path) -> tuple[str, list[str]]:
    """A file's text, unzipped and without a byte order mark, and notes on either."""
    raw, notes = path.read_bytes(), []
    if raw.startswith(_GZIP):
        try:
            with gzip.open(io.BytesIO(raw)) as file:
                raw = file.read(_MOST_BYTES + 1)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(
                f"{path.name}: is no whole gzip file ({error}); use gzip -t to check it"
            ) from None
        notes.append("unzipped")
    if len(raw) > _MOST_BYTES:
        raise ValueError(f"{path.name}: is over {_MOST_BYTES >> 30} GiB of text; use a part of it")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{path.name}:{line}: byte {raw[error.start]:#04x} is no UTF-8; use UTF-8"
        ) from None
    if text.startswith("\ufeff"):
        text = text.removeprefix("\ufeff")
        notes.append("a byte order mark was skipped")
    return text, notes


Record = tuple[int, dict[str, Any]]  # the line, and its cells by column


def _csv_records(text: str, name: str) -> Iterator[Record | Fault]:
    """The header's columns as `(line, {"": columns})`, then a record or a fault a line."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    try:
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            line = reader.line_num
            if header is None:
                header = [cell.strip() for cell in row]
                _check_header(header, f"{name}:{line}")
                # Names given twice stay visible: `find_columns` refuses them.
                yield line, {"": header}
            elif len(row) != len(header):
                rule = f"must have as many fields as the header, {len(header)}"
                yield Fault(f"{name}:{line}: fields", len(row), rule, len(header))
            else:
                yield line, dict(zip(header, row, strict=True))
    except csv.Error as error:
        yield Fault(f"{name}:{reader.line_num}: line", str(error), "is no CSV", "closed quotes")


def _check_header(header: list[str], where: str) -> None:
    for mark, word in ((";", "semicolons"), ("\t", "tabs")):
        if len(header) == 1 and mark in header[0]:
            raise ValueError(f"{where}: fields are separated by {word}; use commas")


def _json_records(text: str, name: str) -> Iterator[Record | Fault]:
    """The first object's keys as `(line, {"": keys})`, then a record or a fault a line."""
    first = True
    for line, row in enumerate(text.split("\n"), 1):
        if not row.strip():
            continue
        where = f"{name}:{line}: line"
        try:
            data = json.loads(
                row, parse_float=Decimal, parse_constant=str, object_pairs_hook=_unique
            )
        except RecursionError:
            yield Fault(where, row[:40], "is nested too deeply", "numbers and lists of ids")
            continue
        except InvalidOperation:
            yield Fault(where, row[:40], "has a number whose exponent is too large", "0")
            continue
        except ValueError as error:
            yield Fault(where, row[:40], f"is no JSON ({error})", '{"timestamp": 0, …}')
            continue
        if not isinstance(data, dict):
            yield Fault(where, row[:40], "must be an object", '{"timestamp": 0, …}')
            continue
        if first:
            first = False
            yield line, {"": list(data)}
        yield line, data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


class _Reader:
    """Turns records into requests, with every fault on the way."""

    def __init__(self, name: str, arrival_unit: str | None, notes: list[str]) -> None:
        self.name, self.arrival_unit, self.notes = name, arrival_unit, notes
        self.faults, self.num_faults = Faults(), 0
        self.columns: Columns | None = None
        self.unit: str | None = None
        self.zoned: bool | None = None

    def read(self, records: Iterator[Record | Fault]) -> Trace:
        requests: list[TraceRequest] = []
        for record in records:
            if isinstance(record, Fault):
                self.add(record.parameter, record.value, record.rule, record.nearest)
            elif "" in record[1] and self.columns is None:
                where = f"{self.name}:{record[0]}"
                self.columns, notes = find_columns(record[1][""], where)
                self.notes.extend(notes)
            else:
                request = self.request(*record)
                if request is not None:
                    requests.append(request)
        if self.num_faults > _MOST_FAULTS:
            rest = self.num_faults - _MOST_FAULTS
            self.faults.add(self.name, f"{rest} more faults", "are not shown", "the first ones")
        self.faults.raise_if_any("trace")
        if not requests:
            raise ValueError(f"{self.name}: has no requests; use one with requests")
        assert self.columns is not None
        return self.trace(requests, self.columns)

    def trace(self, requests: list[TraceRequest], columns: Columns) -> Trace:
        """The requests in order, their arrivals counted from the first."""
        arrivals = [request.arrival_us for request in requests]
        late = sum(one > other for one, other in zip(arrivals, arrivals[1:], strict=False))
        if late:
            self.notes.append(f"{late} arrivals are before the line above them; sorted")
            requests.sort(key=lambda request: request.arrival_us)
        start = requests[0].arrival_us
        if start:
            self.notes.append(f"arrivals count from the first, {start} us")
        silent = sum(request.output_tokens == 0 for request in requests)
        if silent:
            self.notes.append(f"{silent} requests have no output (refused or failed)")
        moved = (
            TraceRequest(r.arrival_us - start, r.prompt_tokens, r.output_tokens, r.block_ids)
            for r in requests
        )
        return Trace(
            self.name, columns.format, tuple(moved), columns.block_tokens, tuple(self.notes)
        )

    def add(self, parameter: str, value: Any, rule: str, nearest: Any = None) -> None:
        self.num_faults += 1
        if self.num_faults <= _MOST_FAULTS:
            self.faults.add(parameter, value, rule, nearest)

    def cell(self, line: int, record: dict[str, Any], column: str, read: Any, *args: Any) -> Any:
        """`read(cell, *args)`, or `None` and a fault."""
        where = f"{self.name}:{line}: {column}"
        if column not in record:
            self.add(where, None, "is missing; the first line has it", column)
            return None
        try:
            return read(record[column], *args)
        except BadCell as error:
            value = record[column]
            self.add(where, str(value) if isinstance(value, Decimal) else value, *error.args)
            return None

    def request(self, line: int, record: dict[str, Any]) -> TraceRequest | None:
        columns = self.columns
        assert columns is not None
        if self.unit is None:
            self.unit = self.unit_of(line, record.get(columns.arrival), columns)
        arrival = self.cell(line, record, columns.arrival, self.arrival)
        prompt = self.cell(line, record, columns.prompt, tokens, 1)
        output = self.cell(line, record, columns.output, tokens, 0)
        ids: tuple[int, ...] | None = ()
        if columns.hashes is not None and prompt is not None:
            ids = self.cell(line, record, columns.hashes, _block_ids, prompt, columns.block_tokens)
        if arrival is None or prompt is None or output is None or ids is None:
            return None
        return TraceRequest(arrival, prompt, output, ids)

    def unit_of(self, line: int, value: Any, columns: Columns) -> str:
        """The unit by argument, format or column name, else by a date; numbers alone have none."""
        if self.arrival_unit is not None:
            return self.arrival_unit
        if columns.unit is not None:
            return columns.unit
        if not is_number(value):
            return "datetime"
        where = f"{self.name}:{line}: {columns.arrival}={str(value)!r}"
        rule = "is a number without a unit"
        raise ValueError(f"{where}: {rule}; use arrival_unit='s', or a column arrival_s")

    def arrival(self, value: Any) -> int:
        assert self.unit is not None
        found = microseconds(value, self.unit)
        if self.unit == "datetime":
            zoned = has_zone(value)
            if self.zoned is not None and self.zoned != zoned:
                raise BadCell("some times have a time zone and some have none", "one form for all")
            self.zoned = zoned
        return found


def _block_ids(value: Any, prompt: int, block_tokens: int) -> tuple[int, ...]:
    rule = f"must be a list of ints, one for each of the prompt's blocks of {block_tokens} tokens"
    wanted = -(-prompt // block_tokens)
    if not isinstance(value, list) or not all(is_int(block) for block in value):
        raise BadCell(rule, f"{wanted} ints")
    if len(value) != wanted:
        raise BadCell(rule, f"{wanted} ids")
    for block in value:
        if not _is_block(block):  # as a group of prefixes it would have another's number
            nearest = min(max(block, 0), MAX_BLOCK)
            raise BadCell(f"block {block} must be an int in 0..{MAX_BLOCK}", nearest)
    return tuple(value)
