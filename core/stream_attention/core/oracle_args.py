"""Arguments of the oracle: checked, resolved and packed, apart from the engine's own checks."""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import dataclass
from typing import Any

import torch

from stream_attention.core.cache import ContiguousKVCache, PagedKVCache
from stream_attention.core.cache_checks import is_dense, require_memory, tensors_of
from stream_attention.core.errors import Faults, shape_of
from stream_attention.core.ir import is_int
from stream_attention.core.problem import MAX_WINDOW
from stream_attention.core.sink_checks import require_sink

_FLOATING = "must be real and floating"


@dataclass(frozen=True, slots=True, eq=False)
class OracleCall:
    """A checked call: packed queries, the cache, and the options of the contract.

    q: `[total_q, num_qo_heads, head_dim_qk]`. indptr: `batch + 1` offsets. cache: `PagedKVCache`,
    `ContiguousKVCache`, or a pair `(k, v)` of `[batch, kv_len, num_kv_heads, head_dim]`.
    attn_mask: expanded to `[batch, num_qo_heads, qo_len, capacity]`. out_shape: of the result.
    """

    q: torch.Tensor
    indptr: list[int]
    cache: Any
    sm_scale: float
    causal: bool
    window_left: int | None
    window_right: int | None
    logits_soft_cap: float | None
    attn_sink: torch.Tensor | None
    attn_mask: torch.Tensor | None
    out_shape: tuple[int, ...]

    @property
    def num_kv_heads(self) -> int:
        return num_kv_heads(self.cache)

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.num_kv_heads


def num_kv_heads(cache: Any) -> int:
    """KV heads of a cache or a `(k, v)` pair."""
    return cache[0].shape[2] if isinstance(cache, tuple) else cache.num_kv_heads


def token_counts(cache: Any) -> list[list[int]]:
    """`[batch][num_kv_heads]` token counts; syncs."""
    heads = num_kv_heads(cache)
    if isinstance(cache, tuple):
        return [[cache[0].shape[1]] * heads] * cache[0].shape[0]
    lens = cache.sequence_lengths
    if lens is None:
        return [[cache.capacity] * heads] * cache.batch
    rows = lens.tolist()
    return rows if lens.dim() == 2 else [[n] * heads for n in rows]


def prepare(
    q: torch.Tensor,
    cache_or_kv: Any,
    qo_indptr: torch.Tensor | None = None,
    *,
    v: torch.Tensor | None = None,
    sm_scale: float | None = None,
    causal: bool = True,
    window_left: int | None = None,
    window_right: int | None = None,
    logits_soft_cap: float | None = None,
    attn_sink: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    return_lse: bool = False,
) -> OracleCall:
    """Check the arguments of `oracle.attention` and pack them; `ValueError` with every fault."""
    faults = Faults()
    cache = _check_cache(faults, cache_or_kv, v)
    faults.require(isinstance(return_lse, bool), "return_lse", return_lse, "must be a bool", True)
    _check_options(faults, causal, sm_scale, window_left, window_right, logits_soft_cap)
    if cache is None or not _check_query(faults, q, cache, qo_indptr):
        faults.raise_if_any("oracle.attention")
    assert cache is not None
    given = {"q": q, "qo_indptr": qo_indptr, "attn_sink": attn_sink, "attn_mask": attn_mask}
    _require_memory(faults, cache, given)
    faults.raise_if_any("oracle.attention")  # what follows reads them
    batch, capacity, dim_vo = _extent(cache)
    if qo_indptr is not None:
        indptr = qo_indptr.tolist()
    else:
        indptr = [request * (q.shape[1] if q.dim() == 4 else 1) for request in range(batch + 1)]
    _check_contents(faults, cache, indptr, q.flatten(0, -3).shape[0])
    heads, dim = q.shape[-2:]
    _check_sink(faults, attn_sink, q)
    rows = None
    if qo_indptr is None:
        rows = q.shape[1] if q.dim() == 4 else 1
    mask = _expand_mask(faults, attn_mask, (indptr, rows), (batch, heads, capacity), q.device)
    faults.raise_if_any("oracle.attention")
    return OracleCall(
        q=q.reshape(-1, heads, dim),
        indptr=indptr,
        cache=cache,
        sm_scale=dim**-0.5 if sm_scale is None else float(sm_scale),
        causal=causal,
        window_left=None if window_left is None else min(window_left, MAX_WINDOW),
        window_right=None if window_right is None else min(window_right, MAX_WINDOW),
        logits_soft_cap=None if logits_soft_cap is None else float(logits_soft_cap),
        attn_sink=attn_sink,
        attn_mask=mask,
        out_shape=(*q.shape[:-1], dim_vo),
    )


