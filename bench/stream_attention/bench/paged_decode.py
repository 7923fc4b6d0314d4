"""Exact decode: every route of this project beside its peers, over the measured read floor.

    ./bazelw run //bench:paged_decode                              a quick suite of this device
    ./bazelw run //bench:paged_decode -- --suite=cpu_headline      the CPU comparison of the goals
    ./bazelw run //bench:paged_decode -- --batch=8 --lengths=4096 --json=out.json
    ./bazelw run //bench:paged_decode -- --batch=64 --lengths=lognormal:4608:1.0:0
    ./bazelw run //bench:paged_decode -- --kv_dtype=fp8 --capacity=131072
    ./bazelw run //bench:paged_decode -- --cache=contiguous --batch_invariant

Suites beside the quick ones: performance_decode (serving shapes), ragged (uneven lengths, verify),
decode_small, decode_pages (page sizes and contiguous), decode_dims (odd groups and head dims),
decode_fp8, decode_capacity (a plan for 128K tokens at 512), decode_invariant, mixed (chunks of
prefill beside decodes), mixed_split (their parts alone), micro_prefill and prefill.

With --isolate every contender has a process of its own, with folders of its own on the import path
where --peer_paths names some: a crash, a hang or a clash of imports costs one row. --paired times
two contenders in turns. --resume goes on with the file of --json where a run was stopped.

Every row is checked against the fp64 oracle in the same run, on outputs poisoned just before the
timed work. A run of several cases ends with a summary: a line a case, its time over that of its
plain form (pages of 16, K and V in q's dtype, least capacity), and geometric means.

Exit status: 0; 1 when one of our own routes failed or was wrong; 2 for bad flags; 3 when no
contender was timed in any case; 4 when the file of --json could not be written; 5 when the report
could not be printed, at once without --json; 130 when interrupted. The first that holds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from absl import app, flags
from rich.console import Console

from stream_attention.bench import contenders as contenders_lib
from stream_attention.bench import flag_types, pairs, report, resume, summary
from stream_attention.bench.campaign import Campaign, InProcess, Kept, State, run_campaign
from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.decode_flags import SHAPE_FLAGS, define_flags
from stream_attention.bench.floor import ReadCurve, measure_read_curve
from stream_attention.bench.isolate import Isolation, Workers
from stream_attention.bench.lengths import uniform
from stream_attention.bench.machine import Environment, environment
from stream_attention.bench.output import UNWRITTEN, output_path
from stream_attention.bench.peer_paths import parse_paths
from stream_attention.bench.progress import reporter
from stream_attention.bench.results import Run, Sink
from stream_attention.bench.routes import missing_packages, route_contenders
from stream_attention.bench.runner import Settings
from stream_attention.bench.screen import UNPRINTED, Screen, Unprintable, say, say_interrupted
from stream_attention.bench.spent import Spent
from stream_attention.bench.stopping import Stopped, stoppable
from stream_attention.bench.suites import SUITES, default_suite

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
) -> tuple[AttentionCase, ...]:
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
    return (AttentionCase(**given),)


@dataclass(frozen=True, slots=True)
class Chosen:
    """contenders: in the order they are run, ours first. known: all that a pair may name.
    missing: packages that brought none, with the reason.
    """

    contenders: tuple[contenders_lib.Contender, ...]
    known: Mapping[str, contenders_lib.Contender]
    missing: dict[str, str]


def chosen_contenders(routes: str, peers: str, modules: Sequence[str]) -> Chosen:
    """The contenders that the flags name. Raises `ValueError` for none, and for unknown names."""
    registry = contenders_lib.load_peers(modules)
    every = contenders_lib.join_names(route_contenders(), registry.peers.values())
    picked = []
    for kind, wanted in (("route", routes), ("peer", peers)):
        available = {name: c for name, c in every.items() if c.kind == kind}
        picked += contenders_lib.choose(available, _names(wanted), f"--{kind}s")
    if not picked:
        raise ValueError("--routes=none --peers=none: nothing to run; use --routes=all")
    return Chosen(tuple(picked), every, {**missing_packages(), **registry.missing})


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

    sink: the file of --json. screen: where the report goes. isolation: of workers, `None` =
    everything in this process. earlier: the run that this one goes on with, kept: what it has.
    """

    cases: tuple[AttentionCase, ...]
    chosen: Chosen
    device: torch.device
    settings: Settings
    options: dict[str, Any]
    environment: Environment
    sink: Sink
    screen: Screen
    isolation: Isolation | None = None
    pairing: pairs.Pairing = field(default_factory=pairs.Pairing)
    earlier: Run | None = None
    kept: Kept = field(default_factory=Kept)


def run_all(job: Job) -> Run:
    """Measure; as results come in, write the JSON file and then print.

    The file is written after rows, and always after a case. Raises `Unprintable` without a file.
    """
    begin, spent, screen = time.monotonic(), Spent(), job.screen
    screen.show(report.print_header, job.environment)
    with spent.on("read curve"):
        curve = _read_curve(job)
    screen.show(report.print_curve, curve)
    run = Run(job.environment, job.options, curve, (), job.chosen.missing)
    try:
        with contextlib.closing(_states(job, curve, spent)) as states:
            for state in states:
                run = replace(run, cases=state.cases, pairs=state.pairs)
                _keep(job, run, state)
    except KeyboardInterrupt:
        if run.cases:
            job.sink.write(run)
        raise
    if len(run.cases) > 1:
        screen.show(summary.print_summary, run.cases)
    if job.chosen.missing:
        screen.show(report.print_missing, job.chosen.missing)
    if job.isolation is not None:
        screen.show(Console.print, f"\n{spent.line(time.monotonic() - begin)}", soft_wrap=True)
    if job.sink.path is not None and not job.sink.error:
        screen.show(Console.print, f"\nraw samples: {job.sink.path}", soft_wrap=True)
    return run


