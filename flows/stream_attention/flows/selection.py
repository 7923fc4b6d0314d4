"""The reference selection: exact, the same bits in every run, batch and device, for any n >= 0.

Order of scores: larger first, of equal ones the lower position; NaN below -inf. The selection
itself is in ascending position order, so the last page of a request comes last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stream_attention.flows.window import Budget, Window


@dataclass(frozen=True, slots=True)
class Selection:
    """What rows read. `...` is `[batch, num_kv_heads]`, or any shape of rows.

    positions: [..., width] int32, positions in the row's page table, ascending, then −1.
    counts: [...] int32, how many. num_nan: [...] int32, candidates whose score was NaN.
    """

    positions: Any
    counts: Any
    num_nan: Any

    def pages(self, page_table: Any) -> Any:
        """Page ids [..., width] int32 of the positions, −1 beyond; page_table [..., max_pages]."""
        found = page_table.gather(-1, self.positions.long().clamp(min=0))
        return torch.where(self.positions >= 0, found, -1).to(torch.int32)


def top_k(scores: Any, k: int) -> Any:
    """Positions of the `k` best of `scores` [n], ascending, int64; all where k >= n."""
    if k >= scores.shape[0]:
        return torch.arange(scores.shape[0], device=scores.device)
    nan = scores.isnan()
    # Two stable sorts: by score, NaN as -inf, then the NaNs after everything.
    order = torch.where(nan, -torch.inf, scores).sort(descending=True, stable=True).indices
    order = order[nan[order].to(torch.uint8).sort(stable=True).indices]
    return order[:k].sort().values


def mass_budget(scores: Any, budget: Budget) -> int:
    """Fewest of `scores` [n], best first, whose softmax mass reaches `budget.mass`, as bounded.

    Weights are `exp(mass_scale · (score − largest))` in fp64; a score that equals the largest, also
    an infinite one, weighs 1, and NaN weighs 0. They are added one after the other, larger scores
    first, of equal ones the lower position first; what all add up to is the whole. Without a number
    among the scores the mass is reached by none. Another order of summation, or fp32, may move the
    answer over a sum that lies within 1e-5 of `mass`, and over nothing else.
    """
    assert budget.mass is not None
    numbers = scores[~scores.isnan()].double().cpu().sort(descending=True, stable=True).values
    fewest = 0
    if len(numbers):
        weights = (budget.mass_scale * (numbers - numbers[0])).exp()
        through = torch.where(numbers == numbers[0], 1.0, weights).cumsum(0)
        fewest = int((through < budget.mass * through[-1]).sum()) + 1
    fewest = max(fewest, budget.min_pages)
    return fewest if budget.max_pages is None else min(fewest, budget.max_pages)


def budgets_of(scores: Any, num_pages: Any, budget: Budget, window: Window) -> Any:
    """Budgets of rows, any kind of budget: int64 [...]; arguments as in `select`.

    By mass it syncs: it loops over rows on the host.
    """
    if budget.mass is None:
        return budget.pages(num_pages)
    flat = scores.reshape(-1, scores.shape[-1])
    first, last = (bound.reshape(-1).tolist() for bound in window.bounds(num_pages))
    found = [mass_budget(flat[row, first[row] : last[row]], budget) for row in range(flat.shape[0])]
    return torch.tensor(found, dtype=torch.int64, device=scores.device).reshape(num_pages.shape)


def select(scores: Any, num_pages: Any, budgets: Any, window: Window) -> Selection:
    """`first bos + top-k of the window + last eos`; all pages where n <= k + bos + eos.

    scores: [..., max_pages] floating, read in the window only. num_pages: [...] integers, 0 to
    max_pages. budgets: [...] integers, k of each row. Syncs: it loops over rows on the host.
    """
    rows_shape, max_pages = num_pages.shape, scores.shape[-1]
    flat = scores.reshape(-1, max_pages)
    first, last = (bound.reshape(-1).tolist() for bound in window.bounds(num_pages))
    ns, ks = num_pages.reshape(-1).tolist(), budgets.reshape(-1).tolist()
    chosen, num_nan = [], []
    for row, (n, k) in enumerate(zip(ns, ks, strict=True)):
        inside = flat[row, first[row] : last[row]]
        num_nan.append(inside.isnan().sum().item())
        every = torch.arange(n, device=scores.device)
        if n <= k + window.bos + window.eos:
            chosen.append(every)
        else:
            best = top_k(inside, k) + first[row]
            chosen.append(torch.cat((every[: first[row]], best, every[last[row] :])))
    counts = [len(each) for each in chosen]
    positions = torch.full(
        (len(chosen), max(counts, default=0)), -1, dtype=torch.int32, device=scores.device
    )
    for row, each in enumerate(chosen):
        positions[row, : len(each)] = each.to(torch.int32)
    as_rows = {"dtype": torch.int32, "device": scores.device}
    return Selection(
        positions.reshape(*rows_shape, -1) if chosen else positions.reshape(*rows_shape, 0),
        torch.tensor(counts, **as_rows).reshape(rows_shape),
        torch.tensor(num_nan, **as_rows).reshape(rows_shape),
    )
