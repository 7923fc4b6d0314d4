"""What the lint tests look at: the tree's sources in runfiles, and its targets as query XML."""

from __future__ import annotations

import pathlib
import re
import shutil
import xml.etree.ElementTree
from collections.abc import Iterator
from dataclasses import dataclass

# Files of these kinds are text of ours. Programs that Bazel made have no suffix.
SUFFIXES = frozenset(
    (".bazel", ".bzl", ".bzlmod", ".cfg", ".cu", ".cuh", ".h", ".in", ".ini", ".json", ".lock")
) | frozenset((".md", ".py", ".pyi", ".sh", ".toml", ".txt", ".typed", ".yml"))
BARE_NAMES = frozenset(
    (".bazelignore", ".bazelrc", ".bazelversion", ".gitignore", "LICENSE", "WORKSPACE")
) | frozenset(("bazel", "bazelrc", "bazelw", "run"))


def sources(*suffixes: str) -> list[pathlib.Path]:
    """Paths of the tree's files, relative to its root (the working directory), sorted."""
    found = []
    for path in pathlib.Path(".").rglob("*"):
        ours = path.suffix in SUFFIXES or path.name in BARE_NAMES
        # Bazel 4 lays other repositories below the folder "external".
        if path.is_file() and ours and path.parts[0] != "external":
            if not suffixes or path.suffix in suffixes:
                found.append(path)
    if not found:
        raise AssertionError(f"no file with {suffixes or 'any suffix'} in runfiles")
    return sorted(found)


def stage(destination: pathlib.Path, paths: list[pathlib.Path]) -> pathlib.Path:
    """Copy files below `destination`: the tools would follow the links of runfiles elsewhere."""
    for path in paths:
        target = destination / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return destination


def canonical(label: str) -> str:
    """A label without what the two build modes write differently."""
    label = re.sub(r"^@@?(?:[^/]*[+~])?pypi//", "@pypi//", label)
    return re.sub(r"^@@?//", "//", label)


@dataclass(frozen=True, slots=True)
class Target:
    """A rule of the tree: its kind ("py_library"), label, sources, direct dependencies and tags."""

    kind: str
    label: str
    srcs: tuple[str, ...]
    deps: tuple[str, ...]
    tags: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """The Bazel package, e.g. "core"."""
        return self.label[2:].partition(":")[0]

    def files(self) -> list[pathlib.Path]:
        """The sources that lie in the target's own package."""
        prefix = f"//{self.package}:"
        own = [src[len(prefix) :] for src in self.srcs if src.startswith(prefix)]
        if self.kind == "py_test":
            # The macro adds the runner to each test; it has a library target of its own.
            own = [src for src in own if src != "pytest_main.py"]
        return [pathlib.Path(self.package) / src for src in own]


def parse_targets(text: str) -> list[Target]:
    """The rules in one `:targets` file."""
    # Bazel declares XML 1.1, which expat does not know; the text itself is plain XML 1.0.
    root = xml.etree.ElementTree.fromstring(re.sub(r"^<\?xml.*?\?>", "", text))
    found = []
    for rule in root.iter("rule"):
        labels: dict[str, tuple[str, ...]] = {"srcs": (), "deps": (), "tags": ()}
        for entry in rule.iter("list"):
            if entry.get("name") in labels:
                values = [canonical(item.get("value", "")) for item in entry]
                labels[entry.get("name", "")] = tuple(values)
        found.append(Target(rule.get("class", ""), canonical(rule.get("name", "")), **labels))
    return found


def targets() -> Iterator[Target]:
    """All rules of the tree."""
    files = sorted(pathlib.Path(".").rglob("targets"))
    if not files:
        raise AssertionError("no :targets file in runfiles")
    for path in files:
        yield from parse_targets(path.read_text())


def closures() -> dict[str, set[str]]:
    """Package → the labels that its rules depend on."""
    files = sorted(pathlib.Path(".").rglob("closure"))
    if not files:
        raise AssertionError("no :closure file in runfiles")
    return {
        str(path.parent): {canonical(line) for line in path.read_text().split()} for path in files
    }
