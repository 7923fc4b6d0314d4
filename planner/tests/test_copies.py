"""Plans are bound to memory, so they refuse to be copied; engines hold none and may be."""

import copy
import pickle

import pytest
import torch

from stream_attention import StreamAttnEngine
from stream_attention.planner.testing import FakeRoute, registry_of, write_batch

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "old pickle": lambda x: pickle.dumps(x, protocol=0),
}


def planned(runs):
    q, k = torch.randn(2, 4, 16), torch.randn(2, 8, 2, 16)
    engine = StreamAttnEngine(registry=registry_of(FakeRoute(body=write_batch)))
    plan = engine.plan(q, k, k.clone())
    for _ in range(runs):
        plan.run()
    return plan, q


def in_a_module(plan):
    module = torch.nn.Linear(1, 1)
    module.plan = plan
    return module


@pytest.mark.parametrize("runs", [0, 1])
@pytest.mark.parametrize("made", COPIES)
def test_a_plan_is_not_copied(runs, made):
    plan, q = planned(runs)
    with pytest.raises(TypeError) as caught:
        COPIES[made](plan)
    text = str(caught.value)
    assert text.startswith("AttentionPlan: cannot be copied or pickled")
    assert text.endswith("plan again over the copied tensors: engine.plan(...)")
    out, _ = plan.run()  # and is none the worse
    assert torch.equal(out[..., 0], q[..., 0])


@pytest.mark.parametrize("made", ["deepcopy", "pickle"])
@pytest.mark.parametrize("holder", [lambda plan: [plan], in_a_module], ids=["list", "module"])
def test_a_plan_is_not_copied_with_what_holds_it(holder, made):
    plan, _ = planned(1)
    with pytest.raises(TypeError, match="AttentionPlan: cannot be copied or pickled"):
        COPIES[made](holder(plan))


@pytest.mark.parametrize("made", COPIES)
def test_a_route_s_bound_launch_is_not_copied(made):
    q, k = torch.randn(2, 4, 16), torch.randn(2, 8, 2, 16)
    launch = StreamAttnEngine().plan(q, k, k.clone())._launch
    with pytest.raises(TypeError, match="TorchLaunch: cannot be copied or pickled"):
        COPIES[made](launch)


@pytest.mark.parametrize("made", ["copy", "deepcopy"])
def test_a_copied_engine_is_the_engine(made):
    engine = StreamAttnEngine(registry=registry_of(FakeRoute()))
    assert COPIES[made](engine) is engine


def test_a_pickled_engine_keeps_its_identity():
    engine = StreamAttnEngine("p", "m", 3)
    loaded = pickle.loads(pickle.dumps(engine))
    assert (loaded.identity, loaded.registry) == (engine.identity, engine.registry)
    q, k = torch.randn(2, 4, 16), torch.randn(2, 8, 2, 16)
    assert torch.equal(loaded.plan(q, k, k).run()[0], engine.plan(q, k, k).run()[0])


class NamedEngine(StreamAttnEngine):
    """One with arguments and attributes of its own, one of them in a slot."""

    __slots__ = ("__secret", "unset")

    def __init__(self, title, *, limit):
        super().__init__(model_id=title, layer_id=limit)
        self.limits = [limit]
        self.__secret = title

    def shown(self):
        return self.identity, self.limits, self.__secret, hasattr(self, "unset")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_engine_of_a_subclass_keeps_what_it_adds(protocol):
    engine = NamedEngine("m", limit=3)
    q, k = torch.randn(2, 4, 16), torch.randn(2, 8, 2, 16)
    want, _ = engine.plan(q, k, k).run()
    loaded = pickle.loads(pickle.dumps(engine, protocol=protocol))
    assert type(loaded) is NamedEngine
    assert loaded.shown() == engine.shown()
    assert loaded.registry is engine.registry
    assert loaded._rankings is not engine._rankings
    assert torch.equal(loaded.plan(q, k, k).run()[0], want)


def test_an_engine_with_a_registry_of_its_own_is_not_pickled():
    engine = StreamAttnEngine(registry=registry_of(FakeRoute()))
    with pytest.raises(TypeError, match="StreamAttnEngine: cannot be pickled with a registry"):
        pickle.dumps(engine)
