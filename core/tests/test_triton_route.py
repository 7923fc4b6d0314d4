"""The Triton route through Triton's CPU interpreter: the contract's lines and the hostile list.

The interpreter rounds fp32 to bf16 by truncation and cannot multiply bf16 tiles, so cases of bf16
run as fp16 here; bf16 itself is checked on a GPU (test_triton_gpu.py). Splits are forced by naming
a device of many processors.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import dataclasses
import random

import pytest
import torch

from stream_attention.core.device import DeviceFacts
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.registry import AttentionRecord
from stream_attention.core.routes import triton_config, triton_route
from stream_attention.core.testing import contract
from stream_attention.core.testing.checks import (
    H200,
    bind,
    check_built,
    check_route,
    find_record,
    launch,
)
from stream_attention.core.testing.far import FAR
from stream_attention.core.testing.hostile import SMALL
from stream_attention.core.testing.problems import Case, build, random_case

MANY_SMS = DeviceFacts(type="cpu", num_sms=32)


def _interpreted(case: Case) -> Case:
    return dataclasses.replace(case, dtype="float16") if case.dtype == "bfloat16" else case


def _record(min_tokens: int | None = None) -> AttentionRecord:
    """The route as if the CPU had 32 processors, with splits from `min_tokens` tokens on."""

    def build_launch(problem, tile_plan, device, bound):
        config = triton_config.choose_config(problem, MANY_SMS)
        if min_tokens is not None and config.schedule in ("direct", "scan", "even"):
            splits = max(2, min(8, problem.kv_capacity // min_tokens))
            config = dataclasses.replace(
                config,
                schedule="even" if problem.batch == 1 else "scan",
                max_splits=splits,
                slots=splits,
                min_tiles=1,
                items=config.items + splits * triton_config.MOST_WAVES * (problem.batch > 1),
                block_n=16,
            )
        return triton_route.TritonLaunch(problem, MANY_SMS, bound, config=config)

    return dataclasses.replace(
        find_record("triton", triton_route.register), rules=(), build=build_launch
    )


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_small_hostile_list(case: Case) -> None:
    check_route(_record(), _interpreted(case))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_small_hostile_list_with_splits(case: Case) -> None:
    check_route(_record(min_tokens=8), _interpreted(case))


@pytest.mark.parametrize("seed", range(12))
def test_random_cases_with_splits(seed: int) -> None:
    case = random_case(random.Random(seed))
    check_route(_record(min_tokens=16), _interpreted(case), seed=seed)


# Lines 1, 6 and 8 run on a GPU: bf16, and 65,537 requests are hours of interpreter.
@pytest.mark.parametrize("line", [2, 3, 4, 5, 7, 9, 10, 11, 12])
def test_contract_line(line: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Case.__init__

    def as_half(self, *args, **kwargs):
        if kwargs.get("dtype", "bfloat16") == "bfloat16":
            kwargs["dtype"] = "float16"
        original(self, *args, **kwargs)

    monkeypatch.setattr(Case, "__init__", as_half)
    contract.LINES[line](_record(min_tokens=None if line == 12 else 8))


def test_a_row_that_sees_only_nan_answers_nan() -> None:
    problem_case = Case(kv_lens=(1,), dtype="float32", head_dim_qk=16)
    built = build(problem_case, 0)
    page = int(built.cache.page_table[0, 0])
    built.cache.key[page, 0].fill_(float("nan"))
    for record in (_record(), _record(min_tokens=8)):
        step, described = launch(record, built)
        step.run()
        assert described.bound.out.isnan().all() and described.bound.lse.isnan().all()


def _problem(**changes) -> AttentionProblem:
    fields = {
        "batch": 1,
        "total_qo_len": 1,
        "max_qo_len": 1,
        "kv_capacity": 4096,
        "num_qo_heads": 32,
        "num_kv_heads": 8,
        "head_dim_qk": 128,
        "head_dim_vo": 128,
        "q_dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "out_dtype": "bfloat16",
        "sm_scale": 0.1,
    }
    return AttentionProblem(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "schedule", "splits"),
    [
        ({}, "even", 16),
        ({"kv_capacity": 1 << 20}, "even", 33),
        ({"kv_capacity": 256}, "direct", 1),
        ({"batch": 16, "total_qo_len": 16}, "scan", 8),
        ({"batch": 2000, "total_qo_len": 2000}, "direct", 1),
        ({"batch": 16, "total_qo_len": 16, "batch_invariant": True}, "fixed", 4),
        ({"kv_capacity": 1 << 20, "batch_invariant": True}, "fixed", 32),
        ({"kv_capacity": 256, "batch_invariant": True}, "fixed", 1),
        ({"total_qo_len": 8192, "max_qo_len": 8192, "kv_capacity": 8192}, "direct", 1),
    ],
)
def test_schedule_follows_capacity_and_batch(changes, schedule: str, splits: int) -> None:
    config = triton_config.choose_config(_problem(**changes), H200)
    assert (config.schedule, config.max_splits) == (schedule, splits)


def test_batch_invariant_tiles_do_not_depend_on_the_batch() -> None:
    configs = {
        triton_config.choose_tiles(
            _problem(batch=batch, total_qo_len=total, max_qo_len=longest, batch_invariant=True)
        )
        for batch, total, longest in ((1, 1, 1), (64, 64, 1), (3, 4098, 4096), (1, 100, 100))
    }
    assert len(configs) == 1


def test_scratch_stays_below_its_bound() -> None:
    for batch in (2, 64, 512, 1024):
        for queries in (1, 5, 300):
            problem = _problem(
                batch=batch,
                total_qo_len=batch * queries,
                max_qo_len=queries,
                kv_capacity=1 << 17,
            )
            config = triton_config.choose_config(problem, H200)
            rows = problem.total_qo_len * problem.num_qo_heads
            scratch = config.max_splits * rows * (problem.head_dim_vo + 1) * 4
            assert config.schedule == "direct" or scratch <= triton_config.MAX_SCRATCH_BYTES


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"block_m": 24}, "block_m=24: must be a power of two >= 16"),
        ({"schedule": "greedy"}, "schedule='greedy': must be 'direct'"),
        ({"schedule": "direct", "max_splits": 2}, "max_splits=2: must be >= 1, and 1 when direct"),
    ],
)
def test_config_rules_reject(changes, rule: str) -> None:
    config = triton_config.choose_config(_problem(), H200)
    assert eval(repr(config), {"TritonConfig": triton_config.TritonConfig}) == config
    with pytest.raises(ValueError, match=rule):
        dataclasses.replace(config, **changes)


@pytest.mark.parametrize(
    ("changes", "device", "word"),
    [
        ({}, DeviceFacts(type="cuda", compute_capability=(7, 5)), "compute capability >= 8.0"),
        ({"differentiable": True}, H200, "differentiable=True"),
        ({"mask": "bool"}, H200, "mask='bool'"),
    ],
)
def test_capability_rules_give_reasons(changes, device: DeviceFacts, word: str) -> None:
    record = find_record("triton", triton_route.register)
    assert record.reasons(_problem(), H200) == ()
    assert any(word in reason for reason in record.reasons(_problem(**changes), device))


def test_cpu_is_refused_unless_interpreting(monkeypatch: pytest.MonkeyPatch) -> None:
    record = find_record("triton", triton_route.register)
    cpu = DeviceFacts(type="cpu")
    assert record.reasons(_problem(), cpu) == ()
    monkeypatch.delenv("TRITON_INTERPRET")
    (reason,) = record.reasons(_problem(), cpu)
    assert "needs a CUDA GPU" in reason


def test_workspace_is_what_the_launch_holds() -> None:
    built = build(Case(qo_lens=(1, 1), kv_lens=(200, 90), dtype="float32"), 0)
    step, _ = launch(_record(min_tokens=16), built)
    held = [t for t in vars(step).values() if isinstance(t, torch.Tensor)]
    scratch = sum(t.numel() * t.element_size() for t in held if t is not step._unit_scale)
    assert step.backend_plan.workspace_bytes == scratch
    assert [spec.kernel for spec in step.backend_plan.launches] == [
        "schedule_splits",
        "attention_split",
        "triton merge_splits",
    ]


def test_what_a_window_hides_is_not_estimated():
    estimate = find_record("triton").estimate_us
    case = Case(qo_lens=(1,) * 4, kv_lens=(5000,) * 4, spare=0, call="batch")
    whole = bind(build(case, 0)).problem
    for shown in (1, 100, 5000):
        window = dataclasses.replace(whole, window_left=shown - 1)
        short = dataclasses.replace(whole, kv_capacity=shown)
        assert estimate(window, H200) == estimate(short, H200) <= estimate(whole, H200)
    assert estimate(dataclasses.replace(whole, window_left=99), H200) < estimate(whole, H200)


@pytest.mark.parametrize("name", sorted(FAR))
def test_offsets_that_32_bits_do_not_hold(name):
    check_built(find_record("triton", triton_route.register), FAR[name]("cpu"))
