"""The quick check of forms, and which device a plan must see to."""

import pytest
import torch

from stream_attention import StreamAttnEngine
from stream_attention.planner import watch
from stream_attention.planner.plan import index_to_hold
from stream_attention.planner.testing import FakeRoute, registry_of


def tensors():
    return (
        torch.zeros(3, 4, 5),
        torch.zeros(2, 1, 3, 1, 2, 2, 1)[..., 0],  # more axes than torch keeps inline
        torch.zeros(()),
        torch.zeros(0, 7),
        torch.nn.Parameter(torch.zeros(4, 6).t(), requires_grad=False),
    )


CHANGES = {
    "dtype": lambda t: setattr(t, "data", t.data.view(torch.int32)),
    "axis of one": lambda t: t.unsqueeze_(0),
    "axis of one, at the end": lambda t: t.unsqueeze_(-1),
    "strides": lambda t: t.set_(t.untyped_storage(), 0, t.shape, [s + 1 for s in t.stride()]),
    "shape": lambda t: t.set_(t.untyped_storage(), 0, [n + 1 for n in t.shape], t.stride()),
    "all axes gone": lambda t: t.set_(t.untyped_storage(), 0, (), ()),
}


@pytest.fixture(params=["torch's guard", "python"])
def form_check(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(watch, "tensor_guards", lambda: None)
    return watch.form_check


@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("change", CHANGES)
def test_one_changed_form_is_seen(form_check, change, position):
    bound = tensors()
    check = form_check(bound)
    assert check(*bound)
    before = watch.form_of(bound[position])
    with torch.no_grad():
        CHANGES[change](bound[position])
    same = watch.form_of(bound[position]) == before  # no axes: no strides or sizes to change
    assert same == (position == 2 and change in ("strides", "shape", "all axes gone"))
    assert check(*bound) == same


def test_contents_are_not_compared(form_check):
    bound = tensors()
    check = form_check(bound)
    for tensor in bound:
        tensor.data.add_(1)
    assert check(*bound)


def test_what_torch_cannot_guard_is_compared_in_python():
    """torch's guard takes no tensor twice; the check then is another one, and right."""
    tensor = torch.zeros(2, 3)
    check = watch.form_check((tensor, tensor))
    assert check(tensor, tensor)
    tensor.t_()
    assert not check(tensor, tensor)


def test_torch_has_the_guard():
    """Not public API: without it `run` costs 2.8 us, not 1.1, and nothing else changes."""
    guards = watch.tensor_guards()
    assert guards is not None
    assert isinstance(watch.form_check(tensors()).__self__, guards)


def guards_over(compare):
    """A class of guards that calls alike what `compare` gives alike."""

    class Guards:
        def __init__(self, *tensors, dynamic_dims_sizes, dynamic_dims_strides):
            self.want = [compare(t) for t in tensors]

        def check(self, *tensors):
            return [compare(t) for t in tensors] == self.want

    return Guards


def strides_that_address(tensor):
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


class OfOtherArguments:
    def __init__(self, *tensors, sizes):
        pass


@pytest.mark.parametrize(
    ("guards", "right"),
    [
        (guards_over(watch.form_of), True),
        (guards_over(lambda t: None), False),
        (guards_over(lambda t: t), False),
        (guards_over(lambda t: (t.shape, t.stride())), False),
        (guards_over(lambda t: (t.dtype, t.stride())), False),
        (guards_over(lambda t: (t.dtype, t.shape)), False),
        (guards_over(lambda t: (t.dtype, t.shape, strides_that_address(t))), False),
        (OfOtherArguments, False),
        (object, False),
    ],
)
def test_guards_that_mean_something_else_are_not_used(guards, right):
    assert watch.tells_apart(guards) is right


def test_a_torch_whose_guards_mean_something_else_is_compared_in_python(monkeypatch):
    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", guards_over(lambda t: None))
    watch.tensor_guards.cache_clear()
    try:
        assert watch.tensor_guards() is None
    finally:
        watch.tensor_guards.cache_clear()


@pytest.mark.parametrize("default", ["meta", "cpu"])
def test_guards_are_tried_out_whatever_the_defaults_are(default):
    watch.tensor_guards.cache_clear()
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device(default), torch.inference_mode():
            assert watch.tensor_guards() is not None
            assert not watch.tells_apart(guards_over(lambda t: (t.shape, t.stride())))
    finally:
        torch.set_default_dtype(kept)
        watch.tensor_guards.cache_clear()


@pytest.mark.parametrize(
    ("device", "count", "index"),
    [("cpu", 0, None), ("cpu", 2, None), ("cuda:0", 1, None), ("cuda:0", 2, 0), ("cuda:3", 8, 3)],
)
def test_one_device_needs_no_holding(monkeypatch, device, count, index):
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: count, raising=False)
    assert index_to_hold(torch.device(device)) == index


@pytest.mark.parametrize(("current", "switched"), [(3, []), (0, ["enter 3", "exit 3"])])
def test_a_run_holds_the_device_of_its_tensors(monkeypatch, current, switched):
    seen = []

    class Holding:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            seen.append(f"enter {self.index}")

        def __exit__(self, *error):
            seen.append(f"exit {self.index}")

    route = FakeRoute(body=lambda bound: seen.append("run"))
    q, k = torch.zeros(2, 4, 16), torch.zeros(2, 8, 2, 16)
    plan = StreamAttnEngine(registry=registry_of(route)).plan(q, k, k.clone())
    plan._device_index = 3
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    monkeypatch.setattr(torch.cuda, "device", Holding)
    plan.run()
    assert seen == (["enter 3", "run", "exit 3"] if switched else ["run"])
