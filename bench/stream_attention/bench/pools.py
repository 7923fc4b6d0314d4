"""Real inputs for a case: random K and V in a shuffled paged pool, with poison in unused slots.

A pool is one set of inputs. Several pools of the same case form the rotation that keeps a
measurement cold; they differ in content and page order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stream_attention.bench.cases import DecodeCase
from stream_attention.bench.machine import available_bytes, cold_rotation_bytes
from stream_attention.core.cache import PagedKVCache
from stream_attention.core.dtypes import dtype_bytes, torch_dtype
from stream_attention.core.errors import Fault

# Pools share the memory with the contenders' outputs, gathers and the oracle.
_MEMORY_SHARE = 0.6
_SPARE_PAGES = 3  # pages that no request uses, full of poison


class NotEnoughMemory(ValueError):
    """The case's pools do not fit the device."""


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """One bound set of inputs.

    case: what was built. q: `[batch * q_len, num_qo_heads, head_dim]`, contiguous.
    cache: the paged cache. kv_lens: lengths on the host.
    unused_pages: `[n]` int64, pages of no request. tail_pages, tail_starts: pages whose slots from
    `start` on are unused (the last, part-filled page of a request).
    """

    case: DecodeCase
    q: torch.Tensor
    cache: PagedKVCache
    kv_lens: tuple[int, ...]
    unused_pages: torch.Tensor
    tail_pages: tuple[int, ...]
    tail_starts: tuple[int, ...]

    def fill_unused(self, value: float) -> None:
        """Write `value` into every slot of K and V that holds no token of any request."""
        for tensor in (self.cache.key, self.cache.value):
            pages = tensor if self.case.layout == "NHD" else tensor.transpose(1, 2)
            pages[self.unused_pages] = value
            for page, start in zip(self.tail_pages, self.tail_starts, strict=True):
                pages[page, start:] = value


def pool_bytes(case: DecodeCase) -> int:
    """Bytes of one pool: K and V in whole pages, spare ones counted, page table, q and output."""
    pages = sum(-(-n // case.page_size) for n in case.kv_lens) + _SPARE_PAGES
    row = 2 * case.num_kv_heads * case.head_dim * dtype_bytes(case.dtype)
    q = case.num_rows * case.num_qo_heads * case.head_dim * dtype_bytes(case.dtype)
    return pages * case.page_size * row + 4 * case.batch * case.max_pages + 2 * q


def num_pools(case: DecodeCase, device: torch.device, cold: bool = True) -> int:
    """Pools whose tokens in use exceed the cache by the rotation's factor; 1 when warm."""
    if not cold or case.kv_bytes == 0:
        return 1
    # At least 2, so that no call follows itself; at most 64, which bounds the set-up of tiny cases.
    return min(64, max(2, -(-cold_rotation_bytes(device) // case.kv_bytes)))


def check_memory(case: DecodeCase, device: torch.device, count: int) -> None:
    """Raise `NotEnoughMemory` unless `count` pools leave room for the rest of the run."""
    need, have = count * pool_bytes(case), available_bytes(device)
    if need <= have * _MEMORY_SHARE:
        return
    fits = int(have * _MEMORY_SHARE / count / max(pool_bytes(case), 1) * sum(case.kv_lens))
    raise NotEnoughMemory(
        str(
            Fault(
                "lengths",
                str(case.lengths),
                f"{count} pools of {pool_bytes(case) / 2**30:.1f} GiB need more than "
                f"{_MEMORY_SHARE:.0%} of the {have / 2**30:.1f} GiB free on {device}",
                f"at most {fits // case.batch} tokens a request on average",
            )
        )
    )


def build_pool(case: DecodeCase, device: torch.device, seed: int) -> Pool:
    """One pool, the same for the same (case, device type, seed).

    q, K and V are standard normal; unused slots hold NaN. Table entries past a request's pages hold
    an id far beyond the pool, which no correct kernel dereferences.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    host = torch.Generator().manual_seed(seed)
    dtype = torch_dtype(case.dtype)
    used = [-(-n // case.page_size) for n in case.kv_lens]
    total = sum(used) + _SPARE_PAGES
    order = torch.randperm(total, generator=host)
    table = torch.full((case.batch, case.max_pages), 2**30, dtype=torch.int32)
    tail_pages, tail_starts, first = [], [], 0
    for request, (pages, tokens) in enumerate(zip(used, case.kv_lens, strict=True)):
        ids = order[first : first + pages]
        table[request, :pages] = ids.to(torch.int32)
        if tokens % case.page_size:
            tail_pages.append(int(ids[-1]))
            tail_starts.append(tokens % case.page_size)
        first += pages
    inner = (case.page_size, case.num_kv_heads)
    shape = (total, *(inner if case.layout == "NHD" else inner[::-1]), case.head_dim)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device=device, dtype=dtype)

    cache = PagedKVCache(
        key=random(*shape),
        value=random(*shape),
        page_table=table.to(device),
        sequence_lengths=torch.tensor(case.kv_lens, dtype=torch.int32, device=device),
        layout=case.layout,
    )
    pool = Pool(
        case=case,
        q=random(case.num_rows, case.num_qo_heads, case.head_dim),
        cache=cache,
        kv_lens=case.kv_lens,
        unused_pages=order[first:].to(device),
        tail_pages=tuple(tail_pages),
        tail_starts=tuple(tail_starts),
    )
    pool.fill_unused(float("nan"))
    return pool


def build_pools(
    case: DecodeCase, device: torch.device, *, seed: int = 0, cold: bool = True
) -> tuple[Pool, ...]:
    """The rotation of a case. Raises `NotEnoughMemory` where it does not fit."""
    count = num_pools(case, device, cold)
    check_memory(case, device, count)
    return tuple(build_pool(case, device, seed + index) for index in range(count))
