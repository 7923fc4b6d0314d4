"""Registry mode, by reading: it cannot be run where the registries hold no newer Bazel."""

import pathlib
import re

import lint_tree
import mode_rules
import pytest


def text_of(path):
    return pathlib.Path(path).read_text()


def stand_in(label):
    """The stand-in's file for a label like "@rules_cc//cc:defs.bzl", in runfiles."""
    repository, _, rest = label[1:].partition("//")
    return pathlib.Path("..", repository, rest.replace(":", "/"))


def module_calls(name):
    return [call for call in mode_rules.calls(text_of("MODULE.bazel")) if call[0] == name]


def problems_of_loads(text, read=text_of):
    """One sentence per external symbol that not both modes define."""
    found = []
    for label, name in mode_rules.loads(text):
        if not label.startswith("@"):
            continue
        if name not in mode_rules.PUBLIC_SYMBOLS.get(label, ()):
            found.append(f"{label} does not define {name} in registry mode")
        elif name not in mode_rules.defined(read(stand_in(label))):
            found.append(f"{label} does not define {name} in air-gapped mode")
    return found


def build_files():
    return [p for p in lint_tree.sources(".bazel") if p.name == "BUILD.bazel"]


def test_every_loaded_symbol_is_one_that_both_modes_define():
    files = build_files() + lint_tree.sources(".bzl")
    found = [f"{path}: {problem}" for path in files for problem in problems_of_loads(text_of(path))]
    assert found == []


def test_a_symbol_of_one_mode_only_is_found():
    assert problems_of_loads('load("@rules_python//python:defs.bzl", "py_wheel")') == [
        "@rules_python//python:defs.bzl does not define py_wheel in registry mode"
    ]
    assert problems_of_loads('load("@rules_python//python:defs.bzl", x = "py_import")') == [
        "@rules_python//python:defs.bzl does not define py_import in air-gapped mode"
    ]


def test_build_files_call_only_what_both_bazels_have():
    assert {
        str(p): names for p in build_files() if (names := mode_rules.unknown_names(text_of(p)))
    } == {}


def test_macros_use_only_native_names_of_both_bazels():
    files = lint_tree.sources(".bzl")
    assert {str(p): names for p in files if (names := mode_rules.unknown_native(text_of(p)))} == {}


def test_a_native_rule_that_bazel_8_dropped_is_found():
    assert mode_rules.unknown_names('sh_test(name = "a")\nfilegroup(name = "b")\n') == {"sh_test"}
    assert mode_rules.unknown_native("def f():\n    native.py_test()\n") == {"py_test"}


def test_module_and_workspace_name_the_same_workspace():
    (module,) = module_calls("module")
    workspaces = [c for c in mode_rules.calls(text_of("WORKSPACE")) if c[0] == "workspace"]
    assert module[2]["name"] == workspaces[0][2]["name"] != "stream_attention"


def test_module_pins_every_dependency_to_one_version():
    deps = module_calls("bazel_dep")
    assert len(deps) >= 5
    for _, _, keywords in deps:
        assert re.fullmatch(r"\d+\.\d+\.\d+", keywords["version"]), keywords
    for _, _, keywords in module_calls("git_override"):
        assert re.fullmatch(r"[0-9a-f]{40}", keywords["commit"]), keywords
        assert keywords["module_name"] in [dep[2]["name"] for dep in deps]


def test_every_external_repository_is_one_that_both_modes_make():
    text = text_of("MODULE.bazel")
    in_module = {dep[2]["name"] for dep in module_calls("bazel_dep")}
    in_module |= set(re.findall(r'use_repo\(\w+, "(\w+)"\)', text))
    in_workspace = set(re.findall(r'name = "(\w+)"', text_of("WORKSPACE")))
    used = set()
    for path in build_files() + lint_tree.sources(".bzl"):
        used |= set(re.findall(r'"@(\w+)//', re.sub(r'""".*?"""', "", text_of(path), flags=re.S)))
    used -= {"bazel_tools"}
    assert {"pypi", "rules_python", "cuda"} <= used
    assert used - in_module == set()
    assert used - in_workspace == set()


def test_every_label_of_the_tree_in_module_bazel_exists():
    labels = re.findall(r'"//([\w/]+):([\w.]+)"', text_of("MODULE.bazel"))
    assert len(labels) >= 3
    assert [label for label in labels if not pathlib.Path(*label).exists()] == []


def test_both_modes_have_the_same_cuda():
    (redist,) = module_calls("cuda.redist_json")
    lock = text_of("tools/cuda/nvcc.lock")
    # The release 13.0.2 holds nvcc 13.0.88; see NVIDIA's list of components of that release.
    assert redist[2]["version"] == "13.0.2"
    assert "nvidia-cuda-nvcc==13.0.88" in lock
    assert redist[2]["platforms"] == ["linux-x86_64"]


def test_workspace_is_ignored_in_registry_mode():
    code = [line for line in text_of("WORKSPACE.bzlmod").splitlines() if not line.startswith("#")]
    assert code == []
    version = [int(part) for part in text_of(".bazelversion").split(".")]
    assert version >= [7, 4, 0]


def test_bazelrc_holds_only_flags_that_both_bazels_know():
    used = {flag for _, flag in mode_rules.flags(text_of(".bazelrc"))}
    assert used - mode_rules.COMMON_FLAGS == set()
    assert "nosandbox_default_allow_network" in used


@pytest.mark.parametrize("name", ["sm80", "sm90", "sm100", "gpu", "cpu"])
def test_each_config_builds_only_what_its_tests_need(name):
    flags = {f for command, f in mode_rules.flags(text_of(".bazelrc")) if command == f"test:{name}"}
    assert flags == {"build_tests_only", "test_tag_filters"}
