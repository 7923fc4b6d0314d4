"""Plain data from JSON, checked by name: a key that is unknown or missing is a fault."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from stream_attention.core.errors import Faults


def check_keys(faults: Faults, data: Any, keys: Collection[str], where: str) -> bool:
    """Whether `data` is a dict of exactly `keys`; a fault for each that is unknown or missing.

    where: how a message calls `data`, such as `batch.requests[3]`.
    """
    if not isinstance(data, Mapping):
        faults.add(where, type(data).__name__, "must be an object", f"one of {len(keys)} keys")
        return False
    missing = [key for key in keys if key not in data]
    unknown = [key for key in data if key not in keys]
    for key in unknown:
        close = difflib.get_close_matches(str(key), missing or list(keys), n=1, cutoff=0.0)
        faults.add(f"{where}.{key}", data[key], "is no key of this object", *close)
    for key in missing:
        faults.add(f"{where}.{key}", None, "is missing", f"all of {', '.join(keys)}")
    return not unknown and not missing


def check_schema(faults: Faults, data: Any, schema: str, version: int, where: str) -> bool:
    """Whether `data` says that it is `schema` of `version`; faults where it does not."""
    if not isinstance(data, Mapping):
        faults.add(where, type(data).__name__, "must be an object", f"a {schema} object")
        return False
    same = faults.require(
        data.get("schema") == schema,
        f"{where}.schema",
        data.get("schema"),
        "must say what the object is",
        repr(schema),
    )
    number = data.get("version")
    return same & faults.require(
        number == version and not isinstance(number, bool),
        f"{where}.version",
        number,
        f"this code reads version {version} of {schema}",
        version,
    )
