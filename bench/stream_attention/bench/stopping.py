"""Signals that ask a program to end, as exceptions: they leave as little as an interrupt does."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """The program was asked to end. number: the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def name(self) -> str:
        """Of the signal."""
        return signal.Signals(self.number).name

    def end(self) -> int:
        """End this process by the signal, outside of `stoppable`; a status where that returns."""
        os.kill(os.getpid(), self.number)
        return 128 + self.number


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Within, the first of `SIGNALS` raises `Stopped`; more of them do nothing to the clean-up.

    One that is ignored stays so, as under nohup. Python sees a signal once a native call returns:
    a program that may hang in one is better left to the signal. In the main thread alone.
    """
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            raise Stopped(number)

    earlier = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if handler not in (signal.SIG_IGN, None):  # None: not to be restored from here
                    earlier[number] = handler
                    signal.signal(number, stop)
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
