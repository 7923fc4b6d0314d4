"""Compares what the files of a target import with what the target depends on.

The venv would let any third-party import pass, and the namespace any first-party one that another
dependency happens to bring.
"""

from __future__ import annotations

import ast
import importlib.metadata
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping

import lint_tree

NAMESPACE = "stream_attention"
# pytest comes with sa_py_test.
IMPLICIT = frozenset({"@pypi//pytest:pytest"})


def facade_owners(text: str) -> dict[str, str]:
    """Public name of the facade → module that owns it, from the facade's own `_OWNER` table."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_OWNER":
            return {k: f"{NAMESPACE}.{v}" for k, v in ast.literal_eval(node.value).items()}
    raise AssertionError("the facade has no table _OWNER")


def third_party() -> dict[str, set[str]]:
    """Importable name → labels of the locked packages that bring it."""
    found = {}
    for module, names in importlib.metadata.packages_distributions().items():
        labels = {re.sub(r"[-_.]+", "-", name).lower() for name in names}
        found[module] = {f"@pypi//{name}:{name}" for name in labels}
    return found


def optional_lines(tree: ast.AST) -> set[int]:
    """Lines inside a function or a `try`: imports there may be of something not installed."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Try)):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def imports(path: pathlib.Path, text: str) -> Iterator[tuple[str, bool]]:
    """(dotted name, whether it may be missing) of each import; `from m import n` gives "m.n"."""
    tree = ast.parse(text)
    optional = optional_lines(tree)
    package = path.parts[1:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno in optional
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                base = package[: len(package) - node.level + 1]
                module = ".".join([*base, *([module] if module else [])])
            for alias in node.names:
                yield f"{module}.{alias.name}", node.lineno in optional


def module_name(path: pathlib.Path) -> str:
    """How a file is imported: its path below its package's folder."""
    parts = path.with_suffix("").parts
    if NAMESPACE in parts:
        parts = parts[parts.index(NAMESPACE) :]
    else:
        parts = parts[-1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class ImportRules:
    """The rules for one tree: which target gives which module."""

    def __init__(self, targets: list[lint_tree.Target], owners: Mapping[str, str]):
        self.owners = owners
        self.third_party = third_party()
        self.providers: dict[str, set[str]] = {}
        for target in targets:
            for path in target.files():
                if path.suffix == ".py":
                    self.providers.setdefault(module_name(path), set()).add(target.label)

    def first_party(self, name: str) -> set[str] | None:
        """Targets that give `name`, by its longest prefix that is a module; None if none does."""
        head, _, tail = name.partition(".")
        if head == NAMESPACE and tail in self.owners:
            name = self.owners[tail]
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            found = self.providers.get(".".join(parts[:length]))
            # The facade alone does not give a package that is below it.
            if found and (length > 1 or len(parts) <= 1 or head != NAMESPACE):
                return found
        return None

    def unused(self, target: lint_tree.Target) -> list[str]:
        """Deps that no source of a target imports."""
        paths = [path for path in target.files() if path.suffix == ".py"]
        used: set[str] = set()
        for path in paths:
            for name, _ in imports(path, path.read_text()):
                head = name.partition(".")[0]
                used |= self.first_party(name) or self.third_party.get(head) or set()
        return sorted(set(target.deps) - used)

    def check(self, target: lint_tree.Target, path: pathlib.Path, text: str) -> Iterator[str]:
        """One sentence per import that the target's deps do not cover."""
        have = {target.label, *target.deps, *IMPLICIT}
        for name, optional in imports(path, text):
            head = name.partition(".")[0]
            if head in sys.stdlib_module_names:
                continue
            wanted = self.first_party(name)
            if wanted is None and head == NAMESPACE:
                yield f"{path}: imports {name}, which no target gives"
                continue
            if wanted is None:
                wanted = self.third_party.get(head)
            if wanted is None:
                if not optional:
                    yield f"{path}: imports {name}, which is neither in the tree nor in the lock"
            elif not wanted & have:
                choice = " or ".join(sorted(wanted))
                yield f"{path}: imports {name}, so {target.label} needs the dep {choice}"
