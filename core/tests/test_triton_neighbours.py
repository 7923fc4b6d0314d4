"""The Triton route under batch invariance: no neighbour and no capacity changes a request's bits.

Through Triton's CPU interpreter, which takes no bf16 products: fp16 stands in, and test_triton_gpu
has bf16.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import dataclasses
import itertools

import pytest
import torch

from stream_attention.core.device import DeviceFacts
from stream_attention.core.problem import AttentionProblem
from stream_attention.core.routes import triton_config, triton_route
from stream_attention.core.testing.checks import H200, find_record, launch
from stream_attention.core.testing.golden import golden
from stream_attention.core.testing.neighbours import FORMS, OPTIONS, check_neighbours
from stream_attention.core.testing.problems import Case, build

RECORD = find_record("triton", triton_route.register)
# Splits of 64 tokens and 4 of them a KV head of two: thresholds at capacities of 64 and 256.
TOKENS, PROGRAMS = 64, 8
LENGTHS = ((60, 70), (200, 300))
SMALL_FORMS = {name: FORMS[name] for name in ("decode", "verify")}
SMALL_FORMS["packed"] = {"qo_lens": (2, 5), "call": "ragged"}
SMALL_FORMS["packed_equal"] = FORMS["packed_equal"]
SMALL_FORMS["packed_long"] = {"qo_lens": (12, 1), "call": "ragged"}


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_config, "BATCH_INVARIANT_SPLIT_TOKENS", TOKENS)
    monkeypatch.setattr(triton_config, "BATCH_INVARIANT_PROGRAMS", PROGRAMS)
    original = triton_config.choose_tiles
    monkeypatch.setattr(
        triton_config, "choose_tiles", lambda problem: (16, 64, *original(problem)[2:])
    )


def _case(form: str, option: str, **fields) -> Case:
    fields = {"head_dim_qk": 16, "dtype": "float16", **SMALL_FORMS[form], **fields}
    return Case(**{**fields, **OPTIONS[option]})


@pytest.mark.parametrize("form", sorted(SMALL_FORMS))
@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_a_longer_neighbour_changes_no_bit(option: str, form: str, small_splits) -> None:
    for lens, dtype in zip(LENGTHS, ("float32", "float16"), strict=True):
        check_neighbours(RECORD, _case(form, option, kv_lens=lens, dtype=dtype))


@pytest.mark.parametrize("lens", LENGTHS, ids=str)
def test_lists_per_kv_head_change_no_bit(lens: tuple[int, int], small_splits) -> None:
    short, long = lens
    for form in ("decode", "packed"):
        case = _case(form, "plain", kv_lens=((short, short // 2), (long, 7)))
        check_neighbours(RECORD, dataclasses.replace(case, sink=1.0))


@pytest.mark.parametrize("lens", [(700, 1400), (1000, 1025), (1100, 3000)], ids=str)
@pytest.mark.parametrize("sink", [None, 1.0])
def test_no_bit_changes_at_the_thresholds_that_are_served(lens: tuple[int, int], sink) -> None:
    case = _case("decode", "plain", kv_lens=lens, num_kv_heads=1, num_qo_heads=2, sink=sink)
    check_neighbours(RECORD, case)
    check_neighbours(RECORD, dataclasses.replace(case, cache_kind="contiguous"))


def test_a_request_among_many_gives_its_bits_alone(small_splits) -> None:
    lens, queries = (70, 1, 0, 64, 300), (5, 1, 2, 20, 1)
    check_neighbours(RECORD, Case(qo_lens=queries, kv_lens=lens, dtype="float32", sink=1.0))


@pytest.mark.parametrize("form", sorted(SMALL_FORMS))
@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_splits_of_every_form_agree_with_the_oracle(option: str, form: str, small_splits) -> None:
    built = build(_case(form, option, kv_lens=(300, 40)), 0)
    step, described = launch(RECORD, built, batch_invariant=True)
    assert step.config.schedule == "fixed"
    step.run()
    want = golden(built.q, built.cache, built.qo_indptr, **built.options)
    want.check(described.result(), described.result_lse(), f"{built.case!r}: ")


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("queries", "group"), [((5,) * 3, 3), ((1,) * 12, 4), ((20,) * 4, 2)])
@pytest.mark.parametrize("tokens", [30, 300])
def test_packed_requests_of_as_many_queries_each_are_all_served(
    tokens: int, queries: tuple[int, ...], group: int, invariant: bool, small_splits
) -> None:
    """Outputs are full of NaN before: a row that no program takes would stay so."""
    fields = {"num_qo_heads": group, "num_kv_heads": 1, "head_dim_qk": 16, "dtype": "float32"}
    built = build(Case(qo_lens=queries, kv_lens=(tokens,) * len(queries), **fields), 0)
    longest = max(queries)  # as a plan finds it when it validates
    step, described = launch(RECORD, built, batch_invariant=invariant, max_qo_len=longest)
    assert described.problem.uniform
    step.run()
    want = golden(built.q, built.cache, built.qo_indptr, **built.options)
    want.check(described.result(), described.result_lse(), f"{built.case!r}: ")


def test_lengths_that_change_in_place_use_their_own_splits(small_splits) -> None:
    built = build(_case("packed", "sink", kv_lens=(300, 300), spare=0), 0)
    step, described = launch(RECORD, built, batch_invariant=True)
    for lens in ((300, 300), (1, 257), (0, 33), (32, 0), (300, 300)):
        built.cache.sequence_lengths.copy_(torch.tensor(lens, dtype=torch.int32))
        described.bound.out.fill_(float("nan"))
        described.bound.lse.fill_(float("nan"))
        step.run()
        want = golden(built.q, built.cache, built.qo_indptr, **built.options)
        want.check(described.result(), described.result_lse(), f"{lens}: ")


def _problem(**changes) -> AttentionProblem:
    fields = {"batch": 1, "total_qo_len": 1, "max_qo_len": 1, "kv_capacity": 4096}
    fields |= {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim_qk": 128, "head_dim_vo": 128}
    fields |= dict.fromkeys(("q_dtype", "kv_dtype", "out_dtype"), "bfloat16")
    return AttentionProblem(**{**fields, "sm_scale": 0.1, "batch_invariant": True, **changes})


def test_what_a_request_is_cut_by_depends_on_neither_batch_nor_capacity_nor_device() -> None:
    found = set()
    many = DeviceFacts(type="cuda", compute_capability=(8, 0), num_sms=7)
    calls = ((1, 1, 1), (64, 64, 1), (3, 4098, 4096), (1, 100, 100), (2000, 2000, 1))
    for (batch, total, longest), capacity, window, device in itertools.product(
        calls, (1, 1024, 1025, 131072, 131073, 1 << 22), (None, 0, 5000), (H200, many)
    ):
        problem = _problem(
            batch=batch,
            total_qo_len=total,
            max_qo_len=longest,
            kv_capacity=capacity,
            window_left=window,
        )
        config = triton_config.choose_config(problem, device)
        free = dataclasses.replace(config, max_splits=1, items=1)
        found.add(free)
        assert config.schedule == "fixed"
    assert len(found) == 1


@pytest.mark.parametrize("group", [1, 4, 16, 128])
@pytest.mark.parametrize("kv_heads", [1, 8, 128, 512])
def test_scratch_of_a_request_is_bounded_whatever_its_capacity(kv_heads: int, group: int) -> None:
    for queries, capacity, dim in itertools.product(
        (1, 3, 16, 500), (1024, 1 << 17, 1 << 24), (64, 512)
    ):
        problem = _problem(
            batch=3,
            total_qo_len=2 * queries + 1,
            max_qo_len=queries,
            kv_capacity=capacity,
            num_qo_heads=kv_heads * group,
            num_kv_heads=kv_heads,
            head_dim_vo=dim,
        )
        config = triton_config.choose_config(problem, H200)
        shape = triton_config.SlotShape.of(problem, config)
        held = kv_heads * shape.slots * shape.rows * (dim + 1) * 4
        programs = max(triton_config.BATCH_INVARIANT_PROGRAMS, kv_heads)
        assert held <= programs * config.block_m * (dim + 1) * 4
        assert shape.merge_rows <= queries * group
        assert shape.slots == 0 or capacity > 1024


def test_every_split_has_a_slot_and_every_row_is_merged() -> None:
    """The device's own rule, in plain Python, over lengths and queries of every kind."""
    for queries, capacity in itertools.product((1, 2, 5, 17, 64, 300), (2000, 40_000, 1 << 18)):
        problem = _problem(
            batch=2, total_qo_len=queries + 1, max_qo_len=queries, kv_capacity=capacity
        )
        config = triton_config.choose_config(problem, H200)
        shape = triton_config.SlotShape.of(problem, config)
        for qo_len, kv_len in itertools.product((1, queries), (1, 1025, capacity // 2, capacity)):
            units = -(-qo_len * 4 // config.block_m)
            most = max(1, config.slots // units)
            tiles = -(-kv_len // config.block_n)
            splits = max(1, -(-tiles // max(-(-tiles // most), config.chunk_tiles)))
            assert splits <= config.max_splits
            if splits > 1:
                assert units * splits <= shape.slots
                assert qo_len * 4 <= shape.merge_rows
