"""JSON text of others as plain data: every text that is not such data is refused with its name."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

MAX_DEPTH = 64
"""Objects and lists inside each other. What we write has a dozen."""


def parse_json(text: str | bytes, source: str = "", advice: str = "") -> Any:
    """The plain data that JSON text holds: a dict, list, string, number, flag or `None`.

    source: how a message calls the text, such as the name of its file. advice: what to do about
    text that is refused. Raises `ValueError` with both for text that is cut off or of another kind
    or encoding than UTF-8, nested deeper than `MAX_DEPTH`, with a key given twice in an object, or
    with NaN or infinity, which JSON has not.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        plain = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        fault = f"is nested too deeply, at most {MAX_DEPTH} levels"
    except ValueError as error:
        fault = f"is no JSON ({error})"
    else:
        if not _is_deeper(plain, MAX_DEPTH):
            return plain
        fault = f"is nested too deeply, at most {MAX_DEPTH} levels"
    said = f"{source}: {fault}" if source else fault
    raise ValueError(f"{said}; {advice}" if advice else said)


def _is_deeper(plain: Any, depth: int) -> bool:
    """Whether there is an object or a list inside of `depth` others."""
    level = [plain]
    for _ in range(depth):
        inner = (each for each in level if isinstance(each, (dict, list)))
        level = [
            child
            for each in inner
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        key, times = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {key[:80]!r} is given {times} times")
    return found


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")
