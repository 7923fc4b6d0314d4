"""One-shot calls over the plan cache: fresh results, right tensors, bounds, threads, no leaks."""

import gc
import threading
import types
import weakref

import pytest
import torch

import stream_attention as stream_attn
from stream_attention import PagedKVCache
from stream_attention.core.testing.golden import golden
from stream_attention.planner import serve as serve_module
from stream_attention.planner.plan_cache import PlanCache
from stream_attention.planner.serve import serve
from stream_attention.planner.testing import FakeRoute, registry_of, write_batch


def kv(batch=2, tokens=8):
    return torch.randn(batch, tokens, 2, 16), torch.randn(batch, tokens, 2, 16)


def once(q, k, v, route, plans, **options):
    registry = options.pop("registry", None) or route.registry
    return serve(q, k, v_cache=v, registry=registry, plans=plans, **options)


@pytest.fixture
def route():
    made = FakeRoute(body=write_batch, workspace_bytes=64)
    made.registry = registry_of(made)
    return made


def test_a_second_call_is_rebound_not_planned(route):
    plans = PlanCache()
    for _ in range(3):
        q, (k, v) = torch.randn(2, 4, 16), kv()
        out, _, _ = once(q, k, v, route, plans)
        assert torch.equal(out[..., 0], q[..., 0])
    assert len(route.built) == 1
    assert route.built[0].runs == 3
    assert len(plans) == 1


def test_results_are_fresh_tensors(route):
    plans, (k, v) = PlanCache(), kv()
    results = [once(torch.randn(2, 4, 16), k, v, route, plans, return_lse=True) for _ in range(4)]
    addresses = {t.data_ptr() for out, lse, _ in results for t in (out, lse)}
    assert len(addresses) == 8


def test_no_tensor_of_the_call_is_kept_alive(route):
    plans = PlanCache()
    q, (k, v), sink = torch.randn(2, 4, 16), kv(), torch.zeros(4)
    lens = torch.tensor([3, 4], dtype=torch.int32)
    cache = stream_attn.ContiguousKVCache(key=k, value=v, sequence_lengths=lens)
    out, lse, info = serve(
        q, cache, registry=route.registry, plans=plans, attn_sink=sink, return_lse=True
    )
    alive = [weakref.ref(t) for t in (q, k, v, sink, lens, out, lse)]
    storages = [weakref.ref(t.untyped_storage()) for t in (q, k, v)]
    del q, k, v, sink, lens, out, lse, cache
    gc.collect()
    assert [ref() for ref in (*alive, *storages)] == [None] * 10
    assert len(plans) == 1
    assert info.route == "fake"


def test_a_launch_that_cannot_let_go_is_not_kept(route, monkeypatch):
    monkeypatch.delattr("stream_attention.planner.testing.FakeLaunch.unbind")
    plans = PlanCache()
    once(torch.randn(2, 4, 16), *kv(), route, plans)
    assert len(plans) == 0


def test_the_default_routes_keep_nothing_alive():
    q, (k, v) = torch.randn(2, 4, 16), kv(tokens=11)
    stream_attn.decode(q, k, v)
    alive = [weakref.ref(t) for t in (q, k, v)]
    launches = [plan.launch for idle in serve_module.PLANS._idle.values() for plan in idle]
    assert launches
    del q, k, v
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    assert not [t for t in tensors if t.shape == (2, 11, 2, 16) and t.device.type != "meta"]


def test_reused_addresses_give_the_new_tensors_answer():
    sizes = {"q": (2, 4, 16), "k": (2, 8, 2, 16), "v": (2, 8, 2, 16)}
    arena = torch.empty(3, 512)
    seen = set()
    for turn in range(6):
        torch.manual_seed(turn)
        arena.normal_()
        # K, V and q sit where another one of them sat the turn before.
        at = {name: arena[(turn + place) % 3] for place, name in enumerate(sizes)}
        q, k, v = (at[n][: torch.Size(sizes[n]).numel()].view(sizes[n]) for n in sizes)
        seen.add((q.data_ptr(), k.data_ptr(), v.data_ptr()))
        out, _ = stream_attn.decode(q, k, v)
        golden(q, stream_attn.ContiguousKVCache(key=k, value=v)).check(out)
    assert len(seen) == 3


