"""JSON that users hand over: whatever the text, what is wrong with it is a `ValueError`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_DEPTH = 64  # far above what a file of the bench has, far below what recursion can follow


def parse(text: str | bytes) -> Any:
    """The data of JSON text. Raises `ValueError` for what is none, and for more than `MAX_DEPTH`
    lists and objects in one another.
    """
    try:
        data = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    level = [data]
    for _ in range(MAX_DEPTH):
        level = [
            entry
            for outer in level
            if isinstance(outer, (list, dict))
            for entry in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(entry, (list, dict))
        ]
        if not level:
            return data
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"is nested too deeply, more than {MAX_DEPTH} levels")


def read(path: Path) -> Any:
    """The data of a file. Raises `ValueError` for what is no JSON in UTF-8, and `OSError`."""
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ValueError(f"line {line}: byte {raw[error.start]:#04x} is no UTF-8") from None
    return parse(text)
