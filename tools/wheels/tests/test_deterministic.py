"""A wheel depends on the names and contents of its files, on nothing else."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from pathlib import Path

import pytest
from build_wheel import build

WHEELHOUSE = Path("tools/wheels/wheelhouse")
WHEELS = sorted(WHEELHOUSE.glob("*.whl"))
SHARED = (
    "core/stream_attention/core/version.py",
    "tools/wheels/hatch_metadata.py",
    "tools/wheels/hatch_native.py",
)


def project_of(wheel: Path) -> str:
    package = wheel.name.split("-")[0].removeprefix("stream_attention").lstrip("_")
    return package or "tools/wheels/umbrella"


def clone(wheel: Path, root: Path, time: int, mode: int) -> dict[str, str]:
    """Lays the sources of a wheel below `root`; returns the manifest of their paths."""
    project = project_of(wheel)
    files = {name: name for name in (*SHARED, f"{project}/pyproject.toml")}
    files[f"{project}/LICENSE"] = "LICENSE"
    if project == "tools/wheels/umbrella":
        files[f"{project}/README.md"] = "README.md"
    with zipfile.ZipFile(wheel) as archive:
        content = [name for name in archive.namelist() if ".dist-info/" not in name]
        for name in content:
            target = root / project / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith((".so", ".resources.json")):  # built, not sources
                target.write_bytes(archive.read(name))
            else:
                shutil.copyfile(f"{project}/{name}", target)
            files[f"{project}/{name}"] = ""
    for name, source in files.items():
        target = root / name
        if source:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        target.chmod(mode)
        os.utime(target, (time, time))
    return {name: str(root / name) for name in files}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("wheel", WHEELS, ids=lambda wheel: project_of(wheel))
def test_two_clones_at_different_paths_give_the_built_bytes(wheel: Path, tmp_path: Path) -> None:
    built = []
    for folder, time, mode in [
        ("a", 1_000_000_000, 0o600),
        ("some/where/else", 1_700_000_000, 0o755),
    ]:
        files = clone(wheel, tmp_path / folder, time, mode)
        if folder != "a":
            files = dict(reversed(files.items()))
        out = tmp_path / f"out{time}"
        out.mkdir()
        built.append(build(files, project_of(wheel), out))
    assert {path.name for path in built} == {wheel.name}
    assert [digest(path) for path in built] == [digest(wheel)] * 2


def test_another_byte_in_a_source_is_another_wheel(tmp_path: Path) -> None:
    (wheel,) = [wheel for wheel in WHEELS if project_of(wheel) == "core"]
    files = clone(wheel, tmp_path / "a", 1_000_000_000, 0o644)
    with open(files["core/stream_attention/core/errors.py"], "a", encoding="utf-8") as source:
        source.write("\n")
    assert digest(build(files, "core", tmp_path)) != digest(wheel)


def test_kernels_without_their_library_are_refused(tmp_path: Path) -> None:
    (wheel,) = [wheel for wheel in WHEELS if project_of(wheel) == "kernels_sm90"]
    files = clone(wheel, tmp_path / "a", 1_000_000_000, 0o644)
    files = {name: source for name, source in files.items() if not name.endswith(".so")}
    with pytest.raises(ValueError, match="stream-attention-kernels-sm90: no shared library"):
        build(files, "kernels_sm90", tmp_path)
