"""`FlowPool`: K, V and a flow's fields in pages, with an allocator and the write launch."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from stream_attention.core.cache import PagedKVCache
from stream_attention.core.cache_checks import check_scales
from stream_attention.core.dtypes import KV_DTYPES, dtype_bytes, dtype_name
from stream_attention.core.errors import Faults
from stream_attention.core.ir import is_int
from stream_attention.core.problem import LAYOUTS
from stream_attention.flows import generated
from stream_attention.flows.fields import SUMMARY_DTYPES
from stream_attention.flows.flow import Flow
from stream_attention.flows.graph import FlowGraph
from stream_attention.flows.page_allocator import PageAllocator, PoolExhausted
from stream_attention.flows.pool_fields import allocate_fields
from stream_attention.flows.write_kernel import write_source, written_fields

if TYPE_CHECKING:
    from stream_attention.flows.write_launch import WriteLaunch

__all__ = ["FlowPool", "PoolExhausted"]


class FlowPool:
    """The memory of a flow: `num_pages` pages of K and V, and of each field.

    flow: what declares the fields and fills them. page_size: tokens a page. dtype: of K and V:
      bfloat16, float16, float32 or float8_e4m3fn. fields_dtype: of summaries that declare none;
      `None` is `dtype`, and bfloat16 beside fp8, for summaries have no scale. States are float32
      unless declared otherwise.
    layout: "NHD" or "HND", of K and V. k_scale, v_scale: fp8 only; a number, or fp32 [], [1] or
      [num_kv_heads]; what is stored, times the scale, is the value meant. `None` is 1.
    prefix_sharing: whether requests will share pages; refused where the flow has state.

    key, value: `[num_pages, page_size, num_kv_heads, head_dim]` (NHD) or `[num_pages, num_kv_heads,
      page_size, head_dim]` (HND), 0 at first. fields: `[num_pages, num_kv_heads, rows, cols]` by
      name, contiguous; with "k" and "v", views `[num_pages, num_kv_heads, page_size, head_dim]` of
      key and value. A page's fields hold what an earlier request left until the write launch
      fills its slot 0, which starts its states at their init.
    key_scale, value_scale: fp32 [num_kv_heads] on the device for fp8, else `None`.

    Raises `ValueError` with every broken rule.
    """

    def __init__(
        self,
        flow: Flow,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: Any = torch.bfloat16,
        device: Any = "cpu",
        layout: str = "NHD",
        fields_dtype: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        prefix_sharing: bool = False,
    ) -> None:
        _check_sizes(num_kv_heads=num_kv_heads, num_pages=num_pages)
        _check_dtypes(dtype, fields_dtype, layout)
        self.flow, self.graph = flow, flow.trace(page_size, head_dim)
        if prefix_sharing and not self.graph.requirements.prefix_sharing:
            states = ", ".join(field.name for field in self.graph.states)
            raise ValueError(
                f"FlowPool: prefix_sharing=True: flow {flow.name} has state ({states}), which "
                "requests that share pages would share too; use prefix_sharing=False"
            )
        self.num_pages, self.page_size = num_pages, page_size
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.dtype, self.layout, self.prefix_sharing = dtype, layout, prefix_sharing
        self.fields_dtype = _fields_dtype(dtype, fields_dtype)
        self.device = torch.empty(0, device=device).device  # with its index
        per_page = (page_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, page_size)
        shape = (num_pages, *per_page, head_dim)
        self.key = torch.zeros(shape, dtype=dtype, device=self.device)
        self.value = torch.zeros(shape, dtype=dtype, device=self.device)
        self.key_scale, self.value_scale = self._scales(k_scale, v_scale)
        made = allocate_fields(self.graph, num_pages, num_kv_heads, self.fields_dtype, self.device)
        head_major = (self.key, self.value)
        if layout == "NHD":
            head_major = (self.key.transpose(1, 2), self.value.transpose(1, 2))
        self.fields: dict[str, Any] = {**made, "k": head_major[0], "v": head_major[1]}
        self._allocator = PageAllocator(num_pages)

    def _scales(self, k_scale: Any, v_scale: Any) -> tuple[Any, Any]:
        found, faults = Faults(), Faults()
        given = SimpleNamespace(key=self.key, key_scale=k_scale, value_scale=v_scale)
        check_scales(given, found, self.num_kv_heads)
        for fault in found:  # by the names that they have here
            name = fault.parameter.replace("key_", "k_").replace("value_", "v_")
            faults.add(name, fault.value, fault.rule, fault.nearest)
        faults.raise_if_any("FlowPool")
        if self.dtype != torch.float8_e4m3fn:
            return None, None
        made = [
            torch.as_tensor(1.0 if scale is None else scale, device=self.device)
            .to(torch.float32)
            .reshape(-1)
            .repeat(self.num_kv_heads)[: self.num_kv_heads]
            for scale in (k_scale, v_scale)
        ]
        return made[0], made[1]

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page: K, V and every field, of all KV heads."""
        return page_bytes(self.graph, self.num_kv_heads, self.dtype, self.fields_dtype)

    @property
    def total_bytes(self) -> int:
        """Bytes of all pages; scales, tables and lengths are not in it."""
        return self.num_pages * self.bytes_per_page

    @classmethod
    def pages_for(
        cls,
        num_bytes: int,
        flow: Flow,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: Any = torch.bfloat16,
        fields_dtype: Any = None,
    ) -> int:
        """Pages that fit in `num_bytes`, at least 1. Raises `ValueError` where none does."""
        _check_sizes(num_kv_heads=num_kv_heads)
        _check_dtypes(dtype, fields_dtype, "NHD")
        graph = flow.trace(page_size, head_dim)
        each = page_bytes(graph, num_kv_heads, dtype, _fields_dtype(dtype, fields_dtype))
        if not (is_int(num_bytes) and num_bytes >= each):
            raise ValueError(
                f"num_bytes={num_bytes!r}: a page of flow {flow.name} takes {each} bytes; "
                f"use {each}"
            )
        return num_bytes // each

    def cache(self, page_table: Any, sequence_lengths: Any) -> PagedKVCache:
        """The engine's view of the pool. page_table: [batch, max_pages] int32, or with a KV head
        axis, such as pages that were selected. sequence_lengths: [batch] or [batch, num_kv_heads]
        int32. Nothing is copied."""
        return PagedKVCache(
            key=self.key,
            value=self.value,
            page_table=page_table,
            sequence_lengths=sequence_lengths,
            layout=self.layout,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
        )

    def write(self, k_new: Any, v_new: Any, page_table: Any, sequence_lengths: Any, **options: Any):
        """Append tokens, fill summaries, start states: `WriteLaunch(...)`, run once."""
        self.write_launch(k_new, v_new, page_table, sequence_lengths, **options).run()

    def write_launch(
        self, k_new: Any, v_new: Any, page_table: Any, sequence_lengths: Any, **options: Any
    ) -> WriteLaunch:
        """The same, bound to its tensors, to be run at every step; see `WriteLaunch`."""
        from stream_attention.flows.write_launch import WriteLaunch

        return WriteLaunch(self, k_new, v_new, page_table, sequence_lengths, **options)

    @functools.cached_property
    def write_source(self) -> str:
        """The source of the write launch, written once: every append of a loop uses it."""
        fields = written_fields(self.graph)
        dtypes = {field.name: dtype_name(self.fields[field.name].dtype) for field in fields}
        return write_source(self.graph, dtypes)

    @functools.cached_property
    def write_kernel(self) -> Any:
        """The kernel of `write_source`, loaded once."""
        return generated.load(self.write_source, "flow_write").write

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give."""
        return self._allocator.num_free

    @property
    def num_used(self) -> int:
        """Pages that somebody holds."""
        return self._allocator.num_used

    def references(self, page: int) -> int:
        """Holders of a page; 0 where it is free."""
        return self._allocator.references(page)

    def allocate(self, n: int) -> list[int]:
        """The `n` lowest free pages; raises `PoolExhausted`, and takes none, where fewer are."""
        return self._allocator.allocate(n)

    def retain(self, pages: Any) -> list[int]:
        """One more reference to pages in use, so that they outlive a `release`; returns them.

        For whoever reads them, such as a transfer; to put them in another request's table, `share`.
        """
        return self._allocator.retain(pages)

    def share(self, pages: Any) -> list[int]:
        """`retain` pages for another request that starts with the same tokens; returns them.

        They must be full: requests write to pages of their own. Raises `ValueError` in a pool
        without `prefix_sharing`.
        """
        if not self.prefix_sharing:
            instead = "FlowPool(..., prefix_sharing=True)"
            if not self.graph.requirements.prefix_sharing:
                instead = f"pages of their own, for flow {self.flow.name} has state"
            raise ValueError(f"share: this pool has prefix_sharing=False; use {instead}")
        return self._allocator.retain(pages)

    def release(self, pages: Any) -> list[int]:
        """One reference less to each page; returns those that are free now, ascending.

        Raises `ValueError`, and releases none, where one is released more often than it is held.
        """
        return self._allocator.release(pages)

    def __repr__(self) -> str:
        scale = 1 << 20
        return (
            f"FlowPool({self.flow.name}, {self.num_pages} pages of {self.page_size} tokens, "
            f"{self.num_kv_heads} KV heads, head_dim {self.head_dim}, {dtype_name(self.dtype)} "
            f"{self.layout} on {self.device}, {self.bytes_per_page} bytes a page, "
            f"{self.total_bytes} bytes ({self.total_bytes / scale:.1f} MiB), {self.num_used} used)"
        )


def page_bytes(graph: FlowGraph, num_kv_heads: int, dtype: Any, fields_dtype: Any) -> int:
    """`num_kv_heads · (2 · page_size · head_dim · size + Σ_fields rows · cols · size)` bytes."""
    per_head = 2 * graph.page_size * graph.head_dim * dtype_bytes(dtype_name(dtype))
    for field in graph.declared:
        rows, cols = graph.sizes.numbers(field.shape)
        per_head += rows * cols * dtype_bytes(field.dtype or dtype_name(fields_dtype))
    return num_kv_heads * per_head


def _fields_dtype(dtype: Any, fields_dtype: Any) -> Any:
    if fields_dtype is not None:
        return fields_dtype
    return torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype


def _check_sizes(**sizes: Any) -> None:
    faults = Faults()
    for name, value in sizes.items():
        faults.require(is_int(value) and value >= 1, name, value, "must be an int >= 1", 1)
    faults.raise_if_any("FlowPool")


def _check_dtypes(dtype: Any, fields_dtype: Any, layout: Any) -> None:
    faults = Faults()
    faults.require(
        isinstance(dtype, torch.dtype) and dtype_name(dtype) in KV_DTYPES,
        "dtype",
        dtype,
        f"must be one of {', '.join(KV_DTYPES)}",
        torch.bfloat16,
    )
    faults.require(
        fields_dtype is None or fields_dtype in SUMMARY_DTYPES,
        "fields_dtype",
        fields_dtype,
        f"must be None or one of {', '.join(dtype_name(each) for each in SUMMARY_DTYPES)}",
        torch.bfloat16,
    )
    faults.require(layout in LAYOUTS, "layout", layout, "must be 'NHD' or 'HND'", "'NHD'")
    faults.raise_if_any("FlowPool")
