"""The shared library as a file: exports, embedded code, what it needs to load; and its record."""

from stream_attention.core.testing.state_suites.library import EXPORTS, LibrarySuite
from stream_attention.kernels_sm90 import capabilities
from stream_attention.kernels_sm90.library import LIBRARY
from stream_attention.kernels_sm90.schedules import SCHEDULES

DECODE_EXPORTS = frozenset(
    {
        "stream_attention_decode",
        "stream_attention_decode_begin",
        "stream_attention_decode_error_string",
        "stream_attention_decode_geometry",
        "stream_attention_decode_blocks_for",
        "stream_attention_decode_divide",
        "stream_attention_decode_node",
        "stream_attention_decode_node_begin",
        "stream_attention_decode_nodes",
        "stream_attention_decode_owner",
        "stream_attention_decode_part_begin",
        "stream_attention_decode_shares",
        "stream_attention_decode_slice_log2",
        "stream_attention_decode_prepare",
        "stream_attention_decode_struct_bytes",
        "stream_attention_decode_tiles",
    }
)


class TestLibrary(LibrarySuite):
    library = LIBRARY
    capabilities = capabilities
    schedules = SCHEDULES
    exports = EXPORTS | DECODE_EXPORTS
    machine_code = frozenset({"sm_90a"})
    ptx = frozenset()
    # Wide read-once loads; the wait for, and the release of, the neighbours of a dependent launch.
    instructions = frozenset({"LDG.E.NA.128", "ACQBULK", "PREEXIT"})
    served = frozenset({(9, 0)})
    arch = 90
