"""State merges as data: a `StateCase` describes one, `build` makes its tensors with poison around.

`StateTensors.check` compares with the fp64 merge and sees that nothing beside the outputs changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stream_attention.core.dtypes import torch_dtype
from stream_attention.core.ir import evaluable_repr
from stream_attention.core.testing.tolerance import (
    assert_close,
    assert_lse_close,
    unit_roundoff,
)

DTYPES = ("float32", "float16", "bfloat16")
NUM_STATES = (1, 2, 3, 7, 32, 129)
HEAD_DIMS = (1, 8, 63, 64, 80, 96, 128, 192, 256, 512)
ROWS = (0, 1, 7, 132, 65537)
LAYOUTS = ("dense", "padded", "states_inside", "offset")

# What the outputs hold beforehand and what lies beside them: no merge computes it.
_SENTINEL = -12345.0


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class StateCase:
    """One merge; `repr` evaluates back.

    layout: memory form of the parts: `"dense"` `[states, rows, dim]`, `"padded"` rows with 16
        unused elements between, `"states_inside"` `[rows, states, dim]`, `"offset"` off the
        vector's alignment by one element. `out` is padded or shifted where the parts are.
    empty: share of empty states; a tenth of the rows has no other, as long as it is not 0.
    sinks: number of heads with a sink, 0 = no sink. pair: two states at separate addresses.
    lse_spread: standard deviation of the lse values.
    """

    num_states: int = 3
    rows: int = 7
    head_dim: int = 64
    parts_dtype: str = "float32"
    out_dtype: str = "float32"
    layout: str = "dense"
    empty: float = 0.25
    sinks: int = 0
    pair: bool = False
    with_lse: bool = True
    lse_spread: float = 4.0
    seed: int = 0

    __repr__ = evaluable_repr

    def build(self, device: Any = "cpu") -> StateTensors:
        """Tensors of the case. Empty states hold NaN or infinities."""
        generator = torch.Generator(device=device).manual_seed(self.seed + 7919 * self.num_states)
        shape = (self.num_states, self.rows, self.head_dim)
        options = {"generator": generator, "device": device}
        values = torch.randn(shape, **options)
        lse = torch.randn(shape[:2], **options) * self.lse_spread
        draw = torch.rand(shape[:2], **options)
        gone = draw < self.empty
        if self.empty > 0:
            gone |= (torch.arange(self.rows, device=device) % 10 == 3)[None]
        lse[gone] = -math.inf
        poison = torch.tensor([math.nan, math.inf, -math.inf], device=device)
        junk = poison[torch.arange(self.num_states, device=device) % 3]
        values = torch.where(gone[:, :, None], junk[:, None, None], values)
        parts = _place(values.to(torch_dtype(self.parts_dtype)), self.layout)
        lse_parts = lse if self.layout != "states_inside" else lse.T.contiguous().T
        sink = torch.randn(self.sinks, **options) * 2 if self.sinks else None
        outer, out = _output(self, device)
        return StateTensors(
            case=self,
            out_parts=tuple(parts.unbind(0)) if self.pair else parts,
            lse_parts=tuple(lse_parts.unbind(0)) if self.pair else lse_parts,
            out=out,
            outer=outer,
            lse=torch.full((self.rows,), _SENTINEL, device=device) if self.with_lse else None,
            attn_sink=sink,
        )


def _place(values: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in the layout's memory form, NaN in the gaps."""
    if layout == "dense":
        return values
    states, rows, dim = values.shape
    fill = {"dtype": values.dtype, "device": values.device}
    if layout == "padded":
        view = torch.full((states, rows, dim + 16), math.nan, **fill)[:, :, :dim]
    elif layout == "states_inside":
        view = torch.full((rows, states, dim), math.nan, **fill).transpose(0, 1)
    elif layout == "offset":
        flat = torch.full((1 + states * rows * dim,), math.nan, **fill)
        view = flat[1:].view(states, rows, dim)
    else:
        raise ValueError(f"layout={layout!r}: must be one of {LAYOUTS}; use 'dense'")
    view.copy_(values)
    return view


