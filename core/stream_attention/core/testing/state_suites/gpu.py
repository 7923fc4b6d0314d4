"""State merges on a GPU of the package: against fp64, and what the contract asks of a launch."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from stream_attention.core.device import DeviceFacts, device_facts
from stream_attention.core.native_merge import MergeLaunch
from stream_attention.core.testing.state_cases import (
    DTYPES,
    HEAD_DIMS,
    NUM_STATES,
    StateCase,
    state_cases,
)
from stream_attention.core.testing.state_suites.base import LibraryTests

# 65537 rows of 512 with two states; more states come with fewer rows or a smaller head_dim.
MAX_ELEMENTS = (1 << 26) + (1 << 11)


def skip_unless_served(
    device_reason: Callable[[DeviceFacts], str | None],
) -> pytest.MarkDecorator:
    """Mark that skips where there is no GPU that `device_reason` has nothing against."""
    if not torch.cuda.is_available():
        missing: str | None = "needs a CUDA device: torch.cuda.is_available() is False"
    else:
        missing = device_reason(device_facts(torch.device("cuda")))
    return pytest.mark.skipif(missing is not None, reason=str(missing))


FIRST_LAUNCH = """
import torch
from stream_attention.core.native_merge import MergeLaunch
from stream_attention.core.testing.state_cases import StateCase
from {package}.library import LIBRARY

