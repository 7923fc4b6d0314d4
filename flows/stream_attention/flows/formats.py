"""The three formats of a value. Rank is always 3: `[leading axis, rows, cols]`.

| format | leading axis | one entry is |
|---|---|---|
| `BATCHED` | `batch · num_kv_heads` | a row: one KV head of one request |
| `RAGGED` | candidate pages, packed: row after row, ascending positions | a page |
| `PAGED` | `num_pages · num_kv_heads` | a page of the pool |

Where formats meet, a `BATCHED` row is broadcast to the candidate pages of that row, and a `PAGED`
field is first gathered to them by a load, so the shortest loop that rebuilds the dense form is

    for row in range(batch * num_kv_heads):
        for position in range(first[row], last[row]):           # the row's window
            ragged[start[row] + position - first[row]] = paged[page_table[row, position], head]
"""

from __future__ import annotations

from enum import Enum


class Format(str, Enum):
    """What the leading axis of a value runs over."""

    BATCHED = "batched"
    RAGGED = "ragged"
    PAGED = "paged"

    def __str__(self) -> str:
        return self.value

    def __repr__(self) -> str:
        return f"Format.{self.name}"


BATCHED, RAGGED, PAGED = Format.BATCHED, Format.RAGGED, Format.PAGED


def join(formats: tuple[Format, ...]) -> Format:
    """The format of an operation on values of these: what all share, else `RAGGED`.

    `BATCHED` with `RAGGED` is `RAGGED`. `PAGED` values meet no other format: they are loaded first.
    """
    return formats[0] if len(set(formats)) == 1 else RAGGED