def _output(case: StateCase, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    gap = 16 if case.layout == "padded" else 0
    start = 1 if case.layout == "offset" else 0
    outer = torch.full(
        (start + case.rows * (case.head_dim + gap) + 16,),
        _SENTINEL,
        dtype=torch_dtype(case.out_dtype),
        device=device,
    )
    stride = (case.head_dim + gap, 1)
    return outer, outer.as_strided((case.rows, case.head_dim), stride, start)


@dataclass(frozen=True, slots=True, eq=False)
class StateTensors:
    """Memory of a case. `arguments` is what a merge takes; `outer` holds `out` and its gaps."""

    case: StateCase
    out_parts: Any
    lse_parts: Any
    out: torch.Tensor
    outer: torch.Tensor
    lse: torch.Tensor | None
    attn_sink: torch.Tensor | None

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.out_parts, self.lse_parts, self.out, self.lse, self.attn_sink)

    def check(self) -> None:
        """Raise `AssertionError` unless the outputs are the fp64 merge and the gaps untouched."""
        case = self.case
        parts = torch.stack(self.out_parts) if case.pair else self.out_parts
        logs = torch.stack(self.lse_parts) if case.pair else self.lse_parts
        out, lse, noise = merge_oracle(parts, logs, self.attn_sink)
        assert_close(self.out, out, torch_dtype(case.out_dtype), noise=noise, label=f"{case}: out")
        if self.lse is not None:
            assert_lse_close(self.lse, lse, label=f"{case}: lse")
        gaps = self.outer.clone()
        gaps.as_strided(self.out.shape, self.out.stride(), self.out.storage_offset()).fill_(0)
        start = self.out.storage_offset()
        touched = (gaps[start:] != _SENTINEL) & (gaps[start:] != 0)
        if touched.any() or (gaps[:start] != _SENTINEL).any():
            raise AssertionError(f"{case}: wrote beside out")


def merge_oracle(
    out_parts: torch.Tensor, lse_parts: torch.Tensor, attn_sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp64 `(out, lse, noise)` of `[states, rows, dim]` parts by the definition.

    `noise` is the size of the fp32 roundings of a merge: each product carries those of its weight
    (which grow with the distance of its lse from the largest) and of its place in the sum.
    """
    logs = lse_parts.double()
    alive = logs != -math.inf
    any_alive = alive.any(0)
    sinks = None
    if attn_sink is not None:
        rows = torch.arange(logs.shape[1], device=logs.device)
        sinks = attn_sink.double()[rows % attn_sink.shape[0]]
    # Not `exp(lse_i - total)`: beside -1e20 a total has no room for the log of a sum.
    largest = logs.amax(0) if logs.shape[0] else logs.new_full(logs.shape[1:], -math.inf)
    if sinks is not None:
        largest = torch.maximum(largest, sinks)
    largest = torch.where(any_alive, largest, 0.0)
    total = torch.exp(logs - largest).sum(0)
    if sinks is not None:
        total = total + torch.exp(sinks - largest)
    total = torch.where(any_alive, total, 1.0)
    lse = torch.where(any_alive, largest + torch.log(total), -math.inf)
    out = out_parts.new_zeros(out_parts.shape[1:], dtype=torch.float64)
    noise = torch.zeros_like(out)
    step = 3 * unit_roundoff(torch.float32)
    for state in range(logs.shape[0]):  # one state at a time: fp64 copies of all would not fit
        weight = (torch.exp(logs[state] - largest) / total)[:, None]
        distance = torch.where(alive[state], logs[state] - lse, 0.0)[:, None]
        term = torch.where(alive[state][:, None], weight * out_parts[state].double(), 0.0)
        out += term
        noise += step * term.abs() * (1 + distance.abs())
    return out, lse, noise


def state_cases(
    parts_dtype: str, out_dtype: str, head_dim: int, max_elements: int
) -> Iterator[StateCase]:
    """Every number of states × every number of rows, within `max_elements`, features in turn."""
    index = 0
    for num_states in NUM_STATES:
        for rows in ROWS:
            if num_states * rows * head_dim > max_elements:
                continue
            yield StateCase(
                num_states=num_states,
                rows=rows,
                head_dim=head_dim,
                parts_dtype=parts_dtype,
                out_dtype=out_dtype,
                layout=LAYOUTS[index % 4],
                empty=(0.25, 0.0, 0.9)[index % 3],
                sinks=(0, 1, 5)[(index // 2) % 3],
                with_lse=index % 5 != 4,
                pair=num_states == 2 and index % 2 == 1,
                seed=index,
            )
            index += 1
