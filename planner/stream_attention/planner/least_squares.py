"""Least squares with coefficients >= 0, without a BLAS whose sums depend on the machine."""

from __future__ import annotations

import math
from collections.abc import Sequence


def non_negative(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """`argmin |A x - b|²` over x >= 0, A = rows, b = targets: the active-set method.

    Columns are scaled to length 1 first, so units do not count. Of columns that say the same, the
    first takes all: a column enters only where it lowers the squares beyond rounding.

    C. Lawson, R. Hanson, "Solving Least Squares Problems" (1974), chapter 23.
    """
    columns = list(zip(*rows, strict=True))
    scales = [math.sqrt(math.fsum(x * x for x in column)) or 1.0 for column in columns]
    columns = [tuple(x / s for x in c) for c, s in zip(columns, scales, strict=True)]
    gram = [[0.0] * len(columns) for _ in columns]
    for i, one in enumerate(columns):
        for j, other in enumerate(columns[: i + 1]):
            gram[i][j] = gram[j][i] = _dot(one, other)
    against = [_dot(column, targets) for column in columns]
    least = _GAIN * math.sqrt(_dot(targets, targets))
    solution = [0.0] * len(columns)
    active: list[int] = []
    dependent: set[int] = set()
    for _ in range(_STEPS * len(columns)):
        gains = {
            index: against[index] - _dot(gram[index], solution)
            for index in range(len(columns))
            if index not in active and index not in dependent
        }
        entering = max(gains, key=lambda index: (gains[index], -index), default=None)
        if entering is None or gains[entering] <= least:
            break
        if _solve(gram, against, [*active, entering]) is None:
            dependent.add(entering)  # says what the active ones say together
            continue
        active.append(entering)
        solution, active = _feasible(gram, against, solution, active)
        dependent.clear()
    return [x / scale for x, scale in zip(solution, scales, strict=True)]


_GAIN = 1e-9  # of the targets' length: below it a gain is rounding
_PIVOT = 1e-10  # of a column of length 1, what the others leave of it: below it they say the same
_STEPS = 8


def _feasible(
    gram: Sequence[Sequence[float]],
    against: Sequence[float],
    solution: list[float],
    active: list[int],
) -> tuple[list[float], list[int]]:
    """The least squares over `active`, less the columns that would turn negative."""
    while True:
        found = _solve(gram, against, active)
        wanted = dict(zip(active, found or (), strict=True))
        if all(x > 0 for x in wanted.values()):
            return [wanted.get(index, 0.0) for index in range(len(solution))], active
        step, leaving = min(
            (solution[i] / (solution[i] - x), i) for i, x in wanted.items() if x <= 0
        )
        solution = [
            old + step * (wanted[i] - old) if i in wanted else 0.0 for i, old in enumerate(solution)
        ]
        solution[leaving] = 0.0
        active = [index for index in active if solution[index] > 0]
        solution = [x if i in active else 0.0 for i, x in enumerate(solution)]
        if not active:
            return solution, active


def _solve(
    gram: Sequence[Sequence[float]], against: Sequence[float], active: Sequence[int]
) -> list[float] | None:
    """The equations of the columns `active`, by Cholesky; `None` where they are dependent."""
    lower: list[list[float]] = []
    for row, i in enumerate(active):
        entries: list[float] = []
        for column in range(row):
            j = active[column]
            known = _dot(entries, lower[column][:column])
            entries.append((gram[i][j] - known) / lower[column][column])
        left = gram[i][i] - _dot(entries, entries)
        if left <= _PIVOT:
            return None
        lower.append([*entries, math.sqrt(left)])
    forward: list[float] = []
    for row, i in enumerate(active):
        forward.append((against[i] - _dot(lower[row][:row], forward)) / lower[row][row])
    solved = [0.0] * len(active)
    for row in reversed(range(len(active))):
        below = range(row + 1, len(active))
        known = _dot([lower[i][row] for i in below], [solved[i] for i in below])
        solved[row] = (forward[row] - known) / lower[row][row]
    return solved


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    # `sum` rounds otherwise from Python 3.12 on; this one is exact.
    return math.fsum(a * b for a, b in zip(one, other, strict=True))
