"""Flows by name: `@register("name")` on a class, `load_flow("name", keyword=...)` anywhere."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from stream_attention.core.errors import Faults
from stream_attention.flows.flow import Flow
from stream_attention.flows.values import nearest

FlowClass = TypeVar("FlowClass", bound=type)

_FLOWS: dict[str, type[Flow]] = {}


def register(name: str) -> Callable[[FlowClass], FlowClass]:
    """Class decorator: make a flow loadable by `name`. A name is given once, else `ValueError`."""

    def decorate(flow_class: FlowClass) -> FlowClass:
        if not (isinstance(name, str) and name.isidentifier()):
            raise ValueError(f"name={name!r}: must be an identifier; use 'my_flow'")
        if not (inspect.isclass(flow_class) and issubclass(flow_class, Flow)):
            raise ValueError(f"flow={flow_class!r}: must be a subclass of Flow; use class X(Flow)")
        if name in _FLOWS:
            taken = _FLOWS[name]
            raise ValueError(
                f"name={name!r}: is taken by {taken.__module__}.{taken.__qualname__}; "
                f"use {name + '_2'!r}"
            )
        _FLOWS[name] = flow_class
        flow_class.registered_name = name
        return flow_class

    return decorate


def registered_flows() -> dict[str, type[Flow]]:
    """Every flow by name: those of the library, and what was registered beside them."""
    library = importlib.import_module("stream_attention.flows.library")
    for module in pkgutil.iter_modules(library.__path__, library.__name__ + "."):
        importlib.import_module(module.name)
    return dict(sorted(_FLOWS.items()))


def load_flow(name_or_file: str | Path, **kwargs: Any) -> Flow:
    """A flow by its registered name, or the one that a Python file registers.

    kwargs: the constructor's. A name, a file or keywords that do not fit raise `ValueError`, with
    the nearest one that does.
    """
    text = str(name_or_file)
    flow_class = _of_file(Path(text)) if text.endswith(".py") else _of_name(text)
    _check_keywords(flow_class, kwargs)
    return flow_class(**kwargs)


def _of_name(name: str) -> type[Flow]:
    flows = registered_flows()
    if name not in flows:
        raise ValueError(f"flow={name!r}: is not registered; use {nearest(name, flows)}")
    return flows[name]


def _of_file(path: Path) -> type[Flow]:
    if not path.is_file():
        raise ValueError(f"flow={str(path)!r}: there is no such file; use a file or a name")
    module_name = f"_flow_file_{path.resolve().as_posix().encode().hex()}"
    if module_name not in sys.modules:  # a file registers its names once
        before = dict(_FLOWS)
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            for name in set(_FLOWS) - set(before):
                del _FLOWS[name]
            raise
    found = [flow for flow in _FLOWS.values() if flow.__module__ == module_name]
    if len(found) != 1:
        names = ", ".join(repr(flow.registered_name) for flow in found) or "none"
        raise ValueError(
            f"flow={str(path)!r}: must register one flow, registers {names}; use one @register"
        )
    return found[0]


def _check_keywords(flow_class: type[Flow], kwargs: dict[str, Any]) -> None:
    parameters = inspect.signature(flow_class).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    named = [n for n, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    faults = Faults()
    for name, value in kwargs.items():
        if name not in parameters and not open_ended:
            faults.add(name, value, "is no keyword of this flow", nearest(name, named))
    for name in named:
        if parameters[name].default is inspect.Parameter.empty and name not in kwargs:
            faults.add(name, None, "has no default and must be given")
    faults.raise_if_any(f"flow {flow_class.registered_name}")
