"""State merges on a GPU of this package: against fp64, and what the contract asks of a launch."""

from stream_attention.core.testing.state_suites.gpu import DependentGpuSuite, skip_unless_served
from stream_attention.kernels_sm100.capabilities import device_reason
from stream_attention.kernels_sm100.library import LIBRARY

pytestmark = skip_unless_served(device_reason)


class TestStateMergeGpu(DependentGpuSuite):
    library = LIBRARY
