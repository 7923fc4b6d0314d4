"""`WriteLaunch`: new tokens into a pool, its summaries and the states of new pages, in one launch.

for request, (keys, values) in enumerate(zip(k_new, v_new)):
    if sequence_lengths[request] < 0: continue                  # a padded request
    for token, (key, value) in enumerate(zip(keys, values)):
        position = sequence_lengths[request] + token
        page = page_table[request, position // page_size]
        pool_k[page, position % page_size], pool_v[page, position % page_size] = key, value
interpret_cache(graph, fields, pool_k, pool_v, the pages written, their counts, first slots)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stream_attention.core.cache_checks import is_dense
from stream_attention.core.dtypes import QUERY_DTYPES, dtype_name
from stream_attention.core.errors import Faults, shape_of
from stream_attention.core.ir import is_int
from stream_attention.flows.dependent import is_dependent
from stream_attention.flows.write_kernel import lanes_of, written_fields

if TYPE_CHECKING:
    from stream_attention.flows.pool import FlowPool

_WARPS = ((256, 1), (1 << 11, 2), (1 << 13, 4), (1 << 15, 8))
"""Warps for a page of at most so many lanes; 16 beyond: near 32 lanes a thread, not tuned yet."""


class WriteLaunch:
    """Appends tokens to requests; bound to its tensors, whose contents may change between runs.

    pool: its key, value and fields are written in place.
    k_new, v_new: `[batch, n_new, num_kv_heads, head_dim]`, or packed `[num_tokens, num_kv_heads,
      head_dim]` with `indptr`; bf16, fp16 or fp32, the last axis contiguous. Rounded once to the
      pool's dtype; of fp8 ±448 times the scale where they are larger.
    page_table: `[batch, max_pages]` int32. A page is written by one request only.
    sequence_lengths: `[batch]` int32, tokens before the append; a negative one is of a padded
      request, which writes nothing. With `lengths_include_new` those after it; one that is
      less than what is new is as a negative one.
    indptr: `[batch + 1]` int32, first packed token of each request. max_new: tokens that a request
      may append at most, then required; of more, the first ones are written and counted.
    active: `[batch]` int32; a request with 0 writes nothing.
    lengths_after: `[batch]` int32, written: the lengths after the append, of requests that append
      nothing as they were. Other memory than `sequence_lengths`, which all programs read.

    Tokens beyond the page table, and those of page ids that are not in the pool, are not written,
    nor counted in `lengths_after` where the table ends. Nothing syncs; `run` allocates nothing and
    can be captured. Raises `ValueError` with every broken rule.
    """

    def __init__(
        self,
        pool: FlowPool,
        k_new: Any,
        v_new: Any,
        page_table: Any,
        sequence_lengths: Any,
        *,
        indptr: Any = None,
        max_new: int | None = None,
        active: Any = None,
        lengths_after: Any = None,
        lengths_include_new: bool = False,
    ) -> None:
        self.pool = pool
        per_request = {
            "sequence_lengths": sequence_lengths,
            "active": active,
            "lengths_after": lengths_after,
        }
        given = {"k_new": k_new, "v_new": v_new, "page_table": page_table, "indptr": indptr}
        _check(pool, {**given, **per_request}, max_new)
        batch = page_table.shape[0]
        n_new = k_new.shape[1] if max_new is None else max_new
        # n consecutive tokens touch most pages where the first one is the last of its page.
        touched = (n_new + pool.page_size - 2) // pool.page_size + 1
        self._grid = (batch * pool.num_kv_heads * touched,)
        strides = pool.fields["k"].stride()
        fields = written_fields(pool.graph)
        self.source = pool.write_source
        self._args = (
            *(k_new, *_new_strides(k_new)),
            *(v_new, *_new_strides(v_new)),
            *(_bits(pool.key), _bits(pool.value), strides[0], strides[2], strides[1]),
            *(pool.key_scale, pool.value_scale),
            *(page_table, page_table.stride(0), sequence_lengths, indptr, active, lengths_after),
            *(n_new, touched, page_table.shape[1], pool.num_pages),
            *(_bits(pool.fields[field.name]) for field in fields),
        )
        lanes = lanes_of(pool.page_size) * lanes_of(pool.head_dim)
        dependent = is_dependent(pool.device)
        self._meta = {
            "NUM_KV_HEADS": pool.num_kv_heads,
            "LENGTHS_INCLUDE_NEW": bool(lengths_include_new),
            "DEPENDENT": dependent,
            "launch_pdl": dependent,
            "num_warps": next((warps for most, warps in _WARPS if lanes <= most), 16),
        }

    def run(self) -> None:
        """Launch on the current stream. Writes the pool, and `lengths_after`."""
        if self._grid[0]:
            self._kernel[self._grid](*self._args, **self._meta)

    @property
    def _kernel(self) -> Any:
        return self.pool.write_kernel


def _new_strides(new: Any) -> tuple[int, int, int]:
    """(batch, token, head) strides; packed tokens have no batch axis."""
    strides = new.stride()
    return (strides[0], strides[1], strides[2]) if new.dim() == 4 else (0, strides[0], strides[1])


def _bits(tensor: Any) -> Any:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _check(pool: FlowPool, tensors: dict[str, Any], max_new: Any) -> None:
    faults = Faults()
    optional = ("indptr", "active", "lengths_after")
    for name, tensor in tensors.items():
        if tensor is None and name in optional:
            continue
        if not faults.require(is_dense(tensor), name, type(tensor), "must be a dense tensor"):
            continue
        faults.require(
            tensor.device == pool.device, f"{name}.device", str(tensor.device), "must be the pool's"
        )
    faults.raise_if_any("WriteLaunch")
    _check_index(faults, tensors)
    _check_new(faults, pool, tensors, max_new)
    faults.raise_if_any("WriteLaunch")


def _check_index(faults: Faults, tensors: dict[str, Any]) -> None:
    table = tensors["page_table"]
    if not faults.require(
        table.dim() == 2, "page_table.shape", shape_of(table), "must be [batch, max_pages]"
    ):
        return
    batch = table.shape[0]
    shapes = {"page_table": shape_of(table), "indptr": (batch + 1,)}
    for name in ("page_table", "sequence_lengths", "indptr", "active", "lengths_after"):
        tensor, shape = tensors[name], shapes.get(name, (batch,))
        if tensor is None:
            continue
        faults.require(
            tensor.dtype == torch.int32, f"{name}.dtype", tensor.dtype, "must be torch.int32"
        )
        have = shape_of(tensor)
        faults.require(have == shape, f"{name}.shape", have, f"must be {list(shape)}", shape)
        faults.require(
            tensor.shape[-1] <= 1 or tensor.stride(-1) == 1,
            f"{name}.stride",
            tensor.stride(),
            "the last axis must be contiguous",
            f"{name}.contiguous()",
        )
    after, lengths = tensors["lengths_after"], tensors["sequence_lengths"]
    faults.require(
        after is None or after.numel() == 0 or not _overlap(after, lengths),
        "lengths_after",
        "sequence_lengths",
        "must be other memory, for every program of the launch reads the lengths",
        "torch.empty_like(sequence_lengths), or lengths_include_new=True",
    )


def _overlap(a: Any, b: Any) -> bool:
    size = a.element_size()
    return a.data_ptr() < b.data_ptr() + b.numel() * size and b.data_ptr() < (
        a.data_ptr() + a.numel() * size
    )


def _check_new(faults: Faults, pool: FlowPool, tensors: dict[str, Any], max_new: Any) -> None:
    is_packed = tensors["indptr"] is not None
    axes = "[num_tokens" if is_packed else f"[{tensors['page_table'].shape[0]}, n_new >= 1"
    rule = f"must be {axes}, {pool.num_kv_heads}, {pool.head_dim}]"
    for name in ("k_new", "v_new"):
        tensor = tensors[name]
        fits = tensor.dim() == (3 if is_packed else 4)
        fits = fits and shape_of(tensor)[-2:] == (pool.num_kv_heads, pool.head_dim)
        if fits and not is_packed:
            fits = tensor.shape[0] == tensors["page_table"].shape[0] and tensor.shape[1] >= 1
        faults.require(fits, f"{name}.shape", shape_of(tensor), rule)
        faults.require(
            dtype_name(tensor.dtype) in QUERY_DTYPES,
            f"{name}.dtype",
            tensor.dtype,
            f"must be one of {', '.join(QUERY_DTYPES)}",
            torch.bfloat16,
        )
        faults.require(
            pool.head_dim == 1 or tensor.stride(-1) == 1,
            f"{name}.stride",
            tensor.stride(),
            "the last axis must be contiguous",
            f"{name}.contiguous()",
        )
    k_shape, v_shape = shape_of(tensors["k_new"]), shape_of(tensors["v_new"])
    faults.require(k_shape == v_shape, "v_new.shape", v_shape, f"must be k_new.shape {k_shape}")
    if is_packed:
        faults.require(
            is_int(max_new) and max_new >= 1,
            "max_new",
            max_new,
            "must be an int >= 1 beside indptr: the most tokens that a request appends",
            max(1, k_shape[0]),
        )
    else:
        faults.require(
            max_new is None, "max_new", max_new, "belongs to packed tokens, with indptr", None
        )
