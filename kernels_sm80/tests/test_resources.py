"""Registers, spills, stack and shared memory of every kernel, from the report of ptxas."""

from stream_attention.core.testing.state_suites.resources import ResourcesSuite
from stream_attention.kernels_sm80.library import LIBRARY

# By elements a vector. A block has at most 256 threads: 64 registers let 4 such blocks reside on an
# SM, with 4 loads in flight a thread.
MAX_REGISTERS = {1: 48, 4: 60, 8: 64}


class TestResources(ResourcesSuite):
    library = LIBRARY
    vector_bytes = (16,)
    target = "sm_80"
    max_registers = MAX_REGISTERS
