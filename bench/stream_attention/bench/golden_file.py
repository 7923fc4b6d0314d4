"""The oracle's answer of a case in a file, for processes that make the same inputs from one seed.

The file holds a digest of the inputs that were judged; who made other ones, such as with another
version of torch, gets no answer from it and runs the oracle for himself.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from stream_attention.bench.check import Expected, Run
from stream_attention.bench.pools import Pool
from stream_attention.core.testing.golden import Golden

_WORDS_AT_ONCE = 1 << 26
_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def save(expected: Sequence[Expected], path: Path) -> None:
    """Write what the oracle said of these pools, in fp64 as it said it. Syncs."""
    entries = [
        {
            "digest": digest(answer.pool),
            "runs": [(run.request, run.start, run.stop) for run in answer.runs],
            "golden": {
                field.name: _on_host(getattr(answer.golden, field.name))
                for field in dataclasses.fields(Golden)
            },
        }
        for answer in expected
    ]
    torch.save(entries, path)


def load(pools: Sequence[Pool], path: Path) -> list[Expected] | None:
    """The answers for `pools`, in that order; `None` where their inputs are not those judged.

    `pools` hold what `build_pools` put there. Syncs.
    """
    entries = torch.load(path, map_location="cpu", weights_only=True)
    if [entry["digest"] for entry in entries] != [digest(pool) for pool in pools]:
        return None
    answers = []
    for entry, pool in zip(entries, pools, strict=True):
        device = pool.q.device
        fields = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in entry["golden"].items()
        }
        runs = tuple(Run(*run) for run in entry["runs"])
        answers.append(Expected(pool, runs, Golden(**fields)))
    return answers


def _on_host(value: object) -> object:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def digest(pool: Pool) -> str:
    """A hash of q, the cache's metadata and sums of K and V, all by their bits. Syncs."""
    found = hashlib.sha256(repr((pool.case, pool.kv_lens)).encode())
    for name in ("page_table", "sequence_lengths", "key_scale", "value_scale"):
        tensor = getattr(pool.cache, name, None)
        if isinstance(tensor, torch.Tensor):
            found.update(_bytes(tensor))
    found.update(_bytes(pool.q))
    for tensor in (pool.cache.key, pool.cache.value):
        found.update(repr((tuple(tensor.shape), str(tensor.dtype), _sum(tensor))).encode())
    return found.hexdigest()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_BY_SIZE[tensor.element_size()])


def _bytes(tensor: torch.Tensor) -> bytes:
    """What the elements are made of, in order; torch's own way to bytes needs numpy."""
    there = tensor.contiguous().cpu()
    return ctypes.string_at(there.data_ptr(), there.nbytes) if there.numel() else b""


def _sum(tensor: torch.Tensor) -> int:
    """The elements' bits summed as integers, part by part: torch widens what it sums."""
    parts = _bits(tensor).flatten().split(_WORDS_AT_ONCE)
    return int(torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum())
