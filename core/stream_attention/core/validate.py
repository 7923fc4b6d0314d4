"""What only contents can tell about a call: lengths, page ids, query offsets, scales, sink.

One summary is computed on the device and fetched in one transfer; only a call that is at fault pays
for more, to name the request, KV head and column of each fault.
"""

from __future__ import annotations

import torch

from stream_attention.core.cache import KVCache, PagedKVCache
from stream_attention.core.describe import Described
from stream_attention.core.errors import Faults

MAX_LISTED = 8
"""Faults of one kind that a message lists; the others are counted."""

_CHUNK_ENTRIES = 1 << 24
"""Page ids looked at in one step, so that masks of the largest tables stay below 64 MiB."""


def validate(described: Described) -> int:
    """Check the contents that a call depends on; returns the most queries of one request.

    Syncs once. Checks, all at once:
    lengths in `0 … capacity`; page ids in `0 … num_pages - 1` among the entries in use (those below
    `ceil(kv_len / page_size)`; the others are never looked at); `qo_indptr` from 0 to `total_q`
    without a descent and within `max_qo_len`; fp8 scales finite and > 0; sink logits below +inf.
    Raises one `ValueError` that names request, KV head and column of every fault, at most
    `MAX_LISTED` of a kind. Tensors on the meta device hold nothing to check.
    """
    problem, bound, cache = described.problem, described.bound, described.cache
    if bound.q.device.type == "meta":
        return problem.max_qo_len
    summary = _summary(described)
    longest = problem.max_qo_len
    flags: list[int] = []
    if summary:
        flags = torch.stack(summary).tolist() if len(summary) > 1 else [summary[0].item()]
    if bound.qo_indptr is not None:
        flags, longest = flags[:-1], flags[-1]
    if any(flags) or longest > problem.max_qo_len:
        faults = Faults()
        _list_length_faults(faults, cache)
        _list_page_faults(faults, cache)
        _list_scale_faults(faults, cache)
        _list_sink_faults(faults, bound.attn_sink)
        _list_offset_faults(faults, bound.qo_indptr, problem.total_qo_len, problem.max_qo_len)
        faults.raise_if_any("attention")
        raise AssertionError("the summary reported a fault that the listing did not find")
    return longest


def _summary(described: Described) -> list[torch.Tensor]:
    """One int64 scalar a check, 0 when it holds; the longest request's queries come last."""
    cache, bound = described.cache, described.bound
    found = []
    lens = cache.sequence_lengths
    if lens is not None and lens.numel():
        found.append(_bad_lengths(lens, cache.capacity).any().long())
        if isinstance(cache, PagedKVCache):
            found.extend(bad.any().long() for _, bad in _bad_pages(cache))
    for scale in (cache.key_scale, cache.value_scale):
        if isinstance(scale, torch.Tensor):
            found.append(_bad_scales(scale).any().long())
    if bound.attn_sink is not None:
        found.append(_bad_sinks(bound.attn_sink).any().long())
    if bound.qo_indptr is not None:
        offsets = bound.qo_indptr.long()
        counts = offsets.diff()
        ends = (offsets[0] != 0) | (offsets[-1] != described.problem.total_qo_len)
        found.append(((counts < 0).any() | ends).long())
        found.append(counts.max() if counts.numel() else counts.new_zeros(()))
    return found


def _bad_lengths(lens: torch.Tensor, capacity: int) -> torch.Tensor:
    return (lens < 0) | (lens.long() > capacity)


