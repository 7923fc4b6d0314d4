"""FlashInfer's fa2 kernels on tensor cores: decode rows, prefill, and both in one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.contenders import Work, peer
from stream_attention.bench.peers import _flashinfer
from stream_attention.bench.pools import Pool


def _gaps(case: AttentionCase, device: torch.device) -> Iterator[str]:
    yield from _flashinfer.gaps(case, device)
    yield from _flashinfer.prefill_gaps(case)


@peer("flashinfer_fa2_tensor_core", supports=_gaps, versions=_flashinfer.versions)
def build(case: AttentionCase, pools: Sequence[Pool], device: torch.device) -> list[Work]:
    """The decode wrapper for one query a request, else a prefill wrapper, with `backend="fa2"`."""
    if case.is_decode:
        return _flashinfer.decode_works(case, pools, device, backend="fa2", tensor_cores=True)
    return _flashinfer.prefill_works(case, pools, device, "fa2")
