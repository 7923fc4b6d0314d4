"""What peers share: reasons why a case cannot be served, and tables that they may read whole."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from types import ModuleType

import torch

from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.pools import Pool


@functools.cache
def load(module: str, package: str) -> tuple[ModuleType | None, str]:
    """An optional module, or `None` and the reason; `package` is what a user installs."""
    try:
        return importlib.import_module(module), ""
    except ModuleNotFoundError as error:
        return None, f"{package} is not installed ({error})"
    except Exception as error:  # a broken install: an ABI mismatch, a missing driver
        return None, f"{package} failed to import: {type(error).__name__}: {error}"


def loaded(module: str, package: str) -> ModuleType:
    """A module whose absence was a reason already; `ImportError` where it is absent after all."""
    found, reason = load(module, package)
    if found is None:
        raise ImportError(reason)
    return found


def row_gaps(case: AttentionCase, package: str) -> Iterator[str]:
    """Reasons of peers for which every row must see a token."""
    if min(case.kv_lens) == 0:
        yield f"lengths={case.lengths}: {package} needs a token a request; use lengths >= 1"
    elif case.causal and any(m > n for m, n in zip(case.q_lens, case.kv_lens, strict=True)):
        asked = f"q_len={case.q_len}" if case.q_lengths is None else f"q_lengths={case.q_lengths}"
        yield f"{asked}: {package} needs a token a row; use q_len <= lengths"
    if min(case.q_lens) == 0:
        yield f"q_lengths={case.q_lengths}: {package} needs a query a request; use q_lengths >= 1"


def half_gaps(case: AttentionCase, package: str) -> Iterator[str]:
    """Reasons of peers that compute in 16 bits."""
    if case.dtype not in ("bfloat16", "float16"):
        yield f"dtype={case.dtype}: {package} takes bfloat16 and float16; use bfloat16"


def kv_dtype_gaps(case: AttentionCase) -> Iterator[str]:
    """Reasons of peers that read K and V in the dtype of q."""
    if case.stored_dtype != case.dtype:
        yield f"kv_dtype={case.stored_dtype}: K and V in q's dtype only; use {case.dtype}"


def cuda_gaps(device: torch.device, package: str) -> Iterator[str]:
    """Reasons of peers that run on a GPU."""
    if device.type != "cuda":
        yield f"device={device.type}: {package} needs CUDA; use cuda"


def live_pages(case: AttentionCase) -> torch.Tensor:
    """`[batch, max_pages]` bool on the host: table entries that hold a page of the request."""
    used = torch.tensor([-(-n // case.page_size) for n in case.kv_lens])
    return torch.arange(case.max_pages) < used.unsqueeze(1)


def dense_table(case: AttentionCase, pool: Pool) -> torch.Tensor:
    """The page table with page 0 in place of ids past a request's pages, which peers may read."""
    table = pool.page_table.cpu()
    return torch.where(live_pages(case), table, torch.zeros_like(table)).to(pool.cache.key.device)


def one_query_gaps(case: AttentionCase) -> Iterator[str]:
    """Reasons of kernels for decode alone."""
    if case.is_decode:
        return
    if case.q_lengths is None:
        yield f"q_len={case.q_len}: one query a request; use 1"
    else:
        yield f"q_lengths={case.q_lengths}: one query a request; use 1"
