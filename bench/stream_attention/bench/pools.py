"""Real inputs for a case: random K and V in shuffled pages, or in one row a request where the cache
is contiguous, with poison in unused slots.

A pool is one set of inputs. Several pools of the same case form the rotation that keeps a
measurement cold; they differ in content and page order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from stream_attention.bench.cases import FP8, AttentionCase
from stream_attention.bench.machine import available_bytes, cold_rotation_bytes
from stream_attention.core.cache import ContiguousKVCache, KVCache, PagedKVCache
from stream_attention.core.dtypes import dtype_bytes, torch_dtype
from stream_attention.core.errors import Fault

# Pools share the memory with the contenders' outputs, gathers and the oracle.
_MEMORY_SHARE = 0.6
_SPARE_PAGES = 3  # pages that no request uses, full of poison
# Bounds the set-up of tiny cases. 4 MiB of K and V need 68 pools to exceed 60 MiB of L2 by 4.5.
_MOST_POOLS = 128
# An id that no correct kernel dereferences, in table entries past a request's pages.
_INVALID_ID = 2**30
# Scales of fp8 K and V: not 1, so that a scale which is left out or swapped shows. With so few bits
# that the product of an e4m3 number and a scale is exact in bf16 and fp16, for peers that widen.
KEY_SCALE = 0.75
VALUE_SCALE = 1.5
_RANDOM_AT_ONCE = 1 << 26  # elements drawn at once for a dtype that randn does not make


class NotEnoughMemory(ValueError):
    """The case's pools do not fit the device."""


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """One bound set of inputs.

    case: what was built. q: `[rows, num_qo_heads, head_dim]`, contiguous, request after request.
    qo_indptr: `[batch + 1]` int32 offsets into q, `None` where the case has one q_len for all.
    cache: the cache; fp8 K and V have one fp32 scale each, `[1]`. kv_lens: lengths on the host.
    unused_pages: `[n]` int64, pages of no request. tail_pages, tail_starts: pages whose slots from
    `start` on are unused (the last, part-filled page of a request; a contiguous cache is one page a
    request).
    """

    case: AttentionCase
    q: torch.Tensor
    cache: KVCache
    kv_lens: tuple[int, ...]
    unused_pages: torch.Tensor
    tail_pages: tuple[int, ...]
    tail_starts: tuple[int, ...]
    qo_indptr: torch.Tensor | None = None

    @property
    def page_table(self) -> torch.Tensor:
        """`[batch, max_pages]` int32, for those that say that they need pages."""
        assert isinstance(self.cache, PagedKVCache), self.case
        return self.cache.page_table

    def fill_unused(self, value: float) -> None:
        """Write `value` into every slot of K and V that holds no token of any request.

        A number that K and V cannot hold is replaced by the nearest that they can.
        """
        for tensor in (self.cache.key, self.cache.value):
            stored, fill = (
                _as_bytes(tensor, value) if tensor.element_size() == 1 else (tensor, value)
            )
            pages = stored if self.case.layout == "NHD" else stored.transpose(1, 2)
            pages[self.unused_pages] = fill
            for page, start in zip(self.tail_pages, self.tail_starts, strict=True):
                pages[page, start:] = fill


def _as_bytes(tensor: torch.Tensor, value: float) -> tuple[torch.Tensor, int]:
    """An fp8 tensor and a number as uint8: torch writes no fp8 by index."""
    if math.isfinite(value):
        limits = torch.finfo(tensor.dtype)
        value = min(max(value, limits.min), limits.max)
    fill = torch.tensor(value).to(tensor.dtype).view(torch.uint8)
    return tensor.view(torch.uint8), int(fill)


def _row_bytes(case: AttentionCase) -> int:
    """Bytes of K and V that one token takes."""
    return 2 * case.num_kv_heads * case.head_dim * dtype_bytes(case.stored_dtype)


