"""From the tensors of a call to a checked `AttentionProblem` and its bound memory; never syncs.

Everything that metadata can tell is checked here: rank, dtype, device, layout, strides, alignment,
geometry, options, outputs. What only contents can tell (lengths, page ids, offsets) is the work of
`stream_attention.core.validate`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from stream_attention.core.cache import (
    ContiguousKVCache,
    KVCache,
    PagedKVCache,
)
from stream_attention.core.cache_checks import check_storage, require_dense, require_memory
from stream_attention.core.call_checks import (
    check_against_cache,
    check_alias,
    check_cache,
    check_outputs,
    check_q,
    check_sink,
    require_values,
)
from stream_attention.core.dtypes import dtype_name, torch_dtype
from stream_attention.core.errors import Faults, shape_of
from stream_attention.core.ir import NOT_OF_TYPE, is_int
from stream_attention.core.launch import BoundTensors
from stream_attention.core.problem import PROBLEM_RULES, AttentionProblem

_NO_FLAGS: Mapping[str, Any] = MappingProxyType({})

MAX_VERIFY_QO_LEN = 16
"""Uniform calls with 2 … this many queries a request are `verify` (speculative tokens)."""


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """A call: the problem asked, the memory it is asked over, and the shape results are handed in.

    result_shape: `q.shape[:-1] + (head_dim_vo,)`; `bound.out.view(result_shape)` is the result.
    `lse_shape` is the same without the last axis.
    """

    problem: AttentionProblem
    bound: BoundTensors
    cache: KVCache
    result_shape: tuple[int, ...]

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return self.result_shape[:-1]

    def result(self) -> torch.Tensor:
        """`out` in the caller's shape (a view)."""
        return self.bound.out.view(self.result_shape)

    def result_lse(self) -> torch.Tensor | None:
        """`lse` in the caller's shape (a view), or `None` when it was not asked for."""
        return None if self.bound.lse is None else self.bound.lse.view(self.lse_shape)


def describe(
    q: torch.Tensor,
    cache: KVCache | torch.Tensor,
    qo_indptr: torch.Tensor | None = None,
    *,
    v_cache: torch.Tensor | None = None,
    sm_scale: float | None = None,
    causal: bool = True,
    window_left: int | None = None,
    window_right: int | None = None,
    logits_soft_cap: float | None = None,
    attn_sink: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    batch_invariant: bool = False,
    max_qo_len: int | None = None,
    allocate: bool = True,
    flags: Mapping[str, Any] = _NO_FLAGS,
) -> Described:
    """Check a serving call and describe it, without a sync.

    Longer than 80 lines because it is the one place where a call's arguments meet.

    q: `[batch, num_qo_heads, head_dim]` (one query a request), `[batch, qo_len, num_qo_heads,
        head_dim]`, or packed `[total_q, num_qo_heads, head_dim]` beside `qo_indptr`. Any strides
        that keep rows contiguous and aligned; viewed, never copied.
    cache: a cache, or a key tensor `[batch, capacity, num_kv_heads, head_dim]` beside `v_cache`.
    qo_indptr: `[batch + 1]` int32 offsets into q on q's device.
    out: `q.shape[:-1] + (head_dim_vo,)`, contiguous, fp16, bf16 or fp32 (the result's dtype);
        allocated in q's dtype when `None`. lse: `q.shape[:-1]` fp32, contiguous; allocated when
        `return_lse` and `None`. Neither may overlap another tensor of the call.
    max_qo_len: most queries of one request beside `qo_indptr`; `None` = `total_q`, which is always
        safe.
    allocate: `False` leaves outputs that were not given on the meta device, for a route that
        makes its own.
    flags: others of the caller, which must be bools too.

    Phase: with the same number m of queries in every request, m = 1 is `decode`, m in 2 … 16 is
    `verify`, a larger m is `prefill` where the cache holds no more than the queries and `append`
    elsewhere; unequal numbers are `mixed`. Raises one `ValueError` with every fault.
    """
    faults = Faults()
    check_q(faults, q)
    cache = _as_cache(faults, cache, v_cache)
    fields = {
        "causal": causal,
        "sm_scale": sm_scale,
        "window_left": window_left,
        "window_right": window_right,
        "logits_soft_cap": logits_soft_cap,
        "batch_invariant": batch_invariant,
        "return_lse": return_lse,
        "has_sink": attn_sink is not None,
    }
    for name, flag in flags.items():
        faults.require(isinstance(flag, bool), name, flag, "must be a bool", "True")
    packed = None
    if cache is not None:
        _add_cache_fields(fields, cache)
        check_cache(faults, cache)
    if isinstance(q, torch.Tensor) and q.dim() in (3, 4):
        packed = _pack_q(faults, q, cache, qo_indptr, max_qo_len, fields)
    check_sink(faults, q, attn_sink)
    if packed is not None and cache is not None:
        check_outputs(faults, q, cache, out, lse, return_lse, fields)
    problem = _problem(faults, fields)
    assert packed is not None and cache is not None
    view = cache.view()
    if view.key.requires_grad or view.value.requires_grad:
        view = dataclasses.replace(view, key=view.key.detach(), value=view.value.detach())
    total, heads = problem.total_qo_len, problem.num_qo_heads
    place = q.device if allocate else torch.device("meta")
    if out is None:
        out = torch.empty(
            (total, heads, problem.head_dim_vo),
            dtype=torch_dtype(problem.out_dtype),
            device=place,
        )
    if lse is None and return_lse:
        lse = torch.empty((total, heads), dtype=torch.float32, device=place)
    bound = BoundTensors(
        q=packed.detach() if packed.requires_grad else packed,
        kv=view,
        qo_indptr=qo_indptr,
        out=out.view(total, heads, problem.head_dim_vo),
        lse=None if lse is None else lse.view(total, heads),
        attn_sink=None if attn_sink is None else attn_sink.detach(),
    )
    check_alias(bound)
    return Described(problem, bound, cache, (*q.shape[:-1], problem.head_dim_vo))


