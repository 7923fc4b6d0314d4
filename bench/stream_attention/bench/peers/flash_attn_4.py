"""FlashAttention-4, the CuTe kernels of the package flash-attn-4; written against 4.0.0b36.

On sm_90 it does not split K and V, so that a decode of few requests leaves most of the GPU idle.
Pages of any size are read; those of one key tile go through TMA. Its calls return a fresh output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.contenders import Work, distribution_versions, peer
from stream_attention.bench.peers._shared import (
    cuda_gaps,
    dense_table,
    half_gaps,
    kv_dtype_gaps,
    load,
    loaded,
    row_gaps,
)
from stream_attention.bench.pools import Pool
from stream_attention.core.cache import PagedKVCache
from stream_attention.core.device import device_facts

PACKAGE = "FlashAttention-4"
_MODULE, _DISTRIBUTION = "flash_attn.cute.interface", "flash-attn-4"
_ARCHS = ("sm_90", "sm_100", "sm_103", "sm_110")  # those with kernels for pages
_MAX_HEAD_DIM = 256
_ALIGNED_DIM = 8  # head_dim of 16-bit K and V in units of 16 bytes
_PAGED_DIM = 16  # pages that are no key tile are copied without a check of the head dim's end


def _versions() -> dict[str, str]:
    return distribution_versions(_DISTRIBUTION, "nvidia-cutlass-dsl", "quack-kernels", "torch")


def _gaps(case: AttentionCase, device: torch.device) -> Iterator[str]:
    yield from cuda_gaps(device, PACKAGE)
    found, reason = load(_MODULE, _DISTRIBUTION)
    if found is None:
        yield reason
    if device.type == "cuda" and device_facts(device).arch not in _ARCHS:
        yield f"device={device_facts(device).arch}: one of {', '.join(_ARCHS)}; use sm_90"
    yield from half_gaps(case, PACKAGE)
    yield from kv_dtype_gaps(case)
    yield from row_gaps(case, PACKAGE)
    step = _ALIGNED_DIM if case.contiguous else _PAGED_DIM
    if case.head_dim > _MAX_HEAD_DIM or case.head_dim % step:
        nearest = min(_MAX_HEAD_DIM, -(-case.head_dim // step) * step)
        yield (
            f"head_dim={case.head_dim}: a multiple of {step}, at most {_MAX_HEAD_DIM}; "
            f"use {nearest}"
        )


@peer("flash_attn_4", supports=_gaps, versions=_versions)
def build(case: AttentionCase, pools: Sequence[Pool], device: torch.device) -> list[Work]:
    """`flash_attn_func` where every row of a contiguous cache is full, else the varlen function."""
    return [_work(pool, _call(case, pool)) for pool in pools]


def _work(pool: Pool, call: Callable[[], Any]) -> Work:
    latest: list[torch.Tensor] = []

    def run() -> None:
        found = call()
        latest[:] = [found[0] if isinstance(found, tuple) else found]

    return Work(run=run, output=lambda: latest[0].view(pool.q.shape))


def _call(case: AttentionCase, pool: Pool) -> Callable[[], Any]:
    interface = loaded(_MODULE, _DISTRIBUTION)
    key, value = (_token_major(case, store) for store in (pool.cache.key, pool.cache.value))
    options: dict[str, Any] = {"softmax_scale": case.head_dim**-0.5, "causal": case.causal}
    q, packed = pool.q, case.uniform_q_len is None
    if not packed:
        q = q.view(case.batch, case.max_q_len, case.num_qo_heads, case.head_dim)
    if case.contiguous and not packed and set(case.kv_lens) == {case.max_tokens}:
        return functools.partial(interface.flash_attn_func, q, key, value, **options)
    if packed:
        options["cu_seqlens_q"] = pool.qo_indptr
        options["max_seqlen_q"] = case.max_q_len
    if isinstance(pool.cache, PagedKVCache):
        options["page_table"] = dense_table(case, pool)
    return functools.partial(
        interface.flash_attn_varlen_func,
        q,
        key,
        value,
        seqused_k=pool.cache.sequence_lengths,
        max_seqlen_k=max(case.kv_lens),
        **options,
    )


def _token_major(case: AttentionCase, store: torch.Tensor) -> torch.Tensor:
    """K or V as `[pages, tokens, heads, head_dim]`: a view, whose strides the kernels take."""
    return store if case.layout == "NHD" else store.transpose(1, 2)
