"""One check a numbered line of the contract, for any route on any device.

`LINES[number](record, device)` raises `AssertionError` when the route breaks the line. The numbers
are those of the contract's section on semantics; lines 13 to 15 concern the planner, which has its
own tests. `testing.faulty` holds a route with a fault for every line, which shows that each check
can fail.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stream_attention.core.cache import ContiguousKVCache, PagedKVCache
from stream_attention.core.registry import AttentionRecord
from stream_attention.core.testing.checks import check_built, check_route, launch, runner_of
from stream_attention.core.testing.far import FAR
from stream_attention.core.testing.golden import golden
from stream_attention.core.testing.problems import FP8, BuiltCase, Case, build

_RAGGED: dict[str, Any] = {"qo_lens": (1, 4, 2), "kv_lens": (70, 33, 5)}


def _same_bits(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    raw = [t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b)]
    if not torch.equal(*raw):
        wrong = int((a != b).sum())
        raise AssertionError(f"{what}: bits differ in {wrong} of {a.numel()} elements")


def _run(record: AttentionRecord, case: Case, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return runner_of(record)(build(case, 0, device))


def formula(record: AttentionRecord, device: Any = "cpu") -> None:
    """Line 1: scale, cap, fp32 accumulation, one rounding at the end; lse in natural log."""
    for dtype in ("bfloat16", "float16", "float32"):
        check_route(record, Case(dtype=dtype, spread=4.0, **_RAGGED), device)
        check_route(record, Case(dtype=dtype, qo_lens=(1,), kv_lens=(700,), sm_scale=0.3), device)
    flat = Case(kv_lens=(4096,), sm_scale=0.0, value_mean=3.0, head_dim_qk=32)
    check_route(record, flat, device)  # sums that grow show each rounding on the way
    check_route(record, Case(logits_soft_cap=2.0, spread=4.0, dtype="float32", **_RAGGED), device)
    check_route(record, Case(sm_scale=0.0, **_RAGGED), device)
    check_route(record, Case(head_dim_qk=96, head_dim_vo=80, num_qo_heads=6, **_RAGGED), device)
    for scales in ("head", "tensor"):
        case = Case(kv_dtype="float8_e4m3fn", kv_scales=scales, dtype="float16", **_RAGGED)
        check_route(record, case, device)
    for dtype, kv_dtype in (("float16", None), ("bfloat16", None), ("bfloat16", FP8)):
        scales = None if kv_dtype is None else "tensor"
        case = Case(dtype=dtype, kv_dtype=kv_dtype, kv_scales=scales, sm_scale=0.0, **_RAGGED)
        _rounded_once(record, dataclasses.replace(case, value_mean=3.0), device)


def _rounded_once(record: AttentionRecord, case: Case, device: Any) -> None:
    """Equal weights leave nothing but sums to be inexact: half a unit of the dtype and no more."""
    built = build(case, 0, device)
    out, _ = runner_of(record)(built)
    want = golden(built.q, built.cache, built.qo_indptr, **built.options).out.to(out.device)
    unit = torch.finfo(out.dtype).eps * 2.0 ** (torch.frexp(want.abs())[1] - 1).double()
    error = (out.double() - want).abs() / unit
    off = ~(error <= 0.51)  # NaN too
    if bool(off.any()):
        raise AssertionError(
            f"{case!r}: {int(off.sum())} of {error.numel()} outputs are up to "
            f"{float(error.max()):.2f} units off: rounded more than once"
        )


def empty_rows(record: AttentionRecord, device: Any = "cpu") -> None:
    """Line 2: a row that sees no token gives 0 and -inf, alone or beside others, also with sink."""
    for sink in (None, "random"):
        for lens in ((0, 0, 0), (0, 33, 0)):
            case = Case(qo_lens=(1, 2, 3), kv_lens=lens, sink=sink)
            out, lse = _run(record, case, device)
            for rows in (slice(0, 1), slice(3, 6)):
                if out[rows].count_nonzero() or not bool((lse[rows] == -math.inf).all()):
                    raise AssertionError(f"{case!r}: an empty row is not (0, -inf)")
            check_route(record, case, device)
    check_route(record, Case(qo_lens=(), kv_lens=()), device)
    check_route(record, Case(kv_lens=((0, 20),), sink=1.0), device)


def causal_bottom_right(record: AttentionRecord, device: Any = "cpu") -> None:
    """Line 3: query i sits at `kv_len - qo_len + i`; rows at negative positions are empty."""
    for qo, kv in (((5, 3), (40, 3)), ((9, 6), (4, 1)), ((33,), (33,)), ((20,), (70,))):
        check_route(record, Case(qo_lens=qo, kv_lens=kv, dtype="float32"), device)
    check_route(record, Case(qo_lens=(4, 4), kv_lens=(2, 50), call="block"), device)
    check_route(record, Case(qo_lens=(3,), kv_lens=((40, 2),)), device)


def window_per_row(record: AttentionRecord, device: Any = "cpu") -> None:
    """Line 4: the query at p sees keys `p - w … p`, each row of a block by its own p."""
    for window in (0, 1, 15, 16, 500):
        case = Case(qo_lens=(1, 20, 6), kv_lens=(70, 50, 2), window_left=window, dtype="float32")
        check_route(record, case, device)
    both: dict[str, Any] = {"causal": False, "window_left": 3, "window_right": 2}
    check_route(record, Case(qo_lens=(7, 9), kv_lens=(40, 5), **both), device)
    check_route(record, Case(qo_lens=(7,), kv_lens=(40,), causal=False, window_right=0), device)


def sink_once(record: AttentionRecord, device: Any = "cpu") -> None:
    """Line 5: `exp(sink)` joins the denominator once, however many splits, empty ones included."""
    for lens in ((3, 16, 17), (1000, 0, 40)):
        for sink in (3.0, "random", 40.0, -1e4):
            case = Case(qo_lens=(1, 1, 1), kv_lens=lens, sink=sink, dtype="float32", head_dim_qk=32)
            check_route(record, case, device)
    case = Case(qo_lens=(1, 5), kv_lens=(900, 30), sink=2.0, window_left=20, head_dim_qk=32)
    check_route(record, case, device)


def unused_slots(record: AttentionRecord, device: Any = "cpu") -> None:
    """Line 6: NaN or Inf at and beyond kv_len changes nothing, bit for bit."""
    paged: dict[str, Any] = {"qo_lens": (1, 3, 1), "kv_lens": (17, 40, 0)}
    for case in (
        Case(**paged),
        Case(page_size=64, layout="HND", **paged),
        Case(page_size=3, dtype="float32", **paged),
        Case(qo_lens=(1, 3), kv_lens=((5, 20), (33, 0))),
        Case(cache_kind="contiguous", **paged),
        Case(kv_dtype="float8_e4m3fn", kv_scales="head", **paged),
    ):
        want = _run(record, dataclasses.replace(case, poison="zero"), device)
        for poison in ("nan", "inf"):
            got = _run(record, dataclasses.replace(case, poison=poison), device)
            for name, a, b in zip(("out", "lse"), got, want, strict=True):
                _same_bits(a, b, f"{case!r} with {poison}, {name}")


def unused_page_ids(record: AttentionRecord, device: Any = "cpu") -> None:
    """Line 7: table entries at and beyond `ceil(kv_len / page_size)` are never dereferenced."""
    for case in (
        Case(qo_lens=(1, 3, 1), kv_lens=(17, 40, 0), spare=5),
        Case(qo_lens=(1, 1), kv_lens=(300, 1), page_size=3, layout="HND"),
        Case(qo_lens=(1, 3), kv_lens=((5, 20), (33, 0))),
    ):
        want = _run(record, dataclasses.replace(case, ids="stale"), device)
        for ids in ("negative", "huge"):
            got = _run(record, dataclasses.replace(case, ids=ids), device)
            for name, a, b in zip(("out", "lse"), got, want, strict=True):
                _same_bits(a, b, f"{case!r} with {ids} ids, {name}")


def wide_offsets(record: AttentionRecord, device: Any = "cpu") -> None:
    """Line 8: page ids above 2^20, pools above 2^31 elements, 65,537 requests, a layer axis."""
    for layout in ("NHD", "HND"):
        check_route(record, Case(pool="layer_axis", layout=layout, **_RAGGED), device)
    for make in FAR.values():
        check_built(record, make(device))
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()  # up to 8.6 GB each, beside other processes
    _late_queries(record, device)


def many_requests(record: AttentionRecord, device: Any = "cpu") -> None:
    """Line 8: 65,537 requests of one token each: out is that token's V, lse its score."""
    out, lse, value, score = _one_token_each(record, device, None)
    if not torch.equal(out, value):
        raise AssertionError("65,537 requests: out is not the one token's value")
    if not torch.allclose(lse, score, rtol=1e-5, atol=1e-5):
        raise AssertionError("65,537 requests: lse is not the one token's score")