def _read_curve(job: Job) -> ReadCurve:
    """The floor of this run; where it goes on with the same cases, the one that it began with."""
    cases = set(job.cases)
    if job.earlier is not None and {result.case for result in job.earlier.cases} == cases:
        return job.earlier.curve
    with reporter(len(job.cases)) as progress:
        progress.start("read curve")
        return measure_read_curve(
            [case.moved_bytes for case in job.cases],
            job.device,
            on_size=lambda size: progress.step(f"{size >> 20} MiB"),
        )


def _keep(job: Job, run: Run, state: State) -> None:
    """Write what there is, and print a case that has just been finished."""
    if state.finished is None:
        job.sink.offer(run)
        return
    job.sink.write(run)
    if job.sink.error:
        say(f"paged_decode: {job.sink.error}")
    job.screen.show(report.print_case, run.cases[state.finished])
    job.screen.show(pairs.print_pairs, state.pairs_of(state.finished))


def _states(job: Job, curve: ReadCurve, spent: Spent) -> Generator[State, None, None]:
    """All cases so far, after every row."""
    campaign = Campaign(
        job.cases,
        job.chosen.contenders,
        job.chosen.known,
        job.device,
        job.settings,
        curve,
        job.pairing,
        pairs.native_routes(),
        job.kept,
    )
    if job.isolation is None:
        yield from run_campaign(campaign, InProcess(job.device, job.settings, curve))
        return
    with Workers(job.isolation, job.device, job.settings, curve, spent) as workers:
        names, cases = campaign.open_rows()
        if names:
            with reporter(len(job.cases)) as progress:
                progress.start(f"{len(names)} contenders, a process each")
                workers.start(names, cases, progress.step)
        yield from run_campaign(campaign, workers)


# Flags that shaped the run, for its file.
_OPTIONS = (
    *("suite", "routes", "peers", "replays", "eager", "warm", "check", "seed", "max_seconds"),
    *("isolate", "paired", "pairs"),
)


def resolve(argv: Sequence[str], values: flags.FlagValues) -> Job:
    """The job that the flags describe. Raises `ValueError` where they contradict each other."""
    flag_types.refuse_arguments(argv)
    if values.threads is not None:
        torch.set_num_threads(values.threads)
    device = chosen_device(values.device)
    shape = {name: getattr(values, name) for name in SHAPE_FLAGS}
    cases = chosen_cases(shape, values.suite, device.type)
    path = output_path(values.json)
    chosen = chosen_contenders(values.routes, values.peers, values.contender_modules)
    paths = parse_paths(values.peer_paths, [contender.name for contender in chosen.contenders])
    if paths and not values.isolate:
        raise ValueError("--peer_paths: needs a process for each contender; use --isolate")
    if values.resume and path is None:
        raise ValueError("--resume: needs the file to go on with; use --json=FILE")
    settings = Settings(
        replays=values.replays,
        cold=not values.warm,
        graph=not values.eager,
        check=values.check,
        seed=values.seed,
        max_seconds=float(values.max_seconds),
        pairs=values.pairs,
    )
    options = {name: getattr(values, name) for name in _OPTIONS}
    options["peer_paths"] = {name: list(folders) for name, folders in paths.items()}
    facts = environment(device)
    earlier = resume.load(path) if values.resume and path is not None else None
    kept = Kept()
    if earlier is not None:
        ours = [contender.name for contender in chosen.contenders]
        kept = resume.keep(earlier, facts, options, cases, ours)
    isolation = Isolation(
        case_seconds=float(values.case_seconds),
        start_seconds=float(values.start_seconds),
        warm_up_seconds=float(values.warm_up_seconds),
        paths=paths,
        modules=tuple(values.contender_modules),
        threads=values.threads,
        warm_up=values.warm_up,
    )
    return Job(
        cases=cases,
        chosen=chosen,
        device=device,
        settings=settings,
        options=options,
        environment=resume.continued(earlier, facts, cases),
        sink=Sink(path),
        screen=Screen("paged_decode", report.make_console(), kept=path is not None),
        isolation=isolation if values.isolate else None,
        pairing=pairs.parse_pairing(values.paired, chosen.known),
        earlier=earlier,
        kept=kept,
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
        # Workers end with this process, but what they started in sessions of their own does not.
        with stoppable() if job.isolation is not None else contextlib.nullcontext():
            try:
                run = run_all(job)
            finally:
                kept = job.sink.kept
    except Stopped as stop:
        say(f"paged_decode: ended by {stop.name}{kept}")
        return stop.end()
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
    """1 when a route of ours failed or was wrong, alone or in a pair: a bug. Peers do not count.

    Else `NOTHING_TIMED` when no row of any case is right and has a time, and 0 when one has.
    """
    rows = [row for case in run.cases for row in case.rows]
    if any(row.outcome in ("failed", "wrong") for row in rows if row.kind == "route"):
        return 1
    checks = [pair.checks[0] for pair in run.pairs]  # of the first, which is ours
    if any(check is not None and not check.ok for check in checks):
        return 1
    timed = any(row.outcome == "ok" and row.timing is not None for row in rows)
    timed = timed or any(pair.outcome == "ok" for pair in run.pairs)
    return 0 if timed else NOTHING_TIMED


if __name__ == "__main__":
    define_flags(FLAGS)
    app.run(main, flags_parser=flag_types.parse_flags)
