"""The streaming-read kernel compiles for every architecture, with wide loads; no GPU is needed."""

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stream_attention.bench import read_kernel


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("block", sorted({shape[0] for shape in read_kernel.LAUNCH_SHAPES}))
def test_loads_are_sixteen_bytes_wide(capability, block, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    source = ASTSource(
        fn=read_kernel._read_kernel,
        signature={"src": "*i32", "dst": "*i32", "count": "i32", "BLOCK": "constexpr"},
        constexprs={(3,): block},
        attrs={(0,): [["tt.divisibility", 16]], (2,): [["tt.divisibility", 16]]},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": read_kernel.NUM_WARPS},
    )
    ptx = compiled.asm["ptx"]
    loads = [line for line in ptx.splitlines() if "ld.global" in line]
    assert len(loads) == block // (32 * read_kernel.NUM_WARPS * 4)
    assert all(".v4.b32" in line for line in loads), loads


def test_every_shape_divides_the_unit_that_sizes_are_made_of():
    assert all(16384 % block == 0 for block, _ in read_kernel.LAUNCH_SHAPES)
