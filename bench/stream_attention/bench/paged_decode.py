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

Exit status: 0; 1 when one of our own routes failed or was wrong; 2 for bad flags; 3 when no
contender was timed in any case; 4 when the file of --json could not be written; 5 when the report
could not be printed, at once without --json; 130 when interrupted. The first that holds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from absl import app, flags
from rich.console import Console

from stream_attention.bench import contenders as contenders_lib
from stream_attention.bench import flag_types, report, summary
from stream_attention.bench.cases import SUITES, DecodeCase, default_suite
from stream_attention.bench.decode_flags import SHAPE_FLAGS, define_flags
from stream_attention.bench.floor import ReadCurve, measure_read_curve
from stream_attention.bench.isolate import run_workers
from stream_attention.bench.lengths import uniform
from stream_attention.bench.machine import environment
from stream_attention.bench.output import UNWRITTEN, output_path
from stream_attention.bench.progress import reporter
from stream_attention.bench.results import CaseResult, Run, Sink
from stream_attention.bench.routes import missing_packages, route_contenders
from stream_attention.bench.runner import Settings, run_case
from stream_attention.bench.screen import UNPRINTED, Screen, Unprintable, say, say_interrupted

FLAGS = flags.FLAGS

NOTHING_TIMED = 3  # an exit status


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
    every = contenders_lib.join_names(route_contenders(), registry.peers.values())
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

    sink: the file of --json. screen: where the report goes. arguments: the flags as given, for
    workers. worker_seconds: limit on one isolated worker, `None` = everything in this process.
    """

    cases: tuple[DecodeCase, ...]
    contenders: tuple[contenders_lib.Contender, ...]
    missing: dict[str, str]
    device: torch.device
    settings: Settings
    options: dict[str, Any]
    sink: Sink
    screen: Screen
    arguments: tuple[str, ...] = ()
    worker_seconds: float | None = None


def run_all(job: Job) -> Run:
    """Measure; as results come in, write the JSON file and then print.

    Isolated workers take all cases one after another: the file is written after every worker, and
    all is printed when the last has ended. Raises `Unprintable` without a file.
    """
    screen = job.screen
    facts = environment(job.device)
    screen.show(report.print_header, facts)
    with reporter(len(job.cases)) as progress:
        progress.start("read curve")
        curve = measure_read_curve(
            [case.moved_bytes for case in job.cases],
            job.device,
            on_size=lambda size: progress.step(f"{size >> 20} MiB"),
        )
    screen.show(report.print_curve, curve)
    run = Run(facts, job.options, curve, (), job.missing)
    for cases, finished in _results(job, curve):
        run = replace(run, cases=cases)
        job.sink.write(run)
        if job.sink.error:
            say(f"paged_decode: {job.sink.error}")
        for result in finished:
            screen.show(report.print_case, result)
    if len(run.cases) > 1:
        screen.show(summary.print_summary, run.cases)
    if job.missing:
        screen.show(report.print_missing, job.missing)
    if job.sink.path is not None and not job.sink.error:
        screen.show(Console.print, f"\nraw samples: {job.sink.path}", soft_wrap=True)
    return run


_Cases = tuple[CaseResult, ...]


def _results(job: Job, curve: ReadCurve) -> Iterator[tuple[_Cases, _Cases]]:
    """All cases so far, and those among them that have just been finished."""
    if job.worker_seconds is not None:
        with reporter(len(job.cases)) as progress:
            progress.start(f"{len(job.contenders)} contenders, a process each")
            states = run_workers(
                job.contenders,
                job.cases,
                curve,
                job.arguments,
                seconds=job.worker_seconds,
                progress=progress.step,
            )
            cases: _Cases = ()
            for cases in states:
                yield cases, ()
        yield cases, cases
        return
    done: list[CaseResult] = []
    for index, case in enumerate(job.cases):
        with reporter(len(job.cases), index) as progress:
            progress.start(case.name)
            result = run_case(case, job.contenders, job.device, job.settings, curve, progress.step)
        done.append(result)
        yield tuple(done), (result,)


def resolve(argv: Sequence[str], values: flags.FlagValues) -> Job:
    """The job that the flags describe. Raises `ValueError` where they contradict each other."""
    flag_types.refuse_arguments(argv)
    if values.threads is not None:
        torch.set_num_threads(values.threads)
    device = chosen_device(values.device)
    shape = {name: getattr(values, name) for name in SHAPE_FLAGS}
    cases = chosen_cases(shape, values.suite, device.type)
    path = output_path(values.json)
    contenders, missing = chosen_contenders(values.routes, values.peers, values.contender_modules)
    settings = Settings(
        replays=values.replays,
        cold=not values.warm,
        graph=not values.eager,
        check=values.check,
        seed=values.seed,
        max_seconds=float(values.max_seconds),
    )
    options = ("suite", "routes", "peers", "replays", "eager", "warm", "check", "seed")
    return Job(
        cases,
        contenders,
        missing,
        device,
        settings,
        {name: getattr(values, name) for name in (*options, "max_seconds", "isolate")},
        Sink(path),
        Screen("paged_decode", report.make_console(), kept=path is not None),
        tuple(sys.argv[1:]),
        float(values.worker_seconds) if values.isolate else None,
    )


def main(argv: Sequence[str], values: flags.FlagValues = FLAGS) -> int:
    """Parse, run, print; gives the exit status."""
    kept = ""
    try:
        try:
            job = resolve(argv, values)
        except ValueError as error:
            say(f"paged_decode: {error}")
            return 2
        try:
            run = run_all(job)
        finally:
            kept = job.sink.kept
    except KeyboardInterrupt:
        return say_interrupted("paged_decode", kept)
    except Unprintable:
        return UNPRINTED
    status = exit_status(run)
    if status == NOTHING_TIMED:
        say(
            "paged_decode: nothing was measured: no contender was timed in any case, for the "
            "reasons above; use --routes=all --peers=all, or a case that they serve"
        )
    unwritten = UNWRITTEN if job.sink.error else 0
    return status or unwritten or (UNPRINTED if job.screen.error else 0)


def exit_status(run: Run) -> int:
    """1 when one of our routes failed or was wrong: those are bugs. Peers do not count.

    Else `NOTHING_TIMED` when no row of any case is right and has a time, and 0 when one has.
    """
    rows = [row for case in run.cases for row in case.rows]
    if any(row.outcome in ("failed", "wrong") for row in rows if row.kind == "route"):
        return 1
    timed = any(row.outcome == "ok" and row.timing is not None for row in rows)
    return 0 if timed else NOTHING_TIMED


if __name__ == "__main__":
    define_flags(FLAGS)
    app.run(main, flags_parser=flag_types.parse_flags)
