"""FlashInfer's wrappers, planned and bound to pools: what its peers, one a file, are made of.

Written against FlashInfer 0.7.4. Where the package is missing the peers stay registered and give
the reason, so that a report says what it was not compared with. The wrappers are planned in their
CUDA-graph mode, because our routes too let lengths change under a graph. One query a request goes
through the decode wrapper, other paged calls through the prefill wrapper, and contiguous K and V
through the ragged one, which reads them where they lie.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from stream_attention.bench.cases import FP8, AttentionCase
from stream_attention.bench.contenders import Work, distribution_versions
from stream_attention.bench.peers._shared import (
    cuda_gaps,
    dense_table,
    half_gaps,
    kv_dtype_gaps,
    live_pages,
    load,
    loaded,
    row_gaps,
)
from stream_attention.bench.pools import KEY_SCALE, VALUE_SCALE, Pool
from stream_attention.core.dtypes import torch_dtype

PACKAGE = "FlashInfer"
# The decode wrapper's recommended size. The prefill wrappers keep fp32 partial outputs of whole
# query tiles there: 270 MiB for 16K queries of 32/8 heads of 128, and they refuse less.
_DECODE_WORKSPACE_BYTES = 128 << 20
_PREFILL_WORKSPACE_BYTES = 512 << 20


def module() -> ModuleType:
    """`flashinfer`, for a case without reasons."""
    return loaded("flashinfer", "flashinfer-python")


def versions() -> dict[str, str]:
    """Versions of FlashInfer, of what it computes with, and of torch."""
    found = distribution_versions(
        "flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache", "nvidia-cudnn-frontend"
    )
    flashinfer, _ = load("flashinfer", "flashinfer-python")
    if flashinfer is not None:  # also where it lies on the path without a distribution's record
        found.setdefault("flashinfer-python", str(flashinfer.__version__))
    return {**found, **distribution_versions("torch")}


def gaps(case: AttentionCase, device: torch.device) -> Iterator[str]:
    """Reasons that all of FlashInfer's peers share."""
    yield from cuda_gaps(device, PACKAGE)
    found, reason = load("flashinfer", "flashinfer-python")
    if found is None:
        yield reason
    yield from half_gaps(case, PACKAGE)
    yield from row_gaps(case, PACKAGE)


def paged_gaps(case: AttentionCase) -> Iterator[str]:
    """Reasons of kernels that read pages alone."""
    if case.contiguous:
        yield "cache=contiguous: FlashInfer reads pages here; use paged"


def prefill_gaps(case: AttentionCase) -> Iterator[str]:
    """Reasons of kernels that read pages, and contiguous K and V where they are ragged tensors."""
    if case.is_decode:
        yield from paged_gaps(case)
        return
    if not case.contiguous:
        return
    if case.layout != "NHD":
        yield f"layout={case.layout}: ragged K and V are [tokens, heads, head_dim]; use NHD"
    if any(n != case.max_tokens for n in case.kv_lens[:-1]):
        yield (
            f"lengths={case.lengths}: ragged K and V follow each other without a gap; use "
            f"lengths={case.max_tokens}"
        )
    yield from kv_dtype_gaps(case)


def decode_works(
    case: AttentionCase,
    pools: Sequence[Pool],
    device: torch.device,
    *,
    backend: str,
    tensor_cores: bool,
) -> list[Work]:
    """The decode wrapper, one a pool, planned here; `run` is its own, into our output."""
    works = []
    for pool in pools:
        indptr, indices, last = csr(case, pool)
        buffers = [tensor.to(device) for tensor in (indptr, indices, last)]
        wrapper = module().BatchDecodeWithPagedKVCacheWrapper(
            _workspace(_DECODE_WORKSPACE_BYTES, device),
            kv_layout=case.layout,
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores,
            paged_kv_indptr_buffer=buffers[0],
            paged_kv_indices_buffer=buffers[1],
            paged_kv_last_page_len_buffer=buffers[2],
            backend=backend,
        )
        options: dict[str, Any] = _dtypes(case)
        if case.max_q_len > 1:
            options["q_len_per_req"] = case.uniform_q_len
        if backend == "cudnn":
            options["block_tables"] = dense_table(case, pool)
        # The plan copies page ids into the buffer, so they come from another place.
        indices_given = buffers[1].clone()
        wrapper.plan(indptr, indices_given, last, *_heads(case), case.page_size, **options)
        works.append(_paged_work(case, pool, wrapper))
    return works


