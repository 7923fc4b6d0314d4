"""Byte and FLOP formulas of attention: what any correct kernel must move and compute.

Every input is read once and every output written once; nothing else is counted, and of a request
without queries no K and V are read. `kv_lens` are the tokens of each request, all KV heads have the
same list. `q_len` is its queries: one number for all requests, or one a request.
"""

from __future__ import annotations

from collections.abc import Sequence

MIB = 1 << 20
INDEX_BYTES = 4  # page tables and lengths are int32


def kv_bytes(kv_lens: Sequence[int], num_kv_heads: int, head_dim: int, element_bytes: int) -> int:
    """`Σ kv_len · num_kv_heads · 2 · head_dim · element_bytes`: each K and V element once."""
    return sum(kv_lens) * num_kv_heads * 2 * head_dim * element_bytes


def qo_bytes(rows: int, num_qo_heads: int, head_dim: int, element_bytes: int) -> int:
    """`rows · num_qo_heads · head_dim · element_bytes`: q read once, or the output written once."""
    return rows * num_qo_heads * head_dim * element_bytes


def index_bytes(kv_lens: Sequence[int], page_size: int | None) -> int:
    """`4 · (Σ ceil(kv_len / page_size) + batch)`: page ids and lengths, int32.

    page_size: `None` for a contiguous cache, which has lengths only.
    """
    pages = 0 if page_size is None else sum(-(-n // page_size) for n in kv_lens)
    return INDEX_BYTES * (pages + len(kv_lens))


def moved_bytes(
    kv_lens: Sequence[int],
    q_len: int | Sequence[int],
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int | None,
    element_bytes: int,
    kv_element_bytes: int,
) -> int:
    """KV + q + output + page table, lengths and offsets: the bytes that the floor is made of.

    element_bytes: of q and output; kv_element_bytes: of K and V. `batch + 1` int32 offsets are read
    where the queries are given a request. The two scales of fp8 K and V, 8 bytes, are left out.
    """
    queries = query_lens(kv_lens, q_len)
    seen = tokens_read(kv_lens, q_len)
    offsets = 0 if isinstance(q_len, int) else len(kv_lens) + 1
    return (
        kv_bytes(seen, num_kv_heads, head_dim, kv_element_bytes)
        + 2 * qo_bytes(sum(queries), num_qo_heads, head_dim, element_bytes)
        + index_bytes(seen, page_size)
        + INDEX_BYTES * offsets
    )


def query_lens(kv_lens: Sequence[int], q_len: int | Sequence[int]) -> tuple[int, ...]:
    """Queries of each request."""
    if isinstance(q_len, int):
        return (q_len,) * len(kv_lens)
    return tuple(q_len)


def tokens_read(kv_lens: Sequence[int], q_len: int | Sequence[int]) -> tuple[int, ...]:
    """Tokens of each request that some query may see: all of them, or none without a query."""
    queries = query_lens(kv_lens, q_len)
    return tuple(n if m else 0 for n, m in zip(kv_lens, queries, strict=True))


def visible_pairs(kv_lens: Sequence[int], q_len: int | Sequence[int], causal: bool = True) -> int:
    """Query-key pairs: all of a request, or those under a causal mask aligned bottom-right.

    Causal, row i of m queries sees `max(0, kv_len - m + i + 1)` keys, so a decode row sees
    `kv_len`.
    """
    total = 0
    for tokens, queries in zip(kv_lens, query_lens(kv_lens, q_len), strict=True):
        # The last m rows see n - m + 1 … n keys, m = min(n, queries); rows before them see none.
        m = min(tokens, queries)
        total += m * (2 * tokens - m + 1) // 2 if causal else tokens * queries
    return total


def window_tokens(kv_len: int, q_len: int, window_left: int | None) -> int:
    """KV tokens that some query of a request sees: all, or those from the oldest query's window."""
    return kv_len if window_left is None else min(kv_len, window_left + q_len)


def window_pairs(kv_lens: Sequence[int], q_len: int, window_left: int | None) -> int:
    """`visible_pairs` of those at most `window_left` tokens apart.

    What a row sees beyond its window it sees of a sequence that ends `window_left + 1` sooner.
    """
    pairs = visible_pairs(kv_lens, q_len)
    if window_left is None:
        return pairs
    return pairs - visible_pairs([max(0, n - window_left - 1) for n in kv_lens], q_len)


def attention_flops(
    kv_lens: Sequence[int],
    q_len: int | Sequence[int],
    num_qo_heads: int,
    head_dim: int,
    causal: bool = True,
) -> int:
    """`4 · pairs · num_qo_heads · head_dim`: a multiply and an add for each of QKᵀ and PV."""
    return 4 * visible_pairs(kv_lens, q_len, causal) * num_qo_heads * head_dim