def phase_of(total_qo_len: int, batch: int, max_qo_len: int, kv_capacity: int) -> str:
    """The phase by the rule that `describe` documents."""
    if total_qo_len != batch * max_qo_len:
        return "mixed"
    if max_qo_len <= 1:
        return "decode"
    if max_qo_len <= MAX_VERIFY_QO_LEN:
        return "verify"
    return "prefill" if kv_capacity <= max_qo_len else "append"


def _as_cache(faults: Faults, cache: Any, v_cache: Any) -> KVCache | None:
    """A cache object as it is, a pair of tensors as a `ContiguousKVCache`, or `None` and faults.

    The metadata of a cache's tensors may have changed since it was made, and a cache that was made
    in a traced function was not checked.
    """
    if isinstance(cache, (PagedKVCache, ContiguousKVCache)):
        if v_cache is not None:
            faults.add(
                "v_cache",
                type(v_cache).__name__,
                "a cache object brings its own",
                "None",
            )
        found = cache.faults()
        faults.extend(found)
        return None if found else cache
    pair = SimpleNamespace(key=cache, value=v_cache, layout="NHD")
    if not isinstance(cache, torch.Tensor):
        faults.add(
            "cache",
            type(cache).__name__,
            "must be a PagedKVCache, a ContiguousKVCache or a key tensor beside v_cache",
            "ContiguousKVCache(key=k, value=v)",
        )
        return None
    if not require_values(faults, v_cache):
        return None
    found = Faults()
    check_storage(pair, found, ("key", "value"))
    if not found:
        return ContiguousKVCache(key=cache, value=v_cache)
    for fault in found:  # in the words of a caller who passed two tensors
        name = fault.parameter.replace("key", "k_cache").replace("value", "v_cache")
        rule = fault.rule.replace("key", "k_cache")
        faults.add(name, fault.value, rule, fault.nearest)
    return None


def _add_cache_fields(fields: dict[str, Any], cache: KVCache) -> None:
    paged = isinstance(cache, PagedKVCache)
    heads = cache.num_kv_heads
    scales = [s for s in (cache.key_scale, cache.value_scale) if s is not None]
    per_head = any(isinstance(s, torch.Tensor) and s.dim() == 1 and s.shape[0] > 1 for s in scales)
    lists = cache.per_head_lists
    fields.update(
        batch=cache.batch,
        kv_capacity=cache.capacity,
        num_kv_heads=heads,
        head_dim_vo=cache.value.shape[3],
        kv_dtype=dtype_name(cache.key.dtype),
        cache_kind="paged" if paged else "contiguous",
        layout=cache.layout,
        page_size=cache.page_size,
        per_head_lists=lists,
        kv_scales=("head" if per_head else "tensor") if scales else None,
        # Lists per KV head are a selection that the caller made: exact over what it names.
        guarantee="schedule_exact" if lists and paged else "exact",
    )


