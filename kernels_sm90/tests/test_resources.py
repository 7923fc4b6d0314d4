"""Registers, spills, shared memory and legality of every kernel, from what ptxas said of them."""

from stream_attention.core.testing.state_suites.resources import ResourcesSuite
from stream_attention.kernels_sm90.library import LIBRARY
from stream_attention.kernels_sm90.schedules import SCHEDULES

# By elements a vector. A block has at most 256 threads: 64 registers let 4 such blocks reside on an
# SM, with 4 loads in flight a thread.
MAX_REGISTERS = {1: 48, 4: 60, 8: 64}


class TestResources(ResourcesSuite):
    library = LIBRARY
    schedules = SCHEDULES
    arch = "sm_90"
    target = "sm_90a"
    vector_bytes = (16,)
    max_registers = MAX_REGISTERS
