"""What metadata can tell about the tensors of a serving call; each check records its faults."""

from __future__ import annotations

from typing import Any

import torch

from stream_attention.core.cache import KVCache
from stream_attention.core.cache_checks import (
    address_of,
    check_row_strides,
    reach_of,
    require_dense,
    require_memory,
    row_alignment,
    tensors_of,
)
from stream_attention.core.dtypes import OUT_DTYPES, QUERY_DTYPES, dtype_name
from stream_attention.core.errors import Faults, shape_of
from stream_attention.core.launch import BoundTensors
from stream_attention.core.sink_checks import require_fp32_sink

_Q_AXES = "[batch, num_qo_heads, head_dim], [batch, qo_len, num_qo_heads, head_dim]"


def check_q(faults: Faults, q: Any) -> None:
    """Rank, dtype, layout, strides, alignment and gradient of the queries."""
    if not faults.require(
        isinstance(q, torch.Tensor),
        "q",
        type(q).__name__,
        f"must be a torch.Tensor {_Q_AXES}",
    ):
        return
    if not require_dense(faults, "q", q):
        faults.raise_if_any("attention")  # it may have no shape or strides to look at
    faults.require(
        dtype_name(q.dtype) in QUERY_DTYPES,
        "q.dtype",
        q.dtype,
        f"must be one of {', '.join(QUERY_DTYPES)}",
        "torch.bfloat16",
    )
    check_grad(faults, "q", q, "a serving call returns no gradient")
    if faults.require(
        q.dim() in (3, 4),
        "q.shape",
        shape_of(q),
        f"must be {_Q_AXES}, or packed [total_q, num_qo_heads, head_dim] beside qo_indptr",
        "rank 3 or 4",
    ):
        check_row_strides(faults, "q", q)
        check_base(faults, "q", q)
        if not require_memory(faults, "q", q):
            faults.raise_if_any("attention")  # torch makes no view of it


def check_grad(faults: Faults, name: str, tensor: torch.Tensor, rule: str) -> None:
    """A tensor that wants a gradient, where gradients are on, would silently get none."""
    if tensor.requires_grad and torch.is_grad_enabled():
        faults.add(
            f"{name}.requires_grad",
            True,
            rule,
            f"stream_attention.train, {name}.detach() or torch.no_grad()",
        )


def check_base(faults: Faults, name: str, tensor: torch.Tensor) -> None:
    """The base address obeys the row rule too (a view can start anywhere)."""
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return
    unit, address = row_alignment(tensor), address_of(tensor)
    if address is not None and address % unit:
        faults.add(
            f"{name}.data_ptr() % {unit}",
            address % unit,
            f"the first element must lie on a multiple of {unit} bytes",
            f"{name}.clone()",
        )


def check_against_cache(faults: Faults, q: torch.Tensor, cache: KVCache) -> None:
    """q and the cache share a device and a head dimension."""
    faults.require(
        q.device == cache.key.device,
        "q.device",
        str(q.device),
        "must be the cache's device",
        str(cache.key.device),
    )
    faults.require(
        q.shape[-1] == cache.key.shape[3],
        "q.shape",
        shape_of(q),
        f"the last axis must be the key's head_dim = {cache.key.shape[3]}",
        (*q.shape[:-1], cache.key.shape[3]),
    )


def check_cache(faults: Faults, cache: KVCache) -> None:
    """Memory and gradients of a cache's tensors, and the base addresses of its pools."""
    for name, tensor in tensors_of(cache).items():
        require_memory(faults, name, tensor)
        check_grad(faults, name, tensor, "a serving call returns no gradient")
        if name in ("key", "value"):
            check_base(faults, name, tensor)


def require_values(faults: Faults, v_cache: Any) -> bool:
    """Beside a key tensor stands a value tensor; of which kind is for others to say."""
    rule, nearest = "a key tensor comes with a value tensor", "v_cache=v, or a cache for k_cache"
    return faults.require(v_cache is not None, "v_cache", v_cache, rule, nearest)


