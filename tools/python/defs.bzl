"""Macros for the tree's Python targets, and the conventions that go with them.

A package `foo` that holds `foo/stream_attention/foo/*.py` and `foo/tests/test_*.py` writes

    load("//tools/python:defs.bzl", "sa_py_library", "sa_py_test", "sa_sources")

    sa_py_library(
        name = "foo",
        srcs = glob(["stream_attention/**/*.py"]),
        visibility = ["//tools/visibility:foo_users"],
        deps = ["//core", "@pypi//torch"],
    )

    sa_py_test(
        name = "test_bar",
        srcs = ["tests/test_bar.py"],
        deps = [":foo", "@pypi//torch"],
    )

    sa_sources()

* Every BUILD file ends with `sa_sources()` and its package is listed in //tools/lint:packages.bzl: the lint
  tests see a package through what that macro makes. A test fails for a file or a target that it misses.
* `deps` names what `srcs` import, first-party and third-party; a lint test compares both.
* One sa_py_test per test file. A test that needs a GPU has the tag "gpu" (any CUDA device) and, where it
  needs one architecture, "sm80", "sm90" or "sm100" too: without the device each of its tests is reported
  as skipped, with the reason. A test of one architecture that needs no GPU has the architecture's tag alone.
"""

load("@rules_python//python:defs.bzl", "py_binary", "py_library", "py_test")

_MAIN = "//tools/python:pytest_main.py"

_ARCH_TAGS = ["sm80", "sm90", "sm100"]

# The namespace's root in a package: `stream_attention` lies beside the BUILD file.
_IMPORTS = ["."]

def sa_sources(name = "sources", include = ["**"]):
    """Gives the package's files and targets to the lint tests; the last statement of every BUILD file.

    `:sources` are the package's files, `:targets` its rules as query XML (srcs and deps of each), `:closure`
    the labels that they depend on.

    Args:
      name: leave the default; the lint tests ask for these names.
      include: globs; only the root package narrows it.
    """
    rules = ["//%s:%s" % (native.package_name(), rule) for rule in native.existing_rules()]
    native.filegroup(
        name = name,
        srcs = native.glob(
            include,
            exclude = [
                "**/__pycache__/**",
                "**/.*_cache/**",
                "**/*.egg-info/**",
                "**/.hypothesis/**",
                "**/*.pyc",
                # Copies of built libraries, for use without Bazel (//tools/cuda:stage_libraries).
                "**/*.ptxas.txt",
                "**/*.resources.json",
                "**/*.so",
                "bazel-*/**",
                "dist/**",
            ],
        ),
        visibility = ["//tools:__subpackages__"],
    )
    if not rules:
        rules = ["//%s:%s" % (native.package_name(), name)]
    for query, expression, output in [
        ("targets", "set(%s)", "xml"),
        ("closure", "deps(set(%s))", "label"),
    ]:
        native.genquery(
            name = query,
            expression = expression % " ".join(rules),
            opts = [
                "--noimplicit_deps",
                "--output=" + output,
            ],
            scope = rules,
            testonly = True,
            visibility = ["//tools:__subpackages__"],
        )

def sa_py_library(name, srcs = [], deps = [], data = [], **kwargs):
    """A py_library whose package folder is a root of the `stream_attention` namespace.

    Args:
      name: the target; a package's own library is named like the package.
      srcs: Python files.
      deps: what srcs import, e.g. "//core" or "@pypi//torch".
      data: files read at run time.
      **kwargs: the other attributes of py_library.
    """
    py_library(
        name = name,
        srcs = srcs,
        data = data,
        imports = _IMPORTS,
        deps = deps,
        **kwargs
    )

def sa_py_binary(name, srcs, main = None, deps = [], data = [], **kwargs):
    """A py_binary in the venv's interpreter; no __init__.py is made up in its runfiles.

    Args:
      name: the target.
      srcs: Python files.
      main: the file to run; default: the only one of srcs.
      deps: what srcs import.
      data: files read at run time.
      **kwargs: the other attributes of py_binary.
    """
    py_binary(
        name = name,
        srcs = srcs,
        main = main or srcs[0],
        data = data,
        imports = _IMPORTS,
        legacy_create_init = 0,
        deps = deps,
        **kwargs
    )

def sa_py_test(
        name,
        srcs,
        deps = [],
        data = [],
        tags = [],
        size = "medium",
        env = {},
        **kwargs):
    """Runs the files `srcs` with pytest.

    Args:
      name: the target, named like the file.
      srcs: test files; all are collected.
      deps: what they import; pytest is there without being named.
      data: files read at run time, relative to the working directory (the workspace's root).
      tags: "gpu", "sm80", "sm90", "sm100", "manual", ...
      size: Bazel's test size; medium has a limit of 5 minutes.
      env: more variables for the tests.
      **kwargs: the other attributes of py_test, e.g. shard_count.
    """
    args = [native.package_name() + "/" + src for src in srcs]
    main_deps = ["@pypi//pytest"]
    if "gpu" in tags:
        archs = [tag for tag in tags if tag in _ARCH_TAGS] or ["any"]
        args = ["--gpu=" + arch for arch in archs] + args
        main_deps.append("@pypi//torch")

        # The device and its driver are no inputs that Bazel knows: a result must not be reused.
        tags = tags + ["external"]
    py_test(
        name = name,
        size = size,
        srcs = srcs + [_MAIN],
        main = _MAIN,
        args = args,
        data = data,
        env = dict({"PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1"}, **env),
        imports = _IMPORTS,
        legacy_create_init = 0,
        tags = tags,
        deps = deps + [dep for dep in main_deps if dep not in deps],
        **kwargs
    )
