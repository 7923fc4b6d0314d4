"""Marks in the environment of workers, by which the processes that they started are found again.

A mark says which worker and which run a process belongs to: `WORKER:NAMESPACE:PID:BEGAN`, the run
by its process id in a namespace of those, and by when it began, since ids are used again. So a run
that was killed leaves what the next one can tell from the workers of a run that is alive.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path

VARIABLE = "STREAM_ATTENTION_WORKER"  # of the environment
END_SECONDS = 10.0  # a killed process may still hang in the driver
_ENDED = ("Z", "X")  # states of a process that only waits for its parent to look


def new_mark() -> str:
    """The mark of another worker of this process."""
    return f"{uuid.uuid4().hex}:{_namespace()}:{os.getpid()}:{_began(os.getpid()) or 0}"


def kill_marked(mark: str) -> None:
    """Kill the processes of this user whose environment has the mark of a worker.

    Linux; a process that left the worker's session is found by it. Elsewhere the session is all.
    """
    _kill(lambda found: found == mark)


def kill_orphans() -> None:
    """Kill the processes of this user whose mark names a run that has ended; Linux."""
    _kill(_is_orphaned)


def _kill(wanted: Callable[[str], bool]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        found = [pid for pid in _process_ids() if (mark := _mark_of(pid)) and wanted(mark)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _is_orphaned(mark: str) -> bool:
    """Whether the mark names a run of this namespace that has ended. No for any doubt."""
    fields = mark.split(":")
    if len(fields) != 4 or not all(field.isdecimal() for field in fields[2:]):
        return False
    namespace, pid, began = fields[1], int(fields[2]), int(fields[3])
    if not namespace or namespace != _namespace() or not pid or not began:
        return False
    if mark == _mark_of(os.getpid()):  # this process comes from such a run itself
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # it is another user's: whether it is the run, `_began` may tell
        pass
    now = _began(pid)
    return now is not None and now != began


def _namespace() -> str:
    """Where process ids mean what they mean here; "" where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [f"/proc/self/ns/{kind}" for kind in ("pid", "time")]
        links = [os.readlink(space) for space in spaces if os.path.lexists(space)]
    except OSError:
        return ""
    numbers = ["".join(filter(str.isdecimal, link)) for link in links]
    return "/".join((boot, *numbers)) if links else ""


def _began(pid: int) -> int | None:
    """When a process began, in ticks since the machine did; 0 when it has ended, `None` unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return 0 if fields[0] in _ENDED else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _process_ids() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return []


def _mark_of(pid: int) -> str:
    """The mark in a process's environment; "" for none, and for a process that cannot be read."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    start = f"{VARIABLE}=".encode()
    found = next((entry for entry in entries if entry.startswith(start)), b"")
    return found.removeprefix(start).decode(errors="replace")
