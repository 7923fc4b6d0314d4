"""Paths as a user types them: relative to where he stands, also under `bazel run`."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(text: str | os.PathLike[str]) -> Path:
    """The path that an argument of a command line names.

    `bazel run` starts a program in a folder of its own, and says in `BUILD_WORKING_DIRECTORY` where
    its user stands. Raises `ValueError` for an empty name, which would be that folder itself.
    """
    if not os.fspath(text):
        raise ValueError("path='': must name a file or a folder; use '.'")
    return Path(os.environ.get("BUILD_WORKING_DIRECTORY") or ".", text)