for pair in (False, True):
    tensors = StateCase(num_states=2, rows=64, head_dim=64, pair=pair).build("cuda")
    launch = MergeLaunch(LIBRARY, *tensors.arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run()
    graph.replay()
    torch.cuda.synchronize()
    tensors.check()
"""


class GpuSuite(LibraryTests):
    """Nothing differs but the library. A subclass is marked with `skip_unless_served`."""

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    @pytest.mark.parametrize("out_dtype", DTYPES)
    @pytest.mark.parametrize("parts_dtype", DTYPES)
    def test_merge_equals_fp64(self, library, parts_dtype, out_dtype, head_dim):
        cases = list(state_cases(parts_dtype, out_dtype, head_dim, MAX_ELEMENTS))
        assert len(cases) >= 24
        for case in cases:
            tensors = case.build("cuda")
            MergeLaunch(library, *tensors.arguments).run()
            tensors.check()

    @pytest.mark.parametrize("num_states", NUM_STATES)
    def test_only_empty_states_give_the_empty_row_with_a_sink_too(self, library, num_states):
        case = StateCase(num_states=num_states, rows=300, head_dim=80, empty=1.0, sinks=3)
        tensors = case.build("cuda")
        MergeLaunch(library, *tensors.arguments).run()
        assert not tensors.out.any()
        assert (tensors.lse == -math.inf).all()

    @pytest.mark.parametrize("broken", [math.nan, math.inf])
    @pytest.mark.parametrize("position", [0, 4, 39])
    @pytest.mark.parametrize("others", [0.0, 1.0])
    def test_broken_lse_of_a_state_shows_as_nan(self, library, broken, position, others):
        tensors = StateCase(num_states=40, rows=4, head_dim=64, empty=others).build("cuda")
        tensors.out_parts[position] = 1.0
        tensors.lse_parts[position] = 0.0
        tensors.lse_parts[position, 1] = broken
        MergeLaunch(library, *tensors.arguments).run()
        assert tensors.out[1].isnan().all()
        assert tensors.lse[1].isnan()
        assert not tensors.out[[0, 2, 3]].isnan().any()

    def test_more_than_two_to_the_31_rows(self, library):
        rows, heads = (1 << 31) + 5, 7
        parts = torch.tensor([[1.0], [3.0]], device="cuda", dtype=torch.bfloat16)
        lse = torch.zeros(2, 1, device="cuda")
        sinks = torch.linspace(-2.0, 3.0, heads, device="cuda")
        out = torch.full((rows, 1), math.nan, device="cuda", dtype=torch.bfloat16)
        states = parts[:, :, None].expand(2, rows, 1)
        MergeLaunch(library, states, lse.expand(2, rows), out, None, sinks).run()
        want = (4.0 / (2.0 + sinks.double().exp())).to(torch.bfloat16)
        whole = rows // heads * heads
        assert (out[:whole, 0].view(-1, heads) == want).all()
        assert torch.equal(out[whole:, 0], want[: rows - whole])

    def test_same_inputs_give_the_same_bits(self, library):
        tensors = StateCase(num_states=129, rows=1000, head_dim=128).build("cuda")
        launch = MergeLaunch(library, *tensors.arguments)
        launch.run()
        first = tensors.out.clone()
        for _ in range(20):
            tensors.out.fill_(math.nan)
            launch.run()
            assert torch.equal(tensors.out, first)

    def test_bits_of_a_row_do_not_depend_on_the_others(self, library):
        tensors = StateCase(num_states=37, rows=70000, head_dim=64).build("cuda")
        MergeLaunch(library, *tensors.arguments).run()
        for first, last in ((0, 1), (17, 40), (69999, 70000)):
            alone = torch.empty(last - first, 64, device="cuda")
            parts, lse = tensors.out_parts[:, first:last], tensors.lse_parts[:, first:last]
            MergeLaunch(library, parts, lse, alone).run()
            assert torch.equal(alone, tensors.out[first:last])

    @pytest.mark.parametrize("pair", [False, True])
    def test_captured_graph_follows_contents_changed_in_place(self, library, pair):
        case = StateCase(num_states=2, rows=512, head_dim=128, pair=pair, sinks=4, seed=1)
        tensors = case.build("cuda")
        launch = MergeLaunch(library, *tensors.arguments)
        launch.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch.run()
        for seed in range(2, 12):
            other = StateCase(num_states=2, rows=512, head_dim=128, sinks=4, seed=seed).build(
                "cuda"
            )
            for index in range(2):
                tensors.out_parts[index].copy_(other.out_parts[index])
                tensors.lse_parts[index].copy_(other.lse_parts[index])
            tensors.attn_sink.copy_(other.attn_sink)
            graph.replay()
            torch.cuda.synchronize()
            tensors.check()

    def test_first_launch_of_a_process_may_be_captured(self, library):
        environment = dict(
            os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path)
        )
        command = [sys.executable, "-c", FIRST_LAUNCH.format(package=self.library.package)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def test_runs_on_the_current_stream(self, library):
        tensors = StateCase(num_states=3, rows=64, head_dim=64, empty=0.0).build("cuda")
        launch = MergeLaunch(library, *tensors.arguments)
        good = tensors.lse_parts.clone()
        tensors.lse_parts.fill_(math.nan)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            tensors.lse_parts.copy_(good)
            launch.run()
        stream.synchronize()
        tensors.check()

    def test_rebound_launch_writes_to_the_new_tensors(self, library):
        first = StateCase(num_states=5, rows=40, head_dim=96, seed=1).build("cuda")
        second = StateCase(num_states=5, rows=40, head_dim=96, seed=2).build("cuda")
        before = first.out.clone()
        launch = MergeLaunch(library, *first.arguments)
        launch.rebind(*second.arguments)
        launch.run()
        second.check()
        assert torch.equal(first.out, before)


class DependentGpuSuite(GpuSuite):
    """Of libraries whose kernels may be launched before their producer has ended."""

    @pytest.mark.parametrize("num_states", [2, 32])
    def test_dependent_launch_sees_what_its_producer_wrote(self, library, num_states):
        tensors = StateCase(num_states=num_states, rows=4096, head_dim=128, empty=0.0).build("cuda")
        parts, lse = tensors.out_parts.clone(), tensors.lse_parts.clone()
        launch = MergeLaunch(library, *tensors.arguments, dependent=True)
        for _ in range(50):
            tensors.out_parts.fill_(math.nan)
            tensors.lse_parts.fill_(math.nan)
            tensors.lse_parts.copy_(lse)
            tensors.out_parts.copy_(parts)
            launch.run()
            tensors.check()
