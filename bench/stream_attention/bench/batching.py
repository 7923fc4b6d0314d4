"""Batches that a serving loop would have formed over a trace: a model of continuous batching.

What it is: a deterministic simulation. Requests are admitted in the order of their arrival while
there is room; every step runs one query of each request that decodes, then chunks of prompts, first
come first served, within the step's budget of tokens. Step times are linear in the tokens of the
step, with coefficients that are given and not measured here. What it is not: there is no memory
limit, so nothing is preempted; a shared prefix is held once in memory, yet every request computes
all of its prompt; drafts are not verified; the trace's own latencies play no part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stream_attention.bench.traces import Trace, TraceRequest
from stream_attention.core.ir import Rule, check_rules, evaluable_repr, is_int
from stream_attention.planner.workloads import WorkloadBatch, WorkloadRequest


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Batching:
    """How steps are filled, and how long one takes.

    max_batch: most requests in a step. chunk_tokens: most tokens of one prompt in a step.
    budget_tokens: most query tokens in a step, at least max_batch, so that every request that
    decodes has its token. step_us, query_token_us: a step with n query tokens takes
    `step_us + n · query_token_us`, rounded. Raises `ValueError` with every broken rule.
    """

    max_batch: int = 64
    chunk_tokens: int = 512
    budget_tokens: int = 2048
    step_us: int = 8000
    query_token_us: float = 20.0

    def __post_init__(self) -> None:
        check_rules(self, _RULES)

    __repr__ = evaluable_repr


def _count(name: str, low: int, nearest: int) -> Rule:
    return Rule(
        name,
        f"must be an int >= {low}",
        lambda b: is_int(getattr(b, name)) and getattr(b, name) >= low,
        lambda b: nearest,
    )


_RULES = (
    _count("max_batch", 1, 64),
    _count("chunk_tokens", 1, 512),
    _count("budget_tokens", 1, 2048),
    _count("step_us", 1, 8000),
    Rule(
        "query_token_us",
        "must be a number in 0..1e9",
        lambda b: not isinstance(b.query_token_us, bool) and 0 <= b.query_token_us <= 1e9,
        lambda b: 20.0,
    ),
    Rule(
        "budget_tokens",
        "must be at least max_batch: a token for every request that decodes",
        lambda b: (
            not is_int(b.budget_tokens) or not is_int(b.max_batch) or b.budget_tokens >= b.max_batch
        ),
        lambda b: b.max_batch,
    ),
)


@dataclass(slots=True)
class _Running:
    """A request in flight: tokens of its prompt and of its output that are done."""

    index: int
    request: TraceRequest
    prefilled: int = 0
    generated: int = 0

    @property
    def decodes(self) -> bool:
        return self.prefilled == self.request.prompt_tokens

    @property
    def finished(self) -> bool:
        """A prompt's last chunk gives the first token, and no step follows the last one."""
        return self.decodes and self.generated >= self.request.output_tokens


def simulate(trace: Trace, batching: Batching, like: WorkloadBatch) -> Iterator[WorkloadBatch]:
    """The batch of every step until all requests are done.

    like: gives geometry, memory form and options; its requests are replaced. Without a `capacity`
    a step's is that of its longest request. Requests whose prompts begin with the same blocks
    share the whole pages of what the running ones of them have in common, one prefix a request.
    Raises `ValueError` at once for a request that `like` cannot hold.
    """
    _check(trace, like)
    return _steps(trace, batching, like)


def _check(trace: Trace, like: WorkloadBatch) -> None:
    if like.differentiable or like.dropout_p:
        raise ValueError("like='training': a serving loop does not train; use decode requests")
    if like.capacity is None:
        return
    for index, request in enumerate(trace.requests):
        longest = request.prompt_tokens + max(request.output_tokens - 1, 0)
        if longest > like.capacity:
            raise ValueError(
                f"like.capacity={like.capacity}: request {index} of {trace.name} grows to "
                f"{longest} tokens; use {-(-longest // like.page_size) * like.page_size}"
            )


