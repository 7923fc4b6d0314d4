"""Where results are written: a checked path, and files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from stream_attention.core.atomic_files import replace_file
from stream_attention.core.user_paths import user_path

UNWRITTEN = 4  # exit status of a program whose results did not reach their file


def output_path(text: str | None) -> Path | None:
    """The path of `--json`; relative to where the user stands, also under `bazel run`.

    `None` stays `None`. Tries the folder, so that hours of samples are not lost to a bad path, and
    makes none: a folder that is not there is most often a mistake in its name.
    Raises `ValueError` for an empty name, a folder, what cannot be written, or the file that stdout
    or stderr goes to.
    """
    if text is None:
        return None
    path = user_path(text or ".")
    try:
        if not text or path.is_dir():
            raise ValueError(f"--json={text!r}: must name a file; use {Path(text, 'out.json')}")
        if _is_special(path):
            return path
        if _is_output(path):
            raise ValueError(
                f"--json={text!r}: must not be the file that stdout or stderr goes to; use out.json"
            )
        folder = path.resolve().parent
        if not folder.exists():
            raise ValueError(
                f"--json={text!r}: must be in a folder that exists, {folder} does not; "
                f"use mkdir -p, or {_nearest_folder(folder) / path.name}"
            )
        with tempfile.TemporaryFile(dir=folder):
            return path
    except OSError as error:
        raise ValueError(
            f"--json={text!r}: must be writable ({error.strerror}); use out.json"
        ) from None


def _nearest_folder(folder: Path) -> Path:
    """The nearest folder above that exists."""
    return next(parent for parent in (folder, *folder.parents) if parent.is_dir())


def _is_special(path: Path) -> bool:
    """Whether `path` is a device or a pipe, such as /dev/null."""
    return path.exists() and not path.is_file()


def _is_output(path: Path) -> bool:
    """Whether `path` is the file that stdout or stderr is redirected to."""
    with contextlib.suppress(FileNotFoundError):
        found = path.stat()
        for number in (1, 2):
            with contextlib.suppress(OSError):  # closed
                if os.path.samestat(found, os.fstat(number)):
                    return True
    return False


def write_text(path: Path, text: str) -> None:
    """Write beside the target under a name of its own and rename: the file is whole or as before.

    A link stays a link, and a file keeps its mode. A device or a pipe is written to: a rename would
    put a file in its place. So is a file that the system lets nobody replace. Raises `OSError`; no
    draft is left behind then.
    """
    if _is_special(path):
        path.write_text(text)
        return
    path = path.resolve()
    mode = path.stat().st_mode & 0o777 if path.exists() else None
    replace_file(path, text.encode(), mode=mode, in_place=True)


def write_fault(path: Path, error: OSError) -> str:
    """What to say of a file that could not be written."""
    return f"--json={str(path)!r}: could not be written ({error.strerror or error}); use another"
