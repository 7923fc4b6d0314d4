"""The kernels' algebra and indices on the CPU: the library's host twin against fp64."""

from stream_attention.core.testing.state_suites.host import HostSuite
from stream_attention.kernels_sm100.library import LIBRARY


class TestStateMergeHost(HostSuite):
    library = LIBRARY
