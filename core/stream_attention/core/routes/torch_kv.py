"""Reads of K and V for the torch route: only slots that a request owns, as fp32 tiles.

`PoolReader.tile` gives a run of one unit's tokens, gathered page by page into a small reused buffer
(or as a view where pages are large and fp32 already). `PoolReader.tiles` gives the tokens of many
short units as one rectangular batch.
"""

from __future__ import annotations

import math

import torch

from stream_attention.core.cache import KVView

_ONE_BYTE = torch.float8_e4m3fn


def raw_bits(pool: torch.Tensor) -> torch.Tensor:
    """fp8 pools as uint8 (torch gathers no fp8 on a CPU); others as they are."""
    return pool.view(torch.uint8) if pool.dtype == _ONE_BYTE else pool


def shared_lists(kv: KVView) -> bool:
    """True when all KV heads of a request have one page list and one length."""
    if kv.num_kv_heads == 1:
        return True
    table, lens = kv.page_table, kv.kv_lens
    table_shared = table is None or table.numel() == 0 or table.stride(1) == 0
    return table_shared and (lens is None or lens.numel() == 0 or lens.stride(1) == 0)


def head_rows(pool: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """An HND pool as rows of one page and head: `(rows [*, page_size, head_dim], rows a page)`.

    Row `page * per_page + head` is that page's run of that head, also with a layer axis inside the
    pool. `None` for NHD pools and where strides do not allow the view.
    """
    pages, size, heads, dim = pool.shape
    page_stride, token_stride, head_stride, _ = pool.stride()
    if pages == 0 or heads == 1 or head_stride < max(1, size * token_stride):
        return None  # also where heads share memory (stride 0)
    if page_stride % head_stride:
        return None
    per_page = page_stride // head_stride
    if per_page < heads:
        return None
    shape = ((pages - 1) * per_page + heads, size, dim)
    rows = pool.as_strided(shape, (head_stride, token_stride, 1), pool.storage_offset())
    return rows, per_page


class PoolReader:
    """Tiles of one pool (K or V). Owns its buffers; they are reused by every call.

    pool: `[num_pages, page_size, num_kv_heads, head_dim]`, last axis contiguous.
    chunk_tokens: longest tile. copy: every `tile` is a dense one at the start of the buffer, so
    that neither the pool's strides nor the page's size or address shape a product.
    """

    __slots__ = ("_buffer", "_copy", "_dtype", "_heads", "_rows", "_stage", "pool")

    def __init__(self, pool: torch.Tensor, heads: int, chunk_tokens: int, copy: bool) -> None:
        self._dtype = pool.dtype
        self._copy = copy or pool.dtype != torch.float32
        self._heads = torch.arange(heads, device=pool.device).unsqueeze(1)
        self.bind(pool)
        page, dim = max(1, pool.shape[1]), pool.shape[3]
        gathers = page < chunk_tokens
        tokens = max(1, chunk_tokens // page) * page if gathers else max(1, chunk_tokens)
        self._stage = self.pool.new_empty(tokens * heads * dim if gathers else 0)
        self._buffer = torch.empty(
            tokens * heads * dim if self._copy else 0, dtype=torch.float32, device=pool.device
        )

    def bind(self, pool: torch.Tensor) -> None:
        """Read from `pool` from now on: same shape, strides, dtype and device."""
        self.pool = raw_bits(pool)
        self._rows = head_rows(self.pool)

    def unbind(self) -> None:
        """Keep the pool alive no longer; a bind must come before the next read."""
        del self.pool, self._rows

    @property
    def workspace_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self._stage, self._buffer))

    def tile(self, pages: torch.Tensor, first: int, tokens: int, head: int | None) -> torch.Tensor:
        """`tokens` tokens of the listed pages from `first` on: `[heads, tokens, head_dim]` fp32.

        pages: int64 ids, all of them owned by the request. head: one KV head, or `None` for all.
        """
        pool = self.pool if head is None else self.pool[:, :, head : head + 1]
        heads, dim = pool.shape[2:]
        count = pages.numel()
        if count == 1:
            run = pool[int(pages)][first : first + tokens].transpose(0, 1)
        else:
            run = self._gather(pool, pages, head)[:, first : first + tokens]
        if not self._copy:
            return run
        if self._dtype == _ONE_BYTE:
            run = run.view(_ONE_BYTE)
        return self._buffer[: heads * tokens * dim].view(heads, tokens, dim).copy_(run)

    def _gather(self, pool: torch.Tensor, pages: torch.Tensor, head: int | None) -> torch.Tensor:
        """Whole pages in the stage, in the pool's own order: `[heads, count * page_size, dim]`."""
        _, size, heads, dim = pool.shape
        count = pages.numel()
        stage = self._stage[: count * size * heads * dim]
        if heads > 1 and self._rows is not None:
            rows, per_page = self._rows
            ids = (pages * per_page + self._heads).view(-1)
            torch.index_select(rows, 0, ids, out=stage.view(heads * count, size, dim))
            return stage.view(heads, count * size, dim)
        torch.index_select(pool, 0, pages, out=stage.view(count, size, heads, dim))
        return stage.view(count * size, heads, dim).transpose(0, 1)

    def tiles(
        self, page: torch.Tensor, slot: torch.Tensor, head: torch.Tensor | None
    ) -> torch.Tensor:
        """Tokens `(page, slot)` of many units: `[units * heads, tokens, head_dim]` fp32, owned.

        page, slot: `[units, tokens]` int64, each owned by its unit. head: `[units]` or `None`.
        """
        pool = self.pool
        dim = pool.shape[3]
        strides = pool.stride()[:3]
        unit = math.gcd(*strides) or 1
        page_step, slot_step, head_step = (stride // unit for stride in strides)
        base = page * page_step + slot * slot_step  # [units, tokens]
        lanes = self._heads if head is None else head.view(-1, 1, 1)
        ids = (base.unsqueeze(1) + lanes * head_step).view(-1)  # [units, heads, tokens]
        last = sum((n - 1) * step for n, step in zip(pool.shape, strides, strict=False))
        rows = pool.as_strided((last // unit + 1, dim), (unit, 1), pool.storage_offset())
        run = rows.index_select(0, ids).view(-1, slot.shape[1], dim)
        if self._dtype == _ONE_BYTE:
            run = run.view(_ONE_BYTE)
        return run.to(torch.float32)
