"""Backend plans, launch specs, rejections, info and device facts: rules and printing."""

import dataclasses

import pytest
import torch

from stream_attention.core.backend_plan import AttentionBackendPlan, LaunchSpec, Rejection
from stream_attention.core.device import DeviceFacts, device_facts
from stream_attention.core.info import AttentionInfo

PLAN = {"route": "torch", "backend": "torch", "arch": "cpu"}
INFO = {"backend_used": "torch", "route": "torch"}
SCOPE = {
    cls.__name__: cls
    for cls in (AttentionBackendPlan, LaunchSpec, Rejection, DeviceFacts, AttentionInfo)
}

# (class, accepted, rejected, message)
RULES = [
    (LaunchSpec, {"kernel": "merge"}, {"kernel": ""}, "kernel='': must be a non-empty string"),
    (
        LaunchSpec,
        {"kernel": "k", "grid": (0, 1, 1)},
        {"kernel": "k", "grid": (1, -1, 1)},
        "grid=(1, -1, 1): must be three ints >= 0",
    ),
    (
        LaunchSpec,
        {"kernel": "k", "threads": 128},
        {"kernel": "k", "threads": -1},
        "threads=-1: must be an int >= 0",
    ),
    (
        LaunchSpec,
        {"kernel": "k", "shared_bytes": 1024},
        {"kernel": "k", "shared_bytes": 0.5},
        "shared_bytes=0.5: must be an int >= 0",
    ),
    (
        Rejection,
        {"route": "a", "reasons": ("b",)},
        {"route": "", "reasons": ("b",)},
        "route='': must be a non-empty string",
    ),
    (
        Rejection,
        {"route": "a", "reasons": ("b", "c")},
        {"route": "a", "reasons": ()},
        "reasons=(): must be a tuple of non-empty strings, one at least",
    ),
    (
        Rejection,
        {"route": "a", "reasons": ("b",)},
        {"route": "a", "reasons": "abc"},
        "reasons='abc': must be a tuple of non-empty strings",
    ),
    (AttentionBackendPlan, PLAN, {**PLAN, "route": ""}, "route='': must be a non-empty string"),
    (AttentionBackendPlan, PLAN, {**PLAN, "backend": ""}, "backend='': must be a non-empty"),
    (AttentionBackendPlan, PLAN, {**PLAN, "arch": 90}, "arch=90: must be a non-empty string"),
    (AttentionBackendPlan, PLAN, {**PLAN, "reason": None}, "reason=None: must be a string"),
    (AttentionBackendPlan, PLAN, {**PLAN, "launches": ("k",)}, "must be a tuple of LaunchSpec"),
    (AttentionBackendPlan, PLAN, {**PLAN, "rejections": None}, "must be a tuple of Rejection"),
    (
        AttentionBackendPlan,
        {**PLAN, "estimate_us": 3},
        {**PLAN, "estimate_us": "3"},
        "estimate_us='3': must be None or a number",
    ),
    (
        AttentionBackendPlan,
        {**PLAN, "estimate_us": 3.0, "estimated_by": "evidence"},
        {**PLAN, "estimated_by": "evidence"},
        "estimated_by='evidence': must be a string, '' where there is no estimate",
    ),
    (
        AttentionBackendPlan,
        {**PLAN, "evidence": ("1f2e",)},
        {**PLAN, "evidence": "1f2e"},
        "evidence='1f2e': must be a tuple of row ids",
    ),
    (
        AttentionBackendPlan,
        {**PLAN, "splits": 1},
        {**PLAN, "splits": 0},
        "splits=0: must be an int >= 1",
    ),
    (
        AttentionBackendPlan,
        {**PLAN, "split_tokens": 64},
        {**PLAN, "split_tokens": -64},
        "split_tokens=-64: must be an int >= 0",
    ),
    (
        AttentionBackendPlan,
        {**PLAN, "workspace_bytes": 8},
        {**PLAN, "workspace_bytes": -8},
        "workspace_bytes=-8: must be an int >= 0",
    ),
    (AttentionInfo, INFO, {**INFO, "backend_used": ""}, "backend_used=''"),
    (AttentionInfo, INFO, {**INFO, "route": ""}, "route=''"),
    (AttentionInfo, INFO, {**INFO, "route": 5}, "route=5: must be a non-empty string"),
    (AttentionInfo, INFO, {**INFO, "arch": ""}, "arch='': must be a non-empty string"),
    (AttentionInfo, INFO, {**INFO, "reason": 5}, "reason=5: must be a string"),
    (AttentionInfo, INFO, {**INFO, "fallback_reasons": None}, "must be a tuple of strings"),
    (AttentionInfo, INFO, {**INFO, "fallback_reasons": (1,)}, "must be a tuple of strings"),
    (
        AttentionInfo,
        {**INFO, "guarantee": "schedule_exact"},
        {**INFO, "guarantee": "roughly"},
        "guarantee='roughly': must be one of",
    ),
    (AttentionInfo, {**INFO, "splits": 4}, {**INFO, "splits": 0}, "splits=0: must be an int >= 1"),
    (AttentionInfo, INFO, {**INFO, "workspace_bytes": -1}, "workspace_bytes=-1"),
    (
        AttentionInfo,
        {**INFO, "policy_id": "cell", "guarantee": "distribution_verified"},
        {**INFO, "policy_id": "cell"},
        "policy_id='cell': only a distribution_verified result carries a policy",
    ),
    (DeviceFacts, {"type": "cpu"}, {"type": ""}, "type='': must be a non-empty device type"),
    (DeviceFacts, {"type": "cpu", "num_sms": 4}, {"type": "cpu", "num_sms": 0}, "num_sms=0"),
    (
        DeviceFacts,
        {"type": "cuda", "compute_capability": (9, 0)},
        {"type": "cuda"},
        "compute_capability=None: must be (major, minor) on cuda and None elsewhere",
    ),
]


@pytest.mark.parametrize(
    ("cls", "good", "bad", "message"), RULES, ids=[f"{r[0].__name__}-{r[3][:24]}" for r in RULES]
)
def test_rule_accepts_and_rejects(cls, good, bad, message):
    node = cls(**good)
    assert eval(repr(node), SCOPE) == node
    with pytest.raises(ValueError) as caught:
        cls(**bad)
    assert message in str(caught.value)


def test_a_full_plan_evaluates_back():
    plan = AttentionBackendPlan(
        **PLAN,
        splits=4,
        launches=(LaunchSpec("split", (4, 8, 1), 128, 1024), LaunchSpec("merge")),
        estimate_us=3.5,
        estimated_by="evidence",
        evidence=("0f3a", "77c1"),
        reason="only route",
        rejections=(Rejection("sm90", ("package is not installed", "head_dim=7")),),
    )
    assert eval(repr(plan), SCOPE) == plan
    assert str(plan.rejections[0]) == "sm90: package is not installed; head_dim=7"
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.splits = 2


def test_device_facts_name_the_architecture():
    assert DeviceFacts(type="cuda", compute_capability=(9, 0)).arch == "sm_90"
    facts = device_facts(torch.device("cpu"))
    assert facts.arch == "cpu" and facts.num_sms >= 1
    assert device_facts(torch.device("cpu")) is facts  # read once
