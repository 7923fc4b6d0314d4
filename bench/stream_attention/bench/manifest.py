"""A manifest: workload cells with the weights, tolerances and baselines they are judged by.

A cell is one workload on the architectures that it is declared for. `exact_cells.json` is the one
that exact attention is judged by: real workloads, boundaries of architectures and schedulers, and
interactions of features, each as data. What its author chose, where no source says it, is listed in
`chosen`: of the file in sentences, of a cell as the names of fields.
"""

from __future__ import annotations

import importlib.resources
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stream_attention.core.errors import Faults
from stream_attention.core.ir import Rule, check_rules, evaluable_repr, is_name, is_tuple_of
from stream_attention.core.testing import tolerance as tolerances
from stream_attention.planner.json_keys import check_keys, check_schema
from stream_attention.planner.workload_content import BATCH_KEYS, read_text
from stream_attention.planner.workloads import WorkloadBatch

SCHEMA, VERSION = "stream_attention.manifest", 1
KINDS = ("real", "boundary", "feature")
ARCHS = ("sm_80", "sm_90", "sm_100")
WEIGHTS = ("trace", "stratified", "boundary")
TOLERANCES = ("assert_close", "assert_lse_close")
"""Rules of `core.testing.tolerance` that a cell may name."""
_SUM_ERROR = 1e-9  # of thirds and thirtieths that are written in decimals

# Architectures that a baseline runs on.
BASELINES: dict[str, tuple[str, ...]] = {
    "flashinfer_fa2_cuda_core": ARCHS,
    "flashinfer_fa2_tensor_core": ARCHS,
    "flashinfer_fa3": ("sm_90",),
    "flashinfer_cudnn": ARCHS,
    "flashinfer_xqa": ("sm_90", "sm_100"),
    "flashinfer_holistic": ARCHS,
    "flash_attn_4": ("sm_90", "sm_100"),
    "sdpa_flash": ARCHS,
    "sdpa_cudnn": ARCHS,
    "sdpa_efficient": ARCHS,
    "sdpa_math": ARCHS,
}

_FILE_KEYS = ("schema", "version", "about", "chosen", "counts", "cells")
_CELL_KEYS = (
    *("name", "kind", "archs", "workload", "weights", "tolerance", "baselines", "chosen"),
)
_ERROR_KEYS = ("max_error", "rms_error")


@dataclass(frozen=True, slots=True, repr=False)
class ErrorBounds:
    """A tolerance in numbers: largest absolute error, and root of the mean square."""

    max_error: float
    rms_error: float

    def __post_init__(self) -> None:
        check_rules(self, _BOUND_RULES)

    __repr__ = evaluable_repr


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Cell:
    """One workload of a manifest.

    name: unique. kind: one of `KINDS`. archs: those it is declared for, of `ARCHS`. batch: the
    workload. weights: its share of each of `WEIGHTS`, 0 … 1. tolerance: the name of a rule of
    `core.testing.tolerance`, or numbers. baselines: what it may be compared with, of `BASELINES`.
    chosen: fields of the cell or of its workload that were chosen and not found in a source.
    Raises `ValueError` with every broken rule.
    """

    name: str
    kind: str
    archs: tuple[str, ...]
    batch: WorkloadBatch
    weights: Mapping[str, float]
    tolerance: str | ErrorBounds
    baselines: tuple[str, ...]
    chosen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_rules(self, _CELL_RULES)

    __repr__ = evaluable_repr

    def baselines_on(self, arch: str) -> tuple[str, ...]:
        """The eligible baselines that run on `arch`; none where the cell is not declared for it."""
        if arch not in self.archs:
            return ()
        return tuple(name for name in self.baselines if arch in BASELINES[name])


@dataclass(frozen=True, slots=True, repr=False)
class Manifest:
    """Cells, checked together: names and contents are unique, each kind of weight sums to 1.

    about: what the manifest is for. chosen: what its author chose, in sentences. counts: cells by
    kind and by architecture, as the author declares them. Raises `ValueError` with every fault.
    """

    about: str
    chosen: tuple[str, ...]
    counts: Mapping[str, int]
    cells: tuple[Cell, ...]

    def __post_init__(self) -> None:
        check_rules(self, _MANIFEST_RULES)

    __repr__ = evaluable_repr

    def of_arch(self, arch: str) -> tuple[Cell, ...]:
        """Cells that are declared for an architecture."""
        return tuple(cell for cell in self.cells if arch in cell.archs)

    def of_kind(self, kind: str) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.kind == kind)