def test_the_callers_out_is_written(route):
    plans, (k, v) = PlanCache(), kv()
    for _ in range(2):
        q, out, lse = torch.randn(2, 4, 16), torch.empty(2, 4, 16), torch.empty(2, 4)
        got, got_lse, _ = once(q, k, v, route, plans, out=out, lse=lse, return_lse=True)
        assert (got.data_ptr(), got_lse.data_ptr()) == (out.data_ptr(), lse.data_ptr())
        assert torch.equal(out[..., 0], q[..., 0])
    assert len(route.built) == 1


def _strided(q):
    wide = torch.randn(q.shape[0], 2 * q.shape[1], q.shape[2])
    return wide[:, ::2]


def _shifted(q):
    return torch.randn(q.numel() + 4)[4:].view(q.shape)  # rows stay aligned to 16 bytes, not to 64


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (lambda q, k, v: (q, k[:, :7], v[:, :7]), {}),
        (lambda q, k, v: (_strided(q), k, v), {}),
        (lambda q, k, v: (_shifted(q), k, v), {}),
        (lambda q, k, v: (q.half(), k.half(), v.half()), {}),
        (lambda q, k, v: (q[:1], k[:1], v[:1]), {}),
        (lambda q, k, v: (q, k, v), {"sm_scale": 0.5}),
        (lambda q, k, v: (q, k, v), {"window_left": 3}),
        (lambda q, k, v: (q, k, v), {"logits_soft_cap": 3.0}),
        (lambda q, k, v: (q, k, v), {"causal": False}),
        (lambda q, k, v: (q, k, v), {"return_lse": True}),
        (lambda q, k, v: (q, k, v), {"batch_invariant": True}),
        (lambda q, k, v: (q, k, v), {"mode": "exact_native"}),
        (lambda q, k, v: (q, k, v), {"attn_sink": torch.zeros(4)}),
        (lambda q, k, v: (q, k, v), {"out": torch.empty(2, 4, 16, dtype=torch.bfloat16)}),
    ],
)
def test_what_a_plan_depends_on_is_in_its_key(route, change, options):
    plans, (k, v), q = PlanCache(), kv(), torch.randn(2, 4, 16)
    once(q, k, v, route, plans)
    once(*change(q, k, v), route, plans, **options)
    assert len(route.built) == 2
    once(q, k, v, route, plans)
    assert len(route.built) == 2


def test_a_new_record_makes_cached_plans_stale(route):
    plans, (k, v), q = PlanCache(), kv(), torch.randn(2, 4, 16)
    assert once(q, k, v, route, plans)[2].route == "fake"
    better = FakeRoute("better", estimate_us=0.1)
    route.registry.register_attention(better.record())
    assert once(q, k, v, route, plans)[2].route == "better"
    route.registry.unregister("better")
    assert once(q, k, v, route, plans)[2].route == "fake"


def test_two_registries_do_not_mix(route):
    plans, (k, v), q = PlanCache(), kv(), torch.randn(2, 4, 16)
    other = FakeRoute("other")
    once(q, k, v, route, plans)
    assert once(q, k, v, route, plans, registry=registry_of(other))[2].route == "other"


def test_the_least_recently_used_plan_goes_first(route):
    plans, q = PlanCache(max_plans=2), torch.randn(2, 4, 16)
    for tokens in (8, 9, 8, 10, 8, 9):
        once(q, *kv(tokens=tokens), route, plans)
    # 8 and 9 are built, 8 is used again, 10 evicts 9, 8 is there still, 9 is built anew.
    assert [launch.capacity for launch in route.built] == [8, 9, 10, 9]
    assert len(plans) == 2


def test_scratch_is_bounded_too(route):
    plans, q = PlanCache(max_scratch_bytes=150), torch.randn(2, 4, 16)
    for tokens in range(8, 14):
        once(q, *kv(tokens=tokens), route, plans)
    assert plans.scratch_bytes == 128
    assert len(plans) == 2
    tiny = PlanCache(max_scratch_bytes=10)
    once(q, *kv(), route, tiny)
    assert len(tiny) == 0


