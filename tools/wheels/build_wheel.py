"""Builds one wheel from a manifest: stages its files, then calls hatchling.

    build_wheel.py MANIFEST OUT_DIR

The manifest is JSON: `project` (the folder of pyproject.toml in the stage) and `files` (path in
the stage -> file to copy). Staged files have one mode and one time, so that the wheel depends on
contents and names only: two clones at different paths give the same bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hatchling.build import build_wheel

# 2020-02-02, hatchling's own choice; zip files cannot tell times before 1980.
SOURCE_DATE_EPOCH = 1580601600


def stage(files: Mapping[str, str], root: Path) -> None:
    """Copies `files` (path below `root` -> source) with mode 0644 and a fixed time."""
    for name, source in sorted(files.items()):
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        target.chmod(0o644)
        os.utime(target, (SOURCE_DATE_EPOCH, SOURCE_DATE_EPOCH))


def build(files: Mapping[str, str], project: str, out: Path) -> Path:
    """Builds the wheel of the staged folder `project` into `out`; returns its path."""
    out = out.absolute()
    sources = {name: os.path.abspath(source) for name, source in files.items()}
    before = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="sa_wheel_") as folder:
        root = Path(folder)
        stage(sources, root)
        os.environ["SOURCE_DATE_EPOCH"] = str(SOURCE_DATE_EPOCH)
        os.chdir(root / project)
        try:
            return out / build_wheel(str(out))
        finally:
            os.chdir(before)


def main(manifest_path: str, out: str) -> int:
    manifest = json.loads(Path(manifest_path).read_text(encoding="utf-8"))
    Path(out).mkdir(parents=True, exist_ok=True)
    build(manifest["files"], manifest["project"], Path(out))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
