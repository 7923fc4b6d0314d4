"""The kernels' algebra and indices on the CPU: the library's host twin against fp64."""

from __future__ import annotations

import math

import pytest
import torch

from stream_attention.core.native_merge import merge_on_host
from stream_attention.core.testing.state_cases import DTYPES, HEAD_DIMS, StateCase, state_cases
from stream_attention.core.testing.state_suites.base import LibraryTests

# Larger cases are the GPU test's: one thread walks all vectors here.
MAX_ELEMENTS = 1 << 18


class HostSuite(LibraryTests):
    """Nothing differs but the library."""

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    @pytest.mark.parametrize("out_dtype", DTYPES)
    @pytest.mark.parametrize("parts_dtype", DTYPES)
    def test_merge_equals_fp64(self, library, parts_dtype, out_dtype, head_dim):
        cases = list(state_cases(parts_dtype, out_dtype, head_dim, MAX_ELEMENTS))
        assert len(cases) >= 20
        for case in cases:
            tensors = case.build()
            merge_on_host(library, *tensors.arguments, num_sms=case.seed % 3 * 40 + 1)
            tensors.check()

    def test_one_state_comes_back_bit_for_bit(self, library):
        tensors = StateCase(num_states=1, rows=50, head_dim=96, empty=0.0).build()
        merge_on_host(library, *tensors.arguments)
        assert torch.equal(tensors.out, tensors.out_parts[0])
        assert torch.equal(tensors.lse, tensors.lse_parts[0])

    def test_no_states_give_the_empty_row(self, library):
        out, lse = torch.full((5, 64), math.nan), torch.full((5,), math.nan)
        merge_on_host(library, torch.empty(0, 5, 64), torch.empty(0, 5), out, lse, torch.zeros(2))
        assert torch.equal(out, torch.zeros(5, 64))
        assert torch.equal(lse, torch.full((5,), -math.inf))

    @pytest.mark.parametrize("num_states", [1, 2, 32])
    def test_only_empty_states_give_the_empty_row_with_a_sink_too(self, library, num_states):
        tensors = StateCase(num_states=num_states, rows=9, head_dim=80, empty=1.0, sinks=3).build()
        merge_on_host(library, *tensors.arguments)
        assert torch.equal(tensors.out, torch.zeros(9, 80))
        assert torch.equal(tensors.lse, torch.full((9,), -math.inf))

    def test_sink_of_minus_infinity_is_no_sink(self, library):
        with_sink = StateCase(rows=20, sinks=4).build()
        without = StateCase(rows=20).build()
        with_sink.attn_sink.fill_(-math.inf)
        for tensors in (with_sink, without):
            merge_on_host(library, *tensors.arguments)
        assert torch.equal(with_sink.out, without.out)
        assert torch.equal(with_sink.lse, without.lse)

    @pytest.mark.parametrize("broken", [math.nan, math.inf])
    @pytest.mark.parametrize("position", [0, 4, 39])
    @pytest.mark.parametrize("others", [0.0, 1.0])
    def test_broken_lse_of_a_state_shows_as_nan(self, library, broken, position, others):
        tensors = StateCase(num_states=40, rows=4, head_dim=64, empty=others).build()
        tensors.out_parts[position] = 1.0
        tensors.lse_parts[position] = 0.0
        tensors.lse_parts[position, 1] = broken
        merge_on_host(library, *tensors.arguments)
        assert tensors.out[1].isnan().all()
        assert tensors.lse[1].isnan()
        assert not tensors.out[[0, 2, 3]].isnan().any()

    @pytest.mark.parametrize("shift", [-1e4, -80.0, 80.0, 1e4])
    def test_far_away_lse_neither_overflows_nor_vanishes(self, library, shift):
        tensors = StateCase(num_states=7, rows=11, empty=0.0, lse_spread=2.0).build()
        tensors.lse_parts.add_(shift)
        merge_on_host(library, *tensors.arguments)
        tensors.check()

    def test_state_far_below_the_others_adds_nothing(self, library):
        tensors = StateCase(num_states=2, rows=3, empty=0.0).build()
        tensors.lse_parts[0], tensors.lse_parts[1] = 0.0, -3e38
        merge_on_host(library, *tensors.arguments)
        assert torch.equal(tensors.out, tensors.out_parts[0])

    def test_bits_of_a_row_do_not_depend_on_the_others(self, library):
        tensors = StateCase(num_states=37, rows=300, head_dim=64).build()
        merge_on_host(library, *tensors.arguments, num_sms=1)
        for first, last in ((0, 1), (17, 40), (299, 300)):
            alone = torch.empty(last - first, 64)
            parts, lse = tensors.out_parts[:, first:last], tensors.lse_parts[:, first:last]
            merge_on_host(library, parts, lse, alone)
            assert torch.equal(alone, tensors.out[first:last])
