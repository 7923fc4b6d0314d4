"""The shared library as a file: exports, embedded code, what it needs to load; and its record."""

from stream_attention.core.testing.state_suites.library import LibrarySuite
from stream_attention.kernels_sm80 import capabilities
from stream_attention.kernels_sm80.library import LIBRARY
from stream_attention.kernels_sm80.schedules import SCHEDULES


class TestLibrary(LibrarySuite):
    library = LIBRARY
    capabilities = capabilities
    schedules = SCHEDULES
    machine_code = frozenset({"sm_80"})
    ptx = frozenset({"sm_80"})
    # Wide read-once loads on the read-only path.
    instructions = frozenset({"LDG.E.NA.LTC128B.128.CONSTANT"})
    served = frozenset({(8, 0), (8, 6), (9, 0), (10, 0), (10, 3), (12, 0)})
    arch = 80
