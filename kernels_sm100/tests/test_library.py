"""The shared library as a file: exports, embedded code, what it needs to load; and its record."""

from stream_attention.core.testing.state_suites.library import LibrarySuite
from stream_attention.kernels_sm100 import capabilities
from stream_attention.kernels_sm100.library import LIBRARY
from stream_attention.kernels_sm100.schedules import SCHEDULES


class TestLibrary(LibrarySuite):
    library = LIBRARY
    capabilities = capabilities
    schedules = SCHEDULES
    machine_code = frozenset({"sm_100a"})
    ptx = frozenset()
    # Wide read-once loads; the wait for, and the release of, the neighbours of a dependent launch.
    instructions = frozenset({"LDG.E.NA.EFL2.256", "LDG.E.NA.128", "ACQBULK", "PREEXIT"})
    served = frozenset({(10, 0)})
    arch = 100
