"""State merges on a GPU of this package: against fp64, and what the contract asks of a launch.

On a GPU later than 8.x these run the library's PTX: the machine code beside it is for 8.x alone.
"""

from stream_attention.core.testing.state_suites.gpu import GpuSuite, skip_unless_served
from stream_attention.kernels_sm80.capabilities import device_reason
from stream_attention.kernels_sm80.library import LIBRARY

pytestmark = skip_unless_served(device_reason)


class TestStateMergeGpu(GpuSuite):
    library = LIBRARY
