"""KV caches as the caller holds them, and the one view of them that every route reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stream_attention.core.cache_checks import (
    check_index,
    check_lengths,
    check_scales,
    check_storage,
    metadata_of,
)
from stream_attention.core.errors import Faults


@dataclass(frozen=True, slots=True, eq=False)
class KVView:
    """A cache as routes read it: pages, a page map with strides, lengths. No copies.

    key: `[num_pages, page_size, num_kv_heads, head_dim_qk]` whatever the layout (an HND pool is
        transposed as a view); the last axis has stride 1, every other stride is free.
    value: likewise with `head_dim_vo`.
    page_table: `[batch, num_kv_heads, max_pages]` int32; stride 0 over heads when shared. `None`
        for a contiguous cache: page `b` is request `b`.
    kv_lens: `[batch, num_kv_heads]` int32; stride 0 over heads when shared. `None`: every request
        holds `capacity` tokens.
    key_scale, value_scale: `[num_kv_heads]` fp32 (stride 0 when one scale serves all) or `None`;
        the stored value times the scale is the value meant.
    layout: the pool's own layout, for kernels that care which axis is outermost.
    """

    key: torch.Tensor
    value: torch.Tensor
    page_table: torch.Tensor | None
    kv_lens: torch.Tensor | None
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None
    batch: int
    capacity: int
    page_size: int
    max_pages: int
    layout: str

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[2]

    @property
    def head_dim_qk(self) -> int:
        return self.key.shape[3]

    @property
    def head_dim_vo(self) -> int:
        return self.value.shape[3]


class _Checked:
    """Remembers the metadata that were checked: those of a tensor may change in place."""

    __slots__ = ("_metadata",)

    def faults(self) -> Faults:
        """What is wrong with the tensors as they are now; looks closely at new metadata only."""
        faults = Faults()
        known = getattr(self, "_metadata", None)  # absent in a copy
        if known is not None and metadata_of(self) == known:
            return faults
        self._check(faults)
        if not faults:
            object.__setattr__(self, "_metadata", metadata_of(self))
        return faults

    def _check(self, faults: Faults) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class PagedKVCache(_Checked):
    """K and V in pages of a shared pool, with a page table a request.

    key: `[num_pages, page_size, num_kv_heads, head_dim_qk]` for `"NHD"`,
        `[num_pages, num_kv_heads, page_size, head_dim_qk]` for `"HND"`; bf16, fp16, fp32 or
        float8_e4m3fn; last axis contiguous, other strides free (a layer axis inside the pool).
    value: the same with `head_dim_vo`.
    page_table: `[batch, max_pages]` int32, or `[batch, num_kv_heads, max_pages]` for a list of
        pages per KV head. Entries at and beyond `ceil(kv_len / page_size)` are never dereferenced.
    sequence_lengths: `[batch]` int32 tokens, or `[batch, num_kv_heads]` beside a per-head table.
    key_scale, value_scale: fp8 only; a Python number, or an fp32 tensor `[]`, `[1]` or
        `[num_kv_heads]` on the cache's device.

    Shapes, dtypes, devices and strides are checked here without a sync; contents (lengths, page
    ids) are checked by `stream_attention.core.validate` when a plan is made. Contents may change in
    place under a plan, addresses may not. Raises `ValueError` with every fault.
    """

    key: torch.Tensor
    value: torch.Tensor
    page_table: torch.Tensor
    sequence_lengths: torch.Tensor
    layout: str = "NHD"
    key_scale: Any = None
    value_scale: Any = None

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():
            return  # messages would fix symbolic sizes; the operator checks when it runs
        self.faults().raise_if_any("PagedKVCache")

    def _check(self, faults: Faults) -> None:
        check_storage(self, faults, ("key", "value"))
        if not faults:
            check_index(self, faults)
            check_scales(self, faults, self.num_kv_heads)

    @property
    def _head_axis(self) -> int:
        return 2 if self.layout == "NHD" else 1

    @property
    def num_pages(self) -> int:
        return self.key.shape[0]

    @property
    def page_size(self) -> int:
        return self.key.shape[3 - self._head_axis]

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[self._head_axis]

    @property
    def batch(self) -> int:
        return self.page_table.shape[0]

    @property
    def max_pages(self) -> int:
        return self.page_table.shape[-1]

    @property
    def capacity(self) -> int:
        """Tokens that one request can hold."""
        return self.max_pages * self.page_size

    @property
    def per_head_lists(self) -> bool:
        return self.page_table.dim() == 3

    def view(self) -> KVView:
        """The route's view: strided views of the same memory."""
        heads = self.num_kv_heads
        table, lens = self.page_table, self.sequence_lengths
        if table.dim() == 2:
            table = table.unsqueeze(1).expand(-1, heads, -1)
        if lens.dim() == 1:
            lens = lens.unsqueeze(1).expand(-1, heads)
        return KVView(
            key=_token_major(self.key, self.layout),
            value=_token_major(self.value, self.layout),
            page_table=table,
            kv_lens=lens,
            key_scale=_scale_view(self.key_scale, heads, self.key.device),
            value_scale=_scale_view(self.value_scale, heads, self.key.device),
            batch=self.batch,
            capacity=self.capacity,
            page_size=self.page_size,
            max_pages=self.max_pages,
            layout=self.layout,
        )


