"""The oracle check of a run: sampled rows against fp64, every row for being written at all.

The oracle judges the first pool and the last, and every output is looked at: a plan bound to the
wrong pool would pass a check of one, and a call that does nothing would pass a check of the ends.
Requests are checked by the project's one tolerance, all heads: whole where they have few queries,
else in runs of rows spread from the first to the last. The one with most queries is always among
them, then the longest and the shortest; how many more is bounded by the oracle's work, so that a
cell of 2 GiB is checked in seconds and bounded memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.contenders import Work
from stream_attention.bench.pools import Pool
from stream_attention.core.cache import KVCache, PagedKVCache
from stream_attention.core.testing.golden import Golden, golden
from stream_attention.core.testing.tolerance import compare

# Rows times tokens times query heads that the oracle works through for one pool. On a CPU: the
# eight requests of the suite `cpu_headline`, some seconds on two cores. On a GPU: eight runs of a
# prefill of 16K tokens and 32 heads.
ORACLE_BUDGET = {"cpu": 1 << 21, "cuda": 1 << 26}
MAX_REQUESTS = 8
RUN_ROWS = 16  # adjoining rows of a request with many: at most MAX_RUNS such runs, 2 at least
MAX_RUNS = 8

# How outputs of pools are told apart: rows of this many requests, which are the same where their
# distance is below this share of their length. Rounding, bf16 and atomics stay below 1e-2. Of 16
# normal numbers, two sets are that near once in 1e26.
_SAMPLED = 8
_SAME = 0.02
_LEAST_NUMBERS = 16


@dataclass(frozen=True, slots=True)
class Check:
    """The verdict on one contender: errors and bounds over the checked rows, worst pool.

    ok: within the tolerance and every row written. Errors are `None` where a fault was found before
    they were computed. rows_checked of rows: against the oracle.
    message: what is wrong, "" when nothing is. rerun: the calls share one output, which holds the
    last result only, so each was judged after a run of its own that was not timed. poisoned: poison
    put into the outputs was found there again; where not, an old result may have been judged.
    """

    ok: bool
    max_error: float | None
    max_bound: float | None
    rms_error: float | None
    rms_bound: float | None
    rows_checked: int
    rows: int
    message: str = ""
    rerun: bool = False
    poisoned: bool = True


@dataclass(frozen=True, slots=True)
class Run:
    """Adjoining rows of a request: its queries `start` … `stop - 1`."""

    request: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """The right answer for some rows of a pool: golden holds those of `runs`, one after another."""

    pool: Pool
    runs: tuple[Run, ...]
    golden: Golden

    def verdict(self, out: torch.Tensor) -> Check:
        """Judge `out` `[rows, num_qo_heads, head_dim]`. Syncs."""
        case = self.pool.case
        fault = form_fault(out, self.pool) or unwritten(out)
        if fault:
            return failed(self.pool, fault)
        rows = _rows(self.runs, case)
        got = out[rows.to(out.device)]
        want = self.golden
        shape = tuple(got.shape)
        result = compare(
            got,
            want.out.reshape(shape),
            want.dtype,
            reference=want.reference_out.reshape(shape),
            noise=want.out_noise.reshape(shape),
        )
        return Check(
            ok=result.ok,
            max_error=result.max_error,
            max_bound=result.max_bound,
            rms_error=result.rms_error,
            rms_bound=result.rms_bound,
            rows_checked=len(rows),
            rows=case.num_rows,
            message="" if result.ok else str(result),
        )


def failed(pool: Pool, message: str) -> Check:
    """A verdict without numbers: what is wrong was found before any were computed."""
    return Check(False, None, None, None, None, 0, pool.case.num_rows, message)


def form_fault(out: torch.Tensor, pool: Pool) -> str:
    """What is wrong with shape and dtype of an output; "" when nothing is."""
    shape, dtype = tuple(pool.q.shape), pool.q.dtype
    if tuple(out.shape) == shape and out.dtype == dtype:
        return ""
    return f"output is {tuple(out.shape)} {out.dtype}, want {shape} {dtype}"


def unwritten(out: torch.Tensor) -> str:
    """Which rows of an output are not finite; "" when all are. Syncs."""
    finite = out.isfinite().flatten(1).all(1)
    if bool(finite.all()):
        return ""
    first = int((~finite).nonzero()[0])
    return (
        f"{int((~finite).sum())} of {len(out)} rows hold NaN, Inf or poison that was not "
        f"overwritten, first row {first}"
    )


def judge_timed(
    works: Sequence[Work], pools: Sequence[Pool], expected: Sequence[Expected]
) -> Check:
    """The verdict on timed runs over outputs that were poisoned before them, one work a pool.

    Every output: shape, dtype, and finite, with one sync for all. `expected` judges the first and
    the last; the others must differ from these and from each other. Leaves the outputs poisoned.
    """
    outs = [work.result() for work in works]
    fault = _fault_of_any(outs, pools)
    if fault is not None:
        return fault
    if len({out.data_ptr() for out in outs}) < len(outs):
        check = _judge_shared(works, pools, expected)
    else:
        ends = zip(expected, (outs[0], outs[-1]), strict=False)
        check = worst([e.verdict(out) for e, out in ends])
        if check.ok:
            check = mixed_up([_sample(out, pools[0].case) for out in outs], pools) or check
    return replace(check, poisoned=_all_poisoned(works)) if check.ok else check


def _all_poisoned(works: Sequence[Work]) -> bool:
    """Whether poison takes hold of outputs that `output()` gives; it does of those that are kept.

    Overwrites them. Syncs. It does not where `output()` gives a copy, or what cannot be filled.
    """
    fresh = [work for work in works if work.out is None]
    for work in fresh:
        work.poison()
    held = [work.result().isnan().all() for work in fresh]
    return not held or bool(torch.stack(held).all())


def _sample(out: torch.Tensor, case: AttentionCase) -> torch.Tensor:
    """`[requests, heads * head_dim]` fp32: the last row of some requests with tokens; a copy."""
    sizes = zip(case.kv_lens, case.q_lens, strict=True)
    live = [request for request, (tokens, queries) in enumerate(sizes) if tokens and queries]
    chosen = live[:: max(1, len(live) // _SAMPLED)][:_SAMPLED]
    ends = case.q_offsets[1:]
    rows = torch.tensor([ends[request] - 1 for request in chosen], dtype=torch.int64)
    return out[rows.to(out.device)].float().flatten(1)


def mixed_up(samples: Sequence[torch.Tensor], pools: Sequence[Pool]) -> Check | None:
    """The first pool whose sample is another pool's, or has a row of zeros; `None` without one.

    q, K and V of a pool are random and its own, so right outputs are as far apart as they are long;
    the same pool twice differs in rounding. Says nothing of rows of so few independent numbers that
    two could be alike by chance. The ends are right: of a pair, the other is at fault. One sync.
    """
    case, count = pools[0].case, len(pools)
    if count < 2 or not samples[0].numel() or case.num_kv_heads * case.head_dim < _LEAST_NUMBERS:
        return None
    stacked = torch.stack(list(samples))
    flat = stacked.flatten(1)
    # Without products of rows: these may be rounded to TF32, and then tell nothing this near.
    apart = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
    near = apart < _SAME * flat.norm(dim=1, keepdim=True)
    zero = (stacked == 0).all(2).any(1, keepdim=True)
    found = torch.cat((zero, near), dim=1).tolist()
    for index in (*range(1, count - 1), count - 1, 0):
        is_zero, *same = found[index]
        if is_zero:
            fault = "a request with tokens has a row of zeros"
            return failed(pools[index], f"pool {index + 1} of {count}: {fault}")
        other = next((i for i in (count - 1, *range(index)) if same[i] and i != index), None)
        if other is not None:
            return failed(
                pools[index], f"pool {index + 1} of {count}: gave pool {other + 1}'s output"
            )
    return None


def _fault_of_any(outs: Sequence[torch.Tensor], pools: Sequence[Pool]) -> Check | None:
    """The first output of a wrong form or with a row that was not written; `None` without one."""
    forms = (form_fault(out, pool) for out, pool in zip(outs, pools, strict=True))
    faults = [(index, fault) for index, fault in enumerate(forms) if fault]
    if not faults:
        finite = torch.stack([out.isfinite().all() for out in outs]).tolist()
        faults = [(i, unwritten(outs[i])) for i, whole in enumerate(finite) if not whole]
    if not faults:
        return None
    index, fault = faults[0]
    where = f"pool {index + 1} of {len(pools)}: " if len(pools) > 1 else ""
    return failed(pools[index], f"{where}{fault}")


def _judge_shared(
    works: Sequence[Work], pools: Sequence[Pool], expected: Sequence[Expected]
) -> Check:
    """As `judge_timed` where an output is shared: each work is run once more, on poison."""
    by_pool = {id(e.pool): e for e in expected}
    verdicts, samples = [], []
    for index, (work, pool) in enumerate(zip(works, pools, strict=True)):
        work.poison()
        work.run()
        out = work.result()
        samples.append(_sample(out, pool.case))
        if id(pool) in by_pool:
            verdicts.append(by_pool[id(pool)].verdict(out))
            continue
        fault = form_fault(out, pool) or unwritten(out)
        if fault:
            verdicts.append(failed(pool, f"pool {index + 1} of {len(pools)}: {fault}"))
    check = worst(verdicts)
    if check.ok:
        check = mixed_up(samples, pools) or check
    return replace(check, rerun=True)


def worst(checks: Sequence[Check]) -> Check:
    """The first that is not ok, else the one nearest to its bound."""
    bad = [check for check in checks if not check.ok]
    if bad:
        return bad[0]
    return max(checks, key=lambda check: (check.max_error or 0.0) / (check.max_bound or 1.0))


def expect(pool: Pool) -> Expected:
    """Run the oracle on sampled rows of `pool`.

    A run of rows is a request of its own that ends where the run does: its queries see the tokens
    before, so causally it holds `kv_len - q_len + stop` of them, and else all.
    """
    case, cache = pool.case, pool.cache
    budget = ORACLE_BUDGET.get(pool.q.device.type, ORACLE_BUDGET["cpu"])
    runs = sample_runs(case.kv_lens, case.q_lens, case.num_qo_heads, budget)
    tokens = [_tokens_seen(case, run) for run in runs]
    device = pool.q.device
    chosen = torch.tensor([run.request for run in runs], device=device)
    lens = torch.tensor(tokens, dtype=torch.int32, device=device)
    part: KVCache
    if isinstance(cache, PagedKVCache):
        part = replace(cache, page_table=cache.page_table[chosen], sequence_lengths=lens)
    else:
        longest = max(1, *tokens)
        part = replace(
            cache,
            key=_rows_of(cache.key, chosen, longest, case.layout),
            value=_rows_of(cache.value, chosen, longest, case.layout),
            sequence_lengths=lens,
        )
    sizes = [0, *(run.stop - run.start for run in runs)]
    offsets = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    q = pool.q[_rows(runs, case).to(device)]
    return Expected(pool, runs, golden(q, part, offsets, causal=case.causal))


def _tokens_seen(case: AttentionCase, run: Run) -> int:
    """Tokens that the last row of a run sees."""
    tokens = case.kv_lens[run.request]
    if not case.causal:
        return tokens
    return max(0, tokens - case.q_lens[run.request] + run.stop)


def _rows_of(
    tensor: torch.Tensor, requests: torch.Tensor, tokens: int, layout: str
) -> torch.Tensor:
    """The first `tokens` slots of some requests of a contiguous K or V: a copy."""
    kept = tensor.narrow(1 if layout == "NHD" else 2, 0, tokens)
    if kept.element_size() > 1:
        return kept[requests]
    return kept.view(torch.uint8)[requests].view(tensor.dtype)  # torch indexes no fp8


def sample_runs(
    kv_lens: Sequence[int], q_lens: Sequence[int], heads: int, budget: int
) -> tuple[Run, ...]:
    """Rows to check, ascending: of the busiest request, the longest, the shortest, then others.

    The busiest has most queries; the others are evenly spread by length. Stops at `MAX_REQUESTS` or
    when Σ rows · kv_len · heads passes `budget`; the first request is always taken. Requests
    without queries have no rows.
    """
    live = [request for request, queries in enumerate(q_lens) if queries]
    order = sorted(live, key=lambda request: (kv_lens[request], request))
    count = min(MAX_REQUESTS, len(order))
    spread = [order[round(i * (len(order) - 1) / max(count - 1, 1))] for i in range(count)]
    # Of those with equally many queries the longest.
    busiest = max(order, key=lambda request: (q_lens[request], kv_lens[request]))
    candidates = list(dict.fromkeys([busiest, spread[-1], spread[0], *spread[1:-1]]))
    chosen: list[Run] = []
    spent = 0
    for request in candidates[:MAX_REQUESTS]:
        row_cost = kv_lens[request] * heads
        runs = _runs(request, q_lens[request], budget // max(1, row_cost))
        cost = row_cost * sum(run.stop - run.start for run in runs)
        if chosen and spent + cost > budget:
            continue
        chosen += runs
        spent += cost
    return tuple(sorted(chosen, key=lambda run: (run.request, run.start)))


def _runs(request: int, queries: int, rows: int) -> list[Run]:
    """All rows of a request where `rows` hold them, else runs of them, first and last among these.

    They are spread evenly, so that they begin and end anywhere in a kernel's tiles.
    """
    if queries <= max(rows, 2 * RUN_ROWS):
        return [Run(request, 0, queries)]
    count = min(max(rows // RUN_ROWS, 2), MAX_RUNS)
    starts = [round(i * (queries - RUN_ROWS) / (count - 1)) for i in range(count)]
    return [Run(request, start, start + RUN_ROWS) for start in starts]


def _rows(runs: Sequence[Run], case: AttentionCase) -> torch.Tensor:
    """Row numbers of some runs, one run after another."""
    starts = case.q_offsets
    return torch.tensor(
        [starts[run.request] + i for run in runs for i in range(run.start, run.stop)]
    )
