"""Each flow of the library as its formula: plain loops over pages and heads, in float64.

`SCORES[name](q, pages, window, state)`: q [G, D]; pages: (keys, values) [tokens, D] of each page of
the row; window: range of candidate positions; state: one number a page before the step, or empty.
Gives `{position: score}` of the window; for flows with state the score is the state after the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Pages = list[tuple[Any, Any]]
Scores = dict[int, float]

DECAY = 0.984375


def _mean_key(keys: Any) -> Any:
    return keys.sum(0) / len(keys)


def _bound(q: Any, keys: Any) -> float:
    """`Σ_d max(q_d M_d, q_d m_d)`, M and m the largest and the smallest key a dimension."""
    upper, lower = q * keys.max(0).values, q * keys.min(0).values
    return math.fsum(torch.maximum(upper, lower).tolist())


def _softmax(logits: Scores, scale: float) -> Scores:
    largest = max((scale * x for x in logits.values()), default=0.0)
    weights = {at: math.exp(scale * x - largest) for at, x in logits.items()}
    total = math.fsum(weights.values())
    return {at: weight / total for at, weight in weights.items()}


def _best_softmax(q: Any, vectors: dict[int, Any], scale: float) -> Scores:
    heads = [_softmax({at: float(h @ x) for at, x in vectors.items()}, scale) for h in q]
    return {at: max(head[at] for head in heads) for at in vectors}


def _block(q: Any, pages: Pages, window: range, state: list[float]) -> Scores:
    mean = q.mean(0)
    return {at: float(mean @ _mean_key(pages[at][0])) for at in window}


def _gqa_block(q: Any, pages: Pages, window: range, state: list[float]) -> Scores:
    means = {at: _mean_key(pages[at][0]) for at in window}
    return _best_softmax(q, means, q.shape[1] ** -0.5)


def _gqa_quest(q: Any, pages: Pages, window: range, state: list[float]) -> Scores:
    return {at: max(_bound(head, pages[at][0]) for head in q) for at in window}


def _best_average(q: Any, keys: Any) -> float:
    return max(float(head @ _mean_key(keys)) for head in q)


def _hybrid(q: Any, pages: Pages, window: range, state: list[float]) -> Scores:
    peak = _gqa_quest(q, pages, window, state)
    return {at: 0.5 * _best_average(q, pages[at][0]) + 0.5 * peak[at] for at in window}


def _lserve(q: Any, pages: Pages, window: range, state: list[float]) -> Scores:
    return {
        at: max(
            _bound(head, pages[at][0][start : start + 16])
            for head in q
            for start in range(0, len(pages[at][0]), 16)
        )
        for at in window
    }


def _value_energy(q: Any, pages: Pages, window: range, state: list[float]) -> Scores:
    average = _block(q, pages, window, state)
    norms = {at: [math.sqrt(float(v @ v)) for v in pages[at][1]] for at in window}
    return {at: average[at] * math.fsum(norms[at]) / len(norms[at]) for at in window}


def _running_average(q: Any, pages: Pages, window: range, state: list[float]) -> Scores:
    average = _block(q, pages, window, state)
    return {at: 0.5 * state[at] + average[at] for at in window}


def _h2o(q: Any, pages: Pages, window: range, state: list[float]) -> Scores:
    mean, average = q.mean(0), _block(q, pages, window, state)
    return {at: average[at] + _bound(mean, pages[at][0]) for at in window}


def _gqa_h2o(q: Any, pages: Pages, window: range, state: list[float]) -> Scores:
    peak = _gqa_quest(q, pages, window, state)
    return {at: _best_average(q, pages[at][0]) + peak[at] for at in window}


def _h2o_token(q: Any, pages: Pages, window: range, state: list[float]) -> Scores:
    mass = _best_softmax(
        q.mean(0)[None], {at: pages[at][0][0] for at in window}, q.shape[1] ** -0.5
    )
    return {at: mass[at] + DECAY * state[at] for at in window}


def _gqa_h2o_token(q: Any, pages: Pages, window: range, state: list[float]) -> Scores:
    mass = _best_softmax(q, {at: pages[at][0][0] for at in window}, q.shape[1] ** -0.5)
    return {at: mass[at] + DECAY * state[at] for at in window}


SCORES: dict[str, Callable[[Any, Pages, range, list[float]], Scores]] = {
    "block_sparse_attention": _block,
    "gqa_block_sparse_attention": _gqa_block,
    "gqa_quest_sparse_attention": _gqa_quest,
    "hybrid_quest_centroid": _hybrid,
    "lserve_sparse_attention": _lserve,
    "value_energy_centroid": _value_energy,
    "running_average_block": _running_average,
    "h2o_sparse_attention": _h2o,
    "gqa_h2o_sparse_attention": _gqa_h2o,
    "h2o_token_sparse_attention": _h2o_token,
    "gqa_h2o_token_sparse_attention": _gqa_h2o_token,
}

TOKEN_FLOWS = ("h2o_token_sparse_attention", "gqa_h2o_token_sparse_attention")


def selected(scores: Scores, num_pages: int, k: int, bos: int, eos: int) -> list[int]:
    """Positions that a row reads, by sorting pairs."""
    if num_pages <= k + bos + eos:
        return list(range(num_pages))
    best = sorted(scores, key=lambda at: (math.isnan(scores[at]), -scores[at], at))[:k]
    return [*range(bos), *sorted(best), *range(num_pages - eos, num_pages)]
