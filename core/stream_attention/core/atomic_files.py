"""Files that are whole or not there: written beside their place, synced, and renamed into it.

What is read back is a file too: a pipe that bears its name would be waited for without end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

DRAFT_PREFIX, DRAFT_SUFFIX = ".stream_attention_", ".part"
# A folder where others' files stay (sticky), a file that is a mount, a file system in layers.
_NOT_REPLACED = (errno.EPERM, errno.EBUSY, errno.EXDEV)
# File systems that have no way to sync a folder.
_NOT_SYNCED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


def replace_file(
    path: Path, content: bytes, *, mode: int | None = None, in_place: bool = False
) -> None:
    """Make `path` hold `content`: at every moment, and after a crash, it is whole or as before.

    Written beside it under a name of its own, synced, renamed; then the folder is synced.
    mode: permission bits; those of the umask by default. in_place: write over a file that the
    system lets nobody replace; else that is an error. Raises `OSError`, and leaves no draft behind
    then. Where the last step fails, syncing the folder, the file is there.
    """
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=DRAFT_PREFIX, suffix=DRAFT_SUFFIX)
    try:
        with open(handle, "wb") as file:
            file.write(content)
            os.fchmod(handle, 0o666 & ~_umask() if mode is None else mode)
            file.flush()
            os.fsync(handle)
        try:
            os.replace(draft, path)
        except OSError as error:
            if not in_place or error.errno not in _NOT_REPLACED:
                raise
            path.write_bytes(content)
            os.unlink(draft)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    sync_folder(path.parent)


def read_file(path: Path) -> bytes:
    """The content of a regular file, or of one that a link leads to.

    Raises `OSError` that says what else it is: a folder, a pipe, a socket, a device.
    """
    _refuse_kind(os.stat(path).st_mode)  # a socket cannot be opened, a device may act on it
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        _refuse_kind(os.fstat(handle).st_mode)  # what came into its place since
        return file.read()


def _refuse_kind(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory, must be a regular file")
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
        kind = kinds.get(stat.S_IFMT(mode), "device")
        raise OSError(errno.EINVAL, f"Is a {kind}, must be a regular file")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder outlast a crash, where its file system can. Raises `OSError`."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NOT_SYNCED:
            raise
    finally:
        os.close(handle)


def _umask() -> int:
    """The mode bits that new files of this process do not get."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