def _bad_pages(cache: PagedKVCache):
    """Yields `(first request, mask)` of entries in use that are no page, some requests a time."""
    table, lens = cache.page_table, cache.sequence_lengths
    batch = table.shape[0]
    if table.numel() == 0:
        return
    columns = torch.arange(cache.max_pages, device=table.device)
    rows = max(1, _CHUNK_ENTRIES * batch // table.numel())
    for first in range(0, batch, rows):
        ids, tokens = table[first : first + rows], lens[first : first + rows].long()
        used = (tokens + (cache.page_size - 1)).div_(cache.page_size, rounding_mode="floor")
        if ids.dim() == 3 and used.dim() == 1:
            used = used.unsqueeze(1)
        bad = (ids < 0) | (ids >= cache.num_pages)
        yield first, bad & (columns < used.unsqueeze(-1))


def _bad_scales(scale: torch.Tensor) -> torch.Tensor:
    return ~((scale > 0) & (scale < float("inf")))


def _bad_sinks(sink: torch.Tensor) -> torch.Tensor:
    return ~(sink < float("inf"))


def _list_length_faults(faults: Faults, cache: KVCache) -> None:
    lens = cache.sequence_lengths
    if lens is None or not lens.numel():
        return
    where = _bad_lengths(lens, cache.capacity).nonzero()
    origin = "rows"
    if isinstance(cache, PagedKVCache):
        origin = f"max_pages * page_size = {cache.max_pages} * {cache.page_size}"
    for index in where[:MAX_LISTED].tolist():
        value = int(lens[tuple(index)])
        faults.add(
            f"sequence_lengths{index}",
            value,
            f"{_place(index)} must hold 0 … {cache.capacity} tokens ({origin} of the cache)",
            min(max(value, 0), cache.capacity),
        )
    _add_rest(faults, "sequence_lengths", where.shape[0])


def _list_page_faults(faults: Faults, cache: KVCache) -> None:
    if not isinstance(cache, PagedKVCache) or not cache.page_table.numel():
        return
    count = 0
    for first, bad in _bad_pages(cache):
        where = bad.nonzero()
        for row, *rest in where[: max(0, MAX_LISTED - count)].tolist():
            index = [first + row, *rest]
            value = int(cache.page_table[tuple(index)])
            nearest = min(max(value, 0), cache.num_pages - 1)
            faults.add(
                f"page_table{index}",
                value,
                f"{_place(index[:-1])}, column {index[-1]}: a page in use must be an id in "
                f"0 … {cache.num_pages - 1}",
                nearest if cache.num_pages else "a pool with at least one page",
            )
        count += where.shape[0]
    _add_rest(faults, "page_table", count)


def _list_scale_faults(faults: Faults, cache: KVCache) -> None:
    for name in ("key_scale", "value_scale"):
        scale = getattr(cache, name)
        if not isinstance(scale, torch.Tensor):
            continue
        flat = scale.reshape(-1)
        where = _bad_scales(flat).nonzero().flatten()
        for index in where[:MAX_LISTED].tolist():
            faults.add(f"{name}[{index}]", float(flat[index]), "must be finite and > 0", 1.0)
        _add_rest(faults, name, where.shape[0])


def _list_sink_faults(faults: Faults, sink: torch.Tensor | None) -> None:
    if sink is None:
        return
    where = _bad_sinks(sink).nonzero().flatten()
    for index in where[:MAX_LISTED].tolist():
        faults.add(
            f"attn_sink[{index}]",
            float(sink[index]),
            f"query head {index}: must be a finite logit, or -inf for no sink",
            "float('-inf')",
        )
    _add_rest(faults, "attn_sink", where.shape[0])


def _list_offset_faults(
    faults: Faults, qo_indptr: torch.Tensor | None, total: int, longest: int
) -> None:
    if qo_indptr is None:
        return
    offsets = qo_indptr.tolist()
    faults.require(offsets[0] == 0, "qo_indptr[0]", offsets[0], "must be 0", 0)
    last = len(offsets) - 1
    faults.require(
        offsets[-1] == total,
        f"qo_indptr[{last}]",
        offsets[-1],
        "must be total_q, the number of rows of q",
        total,
    )
    count = 0
    for request, (start, stop) in enumerate(zip(offsets, offsets[1:], strict=False)):
        if start <= stop <= start + longest:
            continue
        count += 1
        if count > MAX_LISTED:
            continue
        low, high = start, start + longest
        faults.add(
            f"qo_indptr[{request + 1}]",
            stop,
            f"request {request} starts at {start} and must end in {low} … {high} "
            f"(offsets never descend; max_qo_len = {longest})",
            min(max(stop, low), high),
        )
    _add_rest(faults, "qo_indptr", count)


def _place(index: list[int]) -> str:
    request = f"request {index[0]}"
    return request if len(index) == 1 else f"{request}, KV head {index[1]}"


def _add_rest(faults: Faults, name: str, count: int) -> None:
    if count > MAX_LISTED:
        faults.add(name, f"{count} faults", f"the first {MAX_LISTED} are listed")
