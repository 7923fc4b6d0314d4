"""Static checks of caches: shapes, dtypes, devices and strides, without a sync."""

from __future__ import annotations

import math
from typing import Any

import torch

from stream_attention.core.dtypes import KV_DTYPES, dtype_name
from stream_attention.core.errors import Faults, shape_of
from stream_attention.core.problem import LAYOUTS

CACHE_TENSORS = ("key", "value", "page_table", "sequence_lengths", "key_scale", "value_scale")
"""Fields of a cache that may hold a tensor. Some are absent, `None` or a number in some caches."""


def tensors_of(cache: Any) -> dict[str, torch.Tensor]:
    """The tensors of `cache` by the names of their fields, dense or not."""
    fields = {name: getattr(cache, name, None) for name in CACHE_TENSORS}
    return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}


def metadata_of(cache: Any) -> tuple[Any, ...]:
    """All that the checks of this module look at, of every tensor of `cache`, to be compared."""
    return tuple(
        (name, t.dtype, t.shape, t.stride(), t.device, t.is_neg()) if is_dense(t) else name
        for name, t in tensors_of(cache).items()
    )


def check_storage(cache: Any, faults: Faults, names: tuple[str, ...]) -> None:
    """Rank, dtype, device, layout, strides and agreement of the key and value pools."""
    known = isinstance(cache.layout, str) and cache.layout in LAYOUTS
    faults.require(known, "layout", cache.layout, "must be 'NHD' or 'HND'", "'NHD'")
    for name in names:
        pool = getattr(cache, name)
        if not faults.require(
            isinstance(pool, torch.Tensor), name, type(pool).__name__, "must be a torch.Tensor"
        ) or not require_dense(faults, name, pool):
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


def is_dense(tensor: Any) -> bool:
    """A tensor with a shape and strides: neither sparse nor nested."""
    return (
        isinstance(tensor, torch.Tensor) and not tensor.is_nested and tensor.layout == torch.strided
    )


def require_dense(faults: Faults, name: str, tensor: torch.Tensor) -> bool:
    """Neither sparse nor nested nor of another library: others have no strides or no one shape.

    Nor a view with a lazy sign or conjugate: kernels read memory, where that bit is not.
    """
    layout = "nested" if tensor.is_nested else tensor.layout
    rule, nearest = "must be dense", f"{name}.to_dense()"
    if tensor.is_nested:
        nearest = f"torch.nested.to_padded_tensor({name}, 0.0)"
    if not faults.require(layout == torch.strided, f"{name}.layout", layout, rule, nearest):
        return False
    # A tracer cannot ask; the call itself checks again when it runs.
    lazy = not torch.compiler.is_compiling() and (tensor.is_neg() or tensor.is_conj())
    rule, nearest = "must not be a lazily negated view", f"{name}.resolve_neg()"
    return faults.require(not lazy, f"{name}.is_neg()", True, rule, nearest)


def _storage_of(tensor: torch.Tensor) -> Any:
    """A tensor's storage; `None` where the tensor is another's stand-in (fake, functional, of a
    transform, a wrapper) or on the meta device, and has no memory of its own to look at.
    """
    try:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":
            return None
        storage.data_ptr()
    except RuntimeError:
        return None
    return storage


def address_of(tensor: torch.Tensor) -> int | None:
    """`data_ptr()`, or `None` of a tensor without memory of its own."""
    if _storage_of(tensor) is None:
        return None
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return None


def require_memory(faults: Faults, name: str, tensor: torch.Tensor) -> bool:
    """All elements of a dense tensor lie in its storage, which may have been resized or freed.

    Kernels take an address: what lies behind the storage's end is another tensor's, or nobody's.
    """
    storage = _storage_of(tensor) if tensor.numel() else None
    if storage is None:
        return True
    held = storage.nbytes()
    end = (tensor.storage_offset() + reach_of(tensor)) * tensor.element_size()
    if end <= held:
        return True
    return faults.require(
        False,
        f"{name}.untyped_storage().nbytes()",
        held,
        f"must hold the {end} bytes that shape, strides and offset reach",
        f"a new tensor, or {name}.untyped_storage().resize_({end})",
    )


def reach_of(tensor: torch.Tensor) -> int:
    """Elements from the first to the last that a tensor with elements can touch, both counted."""
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


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


def check_index(cache: Any, faults: Faults) -> None:
    """Page size, page table and lengths of a paged cache."""
    table, heads = cache.page_table, cache.num_kv_heads
    faults.require(cache.page_size >= 1, "page_size", cache.page_size, "must be an int >= 1", 16)
    if not faults.require(
        isinstance(table, torch.Tensor),
        "page_table",
        type(table).__name__,
        "must be an int32 tensor [batch, max_pages] or [batch, num_kv_heads, max_pages]",
    ) or not require_dense(faults, "page_table", table):
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
    check_lengths(cache, faults, table.shape[0], per_head=table.dim() == 3)


def check_lengths(
    cache: Any, faults: Faults, batch: int, *, per_head: bool, optional: bool = False
) -> None:
    """`per_head`: lengths may be given per KV head. `optional`: they may be left out."""
    lens, heads = cache.sequence_lengths, cache.num_kv_heads
    if lens is None and optional:
        return
    shapes = [(batch,)] if not per_head else [(batch,), (batch, heads)]
    rule = "must be " + " or ".join(str(list(shape)) for shape in shapes)
    if not faults.require(
        isinstance(lens, torch.Tensor), "sequence_lengths", type(lens).__name__, f"{rule} int32"
    ) or not require_dense(faults, "sequence_lengths", lens):
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


def check_scales(cache: Any, faults: Faults, heads: int) -> None:
    """`key_scale` and `value_scale`: fp8 only, numbers > 0 or fp32 tensors of legal shape."""
    fp8 = cache.key.dtype == torch.float8_e4m3fn
    for name in ("key_scale", "value_scale"):
        scale = getattr(cache, name)
        if scale is None:
            continue
        if not faults.require(fp8, name, scale, "scales belong to float8_e4m3fn K/V only", "None"):
            continue
        if isinstance(scale, torch.Tensor):
            if not require_dense(faults, name, scale):
                continue
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
            limits = torch.finfo(torch.float32)  # scales are fp32 on the device
            faults.require(
                number and limits.tiny <= scale <= limits.max,
                name,
                scale,
                "must be a finite number > 0 or an fp32 tensor",
                1.0,
            )
