"""`Cell`: a problem with the lengths that it was measured at, known by its content's hash."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stream_attention.core.errors import shown
from stream_attention.core.ir import Rule, check_rules, evaluable_repr, is_int, is_tuple_of
from stream_attention.core.problem import AttentionProblem
from stream_attention.planner.plain import digest_of, from_plain, to_plain

# Far above what a server batches; a file that asks for more is broken, and must not fill memory.
MAX_REQUESTS = 1 << 20


def _are_of_64_bits(problem: AttentionProblem) -> bool:
    values = (getattr(problem, name) for name in problem.__dataclass_fields__)
    return all(value < 1 << 63 for value in values if is_int(value))


def _are_lengths(value: Any) -> bool:
    return is_tuple_of(value, int) and all(is_int(each) and each >= 0 for each in value)


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Cell:
    """A problem as the engine sees it, and what its requests hold.

    problem: with capacities. qo_lens, kv_lens: queries and KV tokens of each request.
    Data is random and the order of pages too: neither is a part of a cell.
    """

    problem: AttentionProblem
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    def __post_init__(self) -> None:
        check_rules(self, _RULES)

    __repr__ = evaluable_repr

    @property
    def digest(self) -> str:
        """SHA-256 of the content, 64 hexadecimal digits: the same content has the same one."""
        return digest_of(self.plain())

    @property
    def kv_tokens(self) -> int:
        """KV tokens of all requests."""
        return sum(self.kv_lens)

    @classmethod
    def from_plain(cls, plain: Any) -> Cell:
        """The inverse of `plain`. Raises `ValueError` for a key too many or too few, lengths of
        another number than `problem.batch`, and for what a cell refuses.
        """
        if not isinstance(plain, dict) or set(plain) != {"problem", "qo_lens", "kv_lens"}:
            found = sorted(plain) if isinstance(plain, dict) else plain
            raise ValueError(
                f"cell={shown(found)}: must have the keys problem, qo_lens and kv_lens alone"
            )
        problem = from_plain(AttentionProblem, plain["problem"])
        return cls(
            problem=problem,
            qo_lens=_expanded("qo_lens", plain["qo_lens"], problem.batch),
            kv_lens=_expanded("kv_lens", plain["kv_lens"], problem.batch),
        )

    def plain(self) -> dict[str, Any]:
        """Plain data; lengths as `[count, length]` of equal neighbours."""
        return {
            "problem": to_plain(self.problem),
            "qo_lens": _runs(self.qo_lens),
            "kv_lens": _runs(self.kv_lens),
        }


def cell_from_plain(plain: Any) -> Cell:
    """`Cell.from_plain(plain)`."""
    return Cell.from_plain(plain)


def _runs(lengths: Sequence[int]) -> list[list[int]]:
    return [[len(list(same)), length] for length, same in itertools.groupby(lengths)]


def _expanded(name: str, runs: Any, count: int) -> tuple[int, ...]:
    if count > MAX_REQUESTS:
        raise ValueError(f"batch={count}: a cell has {MAX_REQUESTS} requests at most")
    lengths: list[int] = []
    for run in runs if isinstance(runs, list) else [runs]:
        if not (isinstance(run, list) and len(run) == 2 and all(map(is_int, run)) and run[0] >= 1):
            raise ValueError(f"{name}={shown(run)}: must be a list of [count, length], count >= 1")
        if run[0] > count - len(lengths):  # before a number from a file becomes memory
            raise ValueError(
                f"{name}={shown(run)}: must be {count} lengths in all, as problem.batch"
            )
        lengths.extend([run[1]] * run[0])
    return tuple(lengths)


_RULES = (
    Rule(
        "problem",
        "must be an AttentionProblem",
        lambda c: isinstance(c.problem, AttentionProblem),
    ),
    Rule(
        "problem",
        "must have ints of 64 bits alone: no float holds the features of larger ones",
        lambda c: not isinstance(c.problem, AttentionProblem) or _are_of_64_bits(c.problem),
    ),
    Rule(
        "qo_lens",
        "must be a tuple of ints >= 0 that sum to problem.total_qo_len, none above max_qo_len",
        lambda c: (
            _are_lengths(c.qo_lens)
            and sum(c.qo_lens) == c.problem.total_qo_len
            and max(c.qo_lens, default=0) <= c.problem.max_qo_len
        ),
    ),
    Rule(
        "kv_lens",
        "must be a tuple of ints in 0..problem.kv_capacity",
        lambda c: _are_lengths(c.kv_lens) and max(c.kv_lens, default=0) <= c.problem.kv_capacity,
    ),
    Rule(
        "kv_lens",
        "must have problem.batch entries, as qo_lens",
        lambda c: len(c.kv_lens) == len(c.qo_lens) == c.problem.batch,
        value=lambda c: f"{len(c.kv_lens)} and {len(c.qo_lens)} entries",
    ),
)
