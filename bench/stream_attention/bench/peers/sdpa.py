"""torch's scaled dot product attention: with the kernel that it chooses, and with each forced.

`sdpa_gather` passes GQA to SDPA (`enable_gqa`). `sdpa_gather_packed` lays the query heads of a
group along the query axis instead, which is the same sum and lets SDPA read each K and V once a
group. The forced ones pack decode rows so and pass GQA elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.contenders import Build, Supports, Work, distribution_versions, peer
from stream_attention.bench.peers import _sdpa
from stream_attention.bench.peers._shared import cuda_gaps, half_gaps, one_query_gaps, row_gaps
from stream_attention.bench.pools import Pool

_NO_KERNEL = "No available kernel"  # torch's words where a forced backend refuses a call
_HEAD_DIM_STEP = 8


def _gaps(case: AttentionCase, device: torch.device) -> Iterator[str]:
    for reason in row_gaps(case, "SDPA"):
        if "a query a request" not in reason:  # a request without queries is no call
            yield reason


def _packed_gaps(case: AttentionCase, device: torch.device) -> Iterator[str]:
    yield from _gaps(case, device)
    yield from one_query_gaps(case)


@peer("sdpa_gather", supports=_gaps)
def build_gather(case: AttentionCase, pools: Sequence[Pool], device: torch.device) -> list[Work]:
    """SDPA with `enable_gqa`."""
    return [_sdpa.work(case, pool, _attend_gqa) for pool in pools]


@peer("sdpa_gather_packed", supports=_packed_gaps)
def build_packed(case: AttentionCase, pools: Sequence[Pool], device: torch.device) -> list[Work]:
    """SDPA with the group along the query axis."""
    return [_sdpa.work(case, pool, _attend_packed) for pool in pools]


def _attend_gqa(
    q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, piece: _sdpa.Piece
) -> torch.Tensor:
    """As `_sdpa.Attend` says."""
    mask = piece.mask
    if piece.seen == "lower_right" and mask is None:
        mask = causal_lower_right(q.shape[1], key.shape[2])
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        key,
        value,
        attn_mask=mask,
        is_causal=piece.seen == "square",
        enable_gqa=q.shape[2] != key.shape[1],
    )
    return out.transpose(1, 2)


def _attend_packed(
    q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, piece: _sdpa.Piece
) -> torch.Tensor:
    """As `_attend_gqa` with one query a request: the group is SDPA's query axis."""
    batch, _, heads, dim = q.shape
    packed = q.view(batch, key.shape[1], heads // key.shape[1], dim)
    out = scaled_dot_product_attention(packed, key, value, attn_mask=piece.mask)
    return out.reshape(batch, 1, heads, dim)


def _attend_repeated(
    q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, piece: _sdpa.Piece
) -> torch.Tensor:
    """As `_attend_gqa` with K and V repeated for every query head of a group: a copy of them."""
    group = q.shape[2] // key.shape[1]
    if group > 1:
        key, value = (store.repeat_interleave(group, dim=1) for store in (key, value))
    return _attend_gqa(q, key, value, piece)


def _forced(backend: SDPBackend, *, masks: bool, lower_right: bool, gqa: bool = True) -> Build:
    """A build with one of SDPA's backends. masks, lower_right: as in `_sdpa.work`.

    gqa: the backend takes fewer KV heads than query heads.
    """
    many = _attend_gqa if gqa else _attend_repeated

    def attend(
        q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, piece: _sdpa.Piece
    ) -> torch.Tensor:
        try:
            with sdpa_kernel(backend):
                return (_attend_packed if piece.queries == 1 else many)(q, key, value, piece)
        except RuntimeError as error:
            if _NO_KERNEL not in str(error):
                raise
            refused = f"{backend.name}: torch has no kernel of this backend for the call"
            raise NotImplementedError(refused) from error

    def build(case: AttentionCase, pools: Sequence[Pool], device: torch.device) -> list[Work]:
        on_gpu = device.type == "cuda"
        return [
            _sdpa.work(
                case, pool, attend, masks=masks or not on_gpu, lower_right=lower_right and on_gpu
            )
            for pool in pools
        ]

    return build


def _cuda_half_gaps(case: AttentionCase, device: torch.device) -> Iterator[str]:
    """Reasons of the backends with 16-bit kernels for GPUs."""
    yield from _gaps(case, device)
    yield from half_gaps(case, "this backend")
    yield from _dim_gaps(case)


def _flash_gaps(case: AttentionCase, device: torch.device) -> Iterator[str]:
    """Reasons of the flash backend, which torch has for CPUs too."""
    if device.type == "cuda":
        yield from _cuda_half_gaps(case, device)
        if case.head_dim > 256:
            yield f"head_dim={case.head_dim}: flash takes at most 256; use 256"
    else:
        yield from _gaps(case, device)


def _cudnn_gaps(case: AttentionCase, device: torch.device) -> Iterator[str]:
    yield from cuda_gaps(device, "cuDNN")
    yield from _cuda_half_gaps(case, device)


def _efficient_gaps(case: AttentionCase, device: torch.device) -> Iterator[str]:
    yield from cuda_gaps(device, "the memory-efficient backend")
    yield from _gaps(case, device)
    yield from _dim_gaps(case)


def _dim_gaps(case: AttentionCase) -> Iterator[str]:
    if case.head_dim % _HEAD_DIM_STEP:
        nearest = -(-case.head_dim // _HEAD_DIM_STEP) * _HEAD_DIM_STEP
        yield f"head_dim={case.head_dim}: must be a multiple of {_HEAD_DIM_STEP}; use {nearest}"


def _versions() -> dict[str, str]:
    found = distribution_versions("torch")
    if torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def _register(name: str, supports: Supports, build: Build) -> None:
    peer(name, supports=supports, versions=_versions)(build)


_register(
    "sdpa_flash",
    _flash_gaps,
    _forced(SDPBackend.FLASH_ATTENTION, masks=False, lower_right=True),
)
_register(
    "sdpa_cudnn",
    _cudnn_gaps,
    _forced(SDPBackend.CUDNN_ATTENTION, masks=True, lower_right=False),
)
_register(
    "sdpa_efficient",
    _efficient_gaps,
    _forced(SDPBackend.EFFICIENT_ATTENTION, masks=True, lower_right=True, gqa=False),
)
_register("sdpa_math", _gaps, _forced(SDPBackend.MATH, masks=True, lower_right=False))
