"""Copies the wheels of every package out of the build: `./bazelw run //tools/wheels:dist -- DIR`.

DIR is relative to the folder the command is called from; it is made where it is missing. Wheels of
the same name are replaced, other files are left alone.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

USAGE = "usage: ./bazelw run //tools/wheels:dist -- DIR"
WHEELHOUSE = Path("tools/wheels/wheelhouse")


def copy_wheels(source: Path, target: Path) -> list[Path]:
    """Copies `source/*.whl` into `target`; returns what it wrote. Never leaves half a wheel."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"DIR={str(target)!r}: must be a folder, or not exist yet; use dist")
    wheels = sorted(source.glob("*.whl"))
    assert wheels, f"no wheels in {source}"
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for wheel in wheels:
        partial = target / f".{wheel.name}.part"
        shutil.copyfile(wheel, partial)
        written.append(partial.replace(target / wheel.name))
    return written


def main(args: list[str]) -> int:
    if len(args) != 1 or args[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    target = Path(os.environ.get("BUILD_WORKING_DIRECTORY", os.getcwd()), args[0])
    try:
        written = copy_wheels(WHEELHOUSE, target)
    except (OSError, ValueError) as error:
        print(f"dist: {error}", file=sys.stderr)
        return 1
    for path in written:
        print(f"{path.stat().st_size:>10} bytes  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
