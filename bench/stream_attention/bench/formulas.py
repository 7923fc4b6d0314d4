"""Byte and FLOP formulas of attention: what any correct kernel must move and compute.

Every input is read once and every output written once; nothing else is counted. `kv_lens` are the
tokens of each request, all KV heads have the same list.
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
    q_len: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int | None,
    element_bytes: int,
    kv_element_bytes: int,
) -> int:
    """KV + q + output + page table and lengths: the bytes that the floor of a call is made of.

    element_bytes: of q and output; kv_element_bytes: of K and V. The two scales of fp8 K and V, 8
    bytes, are left out.
    """
    rows = len(kv_lens) * q_len
    return (
        kv_bytes(kv_lens, num_kv_heads, head_dim, kv_element_bytes)
        + 2 * qo_bytes(rows, num_qo_heads, head_dim, element_bytes)
        + index_bytes(kv_lens, page_size)
    )


def visible_pairs(kv_lens: Sequence[int], q_len: int) -> int:
    """Query-key pairs under a causal mask aligned bottom-right.

    Row i of a request sees `max(0, kv_len - q_len + i + 1)` keys, so a decode row sees `kv_len`.
    """
    # The last m rows see n - m + 1 … n keys, m = min(n, q_len); rows before them see none.
    return sum(m * (2 * n - m + 1) // 2 for n in kv_lens for m in (min(n, q_len),))


def attention_flops(kv_lens: Sequence[int], q_len: int, num_qo_heads: int, head_dim: int) -> int:
    """`4 · pairs · num_qo_heads · head_dim`: a multiply and an add for each of QKᵀ and PV."""
    return 4 * visible_pairs(kv_lens, q_len) * num_qo_heads * head_dim
