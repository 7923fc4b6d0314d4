"""Cohorts: a batch's requests parted by their numbers of queries, and where the rows then lie.

Pure functions of host counts; nothing here knows tensors, routes or devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stream_attention.core.describe import MAX_VERIFY_QO_LEN
from stream_attention.core.ir import Rule, check_rules, evaluable_repr, is_int, is_tuple_of

IDLE, DECODE = "idle", "decode"
"""The classes of requests without queries, for which there is nothing to run, and with one."""


@dataclass(frozen=True, slots=True)
class Macro:
    """A way to part a batch: a measure of a request, and classes by the most of it they take.

    measure: `(qo_len, gqa_group_size) -> int >= 0`. classes: `(name, most)` ascending by `most`,
    the last of them `None`, without a limit. A request's class is the first that takes it, so it
    follows from the request alone, whoever else is in the batch.
    """

    name: str
    measure: Callable[[int, int], int]
    classes: tuple[tuple[str, int | None], ...]

    def class_of(self, qo_len: int, group: int) -> str:
        """Name of the class of a request with `qo_len` queries."""
        size = self.measure(qo_len, group)
        return next(name for name, most in self.classes if most is None or size <= most)


def _queries(qo_len: int, group: int) -> int:
    return qo_len


def _rows(qo_len: int, group: int) -> int:
    """Packed rows, query heads of one KV head being rows; 0 and 1 queries keep their own classes.

    Two queries are two rows at least, so no other request measures 0 or 1.
    """
    return qo_len if qo_len <= 1 else qo_len * group


MACROS: tuple[Macro, ...] = (
    Macro("unified", _queries, (("all", None),)),
    # Append and prefill differ by what the cache holds, which changes under a plan; so one class.
    Macro(
        "phases",
        _queries,
        ((IDLE, 0), (DECODE, 1), ("verify", MAX_VERIFY_QO_LEN), ("prefill", None)),
    ),
    # A tile of queries is 8 rows in the narrowest product and 64 rows are the most that a decode
    # kernel takes; beyond, K and V are read once for each tile of them.
    Macro(
        "cohorts",
        _rows,
        ((IDLE, 0), (DECODE, 1), ("rows_2_8", 8), ("rows_9_64", 64), ("rows_65_up", None)),
    ),
)
"""All of them, in the order in which equal estimates are decided: fewer launches first."""


@dataclass(frozen=True, slots=True, repr=False)
class Cohort:
    """Requests of one class: their places in the batch, ascending, and their queries."""

    name: str
    requests: tuple[int, ...]
    qo_lens: tuple[int, ...]

    def __post_init__(self) -> None:
        check_rules(self, _COHORT_RULES)

    __repr__ = evaluable_repr

    @property
    def total_qo_len(self) -> int:
        """Queries of all its requests."""
        return sum(self.qo_lens)

    @property
    def max_qo_len(self) -> int:
        """Most queries of one request."""
        return max(self.qo_lens, default=0)

    @property
    def equal(self) -> bool:
        """Every request has the same number of queries."""
        return len(set(self.qo_lens)) <= 1


_COHORT_RULES = (
    Rule(
        "requests",
        "must be a tuple of ints >= 0, strictly ascending",
        lambda c: (
            is_tuple_of(c.requests, int)
            and all(is_int(each) and each >= 0 for each in c.requests)
            and all(a < b for a, b in itertools.pairwise(c.requests))
        ),
    ),
    Rule(
        "qo_lens",
        "must be a tuple of ints >= 0, one a request",
        lambda c: (
            is_tuple_of(c.qo_lens, int)
            and all(is_int(each) and each >= 0 for each in c.qo_lens)
            and len(c.qo_lens) == len(c.requests)
        ),
    ),
)


def partition(qo_lens: Sequence[int], group: int, macro: Macro) -> tuple[Cohort, ...]:
    """The batch in cohorts: every request in exactly one, in the order of the batch.

    Cohorts come in the order of the macro's classes; a class without requests has none.
    """
    found: dict[str, list[int]] = {name: [] for name, _ in macro.classes}
    for request, qo_len in enumerate(qo_lens):
        found[macro.class_of(qo_len, group)].append(request)
    return tuple(
        Cohort(name, tuple(requests), tuple(qo_lens[request] for request in requests))
        for name, requests in found.items()
        if requests
    )


def to_run(qo_lens: Sequence[int], group: int, macro: Macro) -> tuple[Cohort, ...]:
    """The cohorts that have queries; where none has, one of the whole batch, which may be empty."""
    found = tuple(c for c in partition(qo_lens, group, macro) if c.total_qo_len)
    return found or (Cohort("all", tuple(range(len(qo_lens))), tuple(qo_lens)),)


def offsets(qo_lens: Iterable[int]) -> tuple[int, ...]:
    """Where each request's rows begin, and behind the last one where they end."""
    return tuple(itertools.accumulate(qo_lens, initial=0))


Span = tuple[int, int]
"""First, and one past the last."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cohort finds its share: a span of the batch's own, or of what is gathered.

    rows, requests: spans. rows_gathered, requests_gathered: of the gathered ones, not the batch's.
    """

    rows: Span
    rows_gathered: bool
    requests: Span
    requests_gathered: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the cohorts of a batch lie, neighbours in place and others gathered.

    places: one a cohort. rows, requests: the batch's rows and requests that are gathered, in the
    order of the gathered buffers. returns: `(span, sources)`: rows of the batch's output that are
    taken from the gathered ones, and from which; together with the spans of the cohorts in place
    they are every row, each once.
    """

    places: tuple[Place, ...]
    rows: tuple[int, ...]
    requests: tuple[int, ...]
    returns: tuple[tuple[Span, tuple[int, ...]], ...]


def lay_out(qo_lens: Sequence[int], cohorts: Sequence[Cohort]) -> Layout:
    """The `Layout` of the cohorts that run, which together have all rows of the batch."""
    starts = offsets(qo_lens)
    places: list[Place] = []
    rows: list[int] = []
    requests: list[int] = []
    for cohort in cohorts:
        own = [row for request in cohort.requests for row in range(*starts[request : request + 2])]
        row_span, rows_gathered = _place(own, rows)
        request_span, requests_gathered = _place(cohort.requests, requests)
        places.append(Place(row_span, rows_gathered, request_span, requests_gathered))
    source = {row: index for index, row in enumerate(rows)}
    returns = tuple(
        (span, tuple(source[row] for row in range(*span))) for span in _runs(sorted(rows))
    )
    return Layout(tuple(places), tuple(rows), tuple(requests), returns)


def _place(own: Sequence[int], gathered: list[int]) -> tuple[Span, bool]:
    """The span of ascending numbers that are neighbours; of others, theirs behind `gathered`."""
    runs = _runs(own)
    if len(runs) <= 1:
        return (runs[0] if runs else (0, 0)), False
    first = len(gathered)
    gathered.extend(own)
    return (first, len(gathered)), True


def _runs(ascending: Sequence[int]) -> list[Span]:
    """Spans of neighbours, as long as can be."""
    runs: list[Span] = []
    for number in ascending:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs
