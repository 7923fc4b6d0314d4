"""The edges between packages, from the closure of every rule of the tree, and the shards."""

import pathlib

import lint_tree
import mode_rules
import pytest

KERNELS = ("kernels_sm80", "kernels_sm90", "kernels_sm100")
MAY_USE = {
    "core": set(),
    "planner": {"core"},
    "policies": {"core", "planner"},
    "flows": {"core", "planner"},
    **{kernels: {"core"} for kernels in KERNELS},
}
ARCHS = ("sm80", "sm90", "sm100")
# Bazel macros, toolchains and the pytest runner; no package imports a module from there.
BUILD_ONLY = "tools"

GROUPS = pathlib.Path("tools/visibility/BUILD.bazel")


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


def visibility_groups():
    """package_group → top-level packages in it."""
    found = {}
    for function, _, keywords in mode_rules.calls(GROUPS.read_text()):
        if function == "package_group":
            includes = keywords.get("includes", [])
            listed = {name[2:].partition("/")[0] for name in keywords["packages"]}
            found[keywords["name"]] = (listed, includes)
    return found


@pytest.mark.parametrize("package", [*sorted(MAY_USE), "bench"])
def test_visibility_allows_exactly_the_edges_of_the_architecture(package):
    groups = visibility_groups()
    listed, includes = groups[f"{package}_users"]
    for name in includes:
        listed = listed | groups[name[1:]][0]
    allowed = {user for user, used in MAY_USE.items() if package in used}
    assert listed == allowed | {package, "bench", "tools"}


@pytest.mark.parametrize("package", [*sorted(MAY_USE), "bench"])
def test_each_package_is_visible_to_its_users_only(package):
    text = pathlib.Path(package, "BUILD.bazel").read_text()
    assert f"//tools/visibility:{package}_users" in text
    assert "//visibility:public" not in text


@pytest.mark.parametrize("arch", ARCHS)
def test_shard_of_an_architecture_has_all_tests_of_its_package_and_no_other(arch):
    tests = [target for target in lint_tree.targets() if target.kind == "py_test"]
    own = [target for target in tests if target.package == f"kernels_{arch}"]
    assert own
    assert [target.label for target in own if arch not in target.tags] == []
    others = {f"kernels_{other}" for other in ARCHS if other != arch}
    tagged = [target for target in tests if arch in target.tags]
    assert [target.label for target in tagged if target.package in others] == []
    closures = lint_tree.closures()
    for target in tagged:
        assert not used_packages(closures[target.package]) & others, target.label


def test_every_test_that_the_gpu_shard_runs_is_skipped_by_the_cpu_shard():
    rc = pathlib.Path(".bazelrc").read_text()
    assert "test:gpu --build_tests_only --test_tag_filters=gpu\n" in rc
    assert "test:cpu --build_tests_only --test_tag_filters=-gpu\n" in rc
    assert [target for target in lint_tree.targets() if "gpu" in target.tags]