def check_sink(faults: Faults, q: Any, sink: Any) -> None:
    """The sink is `[num_qo_heads]` fp32, contiguous, on q's device."""
    known = isinstance(q, torch.Tensor)
    heads = q.shape[-2] if known and q.dim() >= 2 else None
    if not require_fp32_sink(
        faults,
        sink,
        kind=f"must be an fp32 tensor [{'num_qo_heads' if heads is None else heads}] of logits",
        shape=None if heads is None else (heads,),
        axes="must be [num_qo_heads]",
        device=q.device if known else None,
        place="must be q's device",
    ):
        return
    faults.require(
        sink.is_contiguous(),
        "attn_sink.stride",
        tuple(sink.stride()),
        "must be contiguous",
        "attn_sink.contiguous()",
    )
    check_grad(faults, "attn_sink", sink, "a serving call returns no gradient")
    require_memory(faults, "attn_sink", sink)


def check_outputs(
    faults: Faults,
    q: torch.Tensor,
    cache: KVCache,
    out: Any,
    lse: Any,
    return_lse: bool,
    fields: dict[str, Any],
) -> None:
    """The caller's `out` and `lse`; records out's dtype in `fields`."""
    shape = (*q.shape[:-1], cache.value.shape[3])
    if out is not None and _check_output(faults, "out", out, shape, q.device):
        faults.require(
            dtype_name(out.dtype) in OUT_DTYPES,
            "out.dtype",
            out.dtype,
            f"must be one of {', '.join(OUT_DTYPES)}",
            q.dtype,
        )
        fields["out_dtype"] = dtype_name(out.dtype)
    if lse is None:
        return
    faults.require(bool(return_lse), "return_lse", return_lse, "lse is given", "return_lse=True")
    if _check_output(faults, "lse", lse, shape[:-1], q.device):
        faults.require(
            lse.dtype == torch.float32,
            "lse.dtype",
            lse.dtype,
            "must be torch.float32",
            "float32",
        )


def _check_output(
    faults: Faults, name: str, tensor: Any, shape: tuple[int, ...], device: torch.device
) -> bool:
    if not faults.require(
        isinstance(tensor, torch.Tensor),
        name,
        type(tensor).__name__,
        "must be a torch.Tensor",
    ) or not require_dense(faults, name, tensor):
        return False
    faults.require(
        shape_of(tensor) == shape,
        f"{name}.shape",
        shape_of(tensor),
        "must fit q",
        shape,
    )
    faults.require(
        tensor.device == device,
        f"{name}.device",
        str(tensor.device),
        "must be q's",
        str(device),
    )
    faults.require(
        tensor.is_contiguous(),
        f"{name}.stride",
        tuple(tensor.stride()),
        "must be contiguous",
        "torch.empty of the result's shape",
    )
    check_grad(faults, name, tensor, "an output is written in place and carries no gradient")
    check_base(faults, name, tensor)
    require_memory(faults, name, tensor)
    return True


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last byte that `tensor` can touch."""
    first = tensor.data_ptr()
    return first, first + reach_of(tensor) * tensor.element_size()


def check_alias(bound: BoundTensors) -> None:
    """Outputs overlap nothing that the call reads, nor each other."""
    if bound.q.device.type == "meta" or bound.out.device.type == "meta":
        return  # no memory, or none that this call writes
    kv = bound.kv
    read = {
        "q": bound.q,
        "key": kv.key,
        "value": kv.value,
        "page_table": kv.page_table,
        "sequence_lengths": kv.kv_lens,
        "key_scale": kv.key_scale,
        "value_scale": kv.value_scale,
        "qo_indptr": bound.qo_indptr,
        "attn_sink": bound.attn_sink,
    }
    faults = Faults()
    for name, tensor in (*read.items(), ("out", bound.out), ("lse", bound.lse)):
        if tensor is None or tensor.device.type == "meta":
            continue
        if address_of(tensor) is None:
            rule = "a serving call takes tensors with memory, not inside torch.func transforms"
            faults.add(name, "transformed", rule, "stream_attention.train")
    faults.raise_if_any("attention")
    spans = {n: _span(t) for n, t in read.items() if t is not None and t.numel()}
    for name, tensor in (("out", bound.out), ("lse", bound.lse)):
        if tensor is None or not tensor.numel() or tensor.device.type == "meta":
            continue
        low, high = _span(tensor)
        for other, (first, last) in spans.items():
            if low < last and first < high:
                faults.add(
                    name,
                    f"overlaps {other}",
                    "must have memory of its own",
                    "torch.empty",
                )
        spans[name] = (low, high)
    faults.raise_if_any("attention")
