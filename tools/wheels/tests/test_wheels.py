"""What the wheels of the tree hold and say about themselves."""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import stat
import sys
import zipfile
from collections import Counter
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest
from hatch_native import platform_tag, read_needs
from packaging.requirements import Requirement

WHEELHOUSE = Path("tools/wheels/wheelhouse")
NATIVE = {"kernels_sm80", "kernels_sm90", "kernels_sm100"}
PURE = {"core", "planner", "policies", "flows", "bench"}
FACADE = {"stream_attention/__init__.py", "stream_attention/reference.py"}
# Imported only where a user has them: core's kit for tests of routes, peers of a benchmark.
OPTIONAL_IMPORTS: dict[str, set[str]] = {
    "core": {"hypothesis", "pytest"},
    "bench": {"flashinfer"},
}
# Import names that differ from their distribution's.
DISTRIBUTION_OF = {"absl": "absl-py"}


class Wheel:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.name, self.version, *_, self.platform = path.stem.split("-")
        self.package = self.name.removeprefix("stream_attention").lstrip("_")
        self.archive = zipfile.ZipFile(path)
        self.info = f"{self.name}-{self.version}.dist-info"
        self.entries = self.archive.infolist()
        self.content = [e.filename for e in self.entries if not e.filename.startswith(self.info)]
        self.metadata = self.header("METADATA")

    def header(self, name: str) -> Message:
        return HeaderParser().parsestr(self.archive.read(f"{self.info}/{name}").decode())

    @property
    def requirements(self) -> list[Requirement]:
        return [Requirement(line) for line in self.metadata.get_all("Requires-Dist", [])]


def all_wheels() -> dict[str, Wheel]:
    return {wheel.package: wheel for wheel in map(Wheel, sorted(WHEELHOUSE.glob("*.whl")))}


WHEELS = all_wheels()
each_wheel = pytest.mark.parametrize("package", sorted(NATIVE | PURE | {""}))


def test_there_is_one_wheel_a_package_and_the_umbrella() -> None:
    assert set(WHEELS) == NATIVE | PURE | {""}
    assert len(list(WHEELHOUSE.iterdir())) == len(WHEELS)


def test_no_two_wheels_hold_the_same_file() -> None:
    count = Counter(name for wheel in WHEELS.values() for name in wheel.content)
    assert not [name for name, times in count.items() if times > 1]


def test_only_core_holds_the_facade() -> None:
    for package, wheel in WHEELS.items():
        outside = [n for n in wheel.content if not n.startswith(f"stream_attention/{package}/")]
        assert set(outside) == (FACADE if package == "core" else set()), package


@each_wheel
def test_files_are_sources_data_or_libraries(package: str) -> None:
    wheel = WHEELS[package]
    suffixes = {Path(name).suffix for name in wheel.content}
    assert suffixes <= {".py", ".json", ".so", ".typed"}, suffixes
    assert not [n for n in wheel.content if "/tests/" in n or "__pycache__" in n]
    assert bool(wheel.content) == bool(package), "only the umbrella is empty"


@each_wheel
def test_entries_have_one_mode_and_one_time(package: str) -> None:
    for entry in WHEELS[package].entries:
        assert stat.S_IMODE(entry.external_attr >> 16) == 0o644, entry.filename
        assert entry.date_time == (2020, 2, 2, 0, 0, 0), entry.filename


@each_wheel
def test_record_lists_every_file_with_its_hash(package: str) -> None:
    wheel = WHEELS[package]
    rows = list(csv.reader(wheel.archive.read(f"{wheel.info}/RECORD").decode().splitlines()))
    assert {row[0] for row in rows} == {entry.filename for entry in wheel.entries}
    for name, digest, size in rows:
        if not name.endswith("/RECORD"):
            data = wheel.archive.read(name)
            raw = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert (digest, int(size)) == (f"sha256={raw}", len(data)), name


@each_wheel
def test_metadata_is_the_same_everywhere(package: str) -> None:
    wheel = WHEELS[package]
    assert wheel.version == WHEELS["core"].version == wheel.metadata["Version"]
    assert wheel.metadata["License-Expression"] == "Apache-2.0"
    assert f"{wheel.info}/licenses/LICENSE" in wheel.archive.namelist()
    assert wheel.metadata["Requires-Python"] == ">=3.10"
    assert wheel.metadata["Summary"]
    for requirement in wheel.requirements:
        if requirement.name.startswith("stream-attention"):
            assert str(requirement.specifier) == f"=={wheel.version}", requirement


def test_version_is_the_one_in_core() -> None:
    scope: dict[str, str] = {}
    exec(WHEELS["core"].archive.read("stream_attention/core/version.py"), scope)
    assert {wheel.version for wheel in WHEELS.values()} == {scope["__version__"]}


def test_umbrella_requires_the_portable_packages_and_offers_extras() -> None:
    umbrella = WHEELS[""]
    by_extra: dict[str, set[str]] = {}
    for requirement in umbrella.requirements:
        extra = (
            str(requirement.marker).partition(" == ")[2].strip('"') if requirement.marker else ""
        )
        by_extra.setdefault(extra, set()).add(requirement.name.removeprefix("stream-attention-"))
    assert by_extra == {
        "": {"core", "planner", "policies", "flows"},
        "sm80": {"kernels-sm80"},
        "sm90": {"kernels-sm90"},
        "sm100": {"kernels-sm100"},
        "cuda": {"kernels-sm80", "kernels-sm90", "kernels-sm100"},
        "bench": {"bench"},
    }
    assert set(umbrella.metadata.get_all("Provides-Extra")) == set(by_extra) - {""}
    assert umbrella.metadata["Description-Content-Type"] == "text/markdown"


@each_wheel
def test_only_native_wheels_are_bound_to_a_platform(package: str, tmp_path: Path) -> None:
    wheel = WHEELS[package]
    libraries = [name for name in wheel.content if name.endswith(".so")]
    if package not in NATIVE:
        assert wheel.path.name.endswith("-py3-none-any.whl")
        assert not libraries
        assert wheel.header("WHEEL")["Root-Is-Purelib"] == "true"
        return
    assert len(libraries) == 1
    assert libraries[0].removesuffix(".so") + ".resources.json" in wheel.content
    library = Path(wheel.archive.extract(libraries[0], tmp_path))
    assert wheel.platform == platform_tag([read_needs(library)])
    assert wheel.header("WHEEL").get_all("Tag") == [f"py3-none-{wheel.platform}"]
    assert wheel.header("WHEEL")["Root-Is-Purelib"] == "false"


def imported(wheel: Wheel) -> set[str]:
    """The distributions that a wheel's modules import, anywhere in the file; its own left out."""
    found = set()
    for name in wheel.content:
        if not name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(wheel.archive.read(name))):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                inner = f"{node.module}.{node.names[0].name}"
                modules = [inner if node.module == "stream_attention" else str(node.module)]
            for module in modules:
                top, _, rest = module.partition(".")
                if top == "stream_attention":
                    package = rest.partition(".")[0]
                    own = package in ("", wheel.package) or package not in NATIVE | PURE
                    found |= set() if own else {f"stream-attention-{package.replace('_', '-')}"}
                elif top not in sys.stdlib_module_names:
                    found.add(DISTRIBUTION_OF.get(top, top))
    return found


@each_wheel
def test_requirements_cover_what_the_modules_import(package: str) -> None:
    required = {requirement.name for requirement in WHEELS[package].requirements}
    optional = OPTIONAL_IMPORTS.get(package, set())
    assert imported(WHEELS[package]) - optional <= required
