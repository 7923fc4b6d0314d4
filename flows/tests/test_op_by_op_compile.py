"""The op-by-op executor's kernels compile for compute capability 8.0, 9.0 and 10.0, and fit.

No GPU is needed. Apart from the tests that interpret: a process does one or the other.
"""

from __future__ import annotations

import os

import pytest
import torch

from stream_attention.core.testing.compiles import SHARED_LIMIT, compile_for
from stream_attention.flows import Flow, Max, Maximum, Mean, Normalize, Transpose, topK
from stream_attention.flows.registry import load_flow
from stream_attention.flows.testing.cases import flow_case

KERNELS = {
    "elementwise_kernel",
    "gather_kernel",
    "gemm_kernel",
    "reduce_kernel",
    "save_kernel",
    "window_combine_kernel",
    "window_finish_kernel",
    "window_partial_kernel",
}


class OverWindow(Flow):
    """What no flow of the library does: of tokens' lanes, a mean and shares of the window."""

    def __init__(self):
        self.normalize, self.over_pages, self.turn = Normalize(), Mean(dim=0), Transpose()
        self.blocks, self.rows, self.cols = Max(dim=1, block=6), Max(dim=1), Max(dim=2)
        self.select = topK()

    def create_cache(self, page_size, head_dim):
        return {}

    def forward_cache(self, cache, loc, ctx):
        """Nothing: keys are read as they are."""

    def forward_indexer(self, q, o, cache, ctx):
        shares = self.turn(self.normalize(cache["k"], ctx=ctx), ctx=ctx)
        ratio = self.rows(self.blocks(cache["k"], ctx=ctx), ctx=ctx)
        mean = self.turn(self.over_pages(shares, ctx=ctx), ctx=ctx)
        best = self.rows(Maximum()(ratio, self.rows(mean, ctx=ctx), ctx=ctx), ctx=ctx)
        self.select(self.cols(best, ctx=ctx), o, ctx=ctx)


def launches_of(flow, page_size):
    from stream_attention.flows.op_by_op import OpByOpScores

    case = flow_case(
        flow.trace(page_size, 128), 4, dtype=torch.bfloat16, field_dtype=torch.bfloat16
    )
    batch, max_pages = case.page_table.shape
    scores = torch.empty(batch, case.num_kv_heads, max_pages)
    made = OpByOpScores(case.graph, 4, case.fields, batch, max_pages, torch.bfloat16)
    return made.launches(case.q, case.page_table, case.lengths, scores)


FLOWS = {
    "gqa_h2o_sparse_attention": 16,
    "lserve_sparse_attention": 32,
    "gqa_h2o_token_sparse_attention": 1,
    "h2o_token_sparse_attention": 1,
    "over_window": 16,
}


@pytest.fixture(autouse=True)
def compiler() -> None:
    assert os.environ.get("TRITON_INTERPRET", "0") != "1", "another file asked for the interpreter"


@pytest.mark.parametrize("capability", sorted(SHARED_LIMIT))
def test_every_kernel_compiles_and_fits(capability: int) -> None:
    from stream_attention.flows.op_by_op import NUM_WARPS

    seen, compiled_names = set(), set()
    for name, page_size in FLOWS.items():
        flow = OverWindow() if name == "over_window" else load_flow(name)
        for kernel, arguments in launches_of(flow, page_size):
            constants = {key: value for key, value in arguments.items() if key.isupper()}
            types = [str(getattr(each, "dtype", each)) for each in arguments.values()]
            key = (kernel.__name__, *types)
            if key in seen:
                continue
            seen.add(key)
            compiled_names.add(kernel.__name__)
            values = tuple(arguments[each] for each in kernel.arg_names if each not in constants)
            compiled = compile_for(
                kernel, values, {**constants, "num_warps": NUM_WARPS}, capability
            )
            assert compiled.metadata.shared <= SHARED_LIMIT[capability]
            if wide(kernel.__name__, arguments):
                assert ".v4.b32" in compiled.asm["ptx"], f"{key} moves no 16 bytes at a time"
    assert compiled_names == KERNELS


def wide(kernel: str, arguments: dict) -> bool:
    """Whether a launch reads rows of head_dim elements."""
    rows_of = {"gather_kernel": "COLS", "elementwise_kernel": "COLS", "gemm_kernel": "DEPTH"}
    if kernel == "reduce_kernel":
        return arguments["DIM"] == 2 and arguments["SIZE"] == 128
    return kernel in rows_of and arguments[rows_of[kernel]] == 128
