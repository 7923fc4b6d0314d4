"""Where results are written: a checked path, and files that are whole or not there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def output_path(text: str | None) -> Path | None:
    """The path of `--json`; relative to where the user stands, also under `bazel run`.

    `None` stays `None`. Makes the folder, so that hours of samples are not lost to a bad path.
    Raises `ValueError` for an empty name, a folder, or what cannot be written.
    """
    if text is None:
        return None
    path = Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."), text)
    try:
        if not text or path.is_dir():
            raise ValueError(f"--json={text!r}: must name a file; use {Path(text, 'out.json')}")
        if _is_special(path):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            return path
    except OSError as error:
        raise ValueError(
            f"--json={text!r}: must be writable ({error.strerror}); use out.json"
        ) from None


def _is_special(path: Path) -> bool:
    """Whether `path` is a device or a pipe, such as /dev/null."""
    return path.exists() and not path.is_file()


def write_text(path: Path, text: str) -> None:
    """Write beside the target and rename, so that a file is whole or not there.

    A link stays a link. A device or a pipe is written to: a rename would put a file in its place.
    """
    if _is_special(path):
        path.write_text(text)
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.part")
    draft.write_text(text)
    draft.replace(path)
