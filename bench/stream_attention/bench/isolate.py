"""Each contender in a process of its own (`--isolate`), with its own import path.

A crash, a hang or a clash of imports costs one row: the worker is begun anew at its next case. All
workers start and compile side by side; then one process at a time measures, and it alone holds
pools. The right answers of a case are computed here, once, and handed on in a file.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from stream_attention.bench import golden_file
from stream_attention.bench.cases import AttentionCase
from stream_attention.bench.check import expect
from stream_attention.bench.contenders import Contender
from stream_attention.bench.floor import ReadCurve
from stream_attention.bench.memory import keep_what_is_loaded
from stream_attention.bench.peer_paths import folders_of
from stream_attention.bench.pools import build_pool, check_memory, num_pools
from stream_attention.bench.results import PairRow, Row, pair_from, row_from
from stream_attention.bench.runner import TOO_LARGE, Settings
from stream_attention.bench.spent import Spent
from stream_attention.bench.worker_marks import kill_orphans
from stream_attention.bench.worker_process import (
    WorkerEnded,
    WorkerProcess,
    spawn,
    wait_for_any,
    worker_command,
)

# A worker that ends before it has found its contender is begun once more, and then no more.
_MOST_FAILED_STARTS = 2
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Isolation:
    """How workers are run. case_seconds: limit on one case of one worker. start_seconds: on its
    imports, and again on its whole warm-up. warm_up_seconds: on one tiny case of that, so that a
    hang costs no more. paths: as `peer_paths.parse_paths` gives them. modules: to import for more
    contenders. threads: CPU threads. warm_up: run tiny cases first, side by side. command: of a
    worker; replaced in tests.
    """

    case_seconds: float = 300.0
    start_seconds: float = 900.0
    warm_up_seconds: float = 300.0
    paths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    threads: int | None = None
    warm_up: bool = True
    command: Callable[[int, int], list[str]] = worker_command


@dataclass(slots=True)
class _Slot:
    """A contender's place. why: how the last start failed. lost: there is no other."""

    name: str
    process: WorkerProcess | None = None
    failed_starts: int = 0
    why: str = ""
    lost: bool = False


