"""What a program prints: a report on stdout that may fail, and lines on stderr that never do."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console

INTERRUPTED = 128 + signal.SIGINT  # exit statuses
UNPRINTED = 5


class Unprintable(Exception):
    """The report could not be printed, and nothing else keeps the results."""


class _Closed(io.StringIO):
    """A stream that was closed before the program began, which Python gives no object for."""

    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def stdout() -> TextIO:
    """`sys.stdout`; where that is closed, a stream that refuses what is written, as the file does.

    Without it a closed stdout would take a report in silence.
    """
    return _Closed() if sys.stdout is None else sys.stdout


@dataclass(slots=True)
class Screen:
    """The report of `program`. kept: the results reach a file too, so that they outlive stdout.

    error: why the report broke off, "" while it did not; nothing more is printed then.
    """

    program: str
    console: Console
    kept: bool
    error: str = ""

    def show(self, draw: Callable[..., Any], *args: Any, **options: Any) -> None:
        """`draw(console, ...)`. Where stdout fails: a line on stderr, `Unprintable` unless kept."""
        if self.error:
            return
        try:
            draw(self.console, *args, **options)
            self.console.file.flush()
        except (OSError, SystemExit) as error:  # rich makes a SystemExit of a broken pipe
            why = reason(error) if isinstance(error, OSError) else "Broken pipe"
            self.error = f"the report could not be printed ({why})"
            _to_null(sys.stdout)
            say(f"{self.program}: {self.error}{'; the run goes on for --json' * self.kept}")
            if not self.kept:
                raise Unprintable from None


def reason(error: OSError) -> str:
    """Why a file failed, in the words of the system."""
    return error.strerror or str(error)


def say_unprinted(program: str, what: str, error: OSError) -> int:
    """Print on stderr that `what` could not be printed on stdout; gives the exit status."""
    _to_null(sys.stdout)
    say(f"{program}: {what} could not be printed ({reason(error)})")
    return UNPRINTED


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line on stderr, or on `stream`; one that fails costs the line and not the run."""
    stream = sys.stderr if stream is None else stream
    if stream is None:  # closed before the program began
        return
    try:
        print(text, file=stream, flush=True)
    except OSError:
        _to_null(stream)


def say_interrupted(program: str, kept: str = "") -> int:
    """Print `program: interrupted`, and what was kept; gives the exit status."""
    say(f"{program}: interrupted{kept}")
    return INTERRUPTED


def _to_null(stream: TextIO) -> None:
    """Send what a stream still holds nowhere: Python would try it again at exit, and end with 120.

    A stream without a file of its own, such as one of a test, is left alone.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)
