"""On a CUDA device: the oracle, the torch route and the dispatch of merges. Tagged `gpu`."""

import dataclasses
import math

import pytest
import torch

from stream_attention.core import state
from stream_attention.core.oracle import attention
from stream_attention.core.registry import CapabilityRule, MergeRecord, Registry
from stream_attention.core.routes import torch_route
from stream_attention.core.state import merge_many, merge_states, torch_merge
from stream_attention.core.testing.checks import check_route, find_record
from stream_attention.core.testing.contract import LINES, many_requests
from stream_attention.core.testing.hostile import HOSTILE
from stream_attention.core.testing.problems import build

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"
)


@pytest.fixture(scope="module")
def record():
    return find_record("torch", torch_route.register)


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case.name)
def test_oracle_is_the_same_on_both_devices(case):
    found = []
    for device in ("cpu", "cuda"):
        built = build(case, 0, device)
        found.append(
            attention(built.q, built.cache, built.qo_indptr, **built.options, return_lse=True)
        )
    for cpu, cuda in zip(*found, strict=True):
        torch.testing.assert_close(cuda.cpu(), cpu, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case.name)
def test_hostile_list_on_the_torch_route(record, case):
    check_route(record, case, "cuda")


@pytest.mark.parametrize("line", LINES)
def test_line_holds_on_the_torch_route(record, line):
    LINES[line](record, "cuda")


def test_sixty_five_thousand_requests_on_the_torch_route(record):
    many_requests(record, "cuda")


class _Recorder:
    """A merge kernel that counts its calls and computes them with torch."""

    def __init__(self):
        self.calls = 0

    def build(self, outs, lses, out, lse, sink):
        if isinstance(outs, tuple):
            outs, lses = torch.stack(outs), torch.stack(lses)
        if sink is not None:
            sink = sink.repeat(lses.shape[1] // len(sink))
        self._args = (outs, lses, sink, out, lse)
        return self

    def run(self):
        outs, lses, sink, out, lse = self._args
        got = torch_merge(outs, lses, sink, out.dtype)
        out.copy_(got[0])
        lse.copy_(got[1])
        self.calls += 1


@pytest.fixture
def recorder(monkeypatch):
    """The only kernel there is, beside one that refuses everything."""
    recorder, registry = _Recorder(), Registry(discover=False)
    never = CapabilityRule("never", lambda problem, device: "serves nothing")
    kernel = MergeRecord(name="recorder", package="test", rules=(), build=recorder.build)
    registry.register_merge(dataclasses.replace(kernel, name="never", rules=(never,), build=None))
    registry.register_merge(kernel)
    monkeypatch.setattr(state, "default_registry", lambda: registry)
    return recorder


def _pair(dim=64, dtype=torch.bfloat16):
    outs = torch.randn(2, 3, 4, dim, device="cuda").to(dtype)
    lses = torch.randn(2, 3, 4, device="cuda")
    lses[0, 0] = -math.inf
    outs[0, 0] = math.nan
    return outs, lses


def test_a_kernel_that_accepts_serves_merges_on_cuda(recorder):
    outs, lses = _pair()
    sink = torch.randn(4, device="cuda")
    got = merge_states(outs[0], lses[0], outs[1], lses[1])
    assert recorder.calls == 1
    want = torch_merge(outs, lses)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    got = merge_many(outs, lses, sink, torch.float32)
    assert recorder.calls == 2
    want = torch_merge(outs, lses, sink, torch.float32)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_what_no_kernel_takes_stays_with_torch(recorder):
    outs, lses = _pair()
    out, lse = merge_states(outs[0].requires_grad_(), lses[0], outs[1], lses[1])
    assert out.requires_grad and lse.shape == (3, 4)
    outs, lses = _pair()
    merge_many(outs.transpose(1, 2), lses.transpose(1, 2))  # no view as rows
    merge_many(outs[:0], lses[:0])
    merge_many(outs[:, :0], lses[:, :0])
    wide, logs = _pair(dim=513)
    merge_many(wide, logs)
    flat = torch.randn(2 * 12 * 64 + 1, device="cuda").bfloat16()[1:].view(2, 3, 4, 64)
    merge_many(flat, lses)  # rows that do not start at multiples of 16 bytes
    torch.compile(merge_many, fullgraph=True, backend="eager")(outs, lses)
    assert recorder.calls == 0


def test_under_no_grad_a_kernel_takes_parameters(recorder):
    outs, lses = _pair()
    with torch.no_grad():
        merge_many(outs.requires_grad_(), lses)
    assert recorder.calls == 1
