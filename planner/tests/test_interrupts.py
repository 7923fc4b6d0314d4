"""What a Ctrl-C, a signal's handler, a finalizer or a fork meets half way leaves all as it was."""

import os
import signal
import sys
import threading
import time

import pytest
import torch

import stream_attention as stream_attn
from stream_attention.core import routes
from stream_attention.core.describe import describe
from stream_attention.core.device import device_facts
from stream_attention.core.registry import Registry, default_registry
from stream_attention.planner.plan_cache import PlanCache
from stream_attention.planner.ranking import Rankings
from stream_attention.planner.serve import serve
from stream_attention.planner.testing import FakeRoute, registry_of, write_batch

MOST_LINES = 400


class InterruptAt:
    """Raises `KeyboardInterrupt` at the n-th line that is run of the functions of `owner`."""

    def __init__(self, owner, n):
        made = ("__init__", "_renew_locks")  # nobody has it yet
        functions = [f for name, f in vars(owner).items() if name not in made]
        self.codes = {f.__code__ for f in functions if hasattr(f, "__code__")}
        self.left = n

    def __enter__(self):
        sys.settrace(lambda frame, event, arg: self.line if frame.f_code in self.codes else None)
        return self

    def line(self, frame, event, arg):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self.line

    def __exit__(self, kind, error, traceback):
        sys.settrace(None)
        return kind is KeyboardInterrupt


def interrupted_everywhere(owner, call):
    """Yields after `call` was interrupted at the first, second, … line of `owner`'s functions."""
    for n in range(1, MOST_LINES):
        with InterruptAt(owner, n) as interrupt:
            call()
        if interrupt.left > 0:
            assert n > 3, "the functions were not run"
            return
        yield n
    raise AssertionError("more lines than expected")


def test_an_interrupted_plan_cache_still_serves_and_keeps_its_bounds():
    route = FakeRoute(body=write_batch, workspace_bytes=64)
    registry = registry_of(route)
    plans = PlanCache(max_plans=2, max_scratch_bytes=150)

    def once(tokens):
        q, k = torch.randn(2, 4, 16), torch.randn(2, tokens, 2, 16)
        out, _, _ = serve(q, k, v_cache=k, registry=registry, plans=plans)
        assert torch.equal(out[..., 0], q[..., 0])

    def drop_and_use():
        for tokens in (8, 9, 10, 8):
            once(tokens)

    for _ in interrupted_everywhere(PlanCache, drop_and_use):
        for tokens in (8, 9, 10, 11, 8):
            once(tokens)
            assert len(plans) <= 2
            assert plans.scratch_bytes <= 150
    built = len(route.built)
    once(8)
    once(8)
    assert len(route.built) <= built + 1  # launches are kept as ever


def test_interrupted_rankings_rank_as_ever():
    q, k = torch.randn(2, 4, 16), torch.randn(2, 8, 2, 16)
    problem = describe(q, k, v_cache=k).problem
    registry = registry_of(FakeRoute("a"), FakeRoute("b"))
    rankings = Rankings(capacity=1)
    device = device_facts(q.device)
    for _ in interrupted_everywhere(Rankings, lambda: rankings.rank(problem, device, registry)):
        found = rankings.rank(problem, device, registry)
        assert [candidate.record.route for candidate in found.candidates] == ["a", "b"]


def test_interrupted_discovery_is_as_if_it_had_not_begun():
    want = [record.route for record in Registry().attention_records()]
    merges = [record.name for record in Registry().merge_records()]
    registries = []

    def discover():
        registries.append(Registry())
        registries[-1].attention_records()

    for _ in interrupted_everywhere(Registry, discover):
        again = registries[-1]
        assert [record.route for record in again.attention_records()] == want
        assert [record.name for record in again.merge_records()] == merges
        assert again.missing() == default_registry().missing()


