"""The run's handle on one worker process: start it, ask it, tell how it ended, leave nothing of it.

A worker leads a session of its own and carries a mark in its environment, which what it starts
inherits: both are ended with it, so that no compiler or server disturbs the next measurement.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from stream_attention.bench.channel import Channel, ChannelClosed, Garbled
from stream_attention.bench.worker import PEER_PATH
from stream_attention.bench.worker_marks import END_SECONDS, VARIABLE, kill_marked, new_mark

MODULE = "stream_attention.bench.worker"
_TAIL_LINES = 3
_TAIL_BYTES = 4096
_POLL_SECONDS = 0.1


class WorkerEnded(Exception):
    """The worker gave no reply and is gone; the text says how."""


def worker_command(read_fd: int, write_fd: int) -> list[str]:
    """The command of a worker: its parent, and the pipes that it reads and writes."""
    return [sys.executable, "-m", MODULE, str(os.getpid()), str(read_fd), str(write_fd)]


@dataclass(slots=True)
class WorkerProcess:
    """One process. begin it with `spawn`; step: what it last said that it does, since `stepped`,
    a time of the monotonic clock.
    """

    process: subprocess.Popen[bytes]
    channel: Channel
    errors: IO[bytes]
    mark: str
    exit_fd: int | None
    step: str = ""
    stepped: float = 0.0
    _seen: int = 0
    _closed: bool = field(default=False)

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The reply to `request`. Raises `WorkerEnded` when there is none within `seconds`."""
        deadline = time.monotonic() + seconds
        self.send(request, seconds)
        while True:
            reply = self.reply(deadline - time.monotonic())
            if reply is not None:
                return reply
            if time.monotonic() >= deadline:
                raise self.timed_out(seconds)

    def send(self, request: dict[str, Any], seconds: float) -> None:
        """Begin a request whose reply `reply` takes."""
        self.step, self.stepped = "", time.monotonic()
        self._seen = os.fstat(self.errors.fileno()).st_size
        try:
            self.channel.send(request, seconds)
        except ChannelClosed:
            raise self.ended() from None
        except TimeoutError:
            raise self.timed_out(seconds) from None

    def reply(self, seconds: float) -> dict[str, Any] | None:
        """A reply if one comes in time. Raises `WorkerEnded` when the worker ends."""
        deadline = time.monotonic() + seconds
        also = [] if self.exit_fd is None else [self.exit_fd]
        while True:
            # What it wrote before its end counts: look for a message once more when it is gone.
            gone = self.process.poll() is not None
            left = 0.0 if gone else max(0.0, deadline - time.monotonic())
            if self.exit_fd is None:
                left = min(left, _POLL_SECONDS)
            try:
                message = self.channel.receive(left, [] if gone else also)
            except ChannelClosed:
                raise self.ended() from None
            except Garbled as error:
                self.end()
                raise WorkerEnded(f"the worker sent what is {error}") from None
            if message is None and gone:
                raise self.ended()
            if message is not None and "step" in message:
                self.step, self.stepped = str(message["step"]), time.monotonic()
            elif message is not None:
                return message
            elif time.monotonic() >= deadline:
                return None

    def timed_out(self, seconds: float) -> WorkerEnded:
        """End the worker; the error that says that it took too long, and over what."""
        self.end()
        where = f", at: {self.step}" if self.step else ""
        return WorkerEnded(f"the worker gave no result within {seconds:g} s{where}{self._tail()}")

    def ended(self) -> WorkerEnded:
        """The error that says how the worker ended, and what it last wrote."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_POLL_SECONDS)  # its pipe closes a moment before it has ended
        status = self.process.poll()
        self.end()
        if status is None:
            how = "closed its pipe"
        elif status < 0:
            how = f"was killed by {_signal_name(-status)}"
        else:
            how = f"ended with status {status}"
        where = f", at: {self.step}" if self.step else ""
        return WorkerEnded(f"the worker {how}{where}{self._tail()}")

    def _tail(self) -> str:
        """The last lines that the worker wrote on stderr since the request was sent."""
        size = os.fstat(self.errors.fileno()).st_size
        start = max(self._seen, size - _TAIL_BYTES)
        text = os.pread(self.errors.fileno(), size - start, start).decode(errors="replace")
        lines = [line.strip() for line in text.strip().splitlines()[-_TAIL_LINES:]]
        return f": {' | '.join(lines)}" if lines else ""

    def end(self) -> None:
        """Kill the worker and whatever it started, and wait until they are gone."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        kill_marked(self.mark)
        self.channel.close()
        if self.exit_fd is not None:
            os.close(self.exit_fd)

    @property
    def is_alive(self) -> bool:
        """Whether it runs, as far as the system says."""
        return not self._closed and self.process.poll() is None


def spawn(folders: Sequence[str], command: Any = worker_command) -> WorkerProcess:
    """Start a worker with `folders` first on its import path. command: replaced in tests.

    Its stdout goes nowhere: libraries print there.
    """
    there, mine = os.pipe(), os.pipe()
    errors = tempfile.TemporaryFile()
    mark = new_mark()
    path = os.pathsep.join((*folders, *(entry for entry in sys.path if entry)))
    extra = {"PYTHONPATH": path, VARIABLE: mark, PEER_PATH: os.pathsep.join(folders)}
    try:
        process = subprocess.Popen(
            command(there[0], mine[1]),
            env={**os.environ, **extra},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=(there[0], mine[1]),
            start_new_session=True,
        )
    except BaseException:
        for number in (there[1], mine[0]):
            os.close(number)
        raise
    finally:
        os.close(there[0])
        os.close(mine[1])
    opener = getattr(os, "pidfd_open", None)
    exit_fd = None
    with contextlib.suppress(OSError):  # an old kernel: polled instead
        exit_fd = None if opener is None else opener(process.pid)
    return WorkerProcess(process, Channel(mine[0], there[1]), errors, mark, exit_fd)


def wait_for_any(workers: Sequence[WorkerProcess], seconds: float) -> None:
    """Wait until one of the workers has something to say or has ended, at most `seconds`."""
    numbers = [worker.channel.read_fd for worker in workers]
    numbers += [worker.exit_fd for worker in workers if worker.exit_fd is not None]
    if len(numbers) < 2 * len(workers):
        seconds = min(seconds, _POLL_SECONDS)
    select.select(numbers, [], [], seconds)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
