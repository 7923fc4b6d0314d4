"""What only contents can tell about a call: lengths, page ids, query offsets, scales, sink, mask.

One summary is computed on the device and fetched in one transfer; only a call that is at fault pays
for more, to name the request, KV head and column of each fault, and what of a mask some row sees.
"""

from __future__ import annotations

import torch

from stream_attention.core.cache import KVCache, PagedKVCache
from stream_attention.core.cache_checks import address_of
from stream_attention.core.describe import Described
from stream_attention.core.errors import Faults
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.routes.sdpa_masks import seen

MAX_LISTED = 8
"""Faults of one kind that a message lists; the others are counted."""

_CHUNK_ENTRIES = 1 << 24
"""Page ids looked at in one step, so that masks of the largest tables stay below 64 MiB."""


def validate(described: Described, attn_mask: torch.Tensor | None = None) -> int:
    """Check the contents that a call depends on; returns the most queries of one request.

    attn_mask: of a call over whole sequences, broadcastable to `[batch, num_qo_heads, qo_len,
        kv_len]` on q's device; bool, or floating and added to the scores.

    Syncs once. Checks, all at once:
    lengths in `0 … capacity`; page ids in `0 … num_pages - 1` among the entries in use (those below
    `ceil(kv_len / page_size)`; the others are never looked at); `qo_indptr` from 0 to `total_q`
    without a descent and within `max_qo_len`; fp8 scales finite and > 0; sink logits below +inf;
    values of an additive mask below +inf where a row sees them, since another makes its row NaN.
    Raises one `ValueError` that names request, KV head and column of every fault, at most
    `MAX_LISTED` of a kind. Tensors on the meta device hold nothing to check, nor does a mask that
    stands for another tensor, as in a transform of `torch.func`.
    """
    problem, bound, cache = described.problem, described.bound, described.cache
    if bound.q.device.type == "meta":
        return problem.max_qo_len
    summary = _summary(described)
    biases = None if attn_mask is None else _seen_biases(attn_mask, problem)
    if biases is not None:
        summary.insert(0, _bad_biases(biases).any().long())
    longest = problem.max_qo_len
    flags = _fetched(summary)
    if bound.qo_indptr is not None:
        flags, longest = flags[:-1], flags[-1]
    of_mask = biases is not None and flags.pop(0) != 0
    faults = Faults()
    if any(flags) or longest > problem.max_qo_len:
        _list_length_faults(faults, cache)
        _list_page_faults(faults, cache)
        _list_scale_faults(faults, cache)
        _list_sink_faults(faults, bound.attn_sink)
        _list_offset_faults(faults, bound.qo_indptr, problem.total_qo_len, problem.max_qo_len)
        if not faults:
            raise AssertionError("the summary reported a fault that the listing did not find")
    if biases is not None and of_mask:
        _list_mask_faults(faults, biases, problem)  # none, where no row sees what it holds
    faults.raise_if_any("attention")
    return longest


def _fetched(summary: list[torch.Tensor]) -> list[int]:
    """The scalars, in one transfer; in a way that transforms of `torch.func` follow or refuse."""
    if len(summary) < 2:
        return [int(found.item()) for found in summary]
    return [int(found.item()) for found in torch.stack(summary).cpu().unbind()]


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


def _seen_biases(mask: torch.Tensor, problem: AttentionProblem) -> torch.Tensor | None:
    """`mask` where it adds values that some row may see, and has memory to look at."""
    if mask.dtype == torch.bool or not mask.numel():
        return None
    if not problem.total_qo_len or not problem.kv_capacity:
        return None
    return None if address_of(mask) is None else mask


def _bad_biases(mask: torch.Tensor) -> torch.Tensor:
    return ~(mask < float("inf"))


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


def _list_mask_faults(faults: Faults, mask: torch.Tensor, problem: AttentionProblem) -> None:
    bad = _bad_biases(mask)
    qo_len, kv_len = problem.max_qo_len, problem.kv_capacity
    visible = seen(problem, (0, qo_len), (0, kv_len), kv_len - qo_len, mask.device)
    if visible is not None:
        bad = (bad & visible).sum_to_size(mask.shape) > 0
    where = bad.nonzero()
    for index in where[:MAX_LISTED].tolist():
        faults.add(
            f"attn_mask{index}",
            float(mask[tuple(index)]),
            "must be a finite number, or -inf for not seen",
            "float('-inf')",
        )
    _add_rest(faults, "attn_mask", where.shape[0])


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
