"""TensorRT-LLM's XQA through FlashInfer. Beside fp8 K and V it rounds q to fp8 too."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.contenders import Work, peer
from stream_attention.bench.peers import _flashinfer
from stream_attention.bench.peers._shared import dense_table, loaded, one_query_gaps
from stream_attention.bench.pools import Pool

# It keeps semaphores in the first 8 MiB, zero before the first use.
_WORKSPACE_BYTES = 128 << 20
_PAGE_SIZES = (16, 32, 64, 128)


def _gaps(case: AttentionCase, device: torch.device) -> Iterator[str]:
    yield from _flashinfer.gaps(case, device)
    yield from _flashinfer.paged_gaps(case)
    yield from one_query_gaps(case)
    if not case.contiguous and case.page_size not in _PAGE_SIZES:
        nearest = min(_PAGE_SIZES, key=lambda size: abs(size - case.page_size))
        yield f"page_size={case.page_size}: one of {_PAGE_SIZES}; use {nearest}"


@peer("flashinfer_xqa", supports=_gaps, versions=_flashinfer.versions)
def build(case: AttentionCase, pools: Sequence[Pool], device: torch.device) -> list[Work]:
    """`xqa_batch_decode_with_kv_cache`, into our output."""
    decode = loaded("flashinfer.decode", "flashinfer-python")
    scales = _flashinfer.scales(case)
    works = []
    for pool in pools:
        table = dense_table(case, pool)
        out = torch.empty_like(pool.q)
        run = functools.partial(
            decode.xqa_batch_decode_with_kv_cache,
            pool.q,
            (pool.cache.key, pool.cache.value),
            torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device),
            table,
            pool.cache.sequence_lengths,
            table.shape[1] * case.page_size,
            bmm1_scale=case.head_dim**-0.5 * scales.get("k_scale", 1.0),
            bmm2_scale=scales.get("v_scale", 1.0),
            out=out,
            kv_layout=case.layout,
        )
        works.append(Work(run=run, out=out))
    return works
