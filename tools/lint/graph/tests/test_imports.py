import dataclasses
import pathlib
import re

import import_rules
import lint_tree
import pytest

FACADE = pathlib.Path("core/stream_attention/__init__.py")
KINDS = ("py_library", "py_binary", "py_test")
REQUIREMENTS = pathlib.Path("tools/python/requirements.in")
# No target imports or starts them.
PACKAGING = {"build", "setuptools", "wheel"}


@pytest.fixture(scope="module")
def targets():
    return [target for target in lint_tree.targets() if target.kind in KINDS]


@pytest.fixture(scope="module")
def rules(targets):
    owners = import_rules.facade_owners(FACADE.read_text())
    return import_rules.ImportRules(targets, owners)


def test_every_import_is_covered_by_a_dep(targets, rules):
    reasons = [
        reason
        for target in targets
        for path in target.files()
        if path.suffix == ".py"
        for reason in rules.check(target, path, path.read_text())
    ]
    assert reasons == []


def test_every_dep_of_a_library_is_imported(targets, rules):
    # Not of tests and binaries: they start programs, and find packages by name.
    libraries = [target for target in targets if target.kind == "py_library"]
    assert len(libraries) > 10
    unused = {target.label: deps for target in libraries if (deps := rules.unused(target))}
    assert unused == {}, "take them out of deps"


def requirements():
    """Names that the workspace asks for."""
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    return {re.match(r"[a-z0-9-]+", line)[0] for line in lines if line.strip()}


def test_every_requirement_is_a_dep_of_some_target(targets):
    deps = {dep.rpartition(":")[2] for target in targets for dep in target.deps}
    assert {"torch", "rich"} < deps and requirements() - deps == PACKAGING


def test_an_unused_dep_is_found(targets, rules):
    (flows,) = [target for target in targets if target.label == "//flows:flows"]
    bad = dataclasses.replace(flows, deps=(*flows.deps, "@pypi//rich:rich"))
    assert rules.unused(bad) == ["@pypi//rich:rich"]


def test_every_module_belongs_to_a_target(targets):
    given = {path for target in targets for path in target.files()}
    # This package's own targets are not in the graph that its tests see.
    here = pathlib.Path("tools/lint/graph")
    loose = [p for p in lint_tree.sources(".py") if p not in given and here not in p.parents]
    assert loose == [], "give each file to a target, above sa_sources() in its BUILD file"


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("import rich.table", "needs the dep @pypi//rich:rich"),
        ("from stream_attention.core import errors", "needs the dep //core:core"),
        ("from stream_attention import PagedKVCache", "needs the dep //core:core"),
        ("import stream_attention.no_such_package", "which no target gives"),
        ("import no_such_distribution", "neither in the tree nor in the lock"),
    ],
)
def test_a_missing_dep_is_found(rules, code, sentence):
    target = lint_tree.Target("py_library", "//flows:flows", (), ("@pypi//numpy:numpy",))
    path = pathlib.Path("flows/stream_attention/flows/bad.py")
    (reason,) = rules.check(target, path, code + "\nimport numpy\n")
    assert sentence in reason


def test_an_absent_package_may_be_tried_inside_a_function(rules):
    target = lint_tree.Target("py_library", "//bench:bench", (), ())
    code = "def peer():\n    import no_such_distribution\n"
    assert list(rules.check(target, pathlib.Path("bench/a.py"), code)) == []


def test_relative_imports_are_resolved():
    path = pathlib.Path("core/stream_attention/core/routes/a.py")
    code = "from . import b\nfrom ..errors import E\n"
    names = [name for name, _ in import_rules.imports(path, code)]
    assert names == ["stream_attention.core.routes.b", "stream_attention.core.errors.E"]
