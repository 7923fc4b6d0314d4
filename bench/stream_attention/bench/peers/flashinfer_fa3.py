"""FlashInfer's fa3 kernels, written for Hopper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.contenders import Work, peer
from stream_attention.bench.peers import _flashinfer
from stream_attention.bench.peers._shared import kv_dtype_gaps
from stream_attention.bench.pools import Pool
from stream_attention.core.device import device_facts

_HEAD_DIMS = (64, 128, 256)
_ARCH = "sm_90"


def _gaps(case: AttentionCase, device: torch.device) -> Iterator[str]:
    yield from _flashinfer.gaps(case, device)
    if case.is_decode or not case.contiguous:  # else the next line says it
        yield from kv_dtype_gaps(case)
    yield from _flashinfer.prefill_gaps(case)
    if case.head_dim not in _HEAD_DIMS:
        nearest = min(_HEAD_DIMS, key=lambda dim: abs(dim - case.head_dim))
        yield f"head_dim={case.head_dim}: fa3 takes one of {_HEAD_DIMS}; use {nearest}"
    if device.type == "cuda" and device_facts(device).arch != _ARCH:
        yield f"device={device_facts(device).arch}: fa3 runs on {_ARCH} alone; use {_ARCH}"


@peer("flashinfer_fa3", supports=_gaps, versions=_flashinfer.versions)
def build(case: AttentionCase, pools: Sequence[Pool], device: torch.device) -> list[Work]:
    """The decode wrapper for one query a request, else a prefill wrapper, with `backend="fa3"`."""
    if case.is_decode:
        return _flashinfer.decode_works(case, pools, device, backend="fa3", tensor_cores=True)
    return _flashinfer.prefill_works(case, pools, device, "fa3")