def test_a_plan_too_large_to_be_kept_puts_out_no_other(route):
    plans, q = PlanCache(max_scratch_bytes=150), torch.randn(2, 4, 16)
    once(q, *kv(), route, plans)
    (idle,) = next(iter(plans._idle.values()))
    large = types.SimpleNamespace(backend_plan=types.SimpleNamespace(workspace_bytes=151))
    plans.give("another call", large)
    assert plans.take("another call") is None
    assert [launch for kept in plans._idle.values() for launch in kept] == [idle]


@pytest.mark.parametrize("bounds", [{"max_plans": -1}, {"max_plans": 0}, {"max_scratch_bytes": -1}])
def test_bounds_below_any_plan_keep_none(route, bounds):
    plans = PlanCache(**bounds)
    for _ in range(2):
        once(torch.randn(2, 4, 16), *kv(), route, plans)
        assert len(plans) == 0


def test_clear_drops_every_plan(route):
    plans = PlanCache()
    once(torch.randn(2, 4, 16), *kv(), route, plans)
    plans.clear()
    assert (len(plans), plans.scratch_bytes) == (0, 0)


def test_a_launch_that_raises_is_not_kept(route):
    plans, (k, v), q = PlanCache(), kv(), torch.randn(2, 4, 16)
    once(q, k, v, route, plans)

    def fail(bound):
        raise RuntimeError("lost device")

    route.built[0]._body = fail
    with pytest.raises(RuntimeError, match="lost device"):
        once(q, k, v, route, plans)
    assert len(plans) == 0
    once(q, k, v, route, plans)
    assert len(route.built) == 2


def test_keep_false_neither_takes_nor_keeps(route):
    plans, (k, v), q = PlanCache(), kv(), torch.randn(2, 4, 16)
    once(q, k, v, route, plans)
    once(q, k, v, route, plans, keep=False)
    assert len(route.built) == 2
    assert len(plans) == 1


def test_a_capture_bypasses_the_cache_and_the_validation(route, monkeypatch):
    plans, (k, v), q = PlanCache(), kv(), torch.randn(2, 4, 16)
    bad = torch.tensor([99, -1], dtype=torch.int32)
    cache = stream_attn.ContiguousKVCache(key=k, value=v, sequence_lengths=bad)
    monkeypatch.setattr(serve_module, "capturing", lambda q: True)
    serve(q, cache, registry=route.registry, plans=plans)
    assert len(plans) == 0
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"sequence_lengths\[0\]=99"):
        serve(q, cache, registry=route.registry, plans=plans)


def test_threads_never_share_a_launch(route):
    inside, most, lock = [], [], threading.Lock()
    barrier = threading.Barrier(4, timeout=30)

    def body(bound):
        with lock:
            assert id(bound.out) not in inside
            inside.append(id(bound.out))
            most.append(len(inside))
        try:
            barrier.wait()  # all four threads are inside a launch at once
        finally:
            write_batch(bound)
            with lock:
                inside.remove(id(bound.out))

    route.body = body
    plans, failures = PlanCache(), []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(5):
            q = torch.randn(2, 4, 16, generator=generator)
            out, _, _ = once(q, *kv(), route, plans)
            if not torch.equal(out[..., 0], q[..., 0]):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert max(most) == 4
    assert len(route.built) == 4
    assert sum(launch.runs for launch in route.built) == 20


def test_threads_get_right_answers_from_the_default_routes():
    failures = []

    def work(seed):
        try:
            generator = torch.Generator().manual_seed(seed)
            for step in range(6):
                q = torch.randn(2, 4, 16, generator=generator)
                pool = torch.randn(8, 16, 2, 16, generator=generator)
                table = torch.randperm(8, generator=generator).to(torch.int32).view(2, 4)
                lens = torch.tensor([seed * 7 + step, 64 - step], dtype=torch.int32)
                cache = PagedKVCache(
                    key=pool, value=pool + 1, page_table=table, sequence_lengths=lens
                )
                golden(q, cache).check(stream_attn.decode(q, cache)[0])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
