"""Registers, spills, stack and shared memory of every decode kernel, from the report of ptxas.

The kernels are what the report holds beside the state merges, whatever their names: a new kernel or
instance is under these bounds without being listed here.
"""

import dataclasses
import itertools
import re
from dataclasses import dataclass

import pytest

from stream_attention.core.problem import AttentionProblem
from stream_attention.core.testing.native_library import library_file, require
from stream_attention.kernels_sm90 import decode
from stream_attention.kernels_sm90.library import LIBRARY

# test_resources.py has these.
OTHERS = re.compile(r"\d+state_(?:merge|pair)_kernelI")
SHARED_LIMIT = 227 << 10
SM_REGISTERS = 65_536
MAX_REGISTERS = 255
DTYPE_NAMES = {"bfloat16": "13__nv_bfloat16", "float16": "6__half"}
# Heads of a KV head and queries: packed rows 1, 8, 9, 16, 20, 64 twice.
ROWS = ((1, 1), (8, 1), (9, 1), (16, 1), (4, 5), (64, 1), (8, 8))


@dataclass(frozen=True, slots=True)
class Kernel:
    """What ptxas says of one kernel; bytes a thread, `shared_bytes` static ones of a block."""

    name: str
    target: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


def parse(report: str) -> list[Kernel]:
    """Every kernel of a `ptxas -v` report but the state merges; `ValueError` for unknown text."""
    kernels = []
    for section in report.split("Compiling entry function")[1:]:
        entry = re.match(r" '(\S+)' for '(\S+)'", section)
        stack = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", section
        )
        registers = re.search(r"Used (\d+) registers", section)
        if not (entry and stack and registers):
            raise ValueError(f"not a ptxas report: {section[:200]!r}")
        if OTHERS.search(entry[1]):
            continue
        shared = re.search(r"(\d+) bytes smem", section)
        kernels.append(
            Kernel(
                name=entry[1],
                target=entry[2],
                registers=int(registers[1]),
                stack_bytes=int(stack[1]),
                spill_bytes=int(stack[2]) + int(stack[3]),
                shared_bytes=int(shared[1]) if shared else 0,
            )
        )
    return kernels


@pytest.fixture(name="kernels", scope="module")
def kernels_fixture():
    require(LIBRARY)
    return parse(library_file(LIBRARY, ".ptxas.txt").read_text())


def problem(dim, group, queries, **changes):
    fields = {"batch": 3, "total_qo_len": 3 * queries, "max_qo_len": queries, "kv_capacity": 4096}
    fields |= {"num_qo_heads": 2 * group, "num_kv_heads": 2, "sm_scale": 0.1}
    fields |= {"head_dim_qk": dim, "head_dim_vo": dim}
    fields |= dict.fromkeys(("q_dtype", "kv_dtype", "out_dtype"), "bfloat16")
    return AttentionProblem(**{**fields, **changes})


def test_report_has_kernels_of_every_dtype_and_head_dim(kernels):
    names = [kernel.name for kernel in kernels]
    assert len(names) == len(set(names))
    missing = [
        (dtype, dim)
        for dtype in decode.DTYPES
        for dim in decode.HEAD_DIMS
        if not any(DTYPE_NAMES[dtype] in name and f"Li{dim}E" in name for name in names)
    ]
    assert missing == []


def test_every_kernel_is_built_for_the_architecture(kernels):
    assert {kernel.target for kernel in kernels} == {"sm_90a"}


def test_no_kernel_spills_or_has_a_stack(kernels):
    assert [k for k in kernels if k.spill_bytes or k.stack_bytes] == []


def test_registers_stay_within_what_a_thread_may_have(kernels):
    assert [k for k in kernels if not 0 < k.registers <= MAX_REGISTERS] == []


@pytest.mark.parametrize("dim", decode.HEAD_DIMS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("invariant", [False, True])
def test_a_block_fits_an_sm(kernels, dim, rows, invariant):
    """Shared memory of the launch and the largest static one; registers of all of its threads.

    Which kernel a problem runs is not in the report, so the largest of its head_dim stands in.
    """
    form = decode.geometry(problem(dim, *rows, batch_invariant=invariant), 132)
    of_dim = [kernel for kernel in kernels if f"Li{dim}E" in kernel.name]
    assert form.shared_bytes + max(k.shared_bytes for k in of_dim) <= SHARED_LIMIT
    assert form.threads % 32 == 0 and 0 < form.threads <= 1024
    # ptxas gives registers to a warp in units of 8 a thread.
    largest = max(-(-k.registers // 8) * 8 for k in of_dim)
    assert form.threads * min(largest, 256) <= SM_REGISTERS


@pytest.mark.parametrize("num_sms", [132, 114, 78])
@pytest.mark.parametrize("batch", [1, 40, 65_536])
@pytest.mark.parametrize("invariant", [False, True])
def test_workspace_of_a_plan_stays_small_on_any_device_and_batch(num_sms, batch, invariant):
    """Scratch is the blocks' business: neither lengths nor batch may blow it up."""
    require(LIBRARY)
    for dim, group in itertools.product(decode.HEAD_DIMS, (8, 64)):
        small = problem(dim, group, 1, batch=batch, total_qo_len=batch, batch_invariant=invariant)
        large = dataclasses.replace(small, kv_capacity=1 << 17)
        forms = [decode.geometry(each, num_sms) for each in (small, large)]
        assert forms[0].scratch_floats <= forms[1].scratch_floats <= 16 << 20


REPORT = """ptxas info    : Compiling entry function '_Z13decode_kernelILi64EEvv' for 'sm_90a'
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 300 registers, used 1 barriers, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function '_Z18state_merge_kernelILi2EEvv' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers
"""


def test_parser_reads_what_is_bad_and_refuses_what_it_does_not_know():
    (kernel,) = parse(REPORT)
    assert dataclasses.astuple(kernel)[1:] == ("sm_90a", 300, 16, 12, 1024)
    with pytest.raises(ValueError, match="not a ptxas report"):
        parse(REPORT.replace("Used 300 registers", ""))
