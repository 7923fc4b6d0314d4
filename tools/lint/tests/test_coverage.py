"""That the lint tests see the whole tree.

Bazel's globs stop at a package's border, so a package that is not in packages.bzl would be
invisible to all other lint tests. This one alone looks at the real folder, and so is never cached.
"""

import os
import pathlib

import lint_tree
import pytest

SKIPPED_FOLDERS = frozenset(("dist", "__pycache__"))
# Air-gapped stand-ins: repositories of their own, which .bazelignore keeps out of the tree.
STAND_INS = "tools/airgap/rules_", "tools/airgap/remote_coverage_tools"


@pytest.fixture(scope="module")
def root():
    folder = pathlib.Path(os.path.realpath("MODULE.bazel")).parent
    assert (folder / "WORKSPACE").exists()
    return folder


def walk(root):
    for folder, folders, files in os.walk(root):
        here = pathlib.Path(folder).relative_to(root)
        folders[:] = [
            name
            for name in folders
            if name not in SKIPPED_FOLDERS
            and (name == ".ci" or not name.startswith("."))
            and not name.endswith((".egg-info", "_cache"))
            and not (here == pathlib.Path(".") and name.startswith("bazel-"))
        ]
        yield from (here / name for name in files)


def test_every_file_of_the_tree_is_seen(root):
    seen = set(lint_tree.sources())
    missing = [
        str(path)
        for path in walk(root)
        if (path.suffix in lint_tree.SUFFIXES or path.name in lint_tree.BARE_NAMES)
        and path not in seen
        and path.name != "user.bazelrc"
        # //tools/cuda:stage_libraries lays these beside the sources, for use without Bazel.
        and not path.name.endswith((".ptxas.txt", ".resources.json"))
        and not str(path).startswith(STAND_INS)
    ]
    assert missing == [], "list the package in //tools/lint:packages.bzl"


def test_every_build_file_ends_with_sa_sources(root):
    late = []
    for path in walk(root):
        if path.name == "BUILD.bazel" and not str(path).startswith(STAND_INS):
            text = (root / path).read_text()
            if "\nsa_sources(" not in text or "\n)\n" in text.partition("\nsa_sources(")[2][:-2]:
                late.append(str(path))
    assert late == []