def _extent(cache: Any) -> tuple[int, int, int]:
    """batch, capacity, head_dim_vo."""
    if isinstance(cache, tuple):
        return cache[0].shape[0], cache[0].shape[1], cache[1].shape[-1]
    return cache.batch, cache.capacity, cache.value.shape[-1]


def _check_cache(faults: Faults, cache: Any, v: Any) -> Any:
    """The cache or the `(k, v)` pair, or `None` when it is neither."""
    if isinstance(cache, torch.Tensor):
        cache = (cache, v)
    elif v is not None:
        faults.add("v", type(v).__name__, "goes with k as a tensor, not with a cache", "None")
    if isinstance(cache, (PagedKVCache, ContiguousKVCache)):
        found = cache.faults()
        faults.extend(found)
        return None if found else cache
    pair = isinstance(cache, (tuple, list)) and len(cache) == 2
    pair = pair and all(is_dense(x) and x.dim() == 4 for x in cache)
    if not faults.require(
        pair,
        "cache_or_kv",
        type(cache).__name__,
        "must be a PagedKVCache, a ContiguousKVCache or (k, v) of [batch, kv_len, num_kv_heads, "
        "head_dim]",
    ):
        return None
    key, value = cache
    fits = True
    for name, tensor in (("k", key), ("v", value)):
        fits &= faults.require(
            tensor.is_floating_point(), f"{name}.dtype", tensor.dtype, _FLOATING, "torch.float64"
        )
    fits &= faults.require(
        key.device == value.device, "v.device", str(value.device), "must be k's device", key.device
    )
    fits &= faults.require(
        shape_of(key)[:3] == shape_of(value)[:3],
        "v.shape",
        shape_of(value),
        f"must equal k.shape {shape_of(key)} on all but the last axis",
        (*shape_of(key)[:3], value.shape[3]),
    )
    return (key, value) if fits else None


def _check_options(
    faults: Faults, causal: Any, sm_scale: Any, left: Any, right: Any, cap: Any
) -> None:
    def number(x: Any) -> bool:
        number = isinstance(x, (int, float)) and not isinstance(x, bool)
        return number and abs(x) <= sys.float_info.max  # also False for NaN

    faults.require(isinstance(causal, bool), "causal", causal, "must be a bool", True)
    faults.require(
        sm_scale is None or number(sm_scale),
        "sm_scale",
        sm_scale,
        "must be None (head_dim ** -0.5) or a finite number (0 is legal)",
        "None",
    )
    for name, window in (("window_left", left), ("window_right", right)):
        faults.require(
            window is None or (is_int(window) and window >= 0),
            name,
            window,
            "must be None (off) or an int >= 0, inclusive",
            "None",
        )
    faults.require(
        not (causal is True and is_int(right) and right > 0),
        "window_right",
        right,
        "a causal problem sees nothing to the right of its query",
        "None, or causal=False",
    )
    faults.require(
        cap is None or (number(cap) and cap > 0),
        "logits_soft_cap",
        cap,
        "must be None (off) or a finite number > 0",
        "None",
    )