def _pack_q(
    faults: Faults,
    q: torch.Tensor,
    cache: KVCache | None,
    qo_indptr: Any,
    max_qo_len: int | None,
    fields: dict[str, Any],
) -> torch.Tensor | None:
    """q as `[total_qo_len, num_qo_heads, head_dim]` over the same memory; adds q's fields."""
    heads, dim = q.shape[-2], q.shape[-1]
    fields.update(num_qo_heads=heads, head_dim_qk=dim, q_dtype=dtype_name(q.dtype))
    fields["out_dtype"] = fields["q_dtype"]
    if fields["sm_scale"] is None:
        fields["sm_scale"] = max(dim, 1) ** -0.5
    if cache is not None:
        check_against_cache(faults, q, cache)
    # A float or a flag may equal a count, and an array compares element by element.
    if max_qo_len is not None and not is_int(max_qo_len):
        rule = "must be an int >= 0, the most queries of one request"
        faults.add("max_qo_len", max_qo_len, rule, "None")
        max_qo_len = None
    if qo_indptr is not None:
        return _pack_ragged(faults, q, cache, qo_indptr, max_qo_len, fields)
    qo_len = 1 if q.dim() == 3 else q.shape[1]
    if cache is not None:
        faults.require(
            q.shape[0] == cache.batch,
            "q.shape",
            shape_of(q),
            f"axis 0 must be the cache's batch = {cache.batch} (packed queries need qo_indptr)",
            (cache.batch, *q.shape[1:]),
        )
    if max_qo_len is not None:
        faults.require(
            max_qo_len == qo_len,
            "max_qo_len",
            max_qo_len,
            "only queries packed by qo_indptr take one; elsewhere q's shape says it",
            "None",
        )
    total = q.shape[0] * qo_len
    if cache is None or q.shape[0] == cache.batch:
        fields.update(total_qo_len=total, max_qo_len=qo_len if q.shape[0] else 0)
    try:
        return q.view(total, heads, dim)
    except RuntimeError:
        faults.add(
            "q.stride",
            tuple(q.stride()),
            f"axes 0 and 1 must merge into one (stride[0] = {qo_len} * stride[1] = "
            f"{qo_len * q.stride(1)}); nothing is copied silently",
            "q.contiguous()",
        )
        return None


def _pack_ragged(
    faults: Faults,
    q: torch.Tensor,
    cache: KVCache | None,
    qo_indptr: Any,
    max_qo_len: int | None,
    fields: dict[str, Any],
) -> torch.Tensor | None:
    total = q.shape[0]
    batch = "batch" if cache is None else cache.batch
    rule = f"must be an int32 tensor [{batch} + 1] on q's device"
    if not isinstance(qo_indptr, torch.Tensor):
        faults.add(
            "qo_indptr",
            type(qo_indptr).__name__,
            rule,
            f"torch.tensor(qo_indptr, dtype=torch.int32, device={str(q.device)!r})",
        )
        return None
    if not require_dense(faults, "qo_indptr", qo_indptr):
        return None
    require_memory(faults, "qo_indptr", qo_indptr)
    faults.require(
        qo_indptr.dtype == torch.int32,
        "qo_indptr.dtype",
        qo_indptr.dtype,
        "must be torch.int32",
        "qo_indptr.to(torch.int32)",
    )
    faults.require(
        qo_indptr.device == q.device,
        "qo_indptr.device",
        str(qo_indptr.device),
        "must be q's device",
        str(q.device),
    )
    if cache is not None:
        faults.require(
            shape_of(qo_indptr) == (cache.batch + 1,),
            "qo_indptr.shape",
            shape_of(qo_indptr),
            "must be [batch + 1]",
            (cache.batch + 1,),
        )
    faults.require(
        qo_indptr.is_contiguous(),
        "qo_indptr.stride",
        tuple(qo_indptr.stride()),
        "must be contiguous",
        "qo_indptr.contiguous()",
    )
    if not faults.require(
        q.dim() == 3,
        "q.shape",
        shape_of(q),
        "must be packed [total_q, num_qo_heads, head_dim] beside qo_indptr",
        "q.flatten(0, 1)",
    ):
        return None
    fields.update(total_qo_len=total, max_qo_len=total if max_qo_len is None else max_qo_len)
    return q


def _problem(faults: Faults, fields: dict[str, Any]) -> AttentionProblem:
    """The problem; with faults already found, adds those of its own rules and raises all."""
    if not faults:
        for name in ("batch", "total_qo_len", "max_qo_len", "kv_capacity"):
            assert name in fields, f"describe left {name} out without a fault"
        phase = phase_of(
            fields["total_qo_len"], fields["batch"], fields["max_qo_len"], fields["kv_capacity"]
        )
        return AttentionProblem(phase=phase, **fields)
    known = SimpleNamespace(**fields)
    for rule in PROBLEM_RULES:
        try:
            if rule.holds(known):
                continue
            value = rule.value(known) if rule.value else getattr(known, rule.parameter)
            nearest = rule.nearest(known) if rule.nearest else None
        except AttributeError:  # about a field that a faulty tensor could not tell
            continue
        except (*NOT_OF_TYPE, ZeroDivisionError):
            value, nearest = getattr(known, rule.parameter, None), None
        faults.add(rule.parameter, value, rule.text, nearest)
    faults.raise_if_any("attention")
    raise AssertionError("unreachable: faults were found")
