"""Registers, spills, stack and shared memory of the state merges, from the report of ptxas."""

import pytest

from stream_attention.core.testing.native_library import library_file, parse_ptxas, require
from stream_attention.core.testing.state_suites.resources import ResourcesSuite
from stream_attention.kernels_sm90.library import LIBRARY

# By elements a vector. A block has at most 256 threads: 64 registers let 4 such blocks reside on an
# SM, with 4 loads in flight a thread.
MAX_REGISTERS = {1: 48, 4: 60, 8: 64}


class TestResources(ResourcesSuite):
    library = LIBRARY
    vector_bytes = (16,)
    target = "sm_90a"
    max_registers = MAX_REGISTERS

    @pytest.fixture(name="kernels")
    def kernels_fixture(self):
        """The merges; test_decode_resources.py has every other kernel of the library."""
        require(LIBRARY)
        head, *sections = (
            library_file(LIBRARY, ".ptxas.txt").read_text().split("Compiling entry function")
        )
        merges = [section for section in sections if "state_" in section.partition(" for ")[0]]
        return parse_ptxas("Compiling entry function".join([head, *merges]))
