"""What the compiler said of the kernels of a native library: read from the file beside it.

`tools/cuda/ptxas_resources.py` writes the file from the report of ptxas when the library is built,
and the wheel brings both. Reading it needs no GPU and does not load the library.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stream_attention.core.arch_limits import ResourceFacts
from stream_attention.core.ir import Rule, check_rules, evaluable_repr, is_int, is_name
from stream_attention.core.json_text import parse_json
from stream_attention.core.native import NativeLibrary
from stream_attention.core.schedule import KernelSchedule

SUFFIX = ".resources.json"
FORMAT = 1


class ResourcesError(RuntimeError):
    """The facts of a library's kernels are not there, or are not understood; says why."""


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class CompiledKernel:
    """What ptxas says of one instance of a kernel.

    target: what it is compiled for. registers, stack_bytes, spill_bytes (stores and loads): of a
    thread. barriers, shared_bytes (static): of a block.
    """

    target: str
    registers: int
    barriers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int

    def __post_init__(self) -> None:
        check_rules(self, _COMPILED_RULES)

    __repr__ = evaluable_repr


def _count(name: str, low: int) -> Rule:
    return Rule(
        name,
        f"must be an int >= {low}",
        lambda k: is_int(getattr(k, name)) and getattr(k, name) >= low,
    )


_COMPILED_RULES = (
    Rule("target", "must be a non-empty string", lambda k: is_name(k.target)),
    _count("registers", 1),
    *(_count(name, 0) for name in ("barriers", "stack_bytes", "spill_bytes", "shared_bytes")),
)


def parse(text: str, name: str) -> dict[str, CompiledKernel]:
    """Instance → what ptxas says of it; `ResourcesError` for text of another kind.

    name: of the file, for the error.
    """
    try:
        content: Any = parse_json(text)
        if content["format"] != FORMAT:
            raise ResourcesError(
                f"{name} has format {content['format']!r}, this core reads {FORMAT}"
            )
        found = {key: CompiledKernel(**said) for key, said in content["kernels"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ResourcesError(f"{name} is not understood: {error!r}") from error
    if not found:
        raise ResourcesError(f"{name} names no kernel")
    return found


@functools.cache
def _read(package: str, name: str) -> dict[str, CompiledKernel] | str:
    try:
        text = importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8")
    except (OSError, ImportError, UnicodeDecodeError) as error:
        return (
            f"{name} is not in package {package}: {error!r}; install its wheel, or "
            "./bazelw run //tools/cuda:stage_libraries"
        )
    try:
        return parse(text, name)
    except ResourcesError as error:
        return str(error)


def _name(library: NativeLibrary) -> str:
    return library.file_name.removesuffix(".so") + SUFFIX


def reason(library: NativeLibrary) -> str | None:
    """Why the facts of the library's kernels are not known, or `None`."""
    found = _read(library.package, _name(library))
    return found if isinstance(found, str) else None


def compiled_kernels(library: NativeLibrary) -> Mapping[str, CompiledKernel]:
    """Instance → what ptxas says of it; `ResourcesError` with `reason` where that is not known."""
    found = _read(library.package, _name(library))
    if isinstance(found, str):
        raise ResourcesError(found)
    return dict(found)


def facts_of(schedule: KernelSchedule, compiled: CompiledKernel) -> ResourceFacts:
    """What a launch takes: what the compiler gave the kernel, and what the schedule asks for."""
    return ResourceFacts(
        threads=schedule.threads,
        registers=compiled.registers,
        static_shared_bytes=compiled.shared_bytes,
        dynamic_shared_bytes=schedule.shared_bytes,
        spill_bytes=compiled.spill_bytes,
        stack_bytes=compiled.stack_bytes,
        barriers=compiled.barriers,
        tmem_columns=schedule.tmem_columns,
        cluster_size=schedule.cluster_size,
    )


def facts(library: NativeLibrary, schedule: KernelSchedule) -> dict[str, ResourceFacts]:
    """Instance → what its launch takes, for each instance of the schedule.

    `ResourcesError` where the facts of the library are not known, or not those of an instance.
    """
    compiled = compiled_kernels(library)
    missing = [name for name in schedule.instances if name not in compiled]
    if missing:
        raise ResourcesError(f"{_name(library)} does not name {missing}: built from other sources")
    return {name: facts_of(schedule, compiled[name]) for name in schedule.instances}
