"""A batch as plain data: the JSON that keeps everything, and the content that its digest names.

Content is what is computed and on which memory form: the lengths of every request, trees, shared
prefixes, geometry, dtypes, options and the phase of the problem. It leaves out labels, the names of
prefix groups, the words that requests have for their phase, and the order of the requests: the
order changes no result, and two orders of one batch must not be held apart as if they were two
workloads. What is stated and what a default means are one content, so are a chain and no tree, and
a group of one request and no group.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any

from stream_attention.core.errors import Faults
from stream_attention.core.ir import is_int
from stream_attention.core.json_text import parse_json
from stream_attention.planner.json_keys import check_keys, check_schema
from stream_attention.planner.page_tables import PageLayout
from stream_attention.planner.plain import canonical_json, digest_of
from stream_attention.planner.workload_requests import WorkloadRequest
from stream_attention.planner.workload_rules import MAX_REQUESTS

if TYPE_CHECKING:
    from stream_attention.planner.workloads import WorkloadBatch

SCHEMA = "stream_attention.workload_batch"
VERSION = 1
CONTENT_VERSION = 1
"""Of the content that is hashed: a change of it gives every workload a new digest."""

REQUEST_KEYS = ("count", *(field.name for field in fields(WorkloadRequest)))
BATCH_KEYS = (
    *("schema", "version", "label", "requests"),
    *("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo"),
    *("q_dtype", "kv_dtype", "out_dtype", "kv_scales"),
    *("cache_kind", "layout", "page_size", "page_layout", "capacity"),
    *("causal", "sm_scale", "window_left", "window_right", "logits_soft_cap", "has_sink"),
    *("return_lse", "batch_invariant", "dropout_p", "dropout_seed"),
)


def runs_of(requests: Sequence[WorkloadRequest]) -> list[tuple[int, WorkloadRequest]]:
    """`(count, request)` of equal neighbours, in order."""
    return [(len(list(same)), request) for request, same in groupby(requests)]


def batch_to_json(batch: WorkloadBatch) -> dict[str, Any]:
    """Every field by name; equal neighbours among the requests are one entry with a count."""
    data: dict[str, Any] = {"schema": SCHEMA, "version": VERSION}
    for key in BATCH_KEYS[2:]:
        data[key] = getattr(batch, key)
    data["page_layout"] = asdict(batch.page_layout)
    data["requests"] = []
    for count, request in runs_of(batch.requests):
        entry = {"count": count, **asdict(request)}
        entry["tree"] = None if request.tree is None else list(request.tree)
        data["requests"].append(entry)
    return data


def batch_fields(data: Any) -> tuple[dict[str, Any], list[tuple[int, dict[str, Any]]]]:
    """`(fields of the batch, (count, fields of the request) …)` of what `batch_to_json` gives.

    Raises one `ValueError` with every key that is unknown or missing and every bad count.
    """
    faults = Faults()
    found: dict[str, Any] = {}
    runs: list[tuple[int, dict[str, Any]]] = []
    if check_schema(faults, data, SCHEMA, VERSION, "batch") and check_keys(
        faults, data, BATCH_KEYS, "batch"
    ):
        found = {key: data[key] for key in BATCH_KEYS[2:]}
        layout_keys = tuple(field.name for field in fields(PageLayout))
        check_keys(faults, data["page_layout"], layout_keys, "batch.page_layout")
        runs = _request_runs(faults, data["requests"])
    faults.raise_if_any("WorkloadBatch")
    return found, runs


def _request_runs(faults: Faults, entries: Any) -> list[tuple[int, dict[str, Any]]]:
    if not isinstance(entries, list):
        faults.add("batch.requests", type(entries).__name__, "must be a list", "a list of objects")
        return []
    runs, total = [], 0
    for index, entry in enumerate(entries):
        where = f"batch.requests[{index}]"
        if not check_keys(faults, entry, REQUEST_KEYS, where):
            continue
        count = entry["count"]
        rule = f"must be an int >= 1, and all together at most {MAX_REQUESTS}"
        whole = is_int(count) and count >= 1
        if not faults.require(
            whole and total + count <= MAX_REQUESTS, f"{where}.count", count, rule, 1
        ):
            continue
        total += count
        values = {key: entry[key] for key in REQUEST_KEYS[1:]}
        if isinstance(values["tree"], list):
            values["tree"] = tuple(values["tree"])
        runs.append((count, values))
    return runs


def digest(batch: WorkloadBatch) -> str:
    """SHA-256, in hex, of `content`."""
    return digest_of(content(batch))


def content(batch: WorkloadBatch) -> dict[str, Any]:
    """What is computed, in one form for all batches that compute it (see the module).

    Numbers of the softmax are those that float32 holds, since kernels compute in it; so an ulp of
    a machine's `** -0.5` makes no other workload.
    """
    scale = 1 / math.sqrt(batch.head_dim_qk) if batch.sm_scale is None else batch.sm_scale
    return {
        "content_version": CONTENT_VERSION,
        "phase": batch.problem().phase,
        "requests": _requests(batch),
        "heads": [batch.num_qo_heads, batch.num_kv_heads],
        "head_dims": [batch.head_dim_qk, batch.dim_vo],
        "dtypes": [batch.q_dtype, batch.stored_dtype, batch.result_dtype],
        "kv_scales": batch.kv_scales,
        "cache_kind": batch.cache_kind,
        "layout": batch.layout,
        "page_size": batch.page_size if batch.paged else None,
        "page_layout": asdict(batch.page_layout) if batch.paged else None,
        "capacity": batch.max_tokens,
        "causal": batch.causal,
        "sm_scale": _float32(scale),
        "window": [batch.window_left, batch.window_right],
        "logits_soft_cap": _float32(batch.logits_soft_cap),
        "has_sink": batch.has_sink,
        "return_lse": batch.return_lse,
        "batch_invariant": batch.batch_invariant,
        "dropout": [_float32(batch.dropout_p), batch.dropout_seed],
    }


def _float32(number: float | None) -> float | None:
    """The nearest float32, and 0 without a sign."""
    if number is None:
        return None
    (rounded,) = struct.unpack("<f", struct.pack("<f", number))
    return rounded + 0.0


def _requests(batch: WorkloadBatch) -> dict[str, Any]:
    """Requests as counted forms in one order: those without a prefix, then group by group."""
    members = Counter(r.prefix_group for r in batch.requests if r.prefix_group is not None)
    alone: Counter[str] = Counter()
    groups: dict[int, Counter[str]] = {}
    prefix_lens = {}
    for count, request in runs_of(batch.requests):
        form = canonical_json([request.qo_len, request.kv_len, _tree(request)])
        group = request.prefix_group
        if group is None or members[group] == 1:
            alone[form] += count
        else:
            groups.setdefault(group, Counter())[form] += count
            prefix_lens[group] = request.prefix_len
    shared = [[prefix_lens[group], sorted(forms.items())] for group, forms in groups.items()]
    return {"alone": sorted(alone.items()), "groups": sorted(shared, key=canonical_json)}


def _tree(request: WorkloadRequest) -> list[int] | None:
    return list(request.tree) if request.branches and request.tree is not None else None


def read_text(text: str, where: str) -> Mapping[str, Any]:
    """The object that JSON text holds. Refuses keys given twice and NaN; `ValueError` says where.

    where: how a message calls the text, such as a file's name.
    """
    data = parse_json(text, where, "use what to_json gives")
    if not isinstance(data, dict):
        kind = type(data).__name__
        raise ValueError(f"{where}: must hold an object, not {kind}; use what to_json gives")
    return data
