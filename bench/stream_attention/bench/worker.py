"""What an isolated worker runs: `python -m stream_attention.bench.worker PARENT_PID READ WRITE`.

It ties itself to its parent before anything slow is imported, puts the folders of its peer in front
of its import path, and answers what comes over the pipes READ and WRITE.
"""

from __future__ import annotations

import ctypes
import os
import signal
import site
import sys

PEER_PATH = "STREAM_ATTENTION_PEER_PATH"  # an environment variable: folders
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


def use_folders(folders: list[str]) -> None:
    """Put installed packages in `folders` first on `sys.path`, as if they were site-packages.

    What their .pth files add comes right behind them.
    """
    rest = [entry for entry in sys.path if entry not in folders]
    sys.path[:] = [*folders, *rest]
    for folder in folders:
        site.addsitedir(folder)
    added = [entry for entry in sys.path if entry not in folders and entry not in rest]
    sys.path[:] = [*folders, *added, *rest]


def main() -> None:
    """Serve until the parent closes its pipe."""
    parent, read_fd, write_fd = (int(argument) for argument in sys.argv[1:4])
    end_with(parent)
    for number in (read_fd, write_fd):
        os.set_inheritable(number, False)  # what this process starts must not hold them open
    folders = os.environ.get(PEER_PATH, "")
    use_folders(folders.split(os.pathsep) if folders else [])
    # By now the path is that of the peer: torch and the project are looked up along it.
    from stream_attention.bench.channel import Channel
    from stream_attention.bench.worker_loop import serve

    serve(Channel(read_fd, write_fd))


if __name__ == "__main__":
    main()
