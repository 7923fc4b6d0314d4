"""Registers, spills, stack and shared memory of every kernel, from the report of ptxas."""

from stream_attention.core.testing.state_suites.resources import ResourcesSuite
from stream_attention.kernels_sm100.library import LIBRARY

# By elements a vector. A block has at most 256 threads: 64 registers let 4 such blocks reside on an
# SM, with 4 loads in flight a thread. 32-byte vectors (8 fp32, 16 of 16 bits) get 80: 3 blocks,
# whose loads in flight are still half as many bytes again.
MAX_REGISTERS = {1: 48, 4: 64, 8: 80, 16: 80}


class TestResources(ResourcesSuite):
    library = LIBRARY
    vector_bytes = (16, 32)
    target = "sm_100a"
    max_registers = MAX_REGISTERS
