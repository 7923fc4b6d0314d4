"""Launch geometry: a pure function of the call and the GPU's size, asked without a GPU."""

from __future__ import annotations

import dataclasses

import pytest

from stream_attention.core.native import NativeLaunchError, StatePairParams
from stream_attention.core.testing.native_library import (
    Shape,
    geometry_shapes,
    model_geometry,
)
from stream_attention.core.testing.state_suites.base import LibraryTests

REFUSED = [
    ("head_dim", 0, "head_dim: must be 1 .. 512"),
    ("head_dim", 513, "head_dim: must be 1 .. 512"),
    ("rows", -1, "rows: must be >= 0"),
    ("rows", 1 << 45, "at most 2147483647 blocks"),
    ("rows", (1 << 63) - 1, "at most 2147483647 blocks"),
    ("num_states", -1, "num_states: must be 0"),
    ("num_states", (1 << 30) + 1, "num_states: must be 0"),
    ("parts_dtype", 3, "dtype: must be 0"),
    ("out_dtype", -1, "dtype: must be 0"),
    ("flags", 2, "flags: unknown bit"),
    ("parts_row_stride", -1, "stride: must be >= 0"),
    ("parts_state_stride", -64, "stride: must be >= 0"),
    ("lse_row_stride", -1, "stride: must be >= 0"),
    ("lse_state_stride", -1, "stride: must be >= 0"),
    ("out_row_stride", 63, "out_row_stride >= head_dim"),
    ("out", 0, "pointer is null"),
    ("out_parts", 0, "pointer is null"),
    ("lse_parts", 0, "pointer is null"),
    ("out", 1 << 40, "same tensor as an input"),
    ("lse", 1 << 42, "same tensor as an input"),
    ("out", (1 << 41) + 1, "not aligned to its element size"),
    ("lse_parts", (1 << 42) + 2, "not aligned to its element size"),
    ("attn_sink", 1 << 43, "num_heads: must be >= 1"),
]


def _pair_params(**changes):
    fields = {
        "out_a": 1 << 40,
        "out_b": 1 << 41,
        "lse_a": 1 << 42,
        "lse_b": 1 << 43,
        "out": 1 << 44,
        "out_a_row_stride": 64,
        "out_b_row_stride": 64,
        "lse_a_row_stride": 1,
        "lse_b_row_stride": 1,
        "out_row_stride": 64,
        "rows": 1000,
        "head_dim": 64,
    }
    return StatePairParams(**{**fields, **changes})


class GeometrySuite(LibraryTests):
    """max_vector_bytes: of the widest load. num_sms: multiprocessors of the largest such GPU."""

    max_vector_bytes: int
    num_sms: int

    def test_geometry_equals_an_independent_model(self, library):
        shapes = list(geometry_shapes())
        assert len(shapes) > 2000
        for shape in shapes:
            got = library.geometry(shape.params(), self.num_sms)
            assert got == model_geometry(shape, self.num_sms, self.max_vector_bytes), shape

    def test_grid_covers_every_vector_and_no_block_is_idle(self, library):
        for shape in geometry_shapes():
            got = library.geometry(shape.params(), self.num_sms)
            assert got.vectors_per_row * got.vector_elements == shape.head_dim
            assert got.num_vectors == shape.rows * got.vectors_per_row
            assert (got.grid - 1) * got.block_vectors < got.num_vectors
            assert got.num_vectors <= got.grid * got.block_vectors

    def test_block_and_shared_memory_stay_within_the_launch_bounds(self, library):
        for shape in geometry_shapes():
            got = library.geometry(shape.params(), self.num_sms)
            assert got.block_vectors % 32 == 0
            assert got.block_threads <= 256
            assert got.shared_bytes <= 48 * 1024

    def test_order_of_sums_depends_on_the_number_of_states_alone(self, library):
        for num_states in range(1, 200):
            slices = {
                library.geometry(Shape(num_states, rows, 128).params(), num_sms).state_slices
                for rows in (1, 33, 5000, 1 << 22)
                for num_sms in (1, self.num_sms, 1000)
            }
            assert len(slices) == 1

    def test_widest_vector_is_used_where_it_is_aligned(self, library):
        for parts_dtype, size in (("float32", 4), ("float16", 2), ("bfloat16", 2)):
            dense = Shape(4, 64, 128, parts_dtype)
            got = library.geometry(dense.params(), self.num_sms)
            assert got.vector_elements == self.max_vector_bytes // size
            shifted = dataclasses.replace(dense, base=dense.base + size)
            assert library.geometry(shifted.params(), self.num_sms).vector_elements == 1

    def test_no_rows_launch_nothing(self, library):
        got = library.geometry(Shape(3, 0, 64).params(), self.num_sms)
        assert (got.grid, got.num_vectors) == (0, 0)

    @pytest.mark.parametrize(("field", "value", "message"), REFUSED)
    def test_illegal_call_is_refused_by_name(self, library, field, value, message):
        params = Shape(3, 1000, 64).params()
        library.geometry(params, self.num_sms)
        setattr(params, field, value)
        with pytest.raises(NativeLaunchError, match=message):
            library.geometry(params, self.num_sms)

    def test_rows_are_taken_up_to_the_last_block_that_cuda_can_launch(self, library):
        rows = 128 * (2**31 - 1)
        assert library.geometry(Shape(1, rows, 1).params(), self.num_sms).grid == 2**31 - 1
        with pytest.raises(NativeLaunchError, match="at most 2147483647 blocks"):
            library.geometry(Shape(1, rows + 1, 1).params(), self.num_sms)

    def test_gpu_without_multiprocessors_is_refused(self, library):
        with pytest.raises(NativeLaunchError, match="num_sms: must be >= 1"):
            library.geometry(Shape(3, 1000, 64).params(), 0)

    def test_pair_has_the_geometry_of_one_slice(self, library):
        got = library.geometry(_pair_params(), self.num_sms)
        assert got == model_geometry(Shape(2, 1000, 64), self.num_sms, self.max_vector_bytes)

    @pytest.mark.parametrize("name", ["out_a", "out_b"])
    def test_pair_looks_at_the_alignment_of_both_states(self, library, name):
        for changes in ({name: (1 << 45) + 4}, {name + "_row_stride": 65}):
            assert library.geometry(_pair_params(**changes), self.num_sms).vector_elements == 1

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"lse_b": 0}, "pointer is null"),
            ({"out": 1 << 41}, "same tensor as an input"),
            ({"lse": 1 << 43}, "same tensor as an input"),
            ({"out_b_row_stride": -1}, "stride: must be >= 0"),
            ({"out_b": (1 << 41) + 2}, "not aligned to its element size"),
            ({"head_dim": 600}, "head_dim: must be 1 .. 512"),
        ],
    )
    def test_illegal_pair_is_refused_by_name(self, library, changes, message):
        with pytest.raises(NativeLaunchError, match=message):
            library.geometry(_pair_params(**changes), self.num_sms)
