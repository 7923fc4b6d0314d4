"""A batch of requests as data: what one attention call computes, apart from device and contents.

A batch knows its problem, its page table, its masks and its counts. `content_digest` names what is
computed: batches that differ in labels, in the names of prefix groups or in the order of their
requests have one digest (see `workload_content`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from stream_attention.core.describe import phase_of
from stream_attention.core.dtypes import dtype_bytes
from stream_attention.core.ir import check_rules, is_int
from stream_attention.core.problem import AttentionProblem
from stream_attention.planner import workload_content
from stream_attention.planner.page_tables import PageLayout, num_pages_of, page_table
from stream_attention.planner.token_trees import ancestor_mask
from stream_attention.planner.workload_requests import WorkloadRequest
from stream_attention.planner.workload_rules import BATCH_RULES

_DEFAULT_PAGES = PageLayout()


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class WorkloadBatch:
    """`out = attention(q, cache)` over `requests`: lengths, geometry, memory form and options.

    head_dim_vo, kv_dtype, out_dtype: `None` = head_dim_qk, q_dtype, q_dtype.
    page_size, page_layout: of a paged cache only; a contiguous one keeps the defaults.
    capacity: tokens that one request can hold, whole pages; `None` = those of the longest request,
        at least one page (contiguous: at least one token).
    sm_scale: `None` = `head_dim_qk ** -0.5`. dropout_p, dropout_seed: training only; dropout draws
        from a seed, so that the workload says which weights are dropped.
    label: a name; no part of the digest.
    Training requests have equal lengths in a contiguous NHD cache, as `train` takes them, and a
    batch with one holds nothing else. Raises `ValueError` with every broken rule.
    """

    requests: tuple[WorkloadRequest, ...]
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim_qk: int = 128
    head_dim_vo: int | None = None
    q_dtype: str = "bfloat16"
    kv_dtype: str | None = None
    out_dtype: str | None = None
    kv_scales: str | None = None
    cache_kind: str = "paged"
    layout: str = "NHD"
    page_size: int = 16
    page_layout: PageLayout = _DEFAULT_PAGES
    capacity: int | None = None
    causal: bool = True
    sm_scale: float | None = None
    window_left: int | None = None
    window_right: int | None = None
    logits_soft_cap: float | None = None
    has_sink: bool = False
    return_lse: bool = False
    batch_invariant: bool = False
    dropout_p: float = 0.0
    dropout_seed: int | None = None
    label: str = ""

    def __post_init__(self) -> None:
        check_rules(self, BATCH_RULES)

    def __repr__(self) -> str:
        """Evaluates back; equal neighbours among the requests are shown once, with their count."""
        shown = [f"requests={_runs_text(self.requests)}"]
        for field in fields(self)[1:]:
            if getattr(self, field.name) != field.default:
                shown.append(f"{field.name}={getattr(self, field.name)!r}")
        return f"WorkloadBatch({', '.join(shown)})"

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.requests)

    @property
    def differentiable(self) -> bool:
        """The requests are those of training."""
        return any(request.phase == "train" for request in self.requests)

    @property
    def paged(self) -> bool:
        return self.cache_kind == "paged"

    @property
    def qo_lens(self) -> tuple[int, ...]:
        """Query tokens of each request."""
        return tuple(request.qo_len for request in self.requests)

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """KV tokens of each request."""
        return tuple(request.kv_len for request in self.requests)

    @property
    def dim_vo(self) -> int:
        """Head dimension of V and of the output."""
        return self.head_dim_qk if self.head_dim_vo is None else self.head_dim_vo

    @property
    def stored_dtype(self) -> str:
        """Dtype of K and V."""
        return self.q_dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def result_dtype(self) -> str:
        """Dtype of the output."""
        return self.q_dtype if self.out_dtype is None else self.out_dtype

    @property
    def max_tokens(self) -> int:
        """Tokens that one request can hold: `capacity`, or those of the longest request."""
        if self.capacity is not None:
            return self.capacity
        longest = max((1, *self.kv_lens))
        if not self.paged:
            return longest
        return num_pages_of(longest, self.page_size) * self.page_size

    @property
    def max_pages(self) -> int:
        """Width of the page table; a contiguous cache is one page a request."""
        return self.max_tokens // self.page_size if self.paged else 1

    @property
    def num_qo_tokens(self) -> int:
        """Query tokens of all requests."""
        return sum(self.qo_lens)

    @property
    def num_rows(self) -> int:
        """Rows of the softmax: query tokens times query heads."""
        return self.num_qo_tokens * self.num_qo_heads

    @property
    def num_kv_tokens(self) -> int:
        """KV tokens that the requests see, a shared prefix once a request."""
        return sum(self.kv_lens)

    @property
    def num_distinct_kv_tokens(self) -> int:
        """KV tokens that are held in memory: the prefix of a group once."""
        prefixes = {r.prefix_group: r.prefix_len for r in self.requests if r.prefix_len}
        return sum(r.kv_len - r.prefix_len for r in self.requests) + sum(prefixes.values())

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of K and V that one token takes, all KV heads."""
        return self.num_kv_heads * (self.head_dim_qk + self.dim_vo) * dtype_bytes(self.stored_dtype)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V, a shared prefix once a request: what is read without sharing."""
        return self.num_kv_tokens * self.kv_token_bytes

    @property
    def distinct_kv_bytes(self) -> int:
        """Bytes of K and V in memory, the prefix of a group once: what must be read at least."""
        return self.num_distinct_kv_tokens * self.kv_token_bytes

    def problem(self) -> AttentionProblem:
        """The problem that `describe` finds for tensors of this batch.

        A batch of training requests is what `train` describes, and one of prefill requests alone
        that `prefill` can take (contiguous, NHD, equal lengths that fill the cache) what `prefill`
        does. Trees that branch need a mask of their own: `mask="bool"`.
        """
        total, longest = self.num_qo_tokens, max(self.qo_lens)
        phase = phase_of(total, self.batch, longest, self.max_tokens)
        if self.differentiable:
            phase = "train"
        elif self._is_sequences("prefill"):
            phase = "prefill"
        return AttentionProblem(
            phase=phase,
            batch=self.batch,
            total_qo_len=total,
            max_qo_len=longest,
            kv_capacity=self.max_tokens,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=self.head_dim_qk,
            head_dim_vo=self.dim_vo,
            q_dtype=self.q_dtype,
            kv_dtype=self.stored_dtype,
            out_dtype=self.result_dtype,
            cache_kind=self.cache_kind,
            layout=self.layout,
            page_size=self.page_size if self.paged else self.max_tokens,
            causal=self.causal,
            sm_scale=self.head_dim_qk**-0.5 if self.sm_scale is None else self.sm_scale,
            window_left=self.window_left,
            window_right=self.window_right,
            logits_soft_cap=self.logits_soft_cap,
            has_sink=self.has_sink,
            kv_scales=self.kv_scales,
            return_lse=self.return_lse,
            batch_invariant=self.batch_invariant,
            mask="bool" if any(request.branches for request in self.requests) else None,
            dropout_p=self.dropout_p,
            differentiable=self.differentiable,
        )

    def _is_sequences(self, phase: str) -> bool:
        """Every request is of `phase`, and all fill one `[batch, seq, heads, head_dim]` tensor."""
        return (
            all(request.phase == phase for request in self.requests)
            and not self.paged
            and self.layout == "NHD"
            and len(set(self.qo_lens)) == 1
            and set(self.kv_lens) == {self.max_tokens}
        )

    def page_table(self, seed: int) -> tuple[torch.Tensor, int]:
        """`([batch, max_pages] int32, pages of the pool)` of a paged batch; the same for a seed.

        Raises `ValueError` for a contiguous cache, which has no pages.
        """
        if not self.paged:
            raise ValueError(f"cache_kind={self.cache_kind!r}: has no page table; use 'paged'")
        if not is_int(seed):
            raise ValueError(f"seed={seed!r}: must be an int; use 0")
        return page_table(self.requests, self.page_size, self.max_pages, self.page_layout, seed)

    def tree_mask(self, index: int) -> torch.Tensor | None:
        """`[qo_len, kv_len]` bool, True = seen, of a request with a tree that branches.

        `None` for any other request: the batch's causal mask and window say what it sees.
        """
        request = self.requests[index]
        if not request.branches:
            return None
        assert request.tree is not None
        context = torch.ones(request.qo_len, request.kv_len - request.qo_len, dtype=torch.bool)
        return torch.cat([context, ancestor_mask(request.tree)], dim=1)

    @property
    def content_digest(self) -> str:
        """SHA-256, in hex, of what is computed; see `workload_content.content`."""
        return workload_content.digest(self)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists that `from_json` takes; every key is written."""
        return workload_content.batch_to_json(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WorkloadBatch:
        """The inverse of `to_json`. Raises `ValueError` that names unknown and missing keys."""
        found, runs = workload_content.batch_fields(data)
        requests: list[WorkloadRequest] = []
        for count, values in runs:
            requests.extend([WorkloadRequest(**values)] * count)
        found["page_layout"] = PageLayout(**found["page_layout"])
        return cls(**{**found, "requests": tuple(requests)})


def _runs_text(requests: Sequence[WorkloadRequest]) -> str:
    runs = workload_content.runs_of(requests)
    if all(count == 1 for count, _ in runs):
        return repr(tuple(requests))
    parts = [f"({request!r},){f' * {count}' * (count > 1)}" for count, request in runs]
    return " + ".join(parts)
