"""What both build modes know, and how to read Bazel's files without Bazel.

BUILD and .bzl files of this tree are also Python as far as `ast` sees it. The tables were read from
the public rules at the versions that MODULE.bazel pins; air-gapped mode's side is checked against
the stand-ins themselves.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

# (repository, file) → symbols that the public rules define there.
PUBLIC_SYMBOLS = {
    "@bazel_skylib//lib:paths.bzl": {"paths"},
    "@rules_cc//cc:defs.bzl": {"cc_binary", "cc_import", "cc_library", "cc_test", "cc_toolchain"},
    "@rules_cc//cc:find_cc_toolchain.bzl": {
        "CC_TOOLCHAIN_ATTRS",
        "find_cc_toolchain",
        "find_cpp_toolchain",
        "use_cc_toolchain",
    },
    "@rules_cc//cc/common:cc_common.bzl": {"cc_common"},
    "@rules_cc//cc/common:cc_info.bzl": {"CcInfo"},
    "@rules_python//python:defs.bzl": {
        "PyInfo",
        "PyRuntimeInfo",
        "current_py_toolchain",
        "py_binary",
        "py_import",
        "py_library",
        "py_runtime",
        "py_runtime_pair",
        "py_test",
    },
    "@rules_python//python:py_runtime.bzl": {"py_runtime"},
    "@rules_python//python:py_runtime_pair.bzl": {"py_runtime_pair"},
}

# Rules and functions of BUILD files that Bazel 4.2.3 and 8 both have without a load. Not cc_*, py_*
# and sh_*: Bazel 8 has dropped them, or is about to.
BUILD_NAMES = frozenset(
    """
    alias config_setting constraint_setting constraint_value exports_files filegroup genquery
    genrule glob package package_group select test_suite toolchain toolchain_type
    """.split()
)
# `native.NAME` in macros.
NATIVE_NAMES = BUILD_NAMES | {"existing_rule", "existing_rules", "package_name", "repository_name"}
# Starlark itself.
STARLARK_NAMES = frozenset(
    """
    all any bool dict dir enumerate fail getattr hasattr hash int len list load max min print
    range repr reversed sorted str tuple type zip
    """.split()
)
# Flags that .bazelrc may hold: both versions know them.
COMMON_FLAGS = frozenset(
    """
    build_tests_only incompatible_strict_action_env jobs local_test_jobs
    nosandbox_default_allow_network test_env test_output test_tag_filters
    """.split()
)


def loads(text: str) -> Iterator[tuple[str, str]]:
    """(label, symbol) of every symbol that a Bazel file loads; the name in the loaded file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "load":
            label, *names = [ast.literal_eval(arg) for arg in node.args]
            for name in names + [ast.literal_eval(keyword.value) for keyword in node.keywords]:
                yield label, name


def _value(node: ast.expr) -> object:
    """A constant, or the source text of anything else."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def calls(text: str) -> list[tuple[str, list[object], dict[str, object]]]:
    """(function, positional, keywords) of each top-level call of a Bazel file."""
    found = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value
            function = ast.unparse(call.func)
            args = [_value(arg) for arg in call.args]
            keywords = {str(k.arg): _value(k.value) for k in call.keywords}
            found.append((function, args, keywords))
    return found


def defined(text: str) -> set[str]:
    """Names that a .bzl file exports."""
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return {name for name in names if not name.startswith("_")}


def unknown_names(text: str) -> set[str]:
    """Functions that a BUILD file calls and that neither a load nor both Bazel versions give."""
    tree = ast.parse(text)
    known = BUILD_NAMES | STARLARK_NAMES
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "load":
            known |= {ast.literal_eval(arg) for arg in node.args[1:]}
            known |= {str(keyword.arg) for keyword in node.keywords}
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return called - known


def unknown_native(text: str) -> set[str]:
    """`native.NAME` in a .bzl file for a NAME that not both Bazel versions have."""
    return {
        node.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "native"
    } - NATIVE_NAMES


def flags(text: str) -> Iterator[tuple[str, str]]:
    """(command with config, flag name) of every flag in a bazelrc."""
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if words and not words[0].endswith("import"):
            for word in words[1:]:
                yield words[0], word.lstrip("-").partition("=")[0]
