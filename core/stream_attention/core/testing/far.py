"""Calls whose tensors are views of memory of more than 2^31 elements, few of which are touched."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from stream_attention.core.cache import PagedKVCache
from stream_attention.core.testing.problems import BuiltCase, Case, build


def _one_request(
    pools: tuple[torch.Tensor, torch.Tensor], pages: list[int], size: int, device: Any
) -> BuiltCase:
    """One query over `pages` of two pools; only those pages are written."""
    rng = torch.Generator().manual_seed(0)
    dim = pools[0].shape[-1]
    for pool in pools:
        for page in pages:
            values = torch.randn(*pool.shape[1:], generator=rng)
            pool[page] = values.to(pool.dtype).to(device)
    case = Case(name="wide offsets", num_kv_heads=1, head_dim_qk=dim, page_size=size)
    cache = PagedKVCache(
        key=pools[0],
        value=pools[1],
        page_table=torch.tensor([pages], dtype=torch.int32, device=device),
        sequence_lengths=torch.tensor([len(pages) * size], dtype=torch.int32, device=device),
    )
    q = torch.randn(1, case.num_qo_heads, dim, generator=rng).to(pools[0].dtype).to(device)
    options = {"sm_scale": None, "causal": True, "window_left": None, "window_right": None}
    options |= {"logits_soft_cap": None, "attn_sink": None}
    return BuiltCase(case, q, cache, None, options)


def _far_pages(device: Any) -> BuiltCase:
    count = (1 << 20) + 9
    pools = tuple(torch.zeros(count, 1, 1, 8, dtype=torch.bfloat16, device=device) for _ in "kv")
    return _one_request((pools[0], pools[1]), [count - 1, 3, 1 << 20, count - 2], 1, device)


def _far_elements(device: Any) -> BuiltCase:
    """Pages 2^27 elements apart: the last one starts beyond element 2^31. Only they are touched."""
    stride, count, dim = 1 << 27, 18, 64
    storage = torch.empty((count - 1) * stride + 8 * dim, dtype=torch.bfloat16, device=device)
    pool = storage.as_strided((count, 4, 1, dim), (stride, dim, dim, 1))
    value = storage.as_strided((count, 4, 1, dim), (stride, dim, dim, 1), 4 * dim)
    return _one_request((pool, value), [17, 0, 16, 15], 4, device)


def _far_slots(device: Any) -> BuiltCase:
    """One long page of a pool with an axis of layers: its last tokens lie beyond element 2^31."""
    size, dim = 1 << 15, 64
    stride = (2**31 // (size * dim) + 2) * dim
    storage = torch.empty(size * stride, dtype=torch.bfloat16, device=device)
    pools = (storage.as_strided((1, size, 1, dim), (size * stride, stride, dim, 1), n * dim)
             for n in range(2))  # fmt: skip
    return _one_request(tuple(pools), [0], size, device)


def _far_heads(device: Any) -> BuiltCase:
    """Queries that lie head by head, the last head beyond element 2^31."""
    built = build(Case(qo_lens=(8,), kv_lens=(64,), num_kv_heads=1), 0, device)
    rows, heads, dim = built.q.shape
    stride = (2**31 // (heads - 1) + 4096) // dim * dim
    storage = torch.empty(stride * (heads - 1) + rows * dim, dtype=built.q.dtype, device=device)
    q = storage.as_strided((rows, heads, dim), (dim, stride, 1))
    q.copy_(built.q)
    return dataclasses.replace(built, q=q)


def _far_lists(device: Any) -> BuiltCase:
    """Page lists of KV heads, and their lengths, the last ones beyond element 2^31."""
    built = build(Case(kv_lens=((50, 33, 40),), num_qo_heads=3, num_kv_heads=3), 0, device)
    table, stride = built.cache.page_table, (1 << 30) + 64
    storage = torch.empty(2 * stride + 64, dtype=torch.int32, device=device)
    far = storage.as_strided(tuple(table.shape), (table.shape[-1], stride, 1))
    far.copy_(table)
    lens = storage.as_strided((1, 3), (1, stride), 32)
    lens.copy_(built.cache.sequence_lengths)
    cache = dataclasses.replace(built.cache, page_table=far, sequence_lengths=lens)
    return dataclasses.replace(built, cache=cache)


FAR = {
    "pages": _far_pages,
    "elements": _far_elements,
    "slots": _far_slots,
    "heads": _far_heads,
    "lists": _far_lists,
}
"""Calls by name, made on a device, in which 32 bits do not hold an offset."""

__all__ = ["FAR"]
