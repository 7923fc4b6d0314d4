"""`AttentionProblem`: every rule with one accepting and one rejecting problem."""

import dataclasses
import math
import re

import numpy as np
import pytest
import torch

from stream_attention.core.errors import shown
from stream_attention.core.problem import PROBLEM_RULES, AttentionProblem

GOOD = {
    "batch": 2,
    "total_qo_len": 2,
    "max_qo_len": 1,
    "kv_capacity": 64,
    "num_qo_heads": 8,
    "num_kv_heads": 2,
    "head_dim_qk": 64,
    "head_dim_vo": 64,
    "q_dtype": "bfloat16",
    "kv_dtype": "bfloat16",
    "out_dtype": "bfloat16",
    "sm_scale": 0.125,
}

# (accepted change, rejected change, what the message must say)
RULES = [
    ({"phase": "mixed"}, {"phase": "chunk"}, "phase='chunk': must be one of 'decode'"),
    (
        {"batch": 0, "total_qo_len": 0, "max_qo_len": 0},
        {"batch": -1},
        "batch=-1: must be an int >= 0; use 0",
    ),
    ({"total_qo_len": 1}, {"total_qo_len": -1}, "total_qo_len=-1: must be an int >= 0; use 0"),
    (
        {"max_qo_len": 2, "total_qo_len": 3},
        {"max_qo_len": True},
        "max_qo_len=True: must be an int >= 0",
    ),
    ({"kv_capacity": 0}, {"kv_capacity": -8}, "kv_capacity=-8: must be an int >= 0; use 0"),
    ({"num_qo_heads": 2}, {"num_qo_heads": 0}, "num_qo_heads=0: must be an int >= 1; use 1"),
    ({"num_kv_heads": 1}, {"num_kv_heads": 0}, "num_kv_heads=0: must be an int >= 1; use 1"),
    (
        {"head_dim_qk": 512},
        {"head_dim_qk": 513},
        "head_dim_qk=513: must be an int in 1..512; use 512",
    ),
    ({"head_dim_vo": 1}, {"head_dim_vo": 0}, "head_dim_vo=0: must be an int in 1..512; use 1"),
    ({"page_size": 24}, {"page_size": 0}, "page_size=0: must be an int >= 1; use 1"),
    (
        {"q_dtype": "float16", "kv_dtype": "float16"},
        {"q_dtype": "float64"},
        "q_dtype='float64': must be one of 'bfloat16'",
    ),
    ({"kv_dtype": "float8_e4m3fn"}, {"kv_dtype": "int8"}, "kv_dtype='int8': must be one of"),
    ({"out_dtype": "float32"}, {"out_dtype": "float8_e4m3fn"}, "out_dtype='float8_e4m3fn'"),
    ({"cache_kind": "contiguous"}, {"cache_kind": "ring"}, "cache_kind='ring': must be one of"),
    ({"layout": "HND"}, {"layout": "DNH"}, "layout='DNH': must be one of 'NHD', 'HND'"),
    (
        {"kv_scales": "head", "kv_dtype": "float8_e4m3fn"},
        {"kv_scales": "row", "kv_dtype": "float8_e4m3fn"},
        "kv_scales='row': must be one of None, 'tensor', 'head'; use 'tensor'",
    ),
    ({"mask": "bool"}, {"mask": "float"}, "mask='float': must be one of None, 'bool'"),
    (
        {"guarantee": "schedule_exact"},
        {"guarantee": "close"},
        "guarantee='close': must be one of 'exact'",
    ),
    ({"causal": False}, {"causal": 1}, "causal=1: must be a bool; use True"),
    ({"per_head_lists": True}, {"per_head_lists": "n"}, "per_head_lists='n': must be a bool"),
    ({"has_sink": True}, {"has_sink": "x"}, "has_sink='x': must be a bool"),
    ({"return_lse": True}, {"return_lse": 3}, "return_lse=3: must be a bool"),
    ({"batch_invariant": True}, {"batch_invariant": None}, "batch_invariant=None: must be a bool"),
    ({"differentiable": True}, {"differentiable": 2}, "differentiable=2: must be a bool"),
    (
        {"num_qo_heads": 6},
        {"num_qo_heads": 7},
        "num_qo_heads=(7, 2): must be a multiple of num_kv_heads; use 6",
    ),
    (
        {"max_qo_len": 2},
        {"max_qo_len": 3},
        "max_qo_len=3: must be at most total_qo_len, and batch * max_qo_len at least total_qo_len",
    ),
    (
        {"sm_scale": 0.0},
        {"sm_scale": math.nan},
        "sm_scale=nan: must be a finite number (0 is legal)",
    ),
    ({"window_left": 0}, {"window_left": -1}, "window_left=-1: must be None (off) or an int >= 0"),
    (
        {"window_right": 3, "causal": False},
        {"window_right": 1.5, "causal": False},
        "window_right=1.5: must be None (off) or an int >= 0",
    ),
    (
        {"window_right": 0},
        {"window_right": 1},
        "window_right=1: a causal problem sees nothing to the right of its query",
    ),
    (
        {"logits_soft_cap": 30.0},
        {"logits_soft_cap": 0.0},
        "logits_soft_cap=0.0: must be None (off) or a finite number > 0",
    ),
    (
        {"dropout_p": 0.5, "differentiable": True},
        {"dropout_p": 0.5},
        "dropout_p=0.5: must be in [0, 1), and 0 unless the problem is differentiable; use 0.0",
    ),
    (
        {"kv_scales": "tensor", "kv_dtype": "float8_e4m3fn"},
        {"kv_scales": "tensor"},
        "kv_scales='tensor': scales belong to float8_e4m3fn K/V only",
    ),
    (
        {"q_dtype": "float32", "kv_dtype": "float32"},
        {"q_dtype": "float32"},
        "kv_dtype='bfloat16': must equal q_dtype, or be float8_e4m3fn; use 'float32'",
    ),
]