def exact_cells() -> Manifest:
    """The manifest that exact attention is judged by."""
    file = importlib.resources.files("stream_attention.bench") / "manifests" / "exact_cells.json"
    return manifest_from_json(read_text(file.read_text(encoding="utf-8"), "exact_cells.json"))


def load_manifest(path: str | Path) -> Manifest:
    """The manifest in a file. Raises `ValueError` with every fault, `OSError` without the file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name}: is no UTF-8 text ({error.reason}); use UTF-8") from None
    return manifest_from_json(read_text(text, path.name))


def manifest_from_json(data: Any) -> Manifest:
    """The inverse of `manifest_to_json`. Raises `ValueError` that names keys and cells."""
    faults = Faults()
    if check_schema(faults, data, SCHEMA, VERSION, "manifest"):
        check_keys(faults, data, _FILE_KEYS, "manifest")
    faults.raise_if_any("manifest")
    cells = []
    entries = data["cells"] if isinstance(data["cells"], list) else [data["cells"]]
    for index, entry in enumerate(entries):
        cell = _cell(faults, entry, f"cells[{index}]")
        cells.extend([cell] if cell is not None else [])
    check_keys(faults, data["counts"], (*KINDS, *ARCHS), "counts")
    faults.raise_if_any("manifest")
    return Manifest(data["about"], _tuple(data["chosen"]), data["counts"], tuple(cells))


def _cell(faults: Faults, data: Any, where: str) -> Cell | None:
    """One cell, or `None` and its faults."""
    if not check_keys(faults, data, _CELL_KEYS, where):
        return None
    where = f"{where} {data['name']!r}"
    tolerance = data["tolerance"]
    named = check_keys(faults, data["weights"], WEIGHTS, f"{where}.weights")
    if isinstance(tolerance, Mapping):
        named &= check_keys(faults, tolerance, _ERROR_KEYS, f"{where}.tolerance")
    if not named:
        return None
    try:
        batch = WorkloadBatch.from_json(data["workload"])
        if isinstance(tolerance, Mapping):
            tolerance = ErrorBounds(**tolerance)
        return Cell(
            name=data["name"],
            kind=data["kind"],
            archs=_tuple(data["archs"]),
            batch=batch,
            weights=dict(data["weights"]),
            tolerance=tolerance,
            baselines=_tuple(data["baselines"]),
            chosen=_tuple(data["chosen"]),
        )
    except ValueError as error:
        faults.add(where, data["kind"], str(error))
        return None


def _tuple(value: Any) -> Any:
    """A list as a tuple; anything else as it is, for the rules to refuse."""
    return tuple(value) if isinstance(value, list) else value


def manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    """Plain data that `manifest_from_json` takes; every key is written."""
    cells = []
    for cell in manifest.cells:
        bounds = cell.tolerance
        if isinstance(bounds, ErrorBounds):
            tolerance: Any = {key: getattr(bounds, key) for key in _ERROR_KEYS}
        else:
            tolerance = bounds
        cells.append(
            {
                "name": cell.name,
                "kind": cell.kind,
                "archs": list(cell.archs),
                "workload": cell.batch.to_json(),
                "weights": dict(cell.weights),
                "tolerance": tolerance,
                "baselines": list(cell.baselines),
                "chosen": list(cell.chosen),
            }
        )
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "about": manifest.about,
        "chosen": list(manifest.chosen),
        "counts": dict(manifest.counts),
        "cells": cells,
    }


def _number(value: Any, low: float, high: float) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and low <= value <= high


def _names(field: str, choices: Any, least: int) -> Rule:
    """A tuple of at least `least` different names out of `choices`."""

    def holds(cell: Any) -> bool:
        names = getattr(cell, field)
        return (
            is_tuple_of(names, str)
            and len(names) >= least
            and len(set(names)) == len(names)
            and set(names) <= set(choices)
        )

    text = f"must be {'one or more' if least else 'any'} of {', '.join(choices)}, each once"
    return Rule(
        field,
        text,
        holds,
        lambda c: tuple(dict.fromkeys(n for n in getattr(c, field) if n in choices)) or None,
    )


def _unfit(cell: Cell) -> list[str]:
    """Baselines that run on none of the cell's architectures."""
    return [name for name in cell.baselines if not set(BASELINES[name]) & set(cell.archs)]


