"""Mutants of a module: its source with one decision flipped, each to be noticed by a scenario.

A scenario is a function of the module that it judges. Scenarios that pass on the module and on one
of its mutants do not say what that line is for.
"""

from __future__ import annotations

import ast
import copy
import pathlib
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator

Scenario = Callable[[types.ModuleType], None]

_FLIPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_SIGNS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


def tree_of(module: types.ModuleType) -> ast.Module:
    """The module's source."""
    assert module.__file__ is not None
    return ast.parse(pathlib.Path(module.__file__).read_text(encoding="utf-8"))


def mutants(
    module: types.ModuleType, equivalent: Collection[str] = ()
) -> Iterator[tuple[str, ast.Module]]:
    """`(expression and its change, tree)`: a comparison, connective, negation, sign, number or
    extremum changed in each. equivalent: expressions whose change nothing can show.
    """
    tree = tree_of(module)
    for index, node in enumerate(ast.walk(tree)):
        for what, change in _changes(node):
            spelled = ast.unparse(node)
            if spelled not in equivalent:
                copied = copy.deepcopy(tree)
                change(list(ast.walk(copied))[index])
                line = getattr(node, "lineno", 0)
                yield f"line {line}: {spelled} [{what}]", ast.fix_missing_locations(copied)


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[..., None]]]:
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            to = _FLIPS[type(operator)]
            yield (
                to.__name__,
                lambda copied, place=place, to=to: copied.ops.__setitem__(place, to()),
            )
    if isinstance(node, ast.BoolOp):
        other: type = ast.And if isinstance(node.op, ast.Or) else ast.Or
        yield other.__name__, lambda copied: setattr(copied, "op", other())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield (
            "not twice",
            lambda copied: setattr(copied, "operand", ast.UnaryOp(ast.Not(), copied.operand)),
        )
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        sign = _SIGNS[type(node.op)]
        yield sign.__name__, lambda copied: setattr(copied, "op", sign())
    if isinstance(node, ast.Name) and node.id in _NAMES:
        name = _NAMES[node.id]
        yield name, lambda copied: setattr(copied, "id", name)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value / 2 + 0.25
        yield f"{value}", lambda copied: setattr(copied, "value", value)


def is_killed(module: types.ModuleType, tree: ast.Module, scenarios: Iterable[Scenario]) -> bool:
    """Whether a scenario fails on `module` made anew from `tree`."""
    made = types.ModuleType(f"{module.__name__}_mutant")
    sys.modules[made.__name__] = made  # records look for their own module
    try:
        exec(compile(tree, made.__name__, "exec"), made.__dict__)
        for scenario in scenarios:
            scenario(made)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # what pytest raises where nothing was raised is no Exception
        return True
    finally:
        del sys.modules[made.__name__]
    return False


def survivors(
    module: types.ModuleType, scenarios: Collection[Scenario], equivalent: Collection[str] = ()
) -> tuple[list[str], int]:
    """The mutants that no scenario fails on, and how many mutants there were.

    Raises `AssertionError` where a scenario fails on the module itself, and where an expression of
    `equivalent` is not in its source.
    """
    tree = tree_of(module)
    spelled = {ast.unparse(node) for node in ast.walk(tree)}
    assert set(equivalent) <= spelled, set(equivalent) - spelled
    assert not is_killed(module, tree, scenarios)
    every = list(mutants(module, equivalent))
    return [what for what, each in every if not is_killed(module, each, scenarios)], len(every)