def prefill_works(
    case: AttentionCase, pools: Sequence[Pool], device: torch.device, backend: str
) -> list[Work]:
    """The prefill wrapper over pages, or over contiguous K and V as ragged tensors."""
    bind = _ragged_work if case.contiguous else _prefill_work
    return [bind(case, pool, device, backend) for pool in pools]


def _prefill_work(case: AttentionCase, pool: Pool, device: torch.device, backend: str) -> Work:
    indptr, indices, last = csr(case, pool)
    queries = query_offsets(case)
    buffers = [tensor.to(device) for tensor in (queries, indptr, indices, last)]
    wrapper = module().BatchPrefillWithPagedKVCacheWrapper(
        _workspace(_PREFILL_WORKSPACE_BYTES, device),
        kv_layout=case.layout,
        use_cuda_graph=True,
        qo_indptr_buf=buffers[0],
        paged_kv_indptr_buf=buffers[1],
        paged_kv_indices_buf=buffers[2],
        paged_kv_last_page_len_buf=buffers[3],
        backend=backend,
    )
    options = _prefill_options(case, backend)
    if backend == "cudnn":
        options["block_tables"] = dense_table(case, pool)
    wrapper.plan(
        queries, indptr, buffers[2].clone(), last, *_heads(case), case.page_size, **options
    )
    return _paged_work(case, pool, wrapper)


def _ragged_work(case: AttentionCase, pool: Pool, device: torch.device, backend: str) -> Work:
    queries = query_offsets(case)
    starts = torch.tensor([0, *case.kv_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    wrapper = module().BatchPrefillWithRaggedKVCacheWrapper(
        _workspace(_PREFILL_WORKSPACE_BYTES, device),
        kv_layout=case.layout,
        use_cuda_graph=True,
        qo_indptr_buf=queries.to(device),
        kv_indptr_buf=starts.to(device),
        backend=backend,
    )
    wrapper.plan(queries, starts, *_heads(case), **_prefill_options(case, backend))
    total = int(starts[-1])
    key, value = (store.flatten(0, 1)[:total] for store in (pool.cache.key, pool.cache.value))
    out = torch.empty_like(pool.q)
    run = functools.partial(wrapper.run, pool.q, key, value, out=out)
    return Work(run=run, out=out, note="ragged")


def _prefill_options(case: AttentionCase, backend: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        "causal": case.causal,
        "sm_scale": case.head_dim**-0.5,
        **_dtypes(case),
    }
    if backend == "fa2" and case.uniform_q_len is not None:
        # Without it a graph plan takes query tiles for the raggedest batch of as many rows.
        options["uniform_q_len"] = case.uniform_q_len
    return options


def _paged_work(case: AttentionCase, pool: Pool, wrapper: Any) -> Work:
    out = torch.empty_like(pool.q)
    store = (pool.cache.key, pool.cache.value)
    run = functools.partial(wrapper.run, pool.q, store, out=out, **scales(case))
    return Work(run=run, out=out)


def _workspace(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _heads(case: AttentionCase) -> tuple[int, int, int]:
    return case.num_qo_heads, case.num_kv_heads, case.head_dim


def _dtypes(case: AttentionCase) -> dict[str, torch.dtype]:
    return {"q_data_type": torch_dtype(case.dtype), "kv_data_type": torch_dtype(case.stored_dtype)}


def scales(case: AttentionCase) -> dict[str, float]:
    """Scales of fp8 K and V on the host, as FlashInfer takes them; none for other dtypes."""
    if case.stored_dtype != FP8:
        return {}
    return {"k_scale": KEY_SCALE, "v_scale": VALUE_SCALE}


def query_offsets(case: AttentionCase) -> torch.Tensor:
    """`[batch + 1]` int32 on the host: where the queries of each request start."""
    return torch.tensor(case.q_offsets, dtype=torch.int32)


def csr(case: AttentionCase, pool: Pool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Page offsets, page ids and tokens in each last page, int32 on the host."""
    live = live_pages(case)
    indptr = torch.zeros(case.batch + 1, dtype=torch.int32)
    indptr[1:] = live.sum(1).cumsum(0)
    indices = pool.page_table.cpu()[live]
    last = torch.tensor([(n - 1) % case.page_size + 1 for n in case.kv_lens], dtype=torch.int32)
    return indptr, indices, last
