"""Progress on stderr: a live line in a terminal, plain lines in a log. Results go to stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.status import Status

from stream_attention.bench.screen import say


@dataclass(slots=True)
class Reporter:
    """`start(subject)` once, then `step(what)` as the work goes on."""

    prefix: str
    stream: TextIO
    status: Status | None
    subject: str = ""
    begin: float = 0.0

    def start(self, subject: str) -> None:
        """Name what is being worked on; in a log this is the one line it gets."""
        self.subject = subject
        self.begin = time.monotonic()
        if self.status is None:
            say(f"{self.prefix}{subject} …", self.stream)
        else:
            self.step("")

    def step(self, what: str) -> None:
        """Show the current step and the seconds since `start`; silent in a log."""
        if self.status is not None:
            seconds = time.monotonic() - self.begin
            detail = f" · {what}" if what else ""
            self.status.update(f"{self.prefix}{self.subject}{detail} · {seconds:.0f} s")


@contextmanager
def reporter(
    total: int, index: int | None = None, stream: TextIO | None = None
) -> Iterator[Reporter]:
    """A reporter for case `index` of `total` (0-based); `None` = work before the first case."""
    stream = sys.stderr if stream is None else stream
    prefix = "" if index is None else f"({index + 1}/{total}) "
    console = Console(file=stream, highlight=False, markup=False)
    if not console.is_terminal:
        yield Reporter(prefix, stream, None)
        return
    with console.status("") as status:
        yield Reporter(prefix, stream, status)
