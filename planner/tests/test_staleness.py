"""A plan notices, for every tensor that it is bound to, that the tensor is no longer the one."""

import pytest
import torch

from stream_attention import PagedKVCache, StalePlanError, StreamAttnEngine
from stream_attention.planner.testing import FakeRoute, registry_of

FP8 = torch.float8_e4m3fn
NAMES = (
    "q",
    "key",
    "value",
    "page_table",
    "sequence_lengths",
    "key_scale",
    "value_scale",
    "qo_indptr",
    "attn_sink",
    "out",
    "lse",
)


def bound_plan():
    """A plan that is bound to a tensor of every kind, and those tensors by name."""
    bound = {
        "q": torch.zeros(5, 4, 16),
        "key": torch.zeros(8, 16, 2, 16).to(FP8),
        "value": torch.zeros(8, 16, 2, 16).to(FP8),
        "page_table": torch.arange(8, dtype=torch.int32).view(2, 4),
        "sequence_lengths": torch.tensor([33, 20], dtype=torch.int32),
        "key_scale": torch.ones(2),
        "value_scale": torch.ones(2),
        "qo_indptr": torch.tensor([0, 2, 5], dtype=torch.int32),
        "attn_sink": torch.zeros(4),
        "out": torch.zeros(5, 4, 16),
        "lse": torch.zeros(5, 4),
    }
    fields = ("key", "value", "page_table", "sequence_lengths", "key_scale", "value_scale")
    cache = PagedKVCache(**{name: bound[name] for name in fields})
    engine = StreamAttnEngine(registry=registry_of(FakeRoute()))
    plan = engine.plan_attention(
        bound["q"],
        cache,
        bound["qo_indptr"],
        attn_sink=bound["attn_sink"],
        out=bound["out"],
        lse=bound["lse"],
        return_lse=True,
    )
    plan.run()
    return plan, bound


@pytest.mark.parametrize("name", NAMES)
def test_moved_storage_is_named(name):
    plan, bound = bound_plan()
    tensor = bound[name]
    tensor.set_(tensor.clone())
    with pytest.raises(StalePlanError, match=rf"^{name}\.data_ptr\(\) changed from 0x"):
        plan.run()


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_shape_is_named(name):
    plan, bound = bound_plan()
    tensor = bound[name]
    old, new = tuple(tensor.shape), (*tensor.shape[:-1], tensor.shape[-1] - 1)
    tensor.set_(tensor.untyped_storage(), 0, new, tensor.stride())
    with pytest.raises(StalePlanError) as caught:
        plan.run()
    assert f"{name}.shape changed from {old} to {new}" in str(caught.value)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("key_scale", "value_scale")])
def test_changed_strides_are_named(name):
    plan, bound = bound_plan()
    tensor = bound[name]
    strides = (0, *tensor.stride()[1:])
    old = tensor.stride()
    tensor.set_(tensor.untyped_storage(), 0, tensor.shape, strides)
    with pytest.raises(StalePlanError) as caught:
        plan.run()
    assert f"{name}.stride() changed from {old} to {strides}" in str(caught.value)


@pytest.mark.parametrize("name", ["q", "sequence_lengths", "lse"])
def test_a_changed_dtype_is_named(name):
    plan, bound = bound_plan()
    tensor = bound[name]
    old = tensor.dtype
    tensor.data = tensor.data.view(torch.int16)[..., : tensor.shape[-1]]
    with pytest.raises(StalePlanError, match=f"{name}.dtype changed from {old} to torch.int16"):
        plan.run()


def test_every_change_is_reported_at_once():
    plan, bound = bound_plan()
    for name in ("q", "value", "attn_sink"):
        bound[name].set_(bound[name].clone())
    with pytest.raises(StalePlanError) as caught:
        plan.run()
    assert str(caught.value).count("changed from") == 3
    assert "plan again" in str(caught.value)


def test_outputs_of_the_plan_itself_are_watched():
    q, k = torch.zeros(2, 4, 16), torch.zeros(2, 8, 2, 16)
    engine = StreamAttnEngine(registry=registry_of(FakeRoute()))
    plan = engine.plan(q, k, k.clone(), return_lse=True)
    out, lse, _ = plan.run()
    out.set_(out.clone())
    lse.set_(lse.clone())
    with pytest.raises(StalePlanError, match=r"out\.data_ptr.*; lse\.data_ptr"):
        plan.run()


def test_contents_may_change_and_nothing_is_stale():
    plan, bound = bound_plan()
    for tensor in bound.values():
        tensor.zero_() if tensor.dtype != FP8 else tensor.view(torch.uint8).zero_()
    plan.run()


def test_a_stale_run_launches_nothing():
    route = FakeRoute(body=lambda bound: None)
    q, k = torch.zeros(2, 4, 16), torch.zeros(2, 8, 2, 16)
    plan = StreamAttnEngine(registry=registry_of(route)).plan(q, k, k.clone())
    q.set_(q.clone())
    with pytest.raises(StalePlanError):
        plan.run()
    assert route.built[0].runs == 0
