"""cuDNN's attention through FlashInfer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.contenders import Work, peer
from stream_attention.bench.peers import _flashinfer
from stream_attention.bench.peers._shared import kv_dtype_gaps
from stream_attention.bench.pools import Pool
from stream_attention.core.describe import MAX_VERIFY_QO_LEN


def _gaps(case: AttentionCase, device: torch.device) -> Iterator[str]:
    yield from _flashinfer.gaps(case, device)
    if case.is_decode or not case.contiguous:  # else the next line says it
        yield from kv_dtype_gaps(case)
    yield from _flashinfer.prefill_gaps(case)


@peer("flashinfer_cudnn", supports=_gaps, versions=_flashinfer.versions)
def build(case: AttentionCase, pools: Sequence[Pool], device: torch.device) -> list[Work]:
    """The decode wrapper for decode and verify over pages, else a prefill wrapper."""
    queries = case.uniform_q_len
    verify = queries is not None and queries <= MAX_VERIFY_QO_LEN and case.causal
    if case.is_decode or (verify and not case.contiguous):
        return _flashinfer.decode_works(case, pools, device, backend="cudnn", tensor_cores=False)
    return _flashinfer.prefill_works(case, pools, device, "cudnn")
