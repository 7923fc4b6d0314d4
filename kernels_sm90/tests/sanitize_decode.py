"""Runs every instance family of sm90_decode once and small, for compute-sanitizer.

    compute-sanitizer --tool TOOL --error-exitcode 9 python kernels_sm90/tests/sanitize_decode.py

with TOOL `memcheck` (also `--leak-check full`), `racecheck --racecheck-report all`, `initcheck` and
`synccheck`; the packages' folders on PYTHONPATH and the library beside its sources
(`//tools/cuda:stage_libraries`). Words after the script's name keep only the cases with one of them
in their line, e.g. `dim128 split`; `--list` prints the lines and runs nothing. Without words: all.

Inputs are made on the CPU and copied, so that nearly all launches are the route's own; torch's
caching allocator is off, so that every tensor is an allocation whose ends the tool knows. Answers
are held against the oracle, which runs on the CPU. `--kernel-name kernel_substring=decode` skips
torch's few kernels, which is quicker, but not for initcheck: it must see what they write. On the
sanitizer's slow clock a launch that waits for its producer or its peers still has to end.
"""

import os
import sys
import time

# Read when torch is imported.
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import dataclasses
import itertools
from typing import Any

import torch

from stream_attention.core.testing.checks import H200, launch, serves
from stream_attention.core.testing.golden import golden
from stream_attention.core.testing.problems import FP8, BuiltCase, Case, build
from stream_attention.kernels_sm90 import decode

# (queries, group) whose product is the rows of an instance; the last but one is verify.
ROWS = ((1, 1), (1, 8), (3, 3), (1, 16), (4, 8), (1, 64), (8, 8))
# In turn over the instances: each comes up with every kind of option over the whole list.
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"layout": "HND", "page_size": 1, "ids": "negative"},
    {"window_left": 40, "page_size": 3},
    {"sink": "random", "logits_soft_cap": 20.0, "page_size": 64, "layout": "HND"},
    {"cache_kind": "contiguous"},
    {"lists": True, "window_left": 200, "page_size": 8},
    {"causal": False, "page_size": 128, "sink": 3.0},
    {"cache_kind": "contiguous", "layout": "HND", "window_left": 0},
    {"page_size": 256, "spare": 40, "logits_soft_cap": 5.0},
)


def dtypes() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"dtype": "bfloat16"}, {"dtype": "float16"}]
    if serves(decode.RECORD, H200, kv_dtype=FP8):
        found.append({"dtype": "bfloat16", "kv_dtype": FP8, "kv_scales": "head"})
        found.append({"dtype": "float16", "kv_dtype": FP8, "kv_scales": "tensor"})
    return found


def make_case(name: str, queries: int, group: int, lens: tuple[int, ...], **changes: Any) -> Case:
    """A case of equal queries; `lists`: a list of pages per KV head, the second one shorter."""
    heads = changes.pop("num_kv_heads", 2)
    lists = changes.pop("lists", False)
    return Case(
        name=f"{name} {queries}x{group}",
        qo_lens=(queries,) * len(lens),
        kv_lens=tuple((n, max(n - 7, 0)) for n in lens) if lists else lens,
        num_qo_heads=group * heads,
        num_kv_heads=heads,
        call="block" if queries > 1 else "batch",
        **changes,
    )


def cases() -> list[Case]:
    """Ragged batches with empty requests for every instance; by dtype and dim also some others.

    `split`: one request over all blocks. `unsplit`: more requests than blocks, a tile each. `idle`:
    blocks without tiles. `invariant`: with `batch_invariant`, spans over many blocks and over few.
    """
    found = []
    options = itertools.cycle(OPTIONS)
    for each in dtypes():
        for dim in decode.HEAD_DIMS:
            stem = f"{each['dtype']}{'_fp8' if 'kv_dtype' in each else ''} dim{dim}"
            fields = {**each, "head_dim_qk": dim}
            for queries, group in ROWS:
                name = f"{stem} ragged"
                lens = (17, 0, 700, 1, 128)
                found.append(make_case(name, queries, group, lens, **fields, **next(options)))
            for queries, group in ((1, 8), (5, 4)):
                found.append(
                    make_case(f"{stem} split", queries, group, (3001,), num_kv_heads=1, **fields)
                )
            for group in (4, 12) if dim == 128 else (4,):  # in 128 also what warpgroups multiply
                lens = (5, 0, 16, 33) * 36
                found.append(make_case(f"{stem} unsplit", 1, group, lens, num_kv_heads=1, **fields))
                for batch in (3, 40):  # fewer tiles than blocks, searched by warps and by blocks
                    lens = (16, 0, 3, 33) * 10
                    found.append(
                        make_case(f"{stem} idle", 1, group, lens[:batch], num_kv_heads=1, **fields)
                    )
            for heads, lens in ((1, (9000, 17, 0, 3001)), (40, (4500, 0, 1500, 700))):
                found.append(
                    make_case(f"{stem} invariant", 1, 4, lens, num_kv_heads=heads, **fields)
                )
    return found


def to_device(built: BuiltCase, device: Any) -> BuiltCase:
    """The case with its tensors copied, by copies alone."""

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    cache = built.cache
    changes = {field.name: moved(getattr(cache, field.name)) for field in dataclasses.fields(cache)}
    return dataclasses.replace(
        built,
        q=moved(built.q),
        cache=dataclasses.replace(cache, **changes),
        options={name: moved(value) for name, value in built.options.items()},
    )


def run_case(case: Case, device: Any, record: Any = decode.RECORD) -> None:
    """Run twice, so that what the first launch leaves behind is met, and check the second."""
    built = build(case, 0)
    on_device = to_device(built, device)
    step, described = launch(record, on_device, batch_invariant="invariant" in case.name)
    step.run()
    step.run()
    if described.bound.out.is_cuda:
        torch.cuda.synchronize()
    want = golden(built.q, built.cache, **built.options)
    want.check(described.result().cpu(), described.result_lse().cpu(), label=f"{case!r}: ")


def main(words: list[str], device: Any = "cuda", record: Any = decode.RECORD) -> int:
    """Number of cases that failed."""
    chosen = [case for case in cases() if not words or any(w in case.name for w in words)]
    if not chosen:
        raise SystemExit(f"no case has one of {words} in its name")
    failed = 0
    for case in chosen:
        begin = time.monotonic()
        try:
            run_case(case, device, record)
        except AssertionError as error:
            failed += 1
            print(f"FAILED   {case.name}: {error}", flush=True)
            continue
        print(f"ok {time.monotonic() - begin:5.1f} s  {case.name}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} cases passed", flush=True)
    return failed


if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        print("\n".join(case.name for case in cases()))
        sys.exit(0)
    sys.exit(1 if main(sys.argv[1:]) else 0)