def pool_bytes(case: AttentionCase) -> int:
    """Bytes of one pool: K and V in whole pages, spare ones counted, page table, q and output.

    A contiguous cache holds `max_tokens` a request and has no table.
    """
    q = case.num_rows * case.num_qo_heads * case.head_dim * dtype_bytes(case.dtype)
    if case.contiguous:
        return case.batch * case.max_tokens * _row_bytes(case) + 2 * q
    pages = sum(-(-n // case.page_size) for n in case.kv_lens) + _SPARE_PAGES
    return pages * case.page_size * _row_bytes(case) + 4 * case.batch * case.max_pages + 2 * q


def num_pools(case: AttentionCase, device: torch.device, cold: bool = True) -> int:
    """Pools whose tokens in use exceed the cache by the rotation's factor; 1 when warm."""
    if not cold or case.kv_bytes == 0:
        return 1
    # At least 2, so that no call follows itself.
    return min(_MOST_POOLS, max(2, -(-cold_rotation_bytes(device) // case.kv_bytes)))


def check_memory(case: AttentionCase, device: torch.device, count: int) -> None:
    """Raise `NotEnoughMemory` unless `count` pools leave room for the rest of the run."""
    need, have = count * pool_bytes(case), available_bytes(device)
    if need <= have * _MEMORY_SHARE:
        return
    budget = have * _MEMORY_SHARE / count
    fits = int(budget / max(pool_bytes(case), 1) * sum(case.kv_lens))
    parameter, value = "lengths", str(case.lengths)
    nearest = f"at most {fits // case.batch} tokens a request on average"
    if fits < case.batch:
        nearest = f"a smaller batch: {fits} tokens fit, such as batch=1 with lengths={fits}"
    if fits < 1:
        nearest = "fewer heads, or a device with more memory: not one token fits"
    capacity = _largest_capacity(case, budget)
    if case.capacity is not None and capacity >= max(case.kv_lens):
        parameter, value, nearest = "capacity", str(case.capacity), f"at most {capacity}"
    rule = (
        f"{count} pools of {pool_bytes(case) / 2**30:.1f} GiB need more than "
        f"{_MEMORY_SHARE:.0%} of the {have / 2**30:.1f} GiB free on {device}"
    )
    raise NotEnoughMemory(str(Fault(parameter, value, rule, nearest)))


def _largest_capacity(case: AttentionCase, budget: float) -> int:
    """The most tokens, in whole pages, that table or buffer may hold in `budget` bytes a pool."""
    page = case.page_size * _row_bytes(case) if case.contiguous else 4
    excess = max(0, math.ceil((pool_bytes(case) - budget) / (case.batch * page)))
    return case.max_tokens - excess * case.page_size


def build_pool(case: AttentionCase, device: torch.device, seed: int) -> Pool:
    """One pool, the same for the same (case, device type, seed).

    q, K and V are standard normal; unused slots hold NaN. Table entries past a request's pages hold
    an id far beyond the pool, which no correct kernel dereferences.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    pages = _contiguous_pages(case) if case.contiguous else _shuffled_pages(case, seed)
    inner = (case.max_tokens if case.contiguous else case.page_size, case.num_kv_heads)
    shape = (pages.total, *(inner if case.layout == "NHD" else inner[::-1]), case.head_dim)
    stored = torch_dtype(case.stored_dtype)
    common = {
        "key": _random(shape, stored, generator),
        "value": _random(shape, stored, generator),
        "sequence_lengths": torch.tensor(case.kv_lens, dtype=torch.int32, device=device),
        "layout": case.layout,
        **_scales(case, device),
    }
    cache: KVCache
    if pages.table is None:
        cache = ContiguousKVCache(**common)
    else:
        cache = PagedKVCache(page_table=pages.table.to(device), **common)
    q_shape = (case.num_rows, case.num_qo_heads, case.head_dim)
    pool = Pool(
        case=case,
        q=_random(q_shape, torch_dtype(case.dtype), generator),
        cache=cache,
        kv_lens=case.kv_lens,
        unused_pages=pages.unused.to(device),
        tail_pages=pages.tail_pages,
        tail_starts=pages.tail_starts,
        qo_indptr=None if case.q_lengths is None else offsets_of(case, device),
    )
    pool.fill_unused(float("nan"))
    return pool


def offsets_of(case: AttentionCase, device: torch.device) -> torch.Tensor:
    """`[batch + 1]` int32: where the queries of each request start."""
    return torch.tensor(case.q_offsets, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True, eq=False)
class _Pages:
    """Where tokens lie, on the host: pages in all, the table, and the slots that hold no token."""

    total: int
    table: torch.Tensor | None
    unused: torch.Tensor
    tail_pages: tuple[int, ...]
    tail_starts: tuple[int, ...]


def _shuffled_pages(case: AttentionCase, seed: int) -> _Pages:
    used = [-(-n // case.page_size) for n in case.kv_lens]
    total = sum(used) + _SPARE_PAGES
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    table = torch.full((case.batch, case.max_pages), _INVALID_ID, dtype=torch.int32)
    tail_pages, tail_starts, first = [], [], 0
    for request, (pages, tokens) in enumerate(zip(used, case.kv_lens, strict=True)):
        ids = order[first : first + pages]
        table[request, :pages] = ids.to(torch.int32)
        if tokens % case.page_size:
            tail_pages.append(int(ids[-1]))
            tail_starts.append(tokens % case.page_size)
        first += pages
    return _Pages(total, table, order[first:], tuple(tail_pages), tuple(tail_starts))


def _contiguous_pages(case: AttentionCase) -> _Pages:
    tails = [(b, n) for b, n in enumerate(case.kv_lens) if n < case.max_tokens]
    none = torch.empty(0, dtype=torch.int64)
    return _Pages(case.batch, None, none, tuple(b for b, _ in tails), tuple(n for _, n in tails))


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Standard normal numbers on the generator's device; fp8 is rounded from fp32, part by part."""
    device = generator.device
    if dtype.itemsize > 1:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)
    result = torch.empty(shape, dtype=dtype, device=device)
    rows = max(1, _RANDOM_AT_ONCE // max(1, math.prod(shape[1:])))
    for part in result.split(rows):
        part.copy_(torch.randn(part.shape, generator=generator, device=device))
    return result


def _scales(case: AttentionCase, device: torch.device) -> dict[str, torch.Tensor | None]:
    """One fp32 scale for K and one for V `[1]`, or `None` where K and V are not fp8."""
    if case.stored_dtype != FP8:
        return {"key_scale": None, "value_scale": None}
    numbers = {"key_scale": KEY_SCALE, "value_scale": VALUE_SCALE}
    return {name: torch.full((1,), number, device=device) for name, number in numbers.items()}


def build_pools(
    case: AttentionCase, device: torch.device, *, seed: int = 0, cold: bool = True
) -> tuple[Pool, ...]:
    """The rotation of a case. Raises `NotEnoughMemory` where it does not fit."""
    count = num_pools(case, device, cold)
    check_memory(case, device, count)
    return tuple(build_pool(case, device, seed + index) for index in range(count))
