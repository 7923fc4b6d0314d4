"""Messages between a run and its workers: JSON objects, a line each, over two pipes of their own.

What libraries print goes elsewhere. Both ends time out rather than wait for one that is stuck.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stream_attention.bench import json_text

_CHUNK_BYTES = 1 << 16


class ChannelClosed(Exception):
    """The other end is gone."""


class Garbled(Exception):
    """A line that is no message."""


@dataclass(slots=True)
class Channel:
    """One end. read_fd, write_fd: pipes, which `close` closes."""

    read_fd: int
    write_fd: int
    _buffer: bytearray = field(default_factory=bytearray)

    def send(self, message: dict[str, Any], seconds: float | None = None) -> None:
        """Write a message. Raises `ChannelClosed`, and `TimeoutError` when it is not taken."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        os.set_blocking(self.write_fd, False)
        deadline = None if seconds is None else time.monotonic() + seconds
        while data:
            try:
                data = data[os.write(self.write_fd, data) :]
            except BlockingIOError:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError from None
                select.select([], [self.write_fd], [], left)
            except OSError as error:
                raise ChannelClosed from error

    def receive(
        self, seconds: float | None = None, also: Sequence[int] = ()
    ) -> dict[str, Any] | None:
        """The next message; `None` when none came in time, or one of `also` became readable first.

        seconds: `None` = wait for ever. Raises `ChannelClosed`, and `Garbled` for what is no JSON
        object.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            line, found, rest = self._buffer.partition(b"\n")
            if found:
                self._buffer = rest
                return _parse(bytes(line))
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self.read_fd, *also], [], [], left)
            if self.read_fd not in ready:
                return None
            try:
                data = os.read(self.read_fd, _CHUNK_BYTES)
            except OSError as error:
                raise ChannelClosed from error
            if not data:
                raise ChannelClosed
            self._buffer += data

    def close(self) -> None:
        """Close both pipes; the other end sees that."""
        os.close(self.read_fd)
        os.close(self.write_fd)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        message = json_text.parse(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise Garbled(f"not a message: {line[:80]!r}")
    return message
