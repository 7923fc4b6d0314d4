"""`check_neighbours`: a batch-invariant request gives the bits that it gives alone.

Alone, its page table (or buffer) is just wide enough for its own tokens; in the batch it is as wide
as the longest request asks, and more. Both sides read the same tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from stream_attention.core.cache import PagedKVCache
from stream_attention.core.registry import AttentionRecord
from stream_attention.core.testing.checks import launch
from stream_attention.core.testing.contract import only
from stream_attention.core.testing.problems import BuiltCase, Case, build

FORMS: dict[str, dict[str, Any]] = {
    "decode": {"qo_lens": (1, 1), "call": "batch"},
    "verify": {"qo_lens": (4, 4), "call": "block"},
    "append": {"qo_lens": (40, 40), "call": "block"},
    "packed": {"qo_lens": (3, 50), "call": "ragged"},
    "packed_equal": {"qo_lens": (8, 8), "call": "ragged"},
    "packed_long": {"qo_lens": (40, 1), "call": "ragged"},
}
"""Calls of two requests, by name."""

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sink": {"sink": 1.0},
    "window": {"window_left": 99},
    "cap_window_sink": {"logits_soft_cap": 20.0, "window_left": 300, "sink": "random"},
    "not_causal": {"causal": False, "window_right": 5},
    "contiguous": {"cache_kind": "contiguous"},
    "contiguous_hnd": {"cache_kind": "contiguous", "layout": "HND", "sink": 1.0},
    "hnd_odd_pages": {"layout": "HND", "page_size": 5, "num_qo_heads": 6},
    "fp8": {"kv_dtype": "float8_e4m3fn", "kv_scales": "head"},
    "one_kv_head": {"num_kv_heads": 1, "num_qo_heads": 16, "sink": 1.0},
}
"""Options that change what a route does, by name."""


def trimmed(built: BuiltCase, request: int) -> BuiltCase:
    """One request alone, over a table or a buffer that holds its own tokens and no more."""
    alone = only(built, request)
    cache = alone.cache
    longest = max(alone.case.lens_of(0))
    if isinstance(cache, PagedKVCache):
        pages = max(1, -(-longest // cache.page_size))
        changed: dict[str, Any] = {"page_table": cache.page_table[..., :pages].contiguous()}
    else:
        axis = 1 if cache.layout == "NHD" else 2
        keep = max(1, longest)
        changed = {n: getattr(cache, n).narrow(axis, 0, keep).clone() for n in ("key", "value")}
    return dataclasses.replace(alone, cache=dataclasses.replace(cache, **changed))


def bits_of(
    record: AttentionRecord, built: BuiltCase, knows_longest: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of one batch-invariant run, as integers of their own size.

    knows_longest: the most queries of a packed request are given, as a plan finds them.
    """
    longest = max(built.case.qo_lens) if knows_longest else None
    step, described = launch(record, built, batch_invariant=True, max_qo_len=longest)
    step.run()
    out, lse = described.bound.out, described.bound.lse
    return out.view({2: torch.int16, 4: torch.int32}[out.element_size()]), lse.view(torch.int32)


def check_neighbours(
    record: AttentionRecord, case: Case, device: Any = "cpu", requests: Sequence[int] | None = None
) -> None:
    """Raise `AssertionError` where a request of `case` alone has other bits than in the batch.

    requests: those to look at, `None` = all.
    """
    built = build(case, 0, device)
    ends = list(itertools.accumulate(case.qo_lens, initial=0))
    for knows in (False, True) if built.qo_indptr is not None else (False,):
        together = bits_of(record, built, knows)
        for request in range(case.batch) if requests is None else requests:
            alone = trimmed(built, request)
            own, wide = alone.cache.capacity, built.cache.capacity
            rows = slice(ends[request], ends[request + 1])
            bits = bits_of(record, alone, knows)
            for name, mine, theirs in zip(("out", "lse"), bits, together, strict=True):
                count = int((mine != theirs[rows]).sum())
                if count:
                    raise AssertionError(
                        f"{case!r}: request {request}: {count} of {mine.numel()} values of {name} "
                        f"differ between capacities of {own} and of {wide} tokens"
                    )
