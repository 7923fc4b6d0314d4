"""The device top-k compiles for compute capability 8.0, 9.0 and 10.0 and fits its shared memory.

Triton compiles ahead of time for a named target, so no GPU is needed. It decides when it is
imported whether it compiles or interprets: this file needs a process of its own.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from stream_attention.flows.window import Budget, Window

SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
_POINTER = {torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
BUDGETS = {
    "count": Budget(64),
    "ratio": Budget(64, 0.1),
    "per_row": Budget(per_row=torch.ones(2, dtype=torch.int32)),
    "mass": Budget(mass=0.9, min_pages=4, max_pages=512),
}
PAGES = (512, 4096, 8192, 131_072)


@pytest.fixture(autouse=True)
def compiler() -> None:
    """An error where another file of this process has asked for Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        pytest.fail("TRITON_INTERPRET='1': run this file in a process of its own", pytrace=False)


def _launches(monkeypatch: Any, max_pages: int, budget: Budget) -> list[Any]:
    """What a run over CPU tensors would launch: (kernel, arguments, constants)."""
    from stream_attention.flows import top_k, top_k_kernels, top_k_long_kernels

    with monkeypatch.context() as patch:  # tensors may be anywhere: nothing is launched
        patch.setenv("TRITON_INTERPRET", "1")
        plan = top_k.TopK(max_pages, 4, 16, Window(1, 1), budget, "cpu")
    ints = {"dtype": torch.int32}
    scores, lengths = torch.zeros(2, 2, max_pages), torch.zeros(2, **ints)
    outputs = (torch.zeros(2, 2, plan.width, **ints), torch.zeros(2, 2, **ints), None)
    table = torch.zeros(2, max_pages, **ints)
    launches = plan._launches(scores, table, lengths, outputs, None)
    assert len(launches) == plan.num_launches
    modules = (top_k_kernels, top_k_long_kernels)
    return [
        (next(getattr(m, name) for m in modules if hasattr(m, name)), args, meta)
        for name, _, args, meta in launches
    ]


def _compile(kernel: Any, args: dict[str, Any], meta: dict[str, Any], capability: int) -> Any:
    """What `kernel[grid](**args, **meta)` would compile on a device of that capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    meta = dict(meta)
    options = {"num_warps": meta.pop("num_warps")}
    free = set(kernel.do_not_specialize or ())
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = meta[name] if name in meta else args[name]
        if name in meta or value is None:
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTER[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and name not in free:
            signature[name], constants[(index,)] = "constexpr", 1
        else:
            signature[name] = "i32"
            if value % 16 == 0 and name not in free:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", sorted(SHARED_LIMIT))
@pytest.mark.parametrize("budget", sorted(BUDGETS))
@pytest.mark.parametrize("max_pages", PAGES)
def test_every_kernel_compiles(
    monkeypatch: Any, max_pages: int, budget: str, capability: int
) -> None:
    if budget in ("ratio", "per_row") and (max_pages in (512, 8192) or capability != 90):
        pytest.skip("differs from the count by a few scalar instructions")
    for kernel, args, meta in _launches(monkeypatch, max_pages, BUDGETS[budget]):
        compiled = _compile(kernel, args, meta, capability)
        assert compiled.metadata.shared <= SHARED_LIMIT[capability]
        ptx = compiled.asm["ptx"]
        assert "ld.global.v4" in ptx, "scores are not loaded 16 bytes at a time"
        if budget != "mass":
            assert "redux.sync" in ptx, "counts are not reduced by one instruction a warp"
