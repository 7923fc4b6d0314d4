"""`Field`: what a flow keeps for each page and KV head, beside K and V."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stream_attention.core.dtypes import dtype_name
from stream_attention.core.errors import Faults
from stream_attention.core.ir import evaluable_repr, is_int

RESERVED = ("k", "v")
"""Every pool has these; a flow reads them and never declares them."""

KINDS = ("summary", "state")
SUMMARY_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Extent(int):
    """An int that remembers which symbol it is the value of: `D` (head dim) or `P` (page size).

    Any arithmetic gives a plain int, so `head_dim // 2` is a number and `head_dim` stays `D`.
    """

    symbol: str

    def __new__(cls, value: int, symbol: str) -> Extent:
        made = super().__new__(cls, value)
        made.symbol = symbol
        return made


@dataclass(frozen=True, slots=True, repr=False)
class Field:
    """One array of the pool: `[num_pages, num_kv_heads, rows, cols]`.

    shape: (rows, cols), each >= 1.
    dtype: of the storage; `None` is float32 for a state and the pool's own dtype for a summary.
      All arithmetic is float32 whatever it is.
    kind: "summary" is filled from K and V by `forward_cache`; "state" is carried from one decode
      step to the next by a `Save`. `None`: the trace finds out.
    init: what a page holds of a state when it is (re)allocated.
    Raises `ValueError` with every broken rule.
    """

    shape: tuple[int, int]
    dtype: torch.dtype | None = None
    kind: str | None = None
    init: float = 0.0

    def __post_init__(self) -> None:
        faults = Faults()
        rows_and_cols = isinstance(self.shape, tuple | list) and len(self.shape) == 2
        faults.require(
            rows_and_cols and all(is_int(n) and n >= 1 for n in self.shape),
            "shape",
            self.shape,
            "must be (rows, cols), two ints >= 1",
            (1, 1),
        )
        faults.require(
            self.kind is None or self.kind in KINDS,
            "kind",
            self.kind,
            f"must be one of {', '.join(KINDS)}",
            "state",
        )
        allowed = STATE_DTYPES if self.kind == "state" else SUMMARY_DTYPES
        faults.require(
            self.dtype is None or self.dtype in allowed,
            "dtype",
            self.dtype,
            f"must be one of {', '.join(dtype_name(d) for d in allowed)}",
            "float32",
        )
        number = isinstance(self.init, float | int) and not isinstance(self.init, bool)
        faults.require(
            number and not math.isnan(self.init), "init", self.init, "must be a number", 0.0
        )
        faults.raise_if_any("Field")

    __repr__ = evaluable_repr


def declared(made: Any) -> dict[str, Field]:
    """What `create_cache` returned, as fields: a plain `(rows, cols)` leaves the rest open.

    Raises `ValueError` with every name and every declaration that is not legal.
    """
    if not isinstance(made, Mapping):
        raise ValueError(
            f"create_cache={made!r}: must return a dict of (rows, cols) or Field by name; "
            "use {'c': (1, head_dim)}"
        )
    fields, faults = {}, Faults()
    for name, what in made.items():
        if name in RESERVED:
            faults.add("field", name, "is reserved: every pool has k and v", f"'page_{name}'")
        elif not (isinstance(name, str) and name.isidentifier()):
            faults.add("field", name, "a name must be an identifier", "'c'")
        try:
            fields[name] = what if isinstance(what, Field) else Field(what)
        except ValueError as error:
            faults.add(f"field {name!r}", what, str(error))
    faults.raise_if_any("create_cache")
    return fields