def _check_query(faults: Faults, q: Any, cache: Any, indptr: Any) -> bool:
    """Rank, heads, head_dim, device of `q` and form of `qo_indptr`."""
    if not faults.require(
        is_dense(q) and q.dim() in (3, 4) and q.is_floating_point(),
        "q",
        shape_of(q) if is_dense(q) else type(q).__name__,
        "must be dense, floating, [total_q, Hq, D], [batch, Hq, D] or [batch, qo_len, Hq, D]",
    ):
        return False
    key = cache[0] if isinstance(cache, tuple) else cache.key
    batch, heads = _extent(cache)[0], num_kv_heads(cache)
    if not faults.require(
        heads >= 1 and key.shape[-1] >= 1,
        "num_kv_heads, head_dim",
        (heads, key.shape[-1]),
        "must be >= 1",
        (1, 1),
    ):
        return False
    ok = faults.require(
        q.shape[-1] == key.shape[-1],
        "q.shape[-1]",
        q.shape[-1],
        "must equal head_dim of the keys",
        key.shape[-1],
    )
    ok &= faults.require(
        q.shape[-2] > 0 and q.shape[-2] % heads == 0,
        "num_qo_heads",
        q.shape[-2],
        f"must be a multiple of num_kv_heads = {heads}",
        max(q.shape[-2] // heads * heads, heads),
    )
    ok &= faults.require(
        q.device == key.device, "q.device", str(q.device), "must be the cache's device", key.device
    )
    ok &= faults.require(
        q.device.type != "meta", "q.device", "meta", "tensors there hold no data", "'cpu'"
    )
    if indptr is None:
        return ok and faults.require(
            q.shape[0] == batch, "q.shape[0]", q.shape[0], "must be the cache's batch", batch
        )
    return ok and faults.require(
        q.dim() == 3
        and is_dense(indptr)
        and indptr.device == q.device
        and indptr.dtype == torch.int32
        and shape_of(indptr) == (batch + 1,),
        "qo_indptr",
        shape_of(indptr) if is_dense(indptr) else type(indptr).__name__,
        f"must be an int32 tensor [{batch + 1}] on q's device, beside q [total_q, Hq, D]",
        (batch + 1,),
    )


def _require_memory(faults: Faults, cache: Any, tensors: dict[str, Any]) -> None:
    """Of all tensors of a call that can be asked."""
    if isinstance(cache, tuple):
        tensors |= {"k": cache[0], "v": cache[1]}
    else:
        tensors |= tensors_of(cache)
    for name, tensor in tensors.items():
        if is_dense(tensor):
            require_memory(faults, name, tensor)


def _check_contents(faults: Faults, cache: Any, indptr: list[int], total: int) -> None:
    """Values: offsets rise from 0 to total, lengths fit, used page ids exist, scales are scales."""
    rises = all(a <= b for a, b in itertools.pairwise(indptr))
    faults.require(
        rises and indptr[0] == 0 and indptr[-1] == total,
        "qo_indptr",
        indptr,
        f"must rise from 0 to total_q = {total}",
    )
    if isinstance(cache, tuple):
        return
    for name in ("key_scale", "value_scale"):
        scale = getattr(cache, name)
        values = scale.reshape(-1).tolist() if isinstance(scale, torch.Tensor) else []
        for index, value in enumerate(values):
            holds = 0 < value < math.inf  # False for NaN
            faults.require(holds, f"{name}[{index}]", value, "must be finite and > 0", 1.0)
    paged = isinstance(cache, PagedKVCache)
    table: Any = cache.page_table.tolist() if paged else None
    for request, counts in enumerate(token_counts(cache)):
        for head, count in enumerate(counts):
            fits = faults.require(
                0 <= count <= cache.capacity,
                f"sequence_lengths[{request}]",
                count,
                f"must be in 0..{cache.capacity} (the capacity), KV head {head}",
                min(max(count, 0), cache.capacity),
            )
            if not (fits and paged):
                continue
            row = table[request][head] if cache.per_head_lists else table[request]
            for column in range(-(-count // cache.page_size)):
                faults.require(
                    0 <= row[column] < cache.num_pages,
                    f"page_table[{request}, {column}]",
                    row[column],
                    f"must be a page id in 0..{cache.num_pages - 1}, KV head {head}",
                )
            if not cache.per_head_lists and len(set(counts)) == 1:
                break


def _check_sink(faults: Faults, sink: Any, q: torch.Tensor) -> None:
    """Form and values: a logit is finite, or -inf for no sink."""
    heads = q.shape[-2]
    kind = f"must be a dense tensor [{heads}] of logits on q's device"
    if not require_sink(faults, sink, kind, (heads,)):
        return
    if faults.require(
        is_dense(sink) and shape_of(sink) == (heads,) and sink.device == q.device,
        "attn_sink",
        shape_of(sink) if is_dense(sink) else type(sink).__name__,
        kind,
        (heads,),
    ) and faults.require(
        sink.is_floating_point(), "attn_sink.dtype", sink.dtype, _FLOATING, "torch.float32"
    ):
        for head, value in enumerate(sink.tolist()):
            rule = "must be a finite logit, or -inf for no sink"
            faults.require(value < math.inf, f"attn_sink[{head}]", value, rule, -math.inf)


def _expand_mask(
    faults: Faults,
    mask: Any,
    queries: tuple[list[int], int | None],
    extent: tuple[int, int, int],
    device: torch.device,
) -> torch.Tensor | None:
    """`[batch, num_qo_heads, qo_len, capacity]`, or `None` without a mask.

    queries: offsets of the requests, and the `qo_len` that q's shape says, requests or none.
    """
    if mask is None:
        return None
    batch, heads, capacity = extent
    indptr, rows = queries
    counts = {b - a for a, b in itertools.pairwise(indptr)} if rows is None else {rows}
    counts = counts or {0}
    if not faults.require(
        len(counts) == 1, "attn_mask", sorted(counts), "needs requests of equal qo_len", "None"
    ):
        return None
    if not faults.require(
        is_dense(mask)
        and mask.device == device
        and (mask.dtype == torch.bool or mask.is_floating_point()),
        "attn_mask",
        mask.dtype if is_dense(mask) else type(mask).__name__,
        "must be a dense bool or floating tensor on q's device",
    ):
        return None
    shape = (batch, heads, counts.pop(), capacity)
    try:
        return mask.expand(shape)
    except RuntimeError:
        faults.add("attn_mask.shape", shape_of(mask), f"must broadcast to {shape}", shape)
        return None
