"""KV caches as the caller holds them, and the one view of them that every route reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from stream_attention.core.dtypes import KV_DTYPES, dtype_name
from stream_attention.core.errors import Faults, shape_of
from stream_attention.core.problem import LAYOUTS


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


@dataclass(frozen=True, slots=True, eq=False)
class PagedKVCache:
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
        faults = Faults()
        _check_storage(self, faults, ("key", "value"))
        if not faults:
            _check_index(self, faults)
            _check_scales(self, faults, self.num_kv_heads)
        faults.raise_if_any("PagedKVCache")

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
class ContiguousKVCache:
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
        faults = Faults()
        _check_storage(self, faults, ("key", "value"))
        if not faults:
            _check_lengths(self, faults, self.batch, per_head=None)
            _check_scales(self, faults, self.num_kv_heads)
        faults.raise_if_any("ContiguousKVCache")

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


def _token_major(pool: torch.Tensor, layout: str) -> torch.Tensor:
    return pool if layout == "NHD" else pool.transpose(1, 2)


def _scale_view(scale: Any, heads: int, device: torch.device) -> torch.Tensor | None:
    if scale is None:
        return None
    if not isinstance(scale, torch.Tensor):
        scale = torch.full((1,), float(scale), dtype=torch.float32, device=device)
    return scale.reshape(-1).expand(heads)


def _check_storage(cache: Any, faults: Faults, names: tuple[str, ...]) -> None:
    """Rank, dtype, device, layout, strides and agreement of the key and value pools."""
    faults.require(
        cache.layout in LAYOUTS, "layout", cache.layout, "must be 'NHD' or 'HND'", "'NHD'"
    )
    for name in names:
        pool = getattr(cache, name)
        if not faults.require(
            isinstance(pool, torch.Tensor), name, type(pool).__name__, "must be a torch.Tensor"
        ):
            continue
        axes = "[num_pages, page_size, num_kv_heads, head_dim]"
        if not faults.require(
            pool.dim() == 4, f"{name}.shape", shape_of(pool), f"must have rank 4, {axes} for NHD"
        ):
            continue
        faults.require(
            dtype_name(pool.dtype) in KV_DTYPES,
            f"{name}.dtype",
            pool.dtype,
            f"must be one of {', '.join(KV_DTYPES)}",
            "torch.bfloat16",
        )
        check_row_strides(faults, name, pool)
    if faults:
        return
    key, value = cache.key, cache.value
    faults.require(
        shape_of(key)[:3] == shape_of(value)[:3],
        "value.shape",
        shape_of(value),
        f"must equal key.shape {shape_of(key)} on all but the last axis",
        (*shape_of(key)[:3], value.shape[3]),
    )
    faults.require(
        key.dtype == value.dtype, "value.dtype", value.dtype, "must equal key.dtype", key.dtype
    )
    faults.require(
        key.device == value.device,
        "value.device",
        str(value.device),
        "must be the device of key",
        str(key.device),
    )


def check_row_strides(faults: Faults, name: str, tensor: torch.Tensor) -> None:
    """The stride rule of the contract: rows contiguous, and aligned as far as a row is.

    A row of `head_dim` elements takes `row_bytes`; wide loads need every row to start at a multiple
    of `gcd(16, row_bytes)` bytes, so strides must be multiples of that (the base address too, which
    is checked when a plan is made).
    """
    if tensor.numel() == 0:
        return
    size = tensor.element_size()
    strides, shape = tensor.stride(), tensor.shape
    if shape[-1] > 1 and not faults.require(
        strides[-1] == 1,
        f"{name}.stride",
        tuple(strides),
        "the last axis must be contiguous (stride 1); nothing is copied silently",
        f"{name}.contiguous()",
    ):
        return
    unit = row_alignment(tensor)
    bad = [
        axis
        for axis in range(tensor.dim() - 1)
        if shape[axis] > 1 and (strides[axis] * size) % unit
    ]
    faults.require(
        not bad,
        f"{name}.stride",
        tuple(strides),
        f"strides of axes {bad} must be multiples of {unit} bytes ({unit // size} elements)",
        f"{name}.contiguous()",
    )


def row_alignment(tensor: torch.Tensor) -> int:
    """Bytes that every row of `tensor` starts at a multiple of: `gcd(16, row_bytes)`."""
    return math.gcd(16, tensor.shape[-1] * tensor.element_size())


def _check_index(cache: PagedKVCache, faults: Faults) -> None:
    table, heads = cache.page_table, cache.num_kv_heads
    faults.require(cache.page_size >= 1, "page_size", cache.page_size, "must be an int >= 1", 16)
    if not faults.require(
        isinstance(table, torch.Tensor),
        "page_table",
        type(table).__name__,
        "must be an int32 tensor [batch, max_pages] or [batch, num_kv_heads, max_pages]",
    ):
        return
    if not faults.require(
        table.dim() in (2, 3),
        "page_table.shape",
        shape_of(table),
        "must be [batch, max_pages] or [batch, num_kv_heads, max_pages]",
    ):
        return
    if table.dim() == 3:
        faults.require(
            table.shape[1] == heads,
            "page_table.shape",
            shape_of(table),
            f"axis 1 must be num_kv_heads = {heads}",
            (table.shape[0], heads, table.shape[2]),
        )
    _check_int32(faults, "page_table", table, cache.key.device)
    faults.require(
        table.numel() == 0 or table.shape[-1] == 1 or table.stride(-1) == 1,
        "page_table.stride",
        tuple(table.stride()),
        "the last axis must be contiguous (stride 1)",
        "page_table.contiguous()",
    )
    _check_lengths(cache, faults, table.shape[0], per_head=table.dim() == 3)


def _check_lengths(cache: Any, faults: Faults, batch: int, per_head: bool | None) -> None:
    """`per_head`: a per-head table is there (lengths may be rank 1 or 2), not there, or `None`."""
    lens, heads = cache.sequence_lengths, cache.num_kv_heads
    if lens is None and isinstance(cache, ContiguousKVCache):
        return
    shapes = [(batch,)] if per_head is False else [(batch,), (batch, heads)]
    rule = "must be " + " or ".join(str(list(shape)) for shape in shapes)
    if not faults.require(
        isinstance(lens, torch.Tensor), "sequence_lengths", type(lens).__name__, f"{rule} int32"
    ):
        return
    faults.require(
        shape_of(lens) in shapes, "sequence_lengths.shape", shape_of(lens), rule, shapes[0]
    )
    _check_int32(faults, "sequence_lengths", lens, cache.key.device)


def _check_int32(faults: Faults, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    faults.require(
        tensor.dtype == torch.int32,
        f"{name}.dtype",
        tensor.dtype,
        "must be torch.int32",
        f"{name}.to(torch.int32)",
    )
    faults.require(
        tensor.device == device,
        f"{name}.device",
        str(tensor.device),
        "must be the cache's device",
        str(device),
    )


def _check_scales(cache: Any, faults: Faults, heads: int) -> None:
    fp8 = cache.key.dtype == torch.float8_e4m3fn
    for name in ("key_scale", "value_scale"):
        scale = getattr(cache, name)
        if scale is None:
            continue
        if not faults.require(fp8, name, scale, "scales belong to float8_e4m3fn K/V only", "None"):
            continue
        if isinstance(scale, torch.Tensor):
            faults.require(
                shape_of(scale) in ((), (1,), (heads,)),
                f"{name}.shape",
                shape_of(scale),
                f"must be [], [1] or [{heads}]",
                (heads,),
            )
            faults.require(
                scale.dtype == torch.float32,
                f"{name}.dtype",
                scale.dtype,
                "must be torch.float32",
                f"{name}.float()",
            )
            faults.require(
                scale.device == cache.key.device,
                f"{name}.device",
                str(scale.device),
                "must be the cache's device",
                str(cache.key.device),
            )
        else:
            number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
            faults.require(
                number and 0 < scale < float("inf"),
                name,
                scale,
                "must be a finite number > 0 or an fp32 tensor",
                1.0,
            )