def test_a_handler_may_come_upon_discovery():
    """A call or a record of a signal's handler finds the registry's lock held by its own thread."""
    want = [record.route for record in Registry().attention_records()]
    for n in range(1, MOST_LINES):
        registry, seen, lines = Registry(), [], [0]

        def handler(frame, event, arg, registry=registry, seen=seen, lines=lines, n=n):
            if frame.f_code is not Registry._draft_all.__code__:
                return None
            lines[0] += event == "line"
            if lines[0] == n and not seen:
                seen.append([record.route for record in registry.attention_records()])
                registry.register_attention(FakeRoute("a handler's").record())
            return handler

        sys.settrace(handler)
        try:
            found = [record.route for record in registry.attention_records()]
        finally:
            sys.settrace(None)
        if not seen:
            assert n > 3
            return
        assert seen[0] == want[: len(seen[0])]
        assert sorted(found) == sorted([*want, "a handler's"])
        assert [record.route for record in registry.attention_records()] == found


def test_what_a_package_does_to_the_registry_while_it_registers_is_kept(monkeypatch):
    registry = Registry()
    registry.register_attention(FakeRoute("mine").record())

    def register(draft):
        assert "torch" in [record.route for record in draft.attention_records()]
        assert "mine" in [record.route for record in registry.attention_records()]
        registry.register_attention(FakeRoute("late").record())
        registry.unregister("mine")

    monkeypatch.setattr(routes, "register", _then(routes.register, register))
    found = [record.route for record in registry.attention_records()]
    assert "late" in found
    assert "mine" not in found
    assert "torch" in found


def _then(first, second):
    def both(registry):
        first(registry)
        second(registry)

    return both


def test_a_change_within_a_change_is_not_lost():
    registry = Registry(discover=False)
    versions = [registry.version]

    def within(known):
        if len(versions) == 1:
            registry.register_attention(FakeRoute("inner").record())
            versions.append(registry.version)
        return {"attention": {**known.attention, "outer": FakeRoute("outer").record()}}

    registry._change(within)
    versions.append(registry.version)
    assert [record.route for record in registry.attention_records()] == ["inner", "outer"]
    assert versions == sorted(set(versions))


class Key:
    """A key whose comparison runs `during`, as those of real keys run Python code."""

    def __init__(self, during=None):
        self.during = during

    def __hash__(self):
        return 7

    def __eq__(self, other):
        during = self.during or other.during
        if during is not None:
            during()
        return True


def test_a_handler_may_come_upon_the_plan_cache():
    plans, nested = PlanCache(), []
    built = _built()
    plans.give(Key(), built)

    def during():
        if not nested:
            nested.append(plans.take(Key()))
            plans.give(Key(), built)

    taken = []
    thread = threading.Thread(target=lambda: taken.append(plans.take(Key(during))), daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive(), "it waits for itself"
    assert nested == [built]
    assert taken == [built]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_holds_no_lock_of_another_thread():
    """The child takes, gives, ranks and registers while the parent's threads are about to."""
    plans, inside, leave = PlanCache(), threading.Barrier(3), threading.Event()
    plans.give(Key(), _built())
    registry, other = default_registry(), Registry()
    registry.attention_records()

    def taking():
        def during():
            inside.wait()
            leave.wait()

        plans.take(Key(during))

    def registering():
        with registry._lock, other._lock, other._drafting:
            inside.wait()
            leave.wait()

    threads = [threading.Thread(target=work, daemon=True) for work in (taking, registering)]
    for thread in threads:
        thread.start()
    inside.wait(timeout=20)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)
            plans.give(Key(), plans.take(Key()))
            registry.register_attention(FakeRoute("in the child").record())
            assert other.attention_records()
            code = 0
        finally:
            os._exit(code)
    try:
        assert _status_of(child) == 0
    finally:
        leave.set()
        for thread in threads:
            thread.join(timeout=20)


def test_an_interrupt_reaches_the_caller_and_the_next_call_is_right():
    q, k = torch.randn(2, 4, 16), torch.randn(2, 8, 2, 16)
    want = stream_attn.decode(q, k, k)[0]
    for _ in interrupted_everywhere(PlanCache, lambda: stream_attn.decode(q, k, k)):
        assert torch.equal(stream_attn.decode(q, k, k)[0], want)


def _status_of(child):
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "it did not end"


def _built():
    class Plan:
        workspace_bytes = 1

    class Built:
        backend_plan = Plan()

    return Built()
