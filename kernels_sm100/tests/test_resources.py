"""Registers, spills, shared memory and legality of every kernel, from what ptxas said of them."""

from stream_attention.core.testing.state_suites.resources import ResourcesSuite
from stream_attention.kernels_sm100.library import LIBRARY
from stream_attention.kernels_sm100.schedules import SCHEDULES

# By elements a vector. A block has at most 256 threads: 64 registers let 4 such blocks reside on an
# SM, with 4 loads in flight a thread. 32-byte vectors (8 fp32, 16 of 16 bits) get 80: 3 blocks,
# whose loads in flight are still half as many bytes again.
MAX_REGISTERS = {1: 48, 4: 64, 8: 80, 16: 80}


class TestResources(ResourcesSuite):
    library = LIBRARY
    schedules = SCHEDULES
    arch = "sm_100"
    target = "sm_100a"
    vector_bytes = (16, 32)
    max_registers = MAX_REGISTERS
