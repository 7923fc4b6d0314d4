"""On a GPU: a plan over CUDA tensors notices every change of form or storage, and nothing else.

Each test of a change runs with torch's guard as the quick check, and without.
"""

import contextlib
import threading

import pytest
import torch

from stream_attention import PagedKVCache, StalePlanError, StreamAttnEngine
from stream_attention.planner import watch
from stream_attention.planner.plan import index_to_hold
from stream_attention.planner.testing import FakeRoute, registry_of, write_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = "cuda"
NAMES = ("q", "key", "value", "page_table", "sequence_lengths", "out", "lse")


@pytest.fixture(params=["torch's guard", "python"])
def quick_check(request, monkeypatch):
    """What compares the forms of the bound tensors."""
    if request.param == "python":
        monkeypatch.setattr(watch, "tensor_guards", lambda: None)
    return request.param


def unrun_plan(device=DEVICE):
    """A plan of a route that answers with the first element of each row of q, and its tensors."""
    bound = {
        "q": torch.arange(2.0, device=device).repeat_interleave(64).view(2, 4, 16).bfloat16(),
        "key": torch.zeros(8, 16, 2, 16, device=device).bfloat16(),
        "value": torch.zeros(8, 16, 2, 16, device=device).bfloat16(),
        "page_table": torch.arange(8, dtype=torch.int32, device=device).view(2, 4),
        "sequence_lengths": torch.tensor([33, 20], dtype=torch.int32, device=device),
        "out": torch.zeros(2, 4, 16, device=device).bfloat16(),
        "lse": torch.zeros(2, 4, device=device),
    }
    cache = PagedKVCache(**{name: bound[name] for name in NAMES[1:5]})
    engine = StreamAttnEngine(registry=registry_of(FakeRoute(body=write_batch)))
    plan = engine.plan(bound["q"], cache, out=bound["out"], lse=bound["lse"], return_lse=True)
    return plan, bound


def bound_plan():
    plan, bound = unrun_plan()
    plan.run()
    return plan, bound


def resized(t, *, shape=None, stride=None):
    shape, stride = shape or t.shape, stride or t.stride()
    t.set_(t.untyped_storage(), 0, shape, stride)


CHANGES = {
    "moved": (lambda t: t.set_(t.clone()), "data_ptr\\(\\)"),
    "moved to the CPU": (lambda t: setattr(t, "data", t.data.cpu()), "data_ptr\\(\\)"),
    "freed": (lambda t: t.untyped_storage().resize_(0), "data_ptr\\(\\)"),
    "shape": (lambda t: resized(t, shape=(*t.shape[:-1], t.shape[-1] - 1)), "shape"),
    "axis of one": (lambda t: t.unsqueeze_(0), "shape"),
    "strides": (lambda t: resized(t, stride=(0, *t.stride()[1:])), "stride\\(\\)"),
    "dtype": (
        lambda t: setattr(t, "data", t.data.view({2: torch.int16, 4: torch.uint32}[t.itemsize])),
        "dtype",
    ),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named(quick_check, change, name):
    plan, bound = bound_plan()
    apply, words = CHANGES[change]
    apply(bound[name])
    for _ in range(2):
        with pytest.raises(StalePlanError, match=rf"^{name}\.{words} changed from "):
            plan.run()


def test_contents_may_change_and_nothing_is_stale(quick_check):
    plan, bound = bound_plan()
    for name in NAMES[1:]:
        bound[name].fill_(1)
    bound["q"].fill_(7)
    out, lse, _ = plan.run()
    assert bool((out == 7).all()) and bool((lse == 7).all())


MODES = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast(DEVICE, dtype=torch.float16),
    "function mode": lambda: torch.device(DEVICE),
    "stream": lambda: torch.cuda.stream(torch.cuda.Stream()),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_is_no_change_and_hides_none(quick_check, mode):
    plan, bound = bound_plan()
    with MODES[mode]():
        plan.run()
    plan.run()
    bound["value"].transpose_(0, 1)
    with MODES[mode](), pytest.raises(StalePlanError, match=r"^value\.shape changed from"):
        plan.run()


def test_torch_guards_cuda_tensors():
    _, bound = unrun_plan()
    check = watch.form_check(tuple(bound.values()))
    assert isinstance(check.__self__, watch.tensor_guards())


@pytest.mark.parametrize("default", [None, DEVICE])
def test_the_first_run_of_a_process_may_be_captured(quick_check, default):
    """It tries torch's guard out and makes the check: neither may touch the device."""
    if quick_check == "torch's guard":
        watch.tensor_guards.cache_clear()
    plan, bound = unrun_plan()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with contextlib.nullcontext() if default is None else torch.device(default):
        with torch.cuda.graph(graph):
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            plan.run()
            after = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert after == before
    bound["q"].fill_(3)
    graph.replay()
    assert bool((bound["out"] == 3).all())


def test_a_first_run_neither_allocates_nor_syncs(quick_check):
    plan, _ = unrun_plan()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_plan_runs_in_a_thread_that_has_not_used_cuda():
    plan, bound = bound_plan()
    bound["q"].fill_(5)
    torch.cuda.synchronize()
    failures = []

    def work():
        try:
            plan.run()
            torch.cuda.synchronize()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures
    assert bool((bound["out"] == 5).all())


def test_only_one_of_several_devices_is_held():
    count = torch.cuda.device_count()
    assert index_to_hold(torch.device(DEVICE, 0)) == (None if count == 1 else 0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_run_goes_to_the_device_of_its_tensors():
    seen = []
    plan, _ = unrun_plan("cuda:1")
    plan._run_launch = lambda: seen.append(torch.cuda.current_device())
    for current in (0, 1):
        with torch.cuda.device(current):
            plan.run()
            assert torch.cuda.current_device() == current
    assert seen == [1, 1]