def _late_queries(record: AttentionRecord, device: Any) -> None:
    """65,537 requests, of which only the first and the last have a query."""
    out, _, value, _ = _one_token_each(record, device, (0, 65_536))
    if not torch.equal(out, value[[0, 65_536]]):
        raise AssertionError("65,537 requests: out of the last is not its one token's value")


def _one_token_each(
    record: AttentionRecord, device: Any, asking: tuple[int, ...] | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse, and each request's V and score; only the requests `asking` have a query."""
    batch, dim = 65_537, 8
    rng = torch.Generator().manual_seed(0)
    key, value = (torch.randn(batch, 1, 1, dim, generator=rng).to(device) for _ in "kv")
    q = torch.randn(batch, 1, dim, generator=rng).to(device)
    case = Case(name="65,537 requests", num_qo_heads=1, num_kv_heads=1, head_dim_qk=dim)
    pages = torch.arange(batch, dtype=torch.int32, device=device).flip(0)
    cache = PagedKVCache(
        key=key,
        value=value,
        page_table=pages.unsqueeze(1),
        sequence_lengths=torch.ones(batch, dtype=torch.int32, device=device),
    )
    options = {"sm_scale": 1.0, "causal": True, "window_left": None, "window_right": None}
    options |= {"logits_soft_cap": None, "attn_sink": None}
    score = (q * key[:, 0].flip(0)).sum(-1)
    indptr = None
    if asking is not None:
        counts = torch.zeros(batch + 1, dtype=torch.int32)
        counts[[request + 1 for request in asking]] = 1
        indptr = counts.cumsum(0).to(torch.int32).to(device)
        q = q[list(asking)]
    out, lse = runner_of(record)(BuiltCase(case, q, cache, indptr, options))
    return out, lse, value[:, 0].flip(0), score


def query_strides(record: AttentionRecord, device: Any = "cpu") -> None:
    """Line 9: q of any legal stride gives the bits of a dense q, and is not written."""
    for case in (
        Case(**_RAGGED),
        Case(dtype="float32", head_dim_qk=80, **_RAGGED),
        Case(qo_lens=(3, 3), kv_lens=(9, 40), call="block"),
        Case(qo_lens=(1, 1), kv_lens=(9, 40), call="batch"),
    ):
        want = _run(record, case, device)
        for form in ("strided", "transposed"):
            built = build(dataclasses.replace(case, q_form=form), 0, device)
            if built.q.is_contiguous():
                raise AssertionError(f"{case!r}: q_form {form} is contiguous")
            got = runner_of(record)(built)
            for name, a, b in zip(("out", "lse"), got, want, strict=True):
                _same_bits(a, b, f"{case!r} with q {form}, {name}")


def separate_scratch(record: AttentionRecord, device: Any = "cpu") -> None:
    """Line 10: two launches of one problem share nothing; `reset` leaves a launch that works."""
    case = Case(qo_lens=(1, 1), kv_lens=(700, 40), head_dim_qk=32)
    first, second = build(case, 1, device), build(case, 2, device)
    one, of_one = launch(record, first)
    two, of_two = launch(record, second)
    for step in (one, two, one):
        step.run()
    two.reset()
    two.run()
    for built, described in ((first, of_one), (second, of_two)):
        want = golden(built.q, built.cache, built.qo_indptr, **built.options)
        want.check(described.result(), described.result_lse(), "two launches interleaved: ")
    kept = of_one.bound.out.clone()
    two.run()
    _same_bits(of_one.bound.out, kept, "a launch's output after another one ran")
    _runs_between(record, device)


def _runs_between(record: AttentionRecord, device: Any) -> None:
    """What a launch leaves in its scratch for its own next step is there when another one ran.

    Steps are torch's operations: of a route that is one kernel of its own this sees nothing.
    """
    case = Case(kv_lens=(20,), head_dim_qk=16, spare=0)
    (one, of_one), (two, _) = (launch(record, build(case, seed, device)) for seed in (1, 2))
    one.run()
    alone = of_one.bound.out.clone()
    of_one.bound.out.zero_()
    with _RunsBetween(two.run):
        one.run()
    _same_bits(of_one.bound.out, alone, "a launch's output with another one run between its steps")


class _RunsBetween(TorchDispatchMode):
    """Calls `other` after every operation of torch: as threads may at their worst."""

    def __init__(self, other: Callable[[], None]) -> None:
        super().__init__()
        self._other = other

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._other()
        return result


_MUTABLE = (
    Case(kv_lens=(160,), spare=0, dtype="float32"),
    Case(qo_lens=(1, 3, 2), kv_lens=(48, 48, 48), spare=0),
    Case(qo_lens=(2, 2), kv_lens=((24, 24), (24, 24)), page_size=3, spare=0, layout="HND"),
    Case(qo_lens=(1, 1), kv_lens=(40, 40), cache_kind="contiguous", spare=0, call="batch"),
)


def mutate(built: BuiltCase, seed: int) -> None:
    """New contents of q, K, V, table and lengths in place: lengths from 0 to capacity.

    The case must have been built at full capacity, so that its pool holds pages for every entry.
    """
    rng = torch.Generator().manual_seed(seed)
    cache = built.cache
    kept = cache.sequence_lengths
    assert kept is not None
    for tensor in (built.q, cache.key, cache.value):
        tensor.copy_(torch.randn(tensor.shape, generator=rng).to(tensor.dtype))
    lens = torch.randint(0, cache.capacity + 1, kept.shape, generator=rng)
    flat = lens.view(-1)
    flat[seed % flat.numel()] = (0, cache.capacity)[seed % 2]
    kept.copy_(lens.to(torch.int32))
    if isinstance(cache, ContiguousKVCache):
        return
    table = cache.page_table
    ids = torch.randperm(cache.num_pages, generator=rng)[: table.numel()].view(table.shape)
    used = -(-lens // cache.page_size)
    beyond = torch.arange(table.shape[-1]) >= used.unsqueeze(-1)
    table.copy_(ids.masked_fill(beyond, 1 << 30).to(torch.int32))


def in_place_changes(record: AttentionRecord, device: Any = "cpu") -> None:
    """Line 11: contents, tables and lengths change in place between runs with no host step."""
    for case in _MUTABLE:
        built = build(case, 0, device)
        step, described = launch(record, built)
        for seed in range(5):
            step.run()
            want = golden(built.q, built.cache, built.qo_indptr, **built.options)
            want.check(described.result(), described.result_lse(), f"{case!r}, change {seed}: ")
            mutate(built, seed)
            described.bound.out.fill_(math.nan)
            described.bound.lse.fill_(math.nan)


def only(built: BuiltCase, request: int) -> BuiltCase:
    """One request of a ragged or batch case alone, over the same pool."""
    case, cache = built.case, built.cache
    start = sum(case.qo_lens[:request])
    stop = start + case.qo_lens[request]
    one = slice(request, request + 1)
    if isinstance(cache, PagedKVCache):
        changed: dict[str, Any] = {"page_table": cache.page_table[one]}
    else:
        changed = {"key": cache.key[one], "value": cache.value[one]}
    if cache.sequence_lengths is not None:
        changed["sequence_lengths"] = cache.sequence_lengths[one]
    indptr = torch.tensor([0, stop - start], dtype=torch.int32, device=built.q.device)
    ragged = case.call == "ragged"
    return BuiltCase(
        dataclasses.replace(
            case, qo_lens=case.qo_lens[one], kv_lens=case.kv_lens[one], name=f"request {request}"
        ),
        built.q[one] if case.call == "block" else built.q[start:stop],
        dataclasses.replace(cache, **changed),
        indptr if ragged else None,
        built.options,
    )


def same_bits(record: AttentionRecord, device: Any = "cpu") -> None:
    """Line 12: run after run the same bits; batch-invariant: the bits of each request alone."""
    for case in (
        Case(qo_lens=(1, 1, 1, 1), kv_lens=(700, 3, 64, 200), call="batch", head_dim_qk=32),
        Case(qo_lens=(1, 5, 20, 3), kv_lens=(300, 33, 20, 0), dtype="float32", head_dim_qk=32),
        Case(qo_lens=(2, 1), kv_lens=((30, 5), (70, 0)), sink=1.0),
    ):
        built = build(case, 0, device)
        step, described = launch(record, built, batch_invariant=True)
        step.run()
        out, lse = described.bound.out.clone(), described.bound.lse.clone()
        for _ in range(3):
            step.run()
            _same_bits(described.bound.out, out, f"{case!r}: out of another run")
            _same_bits(described.bound.lse, lse, f"{case!r}: lse of another run")
        start = 0
        for request, qo_len in enumerate(case.qo_lens):
            alone, of_alone = launch(record, only(built, request), batch_invariant=True)
            alone.run()
            rows = slice(start, start + qo_len)
            _same_bits(of_alone.bound.out, out[rows], f"{case!r}: request {request} alone, out")
            _same_bits(of_alone.bound.lse, lse[rows], f"{case!r}: request {request} alone, lse")
            start += qo_len


LINES: dict[int, Callable[..., None]] = {
    1: formula,
    2: empty_rows,
    3: causal_bottom_right,
    4: window_per_row,
    5: sink_once,
    6: unused_slots,
    7: unused_page_ids,
    8: wide_offsets,
    9: query_strides,
    10: separate_scratch,
    11: in_place_changes,
    12: same_bits,
}

__all__ = ["LINES", "many_requests", "mutate", "only"]
