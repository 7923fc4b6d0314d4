"""`prefill` and `train` under torch.compile(fullgraph=True) equal eager, gradients included."""

import threading
import time

import pytest
import torch

import stream_attention as stream_attn
from stream_attention import UnsupportedProblem
from stream_attention.core.registry import AttentionRecord, default_registry
from stream_attention.planner import traced_sequences


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def tensors(qo_len=6, kv_len=9, **options):
    return tuple(
        torch.randn(2, n, h, 16, **options) for n, h in ((qo_len, 4), (kv_len, 2), (kv_len, 2))
    )


OPTIONS = [
    {},
    {"causal": False, "window_left": 2, "window_right": 1},
    {"logits_soft_cap": 2.0, "sm_scale": 0.5},
    {"attn_sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    {"attn_mask": torch.rand(2, 1, 6, 9) > 0.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_a_compiled_train_call_equals_eager(options):
    inputs = [t.requires_grad_() for t in tensors()]

    def run(q, k, v, sink, mask):
        return stream_attn.train(q, k, v, return_info=True, **given(sink, mask))

    def given(sink, mask):
        rest = {n: x for n, x in options.items() if n not in ("attn_sink", "attn_mask")}
        return {"attn_sink": sink, "attn_mask": mask, **rest}

    arguments = (*inputs, options.get("attn_sink"), options.get("attn_mask"))
    got, info = compiled(run)(*arguments)
    want, eager_info = run(*arguments)
    torch.testing.assert_close(got, want)
    assert (info.route, info.fallback_reasons) == (eager_info.route, eager_info.fallback_reasons)
    weights = torch.randn_like(want)
    mine = torch.autograd.grad(got, inputs, weights)
    for one, other in zip(mine, torch.autograd.grad(want, inputs, weights), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", OPTIONS[:4], ids=lambda options: "-".join(options) or "plain")
def test_a_compiled_prefill_call_equals_eager(options):
    def run(q, k, v):
        return stream_attn.prefill(q, k, v, return_lse=True, return_info=True, **options)

    arguments = tensors()
    got, want = compiled(run)(*arguments), run(*arguments)
    torch.testing.assert_close(got[:2], want[:2])
    assert got[2].route == want[2].route


def test_a_compiled_prefill_call_writes_the_callers_out():
    def run(q, k, v, out):
        stream_attn.prefill(q, k, v, out=out)
        return out * 2

    q, k, v = tensors()
    out = torch.full_like(q, torch.nan)
    doubled = compiled(run)(q, k, v, out)
    torch.testing.assert_close(out, stream_attn.prefill(q, k, v))
    assert torch.equal(doubled, out * 2)


def test_no_graph_breaks_in_a_block_that_trains():
    def block(x, wq, wk, wv):
        q, k, v = (torch.unflatten(x @ w, 2, (-1, 16)) for w in (wq, wk, wv))
        return stream_attn.train(q, k, v).flatten(2).square().mean()

    torch._dynamo.reset()
    weights = [torch.randn(32, n, requires_grad=True) for n in (64, 32, 32)]
    report = torch._dynamo.explain(block)(torch.randn(2, 8, 32), *weights)
    assert report.graph_break_count == 0


def test_a_call_at_fault_names_it_while_it_is_traced():
    q, k, v = tensors()
    with pytest.raises(Exception, match="the last axis must be the key's head_dim = 16"):
        compiled(stream_attn.train)(q[..., :8], k, v)


@pytest.mark.parametrize("function", [stream_attn.prefill, stream_attn.train])
def test_autocast_rounds_nothing_in_a_graph(function):
    inputs = tensors()

    def run(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(q, k, v)

    torch.testing.assert_close(compiled(run)(*inputs), function(*inputs), atol=1e-5, rtol=1e-5)


def refuses(*given, **options):
    raise UnsupportedProblem("not over these tensors")


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("function", [stream_attn.prefill, stream_attn.train])
def test_a_route_that_refuses_when_it_is_traced_gives_way_to_the_next(function, masked):
    """In a prefill to one that writes its result where there is no mask."""
    record = AttentionRecord("picky", "none", "tests", (), lambda p, d: 1e-3, apply=refuses)
    mask = torch.rand(6, 9) > 0.5 if masked else None

    def run(q, k, v):
        return function(q, k, v, attn_mask=mask, return_info=True)

    default_registry().register_attention(record)
    try:
        inputs = tensors()
        (got, info), (want, eager_info) = compiled(run)(*inputs), run(*inputs)
    finally:
        default_registry().unregister("picky")
    torch.testing.assert_close(got, want)
    assert "picky: not over these tensors" in info.fallback_reasons
    assert "once 1 refused to build" in info.reason
    assert (info.route, info.fallback_reasons) == (eager_info.route, eager_info.fallback_reasons)


def two_windows(q, k, v):
    return stream_attn.train(q, k, v) + stream_attn.train(q, k, v, window_left=1)


def capped_and_masked(q, k, v):
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    serves = stream_attn.prefill(q.detach(), k.detach(), v.detach(), attn_mask=mask)
    return stream_attn.train(q, k, v, logits_soft_cap=2.5) + serves


def layers(q, k, v):
    for window in (None, 2, None, 3):
        q = stream_attn.train(q, k, v, window_left=window)
    return q


@pytest.mark.parametrize("function", [two_windows, capped_and_masked, layers])
@pytest.mark.parametrize("tool", ["compile", "export"])
def test_calls_that_differ_share_a_graph(function, tool):
    """Each function at a size of its own, whose decisions no test made before it."""
    size = 20 + 2 * [two_windows, capped_and_masked, layers].index(function) + (tool == "export")
    inputs = [t.requires_grad_() for t in tensors(size, size)]
    if tool == "compile":
        run = compiled(function)
    else:

        class Module(torch.nn.Module):
            def forward(self, q, k, v):
                return function(q, k, v)

        run = torch.export.export(Module(), tuple(inputs), strict=True).module()
    got, want = run(*inputs), function(*inputs)
    torch.testing.assert_close(got, want)
    weights = torch.randn_like(want)
    mine = torch.autograd.grad(got, inputs, weights)
    for one, other in zip(mine, torch.autograd.grad(want, inputs, weights), strict=True):
        torch.testing.assert_close(one, other)


class Slow:
    """A problem of its own, which lets other threads run while it is looked up."""

    def __hash__(self):
        time.sleep(1e-3)
        return id(self)


def test_threads_that_trace_at_once_number_their_decisions_apart():
    gate, found = threading.Barrier(8), []

    def work():
        gate.wait()
        for problem in [Slow() for _ in range(5)]:
            number = traced_sequences._decided("any", refuses, problem)
            assert traced_sequences._decided("any", refuses, problem) == number
            found.append((number, problem))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({number for number, _ in found}) == len(found) == 40
    for number, problem in found:
        assert getattr(traced_sequences._DECIDED, f"problem_{number}") is problem


MATH = [
    {"logits_soft_cap": 2.0},
    {"return_lse": True},
    {"batch_invariant": True, "window_left": 2},
    {"logits_soft_cap": 2.0, "attn_sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
]


@pytest.mark.parametrize("options", MATH, ids=lambda options: "-".join(options))
@pytest.mark.parametrize("function", [stream_attn.prefill, stream_attn.train])
@pytest.mark.parametrize("batch", [0, 2])
def test_the_math_route_compiles_under_a_default_device(function, options, batch):
    inputs = [t[:batch] for t in tensors()]

    def run(q, k, v, mask):
        return function(q, k, v, attn_mask=mask, **options)

    mask = torch.rand(6, 9) > 0.5
    want = run(*inputs, mask)
    with torch.device("cpu"):
        torch.testing.assert_close(compiled(run)(*inputs, mask), want)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "attn_sink", "attn_mask"])
def test_a_compiled_prefill_call_refuses_to_drop_a_gradient(wanted):
    given = dict(zip("qkv", tensors(), strict=True))
    given |= {"attn_sink": torch.zeros(4), "attn_mask": torch.zeros(6, 9)}
    given[wanted].requires_grad_()
    name = {"k": "key", "v": "value"}.get(wanted, wanted)
    with pytest.raises(Exception, match=rf"{name}\.requires_grad=True: a serving call returns no"):
        compiled(stream_attn.prefill)(**given)
