"""Copies the kernel libraries, their ptxas reports and resources to where plain Python finds them.

    ./bazelw run //tools/cuda:stage_libraries            into this checkout, beside the sources
    ./bazelw run //tools/cuda:stage_libraries -- DIR     into DIR, with the same relative paths

Git ignores the copies. They serve only those who run without Bazel, e.g. pytest with PYTHONPATH.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

ARCHS = ("sm80", "sm90", "sm100")


def main(argv: list[str]) -> int:
    """Copies to argv[1], or to the workspace that Bazel names; prints each library's path."""
    if len(argv) > 2:
        print("usage: stage_libraries [DIR]", file=sys.stderr)
        return 2
    root = Path(argv[1] if len(argv) == 2 else os.environ["BUILD_WORKSPACE_DIRECTORY"])
    if not root.is_absolute():
        root = Path(os.environ["BUILD_WORKING_DIRECTORY"]) / root
    for arch in ARCHS:
        folder = Path(f"kernels_{arch}/stream_attention/kernels_{arch}")
        (root / folder).mkdir(parents=True, exist_ok=True)
        for suffix in ("so", "ptxas.txt", "resources.json"):
            name = f"libstream_attention_{arch}.{suffix}"
            target = root / folder / name
            # A new file, not new contents: a process that has the old library mapped keeps it.
            target.unlink(missing_ok=True)
            shutil.copyfile(folder / name, target)
            if suffix == "so":
                print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
