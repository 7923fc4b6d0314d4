"""FlashInfer's paged decode, each kernel family as one peer at its best known setting.

Written against FlashInfer 0.7.4. Where the package is missing the peers stay registered and give
the reason, so that a report says what it was not compared with. The wrappers are planned in their
CUDA-graph mode, because our routes too let lengths change under a graph.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType

import torch

from stream_attention.bench.cases import FP8, DecodeCase
from stream_attention.bench.contenders import Work, peer
from stream_attention.bench.pools import KEY_SCALE, VALUE_SCALE, Pool
from stream_attention.core.dtypes import torch_dtype

# XQA keeps semaphores in its first 8 MiB. The wrappers' recommended size is 128 MiB; every pool has
# its own, because the plan lives there.
_XQA_WORKSPACE_BYTES = 128 << 20
_WRAPPER_WORKSPACE_BYTES = 128 << 20
_XQA_PAGE_SIZES = (16, 32, 64, 128)


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module("flashinfer"), ""
    except ModuleNotFoundError as error:
        return None, f"flashinfer is not installed ({error})"
    except Exception as error:  # a broken install: an ABI mismatch, a missing driver
        return None, f"flashinfer failed to import: {type(error).__name__}: {error}"


def _supports(case: DecodeCase, device: torch.device) -> tuple[str, ...]:
    reasons = []
    if device.type != "cuda":
        reasons.append(f"device={device.type}: FlashInfer needs CUDA; use cuda")
    module, reason = _load()
    if module is None:
        reasons.append(reason)
    if case.dtype not in ("bfloat16", "float16"):
        reasons.append(f"dtype={case.dtype}: FlashInfer takes bfloat16 and float16; use bfloat16")
    if case.contiguous:
        reasons.append("cache=contiguous: FlashInfer's wrappers read pages; use paged")
    if min(case.kv_lens) == 0:
        reasons.append("lengths: a request without tokens is not planned; use lengths >= 1")
    return tuple(reasons)


def _one_query(case: DecodeCase, device: torch.device) -> tuple[str, ...]:
    extra = () if case.q_len == 1 else (f"q_len={case.q_len}: one query a request; use 1",)
    return (*_supports(case, device), *extra)


def _same_dtype(case: DecodeCase, device: torch.device) -> tuple[str, ...]:
    extra: tuple[str, ...] = ()
    if case.stored_dtype != case.dtype:
        extra = (f"kv_dtype={case.stored_dtype}: K and V in q's dtype only; use {case.dtype}",)
    return (*_supports(case, device), *extra)


def _xqa(case: DecodeCase, device: torch.device) -> tuple[str, ...]:
    reasons = list(_one_query(case, device))
    if not case.contiguous and case.page_size not in _XQA_PAGE_SIZES:
        nearest = min(_XQA_PAGE_SIZES, key=lambda size: abs(size - case.page_size))
        reasons.append(f"page_size={case.page_size}: one of {_XQA_PAGE_SIZES}; use {nearest}")
    return tuple(reasons)


@peer("flashinfer_fa2_cuda_core", supports=_one_query)
def build_fa2_cuda_core(
    case: DecodeCase, pools: Sequence[Pool], device: torch.device
) -> list[Work]:
    """The decode kernel without tensor cores."""
    return _wrapper(case, pools, device, backend="fa2", tensor_cores=False)


@peer("flashinfer_fa2_tensor_core", supports=_supports)
def build_fa2_tensor_core(
    case: DecodeCase, pools: Sequence[Pool], device: torch.device
) -> list[Work]:
    """The prefill kernel on decode rows."""
    return _wrapper(case, pools, device, backend="fa2", tensor_cores=True)


@peer("flashinfer_cudnn", supports=_same_dtype)
def build_cudnn(case: DecodeCase, pools: Sequence[Pool], device: torch.device) -> list[Work]:
    """cuDNN's paged SDPA through FlashInfer."""
    return _wrapper(case, pools, device, backend="cudnn", tensor_cores=False)


