"""FlashInfer's `BatchAttention`: one persistent kernel over a balanced work list."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.contenders import Work, peer
from stream_attention.bench.peers import _flashinfer
from stream_attention.bench.peers._shared import kv_dtype_gaps
from stream_attention.bench.pools import Pool
from stream_attention.core.dtypes import torch_dtype

_MAX_HEAD_DIM = 256


def _gaps(case: AttentionCase, device: torch.device) -> Iterator[str]:
    yield from _flashinfer.gaps(case, device)
    yield from _flashinfer.paged_gaps(case)
    yield from kv_dtype_gaps(case)
    if case.head_dim > _MAX_HEAD_DIM:
        yield f"head_dim={case.head_dim}: at most {_MAX_HEAD_DIM}; use {_MAX_HEAD_DIM}"


@peer("flashinfer_holistic", supports=_gaps, versions=_flashinfer.versions)
def build(case: AttentionCase, pools: Sequence[Pool], device: torch.device) -> list[Work]:
    """One `BatchAttention` a pool, planned here; it has a workspace of its own."""
    dtype = torch_dtype(case.dtype)
    works = []
    for pool in pools:
        indptr, indices, _ = _flashinfer.csr(case, pool)
        attention = _flashinfer.module().BatchAttention(kv_layout=case.layout, device=str(device))
        attention.plan(
            _flashinfer.query_offsets(case).to(device),
            indptr.to(device),
            indices.to(device),
            pool.cache.sequence_lengths,
            case.num_qo_heads,
            case.num_kv_heads,
            case.head_dim,
            case.head_dim,
            case.page_size,
            causal=case.causal and not case.is_decode,
            sm_scale=case.head_dim**-0.5,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        out = torch.empty_like(pool.q)
        lse = torch.empty(pool.q.shape[:2], dtype=torch.float32, device=device)
        run = functools.partial(
            attention.run, pool.q, (pool.cache.key, pool.cache.value), out=out, lse=lse
        )
        works.append(Work(run=run, out=out))
    return works
