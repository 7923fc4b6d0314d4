"""The top-k kernels compile for compute capability 8.0, 9.0 and 10.0, and fit."""

from __future__ import annotations

import os

import pytest
import torch

from stream_attention.core.testing.compiles import SHARED_LIMIT, compile_for
from stream_attention.flows.top_k import TopK
from stream_attention.flows.window import Budget, Window

BUDGETS = {
    "count": Budget(128),
    "ratio": Budget(16, ratio=0.05),
    "per_row": Budget(per_row=torch.zeros(8, 8, dtype=torch.int32)),
    "mass": Budget(mass=0.9, max_pages=2048),
}


@pytest.fixture(autouse=True)
def compiler() -> None:
    assert os.environ.get("TRITON_INTERPRET", "0") != "1", "another file asked for the interpreter"


@pytest.mark.parametrize("capability", sorted(SHARED_LIMIT))
@pytest.mark.parametrize("max_pages", [2048, 8192, 32768])
@pytest.mark.parametrize("kind", sorted(BUDGETS))
def test_top_k_compiles_and_fits(
    kind: str, max_pages: int, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stream_attention.flows import top_k_kernels, top_k_long_kernels

    with monkeypatch.context() as patched:  # a plan for a CPU, whose launches are only compiled
        patched.setenv("TRITON_INTERPRET", "1")
        plan = TopK(max_pages, 64, 16, Window(1, 1), BUDGETS[kind], "cpu")
    scores = torch.zeros(8, 8, max_pages)
    table, lengths = (torch.zeros(shape, dtype=torch.int32) for shape in ((8, max_pages), (8,)))
    out = torch.zeros(8, 8, plan.width, dtype=torch.int32)
    sizes = torch.zeros(8, 8, dtype=torch.int32)
    launches = plan._launches(scores, table, lengths, (out, sizes, sizes.clone()), None)
    assert len(launches) == plan.num_launches == (1 if max_pages <= 8192 else 2)
    for name, _, arguments, meta in launches:
        meta["DEPENDENT"] = meta["launch_pdl"] = capability >= 90  # as on such a device
        kernel = getattr(top_k_kernels, name, None) or getattr(top_k_long_kernels, name)
        values = tuple(arguments.get(each) for each in kernel.arg_names if each not in meta)
        compiled = compile_for(kernel, values, meta, capability)
        assert compiled.metadata.shared <= SHARED_LIMIT[capability]