@peer("flashinfer_xqa", supports=_xqa)
def build_xqa(case: DecodeCase, pools: Sequence[Pool], device: torch.device) -> list[Work]:
    """TensorRT-LLM's XQA. Beside fp8 K and V it rounds q to fp8 too, which the oracle judges."""
    module, _ = _load()
    assert module is not None
    decode = importlib.import_module("flashinfer.decode")
    scales = _scales(case)
    works = []
    for pool in pools:
        table = _dense_table(case, pool)
        workspace = torch.zeros(_XQA_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        out = torch.empty_like(pool.q)
        run = functools.partial(
            decode.xqa_batch_decode_with_kv_cache,
            pool.q,
            (pool.cache.key, pool.cache.value),
            workspace,
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


@peer("flashinfer_holistic", supports=_same_dtype)
def build_holistic(case: DecodeCase, pools: Sequence[Pool], device: torch.device) -> list[Work]:
    """`BatchAttention`: one persistent kernel over a balanced work list."""
    module, _ = _load()
    assert module is not None
    dtype = torch_dtype(case.dtype)
    works = []
    for pool in pools:
        indptr, indices, _ = _csr(case, pool)
        queries = torch.arange(case.batch + 1, dtype=torch.int32) * case.q_len
        attention = module.BatchAttention(kv_layout=case.layout, device=str(device))
        attention.plan(
            queries.to(device),
            indptr.to(device),
            indices.to(device),
            pool.cache.sequence_lengths,
            case.num_qo_heads,
            case.num_kv_heads,
            case.head_dim,
            case.head_dim,
            case.page_size,
            causal=case.q_len > 1,
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


def _wrapper(
    case: DecodeCase,
    pools: Sequence[Pool],
    device: torch.device,
    *,
    backend: str,
    tensor_cores: bool,
) -> list[Work]:
    """One wrapper a pool, planned here; `run` is the wrapper's own, into our output."""
    module, _ = _load()
    assert module is not None
    works = []
    for pool in pools:
        indptr, indices, last = _csr(case, pool)
        buffers = [tensor.to(device) for tensor in (indptr, indices, last)]
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(_WRAPPER_WORKSPACE_BYTES, dtype=torch.uint8, device=device),
            kv_layout=case.layout,
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores,
            paged_kv_indptr_buffer=buffers[0],
            paged_kv_indices_buffer=buffers[1],
            paged_kv_last_page_len_buffer=buffers[2],
            backend=backend,
        )
        dtype = torch_dtype(case.dtype)
        options = {"q_data_type": dtype, "kv_data_type": torch_dtype(case.stored_dtype)}
        if case.q_len > 1:
            options["q_len_per_req"] = case.q_len
        if backend == "cudnn":
            options["block_tables"] = _dense_table(case, pool)
        wrapper.plan(
            indptr,
            buffers[1].clone(),
            last,
            case.num_qo_heads,
            case.num_kv_heads,
            case.head_dim,
            case.page_size,
            **options,
        )
        out = torch.empty_like(pool.q)
        store = (pool.cache.key, pool.cache.value)
        run = functools.partial(wrapper.run, pool.q, store, out=out, **_scales(case))
        works.append(Work(run=run, out=out))
    return works


def _scales(case: DecodeCase) -> dict[str, float]:
    """Scales of fp8 K and V on the host, as FlashInfer takes them; none for other dtypes."""
    if case.stored_dtype != FP8:
        return {}
    return {"k_scale": KEY_SCALE, "v_scale": VALUE_SCALE}


def _csr(case: DecodeCase, pool: Pool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Page offsets, page ids and tokens in each last page, int32 on the host."""
    used = torch.tensor([-(-n // case.page_size) for n in case.kv_lens])
    indptr = torch.zeros(case.batch + 1, dtype=torch.int32)
    indptr[1:] = used.cumsum(0)
    live = torch.arange(case.max_pages) < used.unsqueeze(1)
    indices = pool.page_table.cpu()[live]
    last = torch.tensor([(n - 1) % case.page_size + 1 for n in case.kv_lens], dtype=torch.int32)
    return indptr, indices, last


def _dense_table(case: DecodeCase, pool: Pool) -> torch.Tensor:
    """The page table with page 0 in place of ids past a request's pages, which peers may read."""
    used = torch.tensor([-(-n // case.page_size) for n in case.kv_lens])
    live = torch.arange(case.max_pages) < used.unsqueeze(1)
    table = pool.page_table.cpu()
    return torch.where(live, table, torch.zeros_like(table)).to(pool.cache.key.device)
