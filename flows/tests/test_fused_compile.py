"""Generated score launches compile for compute capability 8.0, 9.0 and 10.0, and fit.

No GPU is needed. Apart from the tests that interpret: a process does one or the other.
"""

from __future__ import annotations

import os

import pytest
import torch

from stream_attention.core.testing.compiles import SHARED_LIMIT, compile_for
from stream_attention.flows.registry import load_flow, registered_flows
from stream_attention.flows.testing.cases import flow_case

TOKEN_FLOWS = ("h2o_token_sparse_attention", "gqa_h2o_token_sparse_attention")
PRODUCTS = ("gqa_block_sparse_attention", "gqa_h2o_token_sparse_attention")


CONSTANTS = ("HEADS", "BOS", "EOS", "DOT_FP32", "DEPENDENT")


@pytest.fixture(autouse=True)
def compiler() -> None:
    assert os.environ.get("TRITON_INTERPRET", "0") != "1", "another file asked for the interpreter"


@pytest.mark.parametrize("capability", sorted(SHARED_LIMIT))
@pytest.mark.parametrize("name", registered_flows())
def test_scores_compile_and_fit(name: str, capability: int) -> None:
    from stream_attention.flows.fused import NUM_WARPS, FusedScores

    graph = load_flow(name).trace(1 if name in TOKEN_FLOWS else 16, 128)
    case = flow_case(graph, 4, dtype=torch.bfloat16, field_dtype=torch.bfloat16)
    batch, max_pages = len(case.lengths), case.page_table.shape[1]
    fused = FusedScores(graph, 4, case.fields, batch, max_pages, torch.bfloat16)
    scores = torch.empty(batch, case.num_kv_heads, max_pages)
    for kernel, arguments in fused.launches(case.q, case.page_table, case.lengths, scores):
        constants = {k: v for k, v in arguments.items() if k in CONSTANTS}
        constants["DEPENDENT"] = capability >= 90  # as on such a device
        values = tuple(arguments[each] for each in kernel.arg_names if each not in constants)
        compiled = compile_for(kernel, values, {**constants, "num_warps": NUM_WARPS}, capability)
        assert compiled.metadata.shared <= SHARED_LIMIT[capability]
        ptx = compiled.asm["ptx"]
        if name in PRODUCTS and kernel.__name__ == "score_0":
            assert "mma" in ptx, "the products do not use the tensor cores"
        if "_bf16" not in name and any(each in arguments for each in ("f_k", "f_c", "f_M")):
            assert "v4.b32" in ptx, "fields are not loaded 16 bytes at a time"
