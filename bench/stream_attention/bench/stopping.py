"""How a program ends that is told to stop: one line, and 128 plus the number of the signal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM came. Raised like Ctrl-C, so that no handler of a contender's errors takes it."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """While open, SIGTERM raises `Terminated`, so that what was started is ended and cleaned up.

    A second one ends the process at once. Does nothing outside of the main thread.
    """

    def handler(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    try:
        previous = signal.signal(signal.SIGTERM, handler)
    except ValueError:  # signals reach the main thread only
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


def say_stopped(program: str, error: KeyboardInterrupt, kept: str = "") -> int:
    """Print `program: interrupted`, and what was kept; gives the exit status."""
    ended, number = ("interrupted", signal.SIGINT)
    if isinstance(error, Terminated):
        ended, number = ("terminated", signal.SIGTERM)
    print(f"{program}: {ended}{kept}", file=sys.stderr)
    return 128 + number
