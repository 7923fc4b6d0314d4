"""FlashInfer's decode kernel without tensor cores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.contenders import Work, peer
from stream_attention.bench.peers import _flashinfer
from stream_attention.bench.peers._shared import one_query_gaps
from stream_attention.bench.pools import Pool

_GROUPS = (1, 2, 3, 4, 6, 8, 16)  # query heads of a KV head that it is compiled for


def _gaps(case: AttentionCase, device: torch.device) -> Iterator[str]:
    yield from _flashinfer.gaps(case, device)
    yield from _flashinfer.paged_gaps(case)
    yield from one_query_gaps(case)
    group = case.num_qo_heads // case.num_kv_heads
    if group not in _GROUPS:
        nearest = min(_GROUPS, key=lambda size: abs(size - group)) * case.num_kv_heads
        yield (
            f"num_qo_heads={case.num_qo_heads}: a KV head serves one of {_GROUPS} query heads "
            f"here; use {nearest}"
        )


@peer("flashinfer_fa2_cuda_core", supports=_gaps, versions=_flashinfer.versions)
def build(case: AttentionCase, pools: Sequence[Pool], device: torch.device) -> list[Work]:
    """The decode wrapper with `backend="fa2"`, tensor cores off."""
    return _flashinfer.decode_works(case, pools, device, backend="fa2", tensor_cores=False)
