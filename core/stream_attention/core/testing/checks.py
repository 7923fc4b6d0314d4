"""`check_route`: one route against the oracle on one case, the same for every route and device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stream_attention.core.describe import describe
from stream_attention.core.device import DeviceFacts, device_facts
from stream_attention.core.launch import BoundTensors
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import AttentionRecord
from stream_attention.core.testing.golden import golden
from stream_attention.core.testing.problems import BuiltCase, Case, build
from stream_attention.core.tile_plan import AttentionTilePlan

H200 = DeviceFacts(type="cuda", compute_capability=(9, 0), num_sms=132)
"""An H200 as the rules and the geometry see it, for tests without one."""

Runner = Callable[[BuiltCase], tuple[torch.Tensor, torch.Tensor]]
"""From a built case to `(out, lse)`: out of q's shape with head_dim_vo, lse fp32 without it."""


def bind(built: BuiltCase, **options: Any) -> Any:
    """The `Described` of a built case, with `out` and `lse` full of NaN; `options` are added."""
    options = {**built.options, "return_lse": True, **options}
    described = describe(built.q, built.cache, built.qo_indptr, **options)
    described.bound.out.fill_(math.nan)
    if described.bound.lse is not None:
        described.bound.lse.fill_(math.nan)
    return described


def launch(record: AttentionRecord, built: BuiltCase, **options: Any) -> tuple[Any, Any]:
    """`(launch, described)` of a record on a built case; `AssertionError` when it is not legal."""
    described = bind(built, **options)
    device = device_facts(built.q.device)
    reasons = record.reasons(described.problem, device)
    if reasons:
        raise AssertionError(f"{record.route} refuses {built.case!r}: {'; '.join(reasons)}")
    assert record.build is not None
    plan = AttentionTilePlan.for_problem(described.problem)
    return record.build(described.problem, plan, device, described.bound), described


def capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of `run()`, which runs once before so that nothing is loaded inside."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def wait_for_device(what: str, streams: Sequence[Any] = (), seconds: float = 60) -> None:
    """Wait for the current stream and `streams`; end the whole pytest run where one never ends.

    A launch that hangs would hang the process that waits for it, and with it all later tests.
    """
    import pytest

    event = torch.cuda.Event()
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    event.record()
    end = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > end:
            pytest.exit(f"{what}: not done after {seconds} s; deadlocked", returncode=3)
        time.sleep(0.0005)
    torch.cuda.synchronize()


def runner_of(route: AttentionRecord | Runner, **options: Any) -> Runner:
    """A record as a runner: describe with `options`, build, run once into NaN-filled outputs."""
    if not isinstance(route, AttentionRecord):
        return route

    def run(built: BuiltCase) -> tuple[torch.Tensor, torch.Tensor]:
        built_launch, described = launch(route, built, **options)
        built_launch.run()
        return described.result(), described.result_lse()

    return run


def _runners(route: AttentionRecord | Runner, built: BuiltCase) -> list[Runner]:
    """The route; of packed requests of equally many queries also as a plan knows them: as such."""
    runners = [runner_of(route)]
    counts = set(built.case.qo_lens)
    if isinstance(route, AttentionRecord) and built.qo_indptr is not None and len(counts) == 1:
        longest = {"max_qo_len": counts.pop()}
        if not route.reasons(bind(built, **longest).problem, device_facts(built.q.device)):
            runners.append(runner_of(route, **longest))
    return runners


def check_built(route: AttentionRecord | Runner, built: BuiltCase) -> None:
    """Raise `AssertionError`, naming the case, unless the route gives the oracle's answer.

    The inputs must be as they were afterwards, bit for bit.
    """
    before = _bits(built)
    answers = []
    for run in _runners(route, built):
        answers.append(run(built))
        for (name, old), (_, new) in zip(before, _bits(built), strict=True):
            if not torch.equal(old, new):
                raise AssertionError(f"{built.case!r}: the route changed {name}")
    want = golden(built.q, built.cache, built.qo_indptr, **built.options)
    for out, lse in answers:
        want.check(out, lse, label=f"{built.case!r}: ")
        if tuple(out.shape) != tuple(want.out.shape):
            raise AssertionError(
                f"{built.case!r}: out.shape {tuple(out.shape)}, want {tuple(want.out.shape)}"
            )


def check_route(
    route: AttentionRecord | Runner, case: Case, device: Any = "cpu", seed: int = 0
) -> None:
    """Build `case` on `device` (poison in every unused slot) and `check_built` the route on it.

    `route`: a registry record, or a callable from `BuiltCase` to `(out, lse)`.
    """
    check_built(route, build(case, seed, device))


def serves(record: AttentionRecord, device: DeviceFacts, **changes: Any) -> bool:
    """Whether a record takes a plain bf16 decode problem with `changes` on `device`."""
    fields: dict[str, Any] = {"batch": 1, "total_qo_len": 1, "max_qo_len": 1, "kv_capacity": 64}
    fields |= {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "head_dim_vo": 64}
    fields |= dict.fromkeys(("q_dtype", "kv_dtype", "out_dtype"), "bfloat16")
    return not record.reasons(AttentionProblem(**{**fields, "sm_scale": 0.1, **changes}), device)


def find_record(route: str, register: Callable[[Any], None] | None = None) -> AttentionRecord:
    """The record named `route`, from a module's `register` or else from the default registry."""
    from stream_attention.core.registry import Registry, default_registry

    if register is None:
        records = default_registry().attention_records()
    else:
        private = Registry(discover=False)
        register(private)
        records = private.attention_records()
    found = [record for record in records if record.route == route]
    assert found, f"no route {route!r} among {[record.route for record in records]}"
    return found[0]


def _bits(built: BuiltCase) -> list[tuple[str, torch.Tensor]]:
    """Copies of every input as raw bytes, so that NaN compares equal to itself."""
    cache = built.cache
    tensors = {"q": built.q, "key": cache.key, "value": cache.value}
    tensors["page_table"] = getattr(cache, "page_table", None)
    tensors["sequence_lengths"] = cache.sequence_lengths
    tensors["qo_indptr"] = built.qo_indptr
    tensors["attn_sink"] = built.options["attn_sink"]
    return [
        (name, tensor.detach().contiguous().flatten().view(torch.uint8).clone())
        for name, tensor in tensors.items()
        if tensor is not None
    ]


__all__ = [
    "H200",
    "BoundTensors",
    "Runner",
    "bind",
    "capture",
    "check_built",
    "check_route",
    "find_record",
    "launch",
    "runner_of",
    "serves",
    "wait_for_device",
]
