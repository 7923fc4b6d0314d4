"""A plan notices, for every tensor that it is bound to, that the tensor is no longer the one.

Each test runs with torch's guard as the quick check of dtypes, shapes and strides, and without.
"""

import contextlib

import pytest
import torch

from stream_attention import PagedKVCache, StalePlanError, StreamAttnEngine
from stream_attention.planner import plan as plan_module
from stream_attention.planner import watch
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

MODES = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "function mode": lambda: torch.device("cpu"),
}


@pytest.fixture(autouse=True, params=["torch's guard", "python"])
def quick_check(request, monkeypatch):
    """What compares the forms of the bound tensors."""
    if request.param == "python":
        monkeypatch.setattr(watch, "tensor_guards", lambda: None)
    return request.param


def bound_plan(*, runs=1):
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
    for _ in range(runs):
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


@pytest.mark.parametrize("name", NAMES)
def test_a_resized_storage_is_named(name):
    plan, bound = bound_plan()
    bound[name].untyped_storage().resize_(0)
    with pytest.raises(StalePlanError, match=rf"^{name}\.data_ptr\(\) changed from 0x\w+ to 0x0:"):
        plan.run()


def test_a_change_before_the_first_run_is_named():
    plan, bound = bound_plan(runs=0)
    bound["q"].unsqueeze_(0)
    with pytest.raises(StalePlanError, match=r"^q\.shape changed from .*; q\.stride\(\) changed"):
        plan.run()


def test_a_change_that_is_undone_is_no_change():
    plan, bound = bound_plan()
    bound["q"].unsqueeze_(0)
    for _ in range(2):
        with pytest.raises(StalePlanError):
            plan.run()
    bound["q"].squeeze_(0)
    plan.run()


@pytest.mark.parametrize("planned", MODES)
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_is_no_change_and_hides_none(planned, mode):
    with MODES[planned]():
        plan, bound = bound_plan()
    with MODES[mode]():
        plan.run()
    plan.run()
    with torch.inference_mode(bound["value"].is_inference()):
        bound["value"].transpose_(0, 1)
    for _ in range(2):
        with MODES[mode](), pytest.raises(StalePlanError, match=r"^value\.shape changed from"):
            plan.run()


def test_gradients_asked_for_later_are_no_change():
    plan, bound = bound_plan()
    bound["q"].requires_grad_()
    plan.run()
    bound["q"].requires_grad_(False)
    plan.run()


def test_checks_are_made_once_a_mode(monkeypatch, quick_check):
    made = []

    def form_check(tensors):
        made.append(tensors)
        return watch.form_check(tensors)

    monkeypatch.setattr(plan_module, "form_check", form_check)
    plan, _ = bound_plan(runs=0)
    assert not made
    for _ in range(3):
        for mode in MODES.values():
            with mode():
                plan.run()
    # Without gradients, and under a mode of functions, torch's guard compares the same keys.
    assert len(made) == (3 if quick_check == "torch's guard" else 1)


def test_a_tensor_with_two_names_is_checked_as_one(monkeypatch):
    q, k = torch.zeros(2, 4, 16), torch.zeros(2, 8, 2, 16)
    plan = StreamAttnEngine(registry=registry_of(FakeRoute())).plan(q, k, k)
    plan.run()
    monkeypatch.setattr(plan_module, "form_check", lambda tensors: pytest.fail("checked again"))
    plan.run()
    k.unsqueeze_(0)
    with pytest.raises(StalePlanError, match=r"^key\.shape .*; value\.shape "):
        plan.run()
