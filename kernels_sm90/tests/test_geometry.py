"""Launch geometry: a pure function of the call and the GPU's size, asked without a GPU."""

from stream_attention.core.testing.state_suites.geometry import GeometrySuite
from stream_attention.kernels_sm90.library import LIBRARY


class TestGeometry(GeometrySuite):
    library = LIBRARY
    max_vector_bytes = 16
    num_sms = 132