@dataclass(frozen=True, slots=True, eq=False)
class ContiguousKVCache(_Checked):
    """K and V of each request in one row: one page a request.

    key: `[batch, capacity, num_kv_heads, head_dim_qk]` for `"NHD"`,
        `[batch, num_kv_heads, capacity, head_dim_qk]` for `"HND"`; dtypes and strides as in
        `PagedKVCache`.
    value: the same with `head_dim_vo`.
    sequence_lengths: `[batch]` or `[batch, num_kv_heads]` int32 tokens; `None` = every request
        holds `capacity` tokens.
    key_scale, value_scale: as in `PagedKVCache`. Raises `ValueError` with every fault.
    """

    key: torch.Tensor
    value: torch.Tensor
    sequence_lengths: torch.Tensor | None = None
    layout: str = "NHD"
    key_scale: Any = None
    value_scale: Any = None

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():
            return  # messages would fix symbolic sizes; the operator checks when it runs
        self.faults().raise_if_any("ContiguousKVCache")

    def _check(self, faults: Faults) -> None:
        check_storage(self, faults, ("key", "value"))
        if not faults:
            check_lengths(self, faults, self.batch, per_head=True, optional=True)
            check_scales(self, faults, self.num_kv_heads)

    @property
    def _head_axis(self) -> int:
        return 2 if self.layout == "NHD" else 1

    @property
    def batch(self) -> int:
        return self.key.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens that one request can hold."""
        return self.key.shape[3 - self._head_axis]

    @property
    def page_size(self) -> int:
        return max(self.capacity, 1)

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[self._head_axis]

    @property
    def per_head_lists(self) -> bool:
        return self.sequence_lengths is not None and self.sequence_lengths.dim() == 2

    def view(self) -> KVView:
        """The route's view: strided views of the same memory."""
        heads, lens = self.num_kv_heads, self.sequence_lengths
        if lens is not None and lens.dim() == 1:
            lens = lens.unsqueeze(1).expand(-1, heads)
        return KVView(
            key=_token_major(self.key, self.layout),
            value=_token_major(self.value, self.layout),
            page_table=None,
            kv_lens=lens,
            key_scale=_scale_view(self.key_scale, heads, self.key.device),
            value_scale=_scale_view(self.value_scale, heads, self.key.device),
            batch=self.batch,
            capacity=self.capacity,
            page_size=self.page_size,
            max_pages=1,
            layout=self.layout,
        )


KVCache = PagedKVCache | ContiguousKVCache
CACHE_CLASSES = (PagedKVCache, ContiguousKVCache)
"""For `isinstance`: torch 2.10 traces none of a union."""


def _token_major(pool: torch.Tensor, layout: str) -> torch.Tensor:
    return pool if layout == "NHD" else pool.transpose(1, 2)


def _scale_view(scale: Any, heads: int, device: torch.device) -> torch.Tensor | None:
    if scale is None:
        return None
    if not isinstance(scale, torch.Tensor):
        scale = torch.full((1,), float(scale), dtype=torch.float32, device=device)
    return scale.reshape(-1).expand(heads)