class Workers:
    """The executor of an isolated run; a context manager that leaves no process behind."""

    def __init__(
        self,
        isolation: Isolation,
        device: torch.device,
        settings: Settings,
        curve: ReadCurve,
        spent: Spent | None = None,
    ) -> None:
        self.spent = Spent() if spent is None else spent
        self._isolation, self._device = isolation, device
        self._settings, self._curve = settings, curve
        self._slots: dict[str, _Slot] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="stream_attention_")
        self._case: AttentionCase | None = None
        self._answers: Path | None = None

    def __enter__(self) -> Workers:
        """Begin with what a run that was killed may have left running, which ends here."""
        kill_orphans()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers and what they started."""
        for slot in self._slots.values():
            if slot.process is not None:
                slot.process.end()
                slot.process = None
        self._folder.cleanup()

    def start(
        self,
        names: Sequence[str],
        cases: Sequence[AttentionCase],
        step: Callable[[str], None] = lambda what: None,
    ) -> None:
        """Begin a worker a name, then warm all up, each time as many at once as there are CPUs.

        What fails here is no row: the first case finds the worker gone and says so.
        """
        keep_what_is_loaded()
        slots = [self._slot(name) for name in names]
        seconds = self._isolation.start_seconds
        with self.spent.on("start-up"):
            step(f"start-up of {len(slots)} workers")
            self._together(slots, self._begin, self._started, seconds)
        if not self._isolation.warm_up:
            return
        plain = [dataclasses.asdict(case) for case in dict.fromkeys(case.tiny() for case in cases)]
        with self.spent.on("warm-up"):
            step(f"warm-up of {len(slots)} workers")
            alive = [slot for slot in slots if slot.process is not None]
            request = {"do": "warm", "cases": plain}
            self._together(
                alive,
                lambda slot: self._send(slot, request),
                self._warmed,
                seconds,
                self._isolation.warm_up_seconds,
            )

    def begin(self, case: AttentionCase, step: Callable[[str], None]) -> str:
        """Check that the case fits and compute its right answers; gives why not, or ""."""
        self._case, self._answers = case, None
        try:
            count = num_pools(case, self._device, self._settings.cold)
            check_memory(case, self._device, count)
            if self._settings.check:
                self._answer(case, count, step)
        except TOO_LARGE as error:
            return str(error)
        finally:
            gc.collect()
            if self._device.type == "cuda":  # for the workers, which are other processes
                torch.cuda.empty_cache()
        return ""

    def row(self, contender: Contender) -> Row:
        """The contender on the case, by its worker; a row also where the worker ends over it."""
        begin = time.monotonic()
        reply, reason = self._measure(contender.name, {"do": "row"})
        if reply is None:
            row = Row(contender.name, contender.kind, "failed", (reason,))
        else:
            row = row_from(reply)
        return replace(row, seconds=time.monotonic() - begin)

    def pair(self, first: Contender, second: Contender) -> PairRow:
        """Both in turns, in the worker of the second, with its import path."""
        assert self._case is not None
        begin = time.monotonic()
        request = {"do": "pair", "pair": [first.name, second.name]}
        reply, reason = self._measure(second.name, request)
        if reply is None:
            pair = PairRow(self._case, first.name, second.name, "failed", (reason,))
        else:
            pair = pair_from(reply)
        return replace(pair, seconds=time.monotonic() - begin)

    def end(self) -> None:
        """Forget the answers of the case."""
        if self._answers is not None:
            self._answers.unlink(missing_ok=True)
        self._case, self._answers = None, None

    def _answer(self, case: AttentionCase, count: int, step: Callable[[str], None]) -> None:
        """Write the oracle's answers for the first pool and the last, as `prepare` makes them."""
        step("inputs")
        with self.spent.on("inputs"):
            seeds = dict.fromkeys((self._settings.seed, self._settings.seed + count - 1))
            pools = [build_pool(case, self._device, seed) for seed in seeds]
        step("oracle")
        with self.spent.on("oracle"):
            path = Path(self._folder.name, "answers.pt")
            golden_file.save([expect(pool) for pool in pools], path)
        self._answers = path

    def _measure(self, name: str, request: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
        """The row of a reply, or `None` and how the worker failed to give one."""
        assert self._case is not None
        slot = self._slot(name)
        with self.spent.on("start-up"):
            reason = self._ready(slot)
        if reason or slot.process is None:
            return None, reason
        request = {
            **request,
            "contender": name,
            "case": dataclasses.asdict(self._case),
            "answers": None if self._answers is None else str(self._answers),
        }
        try:
            reply = slot.process.ask(request, self._isolation.case_seconds)
        except WorkerEnded as error:
            slot.process = None
            return None, str(error)
        if reply.get("lost"):  # nothing more can run in that process
            slot.process.end()
            slot.process = None
        if "error" in reply:
            return None, reply["error"]
        self.spent.add(reply["spent"])
        return reply["row"], ""

    def _slot(self, name: str) -> _Slot:
        return self._slots.setdefault(name, _Slot(name))

    def _ready(self, slot: _Slot) -> str:
        """Make sure that the slot has a worker; gives why it has none, or ""."""
        if slot.process is not None and not slot.process.is_alive:
            slot.process.end()  # it ended between two cases
            slot.process = None
        if slot.process is None and not slot.lost:
            seconds = self._isolation.start_seconds
            self._together([slot], self._begin, self._started, seconds)
        return slot.why if slot.process is None else ""

    def _begin(self, slot: _Slot) -> None:
        slot.process = spawn(folders_of(slot.name, self._isolation.paths), self._isolation.command)
        request = {
            "do": "start",
            "modules": list(self._isolation.modules),
            "threads": self._isolation.threads,
            "device": str(self._device),
            "settings": dataclasses.asdict(self._settings),
            "curve": dataclasses.asdict(self._curve),
        }
        self._send(slot, request)

    def _send(self, slot: _Slot, request: dict[str, Any]) -> None:
        assert slot.process is not None
        slot.process.send({**request, "contender": slot.name}, self._isolation.start_seconds)

    def _started(self, slot: _Slot, reply: dict[str, Any] | None, reason: str) -> None:
        if reply is not None and "error" not in reply:
            slot.failed_starts = 0
            return
        if reply is not None and slot.process is not None:
            slot.process.end()
        slot.process = None
        slot.failed_starts += 1
        slot.why = f"its worker did not start: {reason or (reply or {}).get('error')}"
        # What it found out and could still say, it would say again.
        slot.lost = reply is not None or slot.failed_starts >= _MOST_FAILED_STARTS

    def _warmed(self, slot: _Slot, reply: dict[str, Any] | None, reason: str) -> None:
        if reply is None or reply.get("lost"):  # the cases will tell; they get a new worker
            if reply is not None and slot.process is not None:
                slot.process.end()
            slot.process = None

    def _together(
        self,
        slots: Sequence[_Slot],
        begin: Callable[[_Slot], None],
        done: Callable[[_Slot, dict[str, Any] | None, str], None],
        seconds: float,
        step_seconds: float = math.inf,
    ) -> None:
        """Begin a request in each slot, as many at once as there are CPUs; `done` with its reply,
        or with how the worker ended. seconds: limit on a request, step_seconds: on one step of it.
        """
        waiting = list(slots)
        running: dict[str, float] = {}  # deadlines by name
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                slot = waiting.pop(0)
                try:
                    begin(slot)
                except WorkerEnded as error:
                    done(slot, None, str(error))
                    continue
                running[slot.name] = time.monotonic() + seconds
            found = [self._slots[name].process for name in running]
            if found:
                wait_for_any([process for process in found if process], _LOOK_SECONDS)
            for name in list(running):
                slot = self._slots[name]
                assert slot.process is not None
                try:
                    reply = slot.process.reply(0)
                    if reply is None:
                        now = time.monotonic()
                        if now >= running[name]:
                            raise slot.process.timed_out(seconds)
                        if now >= slot.process.stepped + step_seconds:
                            raise slot.process.timed_out(step_seconds)
                        continue
                except WorkerEnded as error:
                    done(slot, None, str(error))
                else:
                    done(slot, reply, "")
                del running[name]
