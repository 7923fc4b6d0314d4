"""The flags of `paged_decode`."""

from __future__ import annotations

import os

from absl import flags

from stream_attention.bench import flag_types
from stream_attention.bench.cases import FP8
from stream_attention.bench.suites import SUITES
from stream_attention.core.problem import CACHE_KINDS
from stream_attention.planner.cells import MAX_REQUESTS

# Flags that describe one case; together with --suite they would contradict it.
SHAPE_FLAGS = (
    "batch",
    "lengths",
    "num_qo_heads",
    "num_kv_heads",
    "head_dim",
    "page_size",
    "layout",
    "dtype",
    "q_len",
    "kv_dtype",
    "cache",
    "capacity",
    "batch_invariant",
    "q_lengths",
    "causal",
)
_DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def define_flags(values: flags.FlagValues) -> None:
    """Register this binary's flags in `values`."""
    define = flag_types.FlagDefiner(values)
    count, choice = define.count, define.choice
    # Lengths are drawn as Python numbers, one a request.
    count("batch", None, "Requests (default 8).", low=1, nearest=8, high=MAX_REQUESTS)
    define.lengths(
        "lengths",
        "KV tokens a request: N, a comma list, lognormal:MEAN:SIGMA:SEED, skewed[:LONG:SHORT], "
        "range:LO:HI:SEED, mixed:NUM:LONG:MEAN:SIGMA:SEED (default 4096).",
    )
    count("num_qo_heads", None, "Query heads (default 32).", low=1, nearest=32)
    count("num_kv_heads", None, "KV heads (default 8).", low=1, nearest=8)
    count("head_dim", None, "Head dimension (default 128).", low=1, nearest=128)
    count("page_size", None, "Tokens a page (default 16).", low=1, nearest=16)
    choice("layout", None, ("NHD", "HND"), "Pool layout (default NHD).")
    choice(
        "dtype",
        None,
        ("bfloat16", "float16", "float32"),
        "Of q and output (default bfloat16 on CUDA, float32 on a CPU).",
        _DTYPE_ALIASES,
    )
    choice(
        "kv_dtype",
        None,
        (*_DTYPE_ALIASES.values(), FP8),
        "Of K and V: that of q, or float8_e4m3fn with a scale each (default: that of q).",
        {**_DTYPE_ALIASES, "fp8": FP8},
    )
    choice(
        "cache",
        None,
        CACHE_KINDS,
        "K and V in shuffled pages, or in one row a request (default paged).",
    )
    count(
        "capacity",
        None,
        "Tokens that page table or row can hold for a request, in whole pages (default: the "
        "longest length, rounded up).",
        low=1,
        nearest=4096,
    )
    define.switch(
        "batch_invariant",
        None,
        "Ask for bits of a request that do not depend on the rest of the batch.",
    )
    count(
        "q_len",
        None,
        "Query tokens of every request; more than 1 is verify or prefill (default 1).",
        low=1,
        nearest=1,
        high=2**20,
    )
    define.lengths(
        "q_lengths",
        "Query tokens of each request in place of --q_len, in the language of --lengths: "
        "mixed:4:512:1:0:0 is four chunks of 512 tokens and decodes.",
    )
    define.switch(
        "causal", None, "A query sees tokens up to its own; --nocausal: all (default causal)."
    )
    _define_run_flags(define)


def _define_run_flags(define: flag_types.FlagDefiner) -> None:
    """Who runs where, how it is measured, and what is left behind."""
    count, choice = define.count, define.choice
    choice("device", "auto", ("auto", "cpu", "cuda"), "Where to run.")
    choice("suite", None, tuple(SUITES), "A named list of cases, in place of the shape flags.")
    define.text("routes", "all", "Our routes: all, none, or names separated by commas.")
    define.text("peers", "all", "Peers: all, none, or names separated by commas.")
    define.names("contender_modules", "Modules to import that register more contenders.")
    count("replays", 25, "Samples a contender.", low=1, nearest=25)
    count("max_seconds", 2, "Limit on one contender's samples (CPU).", low=1, nearest=2)
    cpus = os.cpu_count() or 1
    count("threads", None, "CPU threads (default: torch's).", low=1, nearest=cpus, high=cpus)
    count("seed", 0, "Seed of the random inputs.", low=0, nearest=0)
    define.switch("check", True, "Check every row against the fp64 oracle.")
    define.switch("eager", False, "CUDA: time eager launches in place of graph replay.")
    define.switch("warm", False, "One pool over and over, in place of a cold rotation.")
    define.switch("isolate", False, "Run each contender in a process of its own.")
    count("case_seconds", 300, "Limit on one case of an isolated worker.", low=1, nearest=300)
    count(
        "start_seconds",
        900,
        "Limit on an isolated worker's imports, and on its whole warm-up.",
        low=1,
        nearest=900,
    )
    count(
        "warm_up_seconds",
        300,
        "Limit on one tiny case of an isolated worker's warm-up, where kernels are compiled.",
        low=1,
        nearest=300,
    )
    define.switch("warm_up", True, "Have isolated workers compile for all cases first, at once.")
    define.repeated(
        "peer_paths",
        "NAME_OR_PREFIX=DIR[:DIR]: folders of packages that come first on the import path of the "
        "workers of these contenders. Repeated, or separated by commas.",
    )
    define.text(
        "paired",
        None,
        "Time these in turns too: ROUTE:PEER, separated by commas, or best: each of our native "
        "routes beside the best peer of the case.",
    )
    count("pairs", 50, "Samples of each side of a pair.", low=1, nearest=50)
    define.text("json", None, "Write raw samples and environment to this file.")
    define.switch("resume", False, "Keep what the file of --json has, and run the rest.")
