"""Exact decode: every route of this project beside its peers, over the measured read floor.

    ./bazelw run //bench:paged_decode                              a quick suite of this device
    ./bazelw run //bench:paged_decode -- --suite=cpu_headline      the CPU comparison of the goals
    ./bazelw run //bench:paged_decode -- --batch=8 --lengths=4096 --json=out.json
    ./bazelw run //bench:paged_decode -- --batch=64 --lengths=lognormal:4608:1.0:0
    ./bazelw run //bench:paged_decode -- --kv_dtype=fp8 --capacity=131072
    ./bazelw run //bench:paged_decode -- --cache=contiguous --batch_invariant

Suites beside the quick ones: performance_decode (serving shapes), ragged (uneven lengths, verify),
decode_small, decode_pages (page sizes and contiguous), decode_dims (odd groups and head dims),
decode_fp8, decode_capacity (a plan for 128K tokens at 512) and decode_invariant.

Every row is checked against the fp64 oracle in the same run, on outputs poisoned just before the
timed work. A run of several cases ends with a summary: a line a case, its time over that of its
plain form (pages of 16, K and V in q's dtype, least capacity), and geometric means.

Exit status: 0; 1 when one of our own routes failed or was wrong; 2 for bad flags; 130 when
interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from absl import app, flags

from stream_attention.bench import contenders as contenders_lib
from stream_attention.bench import flag_types, report, summary
from stream_attention.bench.cases import FP8, SUITES, DecodeCase, default_suite
from stream_attention.bench.floor import ReadCurve, measure_read_curve
from stream_attention.bench.isolate import run_workers
from stream_attention.bench.lengths import uniform
from stream_attention.bench.machine import environment
from stream_attention.bench.output import output_path
from stream_attention.bench.progress import reporter
from stream_attention.bench.results import CaseResult, Run, write_json
from stream_attention.bench.routes import missing_packages, route_contenders
from stream_attention.bench.runner import Settings, run_case
from stream_attention.core.problem import CACHE_KINDS

FLAGS = flags.FLAGS

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
)
_DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def define_flags(values: flags.FlagValues) -> None:
    """Register this binary's flags in `values`."""
    define = flag_types.FlagDefiner(values)
    count, choice = define.count, define.choice
    # Lengths are drawn as Python numbers, one a request.
    count("batch", None, "Requests (default 8).", low=1, nearest=8, high=2**20)
    define.lengths(
        "lengths",
        "KV tokens a request: N, a comma list, lognormal:MEAN:SIGMA:SEED, skewed[:LONG:SHORT], "
        "range:LO:HI:SEED (default 4096).",
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
        "Query tokens a request; more than 1 is verify (default 1).",
        low=1,
        nearest=1,
        high=2**20,
    )
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
    count("worker_seconds", 1800, "Limit on one isolated worker.", low=1, nearest=1800)
    define.text("json", None, "Write raw samples and environment to this file.")


def chosen_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. `ValueError` when CUDA is asked for and not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        build = "" if torch.version.cuda else " (a CPU build: set STREAM_ATTENTION_TORCH=cuda)"
        raise ValueError(
            f"--device=cuda: no CUDA device is available to torch here{build}; use cpu"
        )
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def chosen_cases(
    values: dict[str, object], suite: str | None, device_type: str
) -> tuple[DecodeCase, ...]:
    """The suite's cases, or the one that the shape flags describe, or the device's default suite.

    values: shape flags by name, `None` where not given. Raises `ValueError` with every fault.
    """
    given: dict[str, Any] = {name: v for name, v in values.items() if v is not None}
    if suite is not None and given:
        raise ValueError(
            f"--suite={suite}: a suite fixes the shapes, so --{', --'.join(given)} cannot be given "
            f"too; use one or the other"
        )
    if not given:
        return SUITES[suite or default_suite(device_type)]
    lengths = given.setdefault("lengths", uniform(4096))
    given.setdefault("batch", len(lengths.numbers) if lengths.kind == "list" else 8)
    given.setdefault("dtype", "bfloat16" if device_type == "cuda" else "float32")
    return (DecodeCase(**given),)


def chosen_contenders(
    routes: str, peers: str, modules: Sequence[str]
) -> tuple[tuple[contenders_lib.Contender, ...], dict[str, str]]:
    """Contenders in the order they are run, ours first, and packages that brought none."""
    registry = contenders_lib.load_peers(modules)
    every = {c.name: c for c in (*route_contenders(), *registry.peers.values())}
    picked = []
    for kind, wanted in (("route", routes), ("peer", peers)):
        available = {name: c for name, c in every.items() if c.kind == kind}
        picked += contenders_lib.choose(available, _names(wanted), f"--{kind}s")
    if not picked:
        raise ValueError("--routes=none --peers=none: nothing to run; use --routes=all")
    return tuple(picked), {**missing_packages(), **registry.missing}


