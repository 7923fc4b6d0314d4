"""The documents of the tree as data: fenced blocks with their headings, labels and module names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DOCUMENTS = (Path("README.md"), Path("CONTRIBUTING.md"))


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, its text, the heading above it and its first line's number."""

    document: Path
    language: str
    heading: str
    line: int
    text: str


def blocks(document: Path) -> list[Block]:
    """All fenced blocks of a document, in order; raises `ValueError` for one that is left open."""
    found: list[Block] = []
    heading, language, start, body = "", None, 0, []
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        if language is None and line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("```"):
            if language is None:
                language, start, body = line[3:], number + 1, []
            else:
                text = "\n".join([*body, ""])
                found.append(Block(document, language, heading, start, text))
                language = None
        elif language is not None:
            body.append(line)
    if language is not None:
        raise ValueError(f"{document}:{start - 1}: the block is not closed")
    return found


def labels(document: Path) -> set[str]:
    """The build labels `//package:target` that a document names, wildcards left out."""
    return set(re.findall(r"//[a-z0-9_/]+:[a-z0-9_]+", document.read_text(encoding="utf-8")))


def modules(document: Path) -> set[str]:
    """The dotted names below `stream_attention` that a document writes as code."""
    text = document.read_text(encoding="utf-8")
    return set(re.findall(r"`(stream_attention(?:\.\w+)+)`", text))


def paths(document: Path) -> set[str]:
    """The files and folders of the tree that a document writes as code or links to."""
    text = document.read_text(encoding="utf-8")
    quoted = re.findall(r"`(?:pytest )?((?:bench|core|tools)/[\w./]+|\.ci/\w+)`", text)
    return {*quoted, *re.findall(r"\]\(([\w./]+)\)", text)}


def configs(document: Path) -> set[str]:
    """The names given to `--config` in a document."""
    return set(re.findall(r"--config=(\w+)", document.read_text(encoding="utf-8")))