def _steps(trace: Trace, batching: Batching, like: WorkloadBatch) -> Iterator[WorkloadBatch]:
    waiting = deque(enumerate(trace.requests))
    running: list[_Running] = []
    clock_us = 0
    number = 0
    while waiting or running:
        if not running and waiting[0][1].arrival_us > clock_us:
            clock_us = waiting[0][1].arrival_us
        while waiting and len(running) < batching.max_batch:
            if waiting[0][1].arrival_us > clock_us:
                break
            running.append(_Running(*waiting.popleft()))
        step = _fill(running, batching)
        rows = _rows(step, trace, like)
        label = f"{trace.name} step {number}"
        yield replace(like, requests=rows, label=label)
        for active, queries in step:
            if not active.decodes:
                active.prefilled += queries
                active.generated = int(active.decodes)
            else:
                active.generated += 1
        running = [active for active in running if not active.finished]
        tokens = sum(queries for _, queries in step)
        clock_us += batching.step_us + round(tokens * batching.query_token_us)
        number += 1


def _fill(running: Sequence[_Running], batching: Batching) -> list[tuple[_Running, int]]:
    """`(request, query tokens)` of a step: all that decode, then prompts within the budget."""
    step = [(active, 1) for active in running if active.decodes]
    left = batching.budget_tokens - len(step)
    for active in running:
        if active.decodes or not left:
            continue
        rest = active.request.prompt_tokens - active.prefilled
        queries = min(rest, batching.chunk_tokens, left)
        step.append((active, queries))
        left -= queries
    return step


def _rows(
    step: Sequence[tuple[_Running, int]], trace: Trace, like: WorkloadBatch
) -> tuple[WorkloadRequest, ...]:
    held = [_kv_len(active, queries) for active, queries in step]
    prefixes = _prefixes(step, held, trace, like.page_size) if like.paged else {}
    rows = []
    for place, (active, queries) in enumerate(step):
        kv_len = held[place]
        phase = "decode" if active.decodes else ("prefill" if queries == kv_len else "append")
        group, tokens = prefixes.get(place, (None, 0))
        rows.append(
            WorkloadRequest(
                phase=phase,
                qo_len=queries,
                kv_len=kv_len,
                prefix_group=group,
                prefix_len=tokens,
                label=f"request {active.index}",
            )
        )
    return tuple(rows)


def _kv_len(active: _Running, queries: int) -> int:
    """Tokens in the cache in a step, its own queries counted."""
    if active.decodes:  # the query is the last token that was generated
        return active.request.prompt_tokens + active.generated
    return active.prefilled + queries


def _prefixes(
    step: Sequence[tuple[_Running, int]], held: Sequence[int], trace: Trace, page_size: int
) -> dict[int, tuple[int, int]]:
    """`{place in the step: (group, shared tokens)}`.

    Requests with the same first block are a group. What all its members have in common, and hold
    already, is shared in whole pages: a lower bound where some members have more in common.
    """
    by_first: dict[int, list[int]] = {}
    for place, (active, _) in enumerate(step):
        if active.request.block_ids:
            by_first.setdefault(active.request.block_ids[0], []).append(place)
    found = {}
    for first, places in by_first.items():
        if len(places) < 2:
            continue
        blocks = _num_common([step[place][0].request.block_ids for place in places])
        # A prompt's last block may be part-filled: `held` bounds it to tokens that exist.
        tokens = min(
            blocks * trace.block_tokens,
            *(min(held[p], step[p][0].request.prompt_tokens) for p in places),
        )
        tokens -= tokens % page_size
        if tokens:
            found.update(dict.fromkeys(places, (first, tokens)))
    return found


def _num_common(ids: Sequence[tuple[int, ...]]) -> int:
    """Blocks that all begin with."""
    shortest, longest = min(ids), max(ids)  # in the order of ids these two differ first
    for count, (one, other) in enumerate(zip(shortest, longest, strict=False)):
        if one != other:
            return count
    return min(len(shortest), len(longest))