def _known(cell: Cell) -> bool:
    """Whether baselines and architectures are names of such; else their own rules say so."""
    if not is_tuple_of(cell.baselines, str) or not is_tuple_of(cell.archs, str):
        return False
    return set(cell.baselines) <= set(BASELINES) and set(cell.archs) <= set(ARCHS)


_BOUND_RULES = tuple(
    Rule(
        name,
        "must be a finite number >= 0",
        lambda b, name=name: _number(getattr(b, name), 0, 1e30),  # type: ignore[misc]
        lambda b: 1e-3,
    )
    for name in _ERROR_KEYS
)

_CELL_RULES: tuple[Rule, ...] = (
    Rule("name", "must be a str that is not empty", lambda c: is_name(c.name)),
    Rule("kind", f"must be one of {', '.join(KINDS)}", lambda c: c.kind in KINDS, lambda c: "real"),
    _names("archs", ARCHS, 1),
    _names("baselines", tuple(BASELINES), 1),
    _names("chosen", (*_CELL_KEYS, *BATCH_KEYS), 0),
    Rule(
        "baselines",
        "each must run on an architecture that the cell is declared for",
        lambda c: not _known(c) or not _unfit(c),
        lambda c: tuple(name for name in c.baselines if name not in _unfit(c)),
        lambda c: _unfit(c),
    ),
    Rule("batch", "must be a WorkloadBatch", lambda c: isinstance(c.batch, WorkloadBatch)),
    Rule(
        "weights",
        f"must give each of {', '.join(WEIGHTS)} a number in 0..1, and one of them more than 0",
        lambda c: (
            set(c.weights) == set(WEIGHTS)
            and all(_number(weight, 0, 1) for weight in c.weights.values())
            and any(c.weights.values())
        ),
    ),
    Rule(
        "tolerance",
        f"must be ErrorBounds or one of {', '.join(TOLERANCES)}",
        lambda c: (
            isinstance(c.tolerance, ErrorBounds)
            or (c.tolerance in TOLERANCES and callable(getattr(tolerances, c.tolerance)))
        ),
        lambda c: repr(TOLERANCES[0]),
    ),
)


def _cells_are(manifest: Manifest) -> bool:
    return is_tuple_of(manifest.cells, Cell) and bool(manifest.cells)


def _of_cells(holds: Callable[[Manifest], bool]) -> Callable[[Any], bool]:
    return lambda manifest: not _cells_are(manifest) or holds(manifest)


def _twice(manifest: Manifest) -> list[str]:
    names = Counter(cell.name for cell in manifest.cells)
    return sorted(name for name, times in names.items() if times > 1)


def _same_content(manifest: Manifest) -> list[list[str]]:
    found: dict[str, list[str]] = {}
    for cell in manifest.cells:
        found.setdefault(cell.batch.content_digest, []).append(cell.name)
    return [names for names in found.values() if len(names) > 1]


def _sums(manifest: Manifest) -> dict[str, float]:
    return {kind: math.fsum(cell.weights[kind] for cell in manifest.cells) for kind in WEIGHTS}


def _counted(manifest: Manifest) -> dict[str, int]:
    kinds = {kind: len(manifest.of_kind(kind)) for kind in KINDS}
    return {**kinds, **{arch: len(manifest.of_arch(arch)) for arch in ARCHS}}


_MANIFEST_RULES: tuple[Rule, ...] = (
    Rule("about", "must be a str that is not empty", lambda m: is_name(m.about)),
    Rule("chosen", "must be a tuple of str", lambda m: is_tuple_of(m.chosen, str)),
    Rule(
        "cells",
        "must be a tuple of one Cell or more",
        _cells_are,
        None,
        lambda m: type(m.cells).__name__ if m.cells else m.cells,
    ),
    Rule(
        "cells",
        "names must be unique",
        _of_cells(lambda m: not _twice(m)),
        lambda m: "another name",
        _twice,
    ),
    Rule(
        "cells",
        "two cells with one content are one cell, declared for the architectures of both",
        _of_cells(lambda m: not _same_content(m)),
        lambda m: "one of them",
        _same_content,
    ),
    Rule(
        "cells",
        f"each of the weights {', '.join(WEIGHTS)} must sum to 1",
        _of_cells(lambda m: all(abs(total - 1) <= _SUM_ERROR for total in _sums(m).values())),
        lambda m: "weights divided by their sum",
        lambda m: f"sums {_sums(m)}",
    ),
    Rule(
        "counts",
        "must be the cells of every kind and architecture",
        _of_cells(lambda m: dict(m.counts) == _counted(m)),
        _counted,
    ),
)
