"""What an isolated worker runs: `python -m stream_attention.bench.worker PARENT_PID FLAGS...`.

It ties itself to its parent before anything slow is imported, then is the bench with these flags.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PROGRAM = "stream_attention.bench.paged_decode"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with(parent: int) -> None:
    """On Linux, SIGKILL for this process when its parent ends, however that ends.

    A session of its own hides a worker from what ends the parent's, such as a closed terminal.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)
