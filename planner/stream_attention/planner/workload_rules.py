"""What makes a batch of requests legal, as a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stream_attention.core.dtypes import OUT_DTYPES
from stream_attention.core.ir import Rule, is_int
from stream_attention.core.problem import MAX_HEAD_DIM, PROBLEM_RULES
from stream_attention.planner.page_tables import PageLayout
from stream_attention.planner.workload_requests import MAX_TOKENS, WorkloadRequest

if TYPE_CHECKING:
    from stream_attention.planner.workloads import WorkloadBatch

MAX_REQUESTS = 1 << 20
FP8 = "float8_e4m3fn"
_DEFAULT_PAGE_SIZE = 16

# Fields that mean in a batch what they mean in its problem.
_SHARED = frozenset(
    [
        *("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size", "q_dtype", "cache_kind"),
        *("layout", "kv_scales", "causal", "has_sink", "return_lse", "batch_invariant"),
        *("window_left", "window_right", "logits_soft_cap"),
    ]
)


def _of_problem(name: str) -> Rule:
    """The rule of the problem about a field that `None` leaves open here."""
    return next(rule for rule in PROBLEM_RULES if rule.parameter == name)


_SM_SCALE, _DROPOUT = _of_problem("sm_scale"), _of_problem("dropout_p")


def _sound(batch: Any) -> bool:
    """There are requests, and nothing else among them: only then do rules look at them."""
    return (
        isinstance(batch.requests, tuple)
        and 0 < len(batch.requests) <= MAX_REQUESTS
        and all(isinstance(request, WorkloadRequest) for request in batch.requests)
    )


def _of_requests(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda batch: not _sound(batch) or holds(batch)


def _page(batch: WorkloadBatch) -> int:
    return batch.page_size if batch.paged else 1


def _has_page(batch: WorkloadBatch) -> bool:
    return is_int(batch.page_size) and batch.page_size >= 1


def _longest(batch: WorkloadBatch) -> int:
    return max((1, *batch.kv_lens))


def _fits(batch: WorkloadBatch) -> bool:
    if batch.capacity is None or not _has_page(batch):
        return True
    whole = is_int(batch.capacity) and batch.capacity % _page(batch) == 0
    return whole and _longest(batch) <= batch.capacity <= MAX_TOKENS


def _nearest_capacity(batch: WorkloadBatch) -> int:
    wanted = batch.capacity if is_int(batch.capacity) else 0
    tokens = min(max(wanted or 0, _longest(batch)), MAX_TOKENS)
    return -(-tokens // _page(batch)) * _page(batch)


def _prefix_lens(batch: WorkloadBatch) -> dict[int, list[int]]:
    """The lengths that a prefix group is given, ascending."""
    found: dict[int, set[int]] = {}
    for request in batch.requests:
        if request.prefix_group is not None:
            found.setdefault(request.prefix_group, set()).add(request.prefix_len)
    return {group: sorted(lens) for group, lens in found.items()}


def _uneven(batch: WorkloadBatch) -> dict[int, list[int]]:
    return {group: lens for group, lens in _prefix_lens(batch).items() if len(lens) > 1}


def _part_pages(batch: WorkloadBatch) -> dict[int, list[int]]:
    lens = _prefix_lens(batch)
    return {g: ns for g, ns in lens.items() if any(n % batch.page_size for n in ns)}


def _whole_pages(batch: WorkloadBatch) -> str:
    first = next(iter(_part_pages(batch).values()))[0]
    below = first // batch.page_size * batch.page_size
    return f"{below} tokens" if below else f"{batch.page_size} tokens, or no prefix"


def _is_training(batch: WorkloadBatch) -> bool:
    """Whole sequences of one length, in the one memory form that `train` takes."""
    return (
        all(request.phase == "train" for request in batch.requests)
        and batch.cache_kind == "contiguous"
        and batch.layout == "NHD"
        and len(set(batch.qo_lens)) == 1
        and set(batch.kv_lens) == {batch.max_tokens}
    )


def _branches(batch: WorkloadBatch) -> bool:
    return any(request.branches for request in batch.requests)


BATCH_RULES: tuple[Rule, ...] = (
    *(rule for rule in PROBLEM_RULES if rule.parameter in _SHARED),
    Rule(
        "requests",
        f"must be a tuple of 1..{MAX_REQUESTS} WorkloadRequest",
        _sound,
        lambda b: "(WorkloadRequest(kv_len=4096),)",
        lambda b: _shown_requests(b.requests),
    ),
    Rule(
        "requests",
        f"must have at most {MAX_TOKENS} query tokens: offsets are int32",
        _of_requests(lambda b: b.num_qo_tokens <= MAX_TOKENS),
        lambda b: "fewer requests",
        lambda b: f"{b.num_qo_tokens} query tokens",
    ),
    Rule(
        "head_dim_vo",
        f"must be None (head_dim_qk) or an int in 1..{MAX_HEAD_DIM}",
        lambda b: (
            b.head_dim_vo is None or (is_int(b.head_dim_vo) and 1 <= b.head_dim_vo <= MAX_HEAD_DIM)
        ),
        lambda b: "None",
    ),
    Rule(
        "kv_dtype",
        f"must be None (q_dtype), q_dtype itself or {FP8}",
        lambda b: b.kv_dtype in (None, b.q_dtype, FP8),
        lambda b: "None",
    ),
    Rule(
        "out_dtype",
        f"must be None (q_dtype) or one of {', '.join(OUT_DTYPES)}",
        lambda b: b.out_dtype is None or b.out_dtype in OUT_DTYPES,
        lambda b: "None",
    ),
    Rule(
        "sm_scale",
        f"must be None (head_dim_qk ** -0.5), or {_SM_SCALE.text.removeprefix('must be ')}",
        lambda b: b.sm_scale is None or _SM_SCALE.holds(b),
        lambda b: "None",
    ),
    Rule(
        "page_size",
        "a contiguous cache has no pages",
        lambda b: b.cache_kind != "contiguous" or b.page_size == _DEFAULT_PAGE_SIZE,
        lambda b: f"the default, {_DEFAULT_PAGE_SIZE}",
    ),
    Rule(
        "page_layout",
        "must be a PageLayout",
        lambda b: isinstance(b.page_layout, PageLayout),
        lambda b: "PageLayout()",
    ),
    Rule(
        "page_layout",
        "a contiguous cache has no pages",
        lambda b: b.cache_kind != "contiguous" or b.page_layout == PageLayout(),
        lambda b: "the default, PageLayout()",
    ),
    Rule(
        "capacity",
        "must be None or an int, whole pages, not below the longest kv_len (and 1)",
        _of_requests(_fits),
        _nearest_capacity,
        lambda b: f"{b.capacity} with longest kv_len {_longest(b)}, page_size={b.page_size}",
    ),
    Rule(
        "requests",
        "only a paged cache shares prefixes",
        _of_requests(lambda b: b.cache_kind != "contiguous" or not _prefix_lens(b)),
        lambda b: "cache_kind='paged', or prefix_group=None",
        lambda b: f"prefix groups {sorted(_prefix_lens(b))}",
    ),
    Rule(
        "requests",
        "all requests of a prefix group must give it one length",
        _of_requests(lambda b: not _uneven(b)),
        lambda b: f"{next(iter(_uneven(b).values()))[0]} tokens",
        lambda b: f"prefix groups {_uneven(b)}",
    ),
    Rule(
        "requests",
        "a prefix is shared in whole pages",
        _of_requests(lambda b: not _has_page(b) or not _part_pages(b)),
        _whole_pages,
        lambda b: f"prefix groups {_part_pages(b)} with page_size={b.page_size}",
    ),
    Rule(
        "requests",
        "training has equal lengths, alone in a contiguous NHD cache that they fill",
        _of_requests(lambda b: not b.differentiable or _is_training(b)),
        lambda b: "cache_kind='contiguous', layout='NHD', capacity=None and one length",
        lambda b: f"phases {sorted({r.phase for r in b.requests})} in {b.cache_kind} {b.layout}",
    ),
    Rule(
        "requests",
        "a tree that branches has a mask of its own, so the batch is causal without a window",
        _of_requests(
            lambda b: (
                not _branches(b)
                or (b.causal is True and b.window_left is None and b.window_right is None)
            )
        ),
        lambda b: "causal=True, window_left=None, window_right=None",
        lambda b: f"trees with causal={b.causal}, window_left={b.window_left}",
    ),
    Rule("dropout_p", _DROPOUT.text, _of_requests(_DROPOUT.holds), lambda b: "0.0"),
    Rule(
        "dropout_seed",
        "must be an int >= 0 where dropout_p > 0, and None elsewhere",
        lambda b: (
            b.dropout_seed is None
            if b.dropout_p == 0
            else is_int(b.dropout_seed) and b.dropout_seed >= 0
        ),
        lambda b: "None" if b.dropout_p == 0 else 0,
    ),
    Rule("label", "must be a str", lambda b: isinstance(b.label, str), lambda b: repr("")),
)


def _shown_requests(requests: Any) -> Any:
    """What a message shows of requests that are none: the whole may be long."""
    if not isinstance(requests, tuple):
        return type(requests).__name__
    wrong = [r for r in requests if not isinstance(r, WorkloadRequest)]
    return wrong[0] if wrong else f"{len(requests)} requests"
