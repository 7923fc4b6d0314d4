"""Folders of installed packages that a contender's worker alone sees (`--peer_paths`)."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence

from stream_attention.core.errors import Faults
from stream_attention.core.user_paths import user_path

_FORM = "must be NAME_OR_PREFIX=DIR[:DIR]"


def parse_paths(entries: Sequence[str], names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """`NAME_OR_PREFIX=DIR[:DIR]`, one an entry or separated by commas → absolute folders by key.

    A relative folder is looked up from where the user stands. Raises `ValueError` with every fault:
    another form, a key that no contender of `names` begins with, a key twice, a folder that is not
    there.
    """
    base = user_path(".").resolve()
    known, faults = list(names), Faults()
    found: dict[str, tuple[str, ...]] = {}
    for part in (piece for entry in entries for piece in entry.split(",") if piece):
        key, equals, text = part.partition("=")
        folders = [str(base / folder) for folder in text.split(os.pathsep) if folder]
        if not equals or not key or not folders:
            faults.add("--peer_paths", part, _FORM, "flash_attn=/opt/flash_attn")
            continue
        if not any(name.startswith(key) for name in known):
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            rule = f"must begin the name of a contender of this run: {', '.join(known)}"
            faults.add("--peer_paths", key, rule, close[0] if close else None)
        faults.require(key not in found, "--peer_paths", key, "must be given once; use DIR:DIR")
        for folder in folders:
            there = os.path.isdir(folder)
            faults.require(there, "--peer_paths", folder, "must be a folder that exists")
        found[key] = tuple(folders)
    faults.raise_if_any()
    return found


def folders_of(name: str, paths: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The folders of a contender: those of its name, else of the longest beginning of it."""
    keys = [key for key in paths if name.startswith(key)]
    return paths[max(keys, key=len)] if keys else ()
