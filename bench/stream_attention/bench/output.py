"""Where results are written: a checked path, and files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path


def output_path(text: str | None) -> Path | None:
    """The path of `--json`; relative to where the user stands, also under `bazel run`.

    `None` stays `None`. Raises `ValueError` for an empty name or a folder.
    """
    if text is None:
        return None
    path = Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."), text)
    if not text or path.is_dir():
        raise ValueError(f"--json={text!r}: must name a file; use {Path(text, 'out.json')}")
    return path


def write_text(path: Path, text: str) -> None:
    """Write beside the target and rename, so that a file is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.part")
    draft.write_text(text)
    draft.replace(path)
