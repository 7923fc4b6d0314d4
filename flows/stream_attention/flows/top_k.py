"""The device top-k: pages that each KV head reads, from scores, without a host in the loop.

A plan is built once and run every step; lengths, tables and budgets change in place under it, so
one captured graph serves every step. Answers equal those of `selection.select` bit for bit.

    plan = TopK(max_pages=4096, num_rows=batch * num_kv_heads, page_size=16, budget=Budget(64))
    pages = torch.zeros(batch, num_kv_heads, plan.width, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(batch, num_kv_heads, dtype=torch.int32, device="cuda")
    plan.run(scores, page_table, sequence_lengths, pages, lengths)
    # For a cache of this page table and these lengths, attention reads the selected pages.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stream_attention.core.errors import Faults, shape_of
from stream_attention.core.ir import Rule, check_rules, evaluable_repr, is_int
from stream_attention.flows.dependent import is_dependent
from stream_attention.flows.window import Budget, Window

# Positions are int32 on the device, and a tile past the last page must not overflow.
MOST_PAGES = (1 << 31) - (1 << 22)
MOST_CHUNKS = 1024  # of a row; more pages make longer chunks
LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class TopKConfig:
    """Tiles of a plan; answers do not depend on them, save by mass where sums decide within 1e-5.

    single_pages: rows of up to so many pages take one launch, a program a row. keys_per_thread: of
    such a program. tile, chunk: pages of a longer row that are read at a time, and that a program
    takes. sample: keys that bracket the k-th. candidates: keys that are searched in registers.
    """

    single_pages: int = 8192
    keys_per_thread: int = 16
    tile: int = 4096
    chunk: int = 4096
    sample: int = 4096
    candidates: int = 8192

    def __post_init__(self) -> None:
        check_rules(self, _CONFIG_RULES)

    __repr__ = evaluable_repr


def _power_of_two(name: str, low: int, high: int) -> Rule:
    def holds(config: Any) -> bool:
        value = getattr(config, name)
        return is_int(value) and low <= value <= high and value & (value - 1) == 0

    return Rule(name, f"must be a power of two in [{low}, {high}]", holds, lambda _: low)


_CONFIG_RULES = (
    _power_of_two("single_pages", 16, 16_384),  # counts of a tile are 15 bits, two in an int32
    _power_of_two("keys_per_thread", 1, 64),
    _power_of_two("tile", 16, 8192),
    _power_of_two("chunk", 16, 1 << 30),
    _power_of_two("sample", 16, 16_384),
    _power_of_two("candidates", 16, 16_384),
    Rule("chunk", "must be >= tile", lambda c: c.chunk >= c.tile, lambda c: c.tile),
)


def _power_at_least(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def _budget_args(budget: Budget, max_pages: int, max_budget: int | None) -> dict[str, Any]:
    """KIND of the kernels, and the numbers of a budget: those of its kind, the others neutral."""
    share = budget.fraction
    kind = 3 if budget.mass is not None else 2 if budget.per_row is not None else 0
    if kind == 0 and share.numerator:
        kind = 1
    most = max_pages if max_budget is None else min(max_budget, max_pages)
    if kind == 3 and budget.max_pages is not None:
        most = min(most, budget.max_pages)
    return {
        "KIND": kind,
        "topk": min(budget.topk, max_pages),
        "numerator": share.numerator,
        "denominator": share.denominator,
        "max_budget": most,
        "least": min(budget.min_pages, max_pages),
        "mass": float(budget.mass or 0.0),
        "scale_log2": float(budget.mass_scale * LOG2E) if kind == 3 else 0.0,
    }


class TopK:
    """A plan: `first bos pages + top-k of the window + last eos pages`, for rows on a device.

    max_pages: most pages of a row, 1 to `MOST_PAGES`. num_rows: most batch · num_kv_heads of a run.
    page_size: tokens. window, budget: their defaults; a budget's `per_row` tensor is read on the
    device at every run, so it may change in place. max_budget: what budgets `per_row` are cut to,
    pages; `None`: no bound, and outputs are max_pages wide. device: of all tensors. score, save:
    device functions in place of those in `top_k_kernels`, which says what they must do.

    width: pages that outputs must hold at least. num_launches: kernels a run. workspace_bytes:
    of scratch, which is allocated here; a run allocates nothing and does not sync. Runs of one plan
    share it, so they must be ordered (one stream). Errors: ValueError with every fault.

    By mass, k of a row may differ from the reference's only over cumulative masses within 1e-5 of
    `mass`. Rows above `config.single_pages` want a `Budget.max_pages`, at most about half of
    `config.candidates`: without it they are searched in memory, which takes milliseconds.
    """

    def __init__(
        self,
        max_pages: int,
        num_rows: int,
        page_size: int,
        window: Window | None = None,
        budget: Budget | None = None,
        device: Any = "cuda",
        *,
        max_budget: int | None = None,
        score: Any = None,
        save: Any = None,
        config: TopKConfig | None = None,
    ) -> None:
        self.window, self.budget = window or Window(), budget or Budget()
        self.config = config or TopKConfig()
        self.device = torch.device(device)
        self._check(max_pages, num_rows, page_size, max_budget)
        from stream_attention.flows import top_k_kernels, top_k_long_kernels

        self._kernels, self._long_kernels = top_k_kernels, top_k_long_kernels
        self.max_pages, self.num_rows, self.page_size = max_pages, num_rows, page_size
        self._capacity = min(max_pages * page_size, (1 << 31) - 1)
        self._budget_args = _budget_args(self.budget, max_pages, max_budget)
        self._kind = self._budget_args.pop("KIND")
        self._bos, self._eos = (min(x, max_pages) for x in (self.window.bos, self.window.eos))
        most = self._most_pages()
        self.width = min(max_pages, self._bos + self._eos + most)
        vec = 4 if max_pages % 4 == 0 else 1  # of 4: a row's memory ends with a whole vector
        dependent = is_dependent(self.device)
        self._meta = {"PAGE": page_size, "KIND": self._kind, "VEC": vec}
        self._meta |= {"DEPENDENT": dependent, "launch_pdl": dependent}
        self._score = score or top_k_kernels.load_score
        self._save, self._has_save = save or top_k_kernels.save_nothing, save is not None
        self.num_launches = 1 if max_pages <= self.config.single_pages else 2
        self._scratch: dict[str, Any] = {}
        if self.num_launches == 1:
            self._plan_single(most)
        else:
            self._plan_long()
        self.workspace_bytes = sum(4 * each.numel() for each in self._scratch.values())

    def _check(self, max_pages: Any, num_rows: Any, page_size: Any, max_budget: Any) -> None:
        faults = Faults()
        fits = is_int(max_pages) and 1 <= max_pages <= MOST_PAGES
        faults.require(fits, "max_pages", max_pages, f"must be an int in [1, {MOST_PAGES}]", 1)
        for name, value in (("num_rows", num_rows), ("page_size", page_size)):
            faults.require(is_int(value) and value >= 1, name, value, "must be an int >= 1", 1)
        rule = "must be None or an int >= 0 with a budget per_row"
        allowed = max_budget is None or (
            is_int(max_budget) and max_budget >= 0 and self.budget.per_row is not None
        )
        faults.require(allowed, "max_budget", max_budget, rule)
        interpreting = os.environ.get("TRITON_INTERPRET", "0") == "1"
        faults.require(
            self.device.type == "cuda" or interpreting,
            "device",
            str(self.device),
            "needs a CUDA GPU (or TRITON_INTERPRET=1, to check it)",
            "selection.select",
        )
        per_row = self.budget.per_row
        if per_row is not None:
            rule = f"must be on the plan's device {self.device}"
            place = per_row.device.type == self.device.type
            faults.require(place, "budget.per_row.device", str(per_row.device), rule)
        faults.raise_if_any("TopK")

    def _most_pages(self) -> int:
        """The largest budget that a row can have, pages."""
        args = self._budget_args
        if self._kind >= 2:
            return min(self.max_pages, max(args["max_budget"], 0))
        share = self.max_pages * args["numerator"] // args["denominator"]
        return min(self.max_pages, max(args["topk"], share))

    def _plan_single(self, most: int) -> None:
        block = max(32, _power_at_least(self.max_pages))
        # A group holds 4 keys or more, of fewer the smallest maximum says little; or 16, where k is
        # likely to be far below its bound.
        groups = max(1, min(_power_at_least(most), block // (4 if self._kind < 2 else 16)))
        # A block's reduction costs more the more warps it has, and its counts less. On an H200 it
        # is to be compared; this follows the number of instructions.
        warps = min(16, max(1, block // (32 * self.config.keys_per_thread)))
        self._meta |= {"BLOCK": block, "GROUPS": groups, "num_warps": warps}

    def _plan_long(self) -> None:
        config = self.config
        chunk = max(config.chunk, _power_at_least(-(-self.max_pages // MOST_CHUNKS)))
        chunks = -(-self.max_pages // chunk)
        padded = _power_at_least(chunks)
        self._num_chunks = chunks
        self._meta |= {"CHUNK": chunk, "TILE": config.tile, "CANDIDATES": config.candidates}
        per_warp = 32 * config.keys_per_thread
        self._bracket_meta = {
            "SAMPLE": config.sample,
            "SAMPLE_LOG2": config.sample.bit_length() - 1,
            "num_warps": min(16, max(1, max(config.sample, config.tile) // per_warp)),
        }
        self._place_meta = {
            "CHUNKS": padded,
            "CHUNKS_LOG2": padded.bit_length() - 1,
            "HAS_SAVE": self._has_save,
            "num_warps": min(16, max(1, max(config.candidates, config.tile) // per_warp)),
        }
        ints = {"dtype": torch.int32, "device": self.device}
        stats = self.num_rows * self._long_kernels.NUM_STATS * chunks
        self._scratch = {
            "keys_ptr": torch.zeros(self.num_rows * chunks * chunk, **ints),
            "between_ptr": torch.zeros(self.num_rows * chunks * chunk, **ints),
            "stats_ptr": torch.zeros(stats, **ints),
            "bracket_ptr": torch.zeros(self.num_rows * 2, **ints),
        }

    def run(
        self,
        scores: Any,
        page_table: Any,
        sequence_lengths: Any,
        out_page_table: Any,
        out_lengths: Any,
        out_nan_counts: Any = None,
        aux: Any = None,
    ) -> None:
        """Enqueue the selection on the current stream; `num_launches` kernels, no sync.

        scores: [batch, num_kv_heads, max_pages] fp32, last axis contiguous; only those of the
        window have an effect. page_table: [batch, max_pages] or [batch, num_kv_heads, max_pages]
        int32 page ids, last axis contiguous; entries past a row's last page have no effect.
        sequence_lengths: [batch] int32 tokens; 0 or less is an empty row, more than max_pages ·
        page_size is cut to that.

        Written, contiguous: out_page_table [batch, num_kv_heads, >= width] int32, ids of the
        selected pages in ascending position, then 0. out_lengths [batch, num_kv_heads] int32
        tokens of the selection: every page full, save that the request's last page holds the rest.
        out_nan_counts [batch, num_kv_heads] int32, candidates whose score is NaN. aux: a tensor for
        the plan's device functions. ValueError where a shape, dtype, stride or device is not so.
        """
        for launch in self.bind(
            scores,
            page_table,
            sequence_lengths,
            out_page_table,
            out_lengths,
            out_nan_counts,
            aux,
        ):
            launch()

    def bind(
        self,
        scores: Any,
        page_table: Any,
        sequence_lengths: Any,
        out_page_table: Any,
        out_lengths: Any,
        out_nan_counts: Any = None,
        aux: Any = None,
    ) -> tuple[Callable[[], Any], ...]:
        """The launches of `run` on these tensors, checked now: for tensors that change in place."""
        outputs = (out_page_table, out_lengths, out_nan_counts)
        self._check_run(scores, page_table, sequence_lengths, outputs)
        if not scores.shape[0] * scores.shape[1]:
            return ()
        modules = (self._kernels, self._long_kernels)
        return tuple(
            functools.partial(
                next(getattr(module, name) for module in modules if hasattr(module, name))[grid],
                **arguments,
                **meta,
            )
            for name, grid, arguments, meta in self._launches(
                scores, page_table, sequence_lengths, outputs, aux
            )
        )

    def _launches(
        self, scores: Any, page_table: Any, lengths: Any, outputs: Any, aux: Any
    ) -> list[tuple[str, tuple[int, ...], dict[str, Any], dict[str, Any]]]:
        """(kernel, grid, arguments, constants) of each launch of a run."""
        out, out_lengths, nan = outputs
        per_row = self.budget.per_row
        both = {
            "score_ptr": scores,
            "aux_ptr": aux,
            "lengths_ptr": lengths,
            "budgets_ptr": per_row,
            "score_stride_b": scores.stride(0),
            "score_stride_h": scores.stride(1),
            "lengths_stride": lengths.stride(0),
            "budgets_stride_b": 0 if per_row is None else per_row.stride(0),
            "budgets_stride_h": per_row.stride(1) if getattr(per_row, "ndim", 0) == 2 else 0,
            "capacity": self._capacity,
            "bos": self._bos,
            "eos": self._eos,
            **self._scratch,
            **self._budget_args,
        }
        last = {
            **both,
            "table_ptr": page_table,
            "table_stride_b": page_table.stride(0),
            "table_stride_h": page_table.stride(1) if page_table.ndim == 3 else 0,
            "out_ptr": out,
            "out_lengths_ptr": out_lengths,
            "nan_ptr": nan,
            "width": out.shape[-1],
        }
        shared = {**self._meta, "SCORE": self._score}
        with_save = {**shared, "SAVE": self._save}
        grid = tuple(scores.shape[:2])
        if self.num_launches == 1:
            return [("select_rows", grid, last, with_save)]
        first = {name: both[name] for name in both if name not in ("least", "mass")}
        grid = (*grid, self._num_chunks)
        return [
            ("bracket_chunks", grid, first, {**shared, **self._bracket_meta}),
            ("place_chunks", grid, last, {**with_save, **self._place_meta}),
        ]

    def _check_run(self, scores: Any, page_table: Any, lengths: Any, outputs: Any) -> None:
        faults = Faults()
        batch, heads = (*scores.shape, 0, 0)[:2]
        pages, rows = self.max_pages, (batch, heads)
        out, out_lengths, nan = outputs
        width = max(self.width, out.shape[-1] if out.ndim else 0)
        expected: list[tuple[str, Any, list[Any], Any]] = [
            ("scores", scores, [(batch, heads, pages)], torch.float32),
            ("page_table", page_table, [(batch, pages), (*rows, pages)], torch.int32),
            ("sequence_lengths", lengths, [(batch,)], torch.int32),
            ("out_page_table", out, [(*rows, width)], torch.int32),
            ("out_lengths", out_lengths, [rows], torch.int32),
        ]
        if nan is not None:
            expected.append(("out_nan_counts", nan, [rows], torch.int32))
        if self.budget.per_row is not None:
            per_row = self.budget.per_row
            expected.append(("budget.per_row", per_row, [(batch,), rows], per_row.dtype))
        for name, tensor, shapes, dtype in expected:
            shape = shape_of(tensor)
            rule = f"must be {' or '.join(map(str, shapes))}"
            fits = faults.require(shape in shapes, f"{name}.shape", shape, rule)
            faults.require(tensor.dtype == dtype, f"{name}.dtype", tensor.dtype, f"must be {dtype}")
            rule = f"must be {self.device}"
            place = tensor.device.type == self.device.type
            faults.require(place, f"{name}.device", str(tensor.device), rule)
            if fits and name.startswith("out_"):
                whole = tensor.is_contiguous()
                faults.require(whole, f"{name}.stride()", tensor.stride(), "must be contiguous")
            elif fits and name in ("scores", "page_table"):
                dense = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
                faults.require(dense, f"{name}.stride(-1)", tensor.stride(-1), "must be 1", 1)
        most = self.num_rows
        rule = f"batch · num_kv_heads must be <= num_rows={most}"
        faults.require(batch * heads <= most, "scores.shape", shape_of(scores), rule)
        faults.raise_if_any("TopK.run")