@pytest.mark.parametrize(("good", "bad", "message"), RULES, ids=[rule[2][:40] for rule in RULES])
def test_rule_accepts_and_rejects(good, bad, message):
    AttentionProblem(**{**GOOD, **good})
    with pytest.raises(ValueError) as caught:
        AttentionProblem(**{**GOOD, **bad})
    assert message in str(caught.value)


def test_every_rule_has_a_row():
    assert len(RULES) == len(PROBLEM_RULES)
    for rule, row in zip(PROBLEM_RULES, RULES, strict=True):
        assert row[2].startswith(f"{rule.parameter}="), (rule.parameter, row[2])


def test_all_faults_are_reported_at_once():
    with pytest.raises(ValueError) as caught:
        AttentionProblem(**{**GOOD, "page_size": 0, "sm_scale": math.inf, "layout": "?"})
    text = str(caught.value)
    assert text.startswith("AttentionProblem: 3 faults")
    assert all(part in text for part in ("page_size=0", "sm_scale=inf", "layout='?'"))


def test_a_value_of_a_wrong_type_is_a_fault_and_not_a_crash():
    with pytest.raises(ValueError, match=r"num_qo_heads='8': must be an int >= 1"):
        AttentionProblem(**{**GOOD, "num_qo_heads": "8"})


@pytest.mark.parametrize("value", [True, 10**400, 1e300], ids=["flag", "huge_int", "huge"])
@pytest.mark.parametrize("name", ["sm_scale", "logits_soft_cap"])
def test_a_number_that_float32_cannot_hold_is_a_fault(name, value):
    with pytest.raises(
        ValueError, match=rf"{name}={re.escape(shown(value))}: must be .*that float32 can hold"
    ):
        AttentionProblem(**{**GOOD, name: value})


def test_a_cap_that_float32_rounds_to_zero_is_a_fault():
    with pytest.raises(ValueError, match="logits_soft_cap=1e-300: must be"):
        AttentionProblem(**{**GOOD, "logits_soft_cap": 1e-300})


def test_repr_evaluates_back_and_omits_defaults():
    problem = AttentionProblem(**GOOD)
    assert "page_size" not in repr(problem)
    other = dataclasses.replace(problem, page_size=3, window_left=5, has_sink=True)
    assert "page_size=3, " in repr(other)
    for node in (problem, other):
        assert eval(repr(node), {"AttentionProblem": AttentionProblem}) == node


def test_problems_are_frozen_and_hash_by_value():
    problem = AttentionProblem(**GOOD)
    assert hash(problem) == hash(AttentionProblem(**GOOD))
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.batch = 3


def test_derived_facts():
    problem = AttentionProblem(**{**GOOD, "head_dim_vo": 32, "total_qo_len": 3, "max_qo_len": 2})
    assert problem.gqa_group_size == 4
    assert problem.kv_token_bytes == 2 * (64 + 32) * 2
    assert not problem.uniform and AttentionProblem(**GOOD).uniform
    assert not problem.has_window
    assert dataclasses.replace(problem, window_left=0).has_window


@pytest.mark.parametrize(
    ("window", "qo_len", "seen"),
    [(None, 1, 64), (0, 1, 1), (9, 1, 10), (9, 4, 13), (62, 1, 63), (63, 1, 64), (1 << 30, 4, 64)],
)
def test_a_window_bounds_the_tokens_that_are_seen(window, qo_len, seen):
    changes = {"window_left": window, "max_qo_len": qo_len, "total_qo_len": 2 * qo_len}
    assert AttentionProblem(**{**GOOD, **changes}).kv_tokens_seen == seen


def test_an_int_for_a_number_is_a_float_as_torch_takes_no_large_one():
    problem = AttentionProblem(**{**GOOD, "sm_scale": 2, "logits_soft_cap": 10**30})
    assert [type(problem.sm_scale), type(problem.logits_soft_cap)] == [float, float]
    assert (problem.sm_scale, problem.logits_soft_cap) == (2.0, 1e30)
    with pytest.raises(ValueError, match=r"sm_scale=1000+: must be a finite number"):
        AttentionProblem(**{**GOOD, "sm_scale": 10**39})


@pytest.mark.parametrize("name", ["phase", "batch", "q_dtype", "sm_scale", "causal", "layout"])
def test_an_array_for_a_field_breaks_its_rule(name):
    for array in (torch.zeros(2), np.zeros(2), np.array(["a", "b"])):
        with pytest.raises(ValueError, match=rf"{name}=\w*\(?\["):
            AttentionProblem(**{**GOOD, name: array})
