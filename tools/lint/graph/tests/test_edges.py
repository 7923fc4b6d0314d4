"""The edges between packages, from the closure of every rule of the tree."""

import lint_tree
import pytest

KERNELS = ("kernels_sm80", "kernels_sm90", "kernels_sm100")
MAY_USE = {
    "core": set(),
    "planner": {"core"},
    "policies": {"core", "planner"},
    "flows": {"core", "planner"},
    **{kernels: {"core"} for kernels in KERNELS},
}
# Bazel macros, toolchains and the pytest runner; no package imports a module from there.
BUILD_ONLY = "tools"


def used_packages(labels):
    """Top-level packages of first-party labels."""
    return {
        label[2:].replace(":", "/").partition("/")[0] for label in labels if label.startswith("//")
    }


def forbidden_edges(package, labels):
    """Top-level packages that `package` depends on and must not."""
    allowed = MAY_USE[package] | {package, BUILD_ONLY}
    return sorted(used_packages(labels) - allowed)


def top(package):
    return package.partition("/")[0]


@pytest.mark.parametrize("package", sorted(MAY_USE))
def test_package_depends_on_its_allowed_packages_only(package):
    closures = [labels for name, labels in lint_tree.closures().items() if top(name) == package]
    assert closures, f"no :closure of {package}: is it in //tools/lint:packages.bzl?"
    for labels in closures:
        assert forbidden_edges(package, labels) == []


@pytest.mark.parametrize("package", KERNELS)
def test_kernel_packages_are_independent(package):
    siblings = set(KERNELS) - {package}
    for name, labels in lint_tree.closures().items():
        if top(name) == package:
            assert not used_packages(labels) & siblings


def test_nobody_depends_on_bench():
    for name, labels in lint_tree.closures().items():
        if top(name) not in ("bench", "tools"):
            assert "bench" not in used_packages(labels), name


def test_no_package_has_a_python_library_of_tools_in_its_deps():
    for target in lint_tree.targets():
        if top(target.package) != "tools" and target.kind in ("py_library", "py_binary"):
            assert not [dep for dep in target.deps if dep.startswith("//tools")], target.label


def test_a_forbidden_edge_is_found():
    labels = {"//kernels_sm80:kernels_sm80", "//core:core", "//tools/python:pytest_main.py"}
    assert forbidden_edges("kernels_sm90", labels) == ["kernels_sm80"]
    assert forbidden_edges("kernels_sm80", labels) == []
    assert forbidden_edges("core", {"//planner/x:y"}) == ["planner"]