def _names(text: str) -> tuple[str, ...] | None:
    """`all` → `None`, `none` → `()`, else the names."""
    if text.strip() == "all":
        return None
    if text.strip() == "none":
        return ()
    return tuple(name.strip() for name in text.split(",") if name.strip())


@dataclass(frozen=True, slots=True)
class Job:
    """What the flags ask for, resolved.

    arguments: the flags as given, for workers. worker_seconds: limit on one isolated worker,
    `None` = everything in this process.
    """

    cases: tuple[DecodeCase, ...]
    contenders: tuple[contenders_lib.Contender, ...]
    missing: dict[str, str]
    device: torch.device
    settings: Settings
    options: dict[str, Any]
    path: Path | None
    arguments: tuple[str, ...] = ()
    worker_seconds: float | None = None


def run_all(job: Job) -> Run:
    """Measure, print as results come in, and write the JSON file after every case.

    Isolated workers take all cases one after another, so results come when the last has ended.
    """
    console = report.make_console()
    facts = environment(job.device)
    report.print_header(console, facts)
    with reporter(len(job.cases)) as progress:
        progress.start("read curve")
        curve = measure_read_curve(
            [case.moved_bytes for case in job.cases],
            job.device,
            on_size=lambda size: progress.step(f"{size >> 20} MiB"),
        )
    report.print_curve(console, curve)
    run = Run(facts, job.options, curve, (), job.missing)
    for result in _results(job, curve):
        run = replace(run, cases=(*run.cases, result))
        report.print_case(console, result)
        if job.path is not None:
            write_json(run, job.path)
    if len(run.cases) > 1:
        summary.print_summary(console, run.cases)
    if job.missing:
        console.print()
        report.print_missing(console, job.missing)
    if job.path is not None:
        console.print(f"\nraw samples: {job.path}", soft_wrap=True)
    return run


def _results(job: Job, curve: ReadCurve) -> Iterator[CaseResult]:
    if job.worker_seconds is not None:
        with reporter(len(job.cases)) as progress:
            progress.start(f"{len(job.contenders)} contenders, a process each")
            results = run_workers(
                job.contenders,
                job.cases,
                curve,
                job.arguments,
                seconds=job.worker_seconds,
                progress=progress.step,
            )
        yield from results
        return
    for index, case in enumerate(job.cases):
        with reporter(len(job.cases), index) as progress:
            progress.start(case.name)
            result = run_case(case, job.contenders, job.device, job.settings, curve, progress.step)
        yield result


def main(argv: Sequence[str], values: flags.FlagValues = FLAGS) -> int:
    """Parse, run, print; gives the exit status."""
    try:
        if len(argv) > 1:
            raise ValueError(
                f"argument {argv[1]!r}: only flags are taken, as --name=value; use --help"
            )
        if values.threads is not None:
            torch.set_num_threads(values.threads)
        device = chosen_device(values.device)
        shape = {name: getattr(values, name) for name in SHAPE_FLAGS}
        cases = chosen_cases(shape, values.suite, device.type)
        path = output_path(values.json)
        contenders, missing = chosen_contenders(
            values.routes, values.peers, values.contender_modules
        )
    except ValueError as error:
        print(f"paged_decode: {error}", file=sys.stderr)
        return 2
    settings = Settings(
        replays=values.replays,
        cold=not values.warm,
        graph=not values.eager,
        check=values.check,
        seed=values.seed,
        max_seconds=float(values.max_seconds),
    )
    options = {
        "suite": values.suite,
        "routes": values.routes,
        "peers": values.peers,
        "replays": values.replays,
        "eager": values.eager,
        "warm": values.warm,
        "check": values.check,
        "seed": values.seed,
        "max_seconds": values.max_seconds,
        "isolate": values.isolate,
    }
    job = Job(
        cases,
        contenders,
        missing,
        device,
        settings,
        options,
        path,
        tuple(sys.argv[1:]),
        float(values.worker_seconds) if values.isolate else None,
    )
    try:
        return exit_status(run_all(job))
    except KeyboardInterrupt:
        kept = f"; finished cases are in {path}" if path is not None and path.exists() else ""
        print(f"paged_decode: interrupted{kept}", file=sys.stderr)
        return 130


def exit_status(run: Run) -> int:
    """1 when one of our routes failed or was wrong: those are bugs. Peers do not count."""
    rows = [row for case in run.cases for row in case.rows if row.kind == "route"]
    return int(any(row.outcome in ("failed", "wrong") for row in rows))


if __name__ == "__main__":
    define_flags(FLAGS)
    app.run(main, flags_parser=flag_types.parse_flags)
