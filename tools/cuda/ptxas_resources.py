"""What ptxas says of every kernel, from its report to the JSON that a kernel wheel holds.

    ptxas_resources.py REPORT OUT

The one reader of reports. Kernels go by their C++ names without the namespace, e.g.
`state_pair_kernel<Arch, 2, 2, 8>`; `stream_attention.core.resources` reads what is written here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

FORMAT = 1
NAMESPACE = "stream_attention::"

_ENTRY = re.compile(r" '(\S+)' for '(\S+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_BARRIERS = re.compile(r"used (\d+) barriers")
_SHARED = re.compile(r"(\d+) bytes smem")

# Itanium C++ ABI, 5.1.5: builtin types that template arguments of ours may have.
_BUILTIN = {
    "a": "signed char",
    "b": "bool",
    "c": "char",
    "d": "double",
    "f": "float",
    "h": "unsigned char",
    "i": "int",
    "j": "unsigned int",
    "l": "long",
    "m": "unsigned long",
    "s": "short",
    "t": "unsigned short",
    "v": "void",
    "x": "long long",
    "y": "unsigned long long",
}
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"

T = TypeVar("T")


class _Mangled:
    """Reads a mangled name (Itanium C++ ABI, 5.1): nested names, templates, literals."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.seen: list[str] = []

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def take(self, expected: str) -> bool:
        if self.text.startswith(expected, self.at):
            self.at += len(expected)
            return True
        return False

    def match(self, pattern: str) -> str:
        found = re.compile(pattern).match(self.text, self.at)
        if found is None:
            raise ValueError(f"{self.text}: not understood at {self.text[self.at :]!r}")
        self.at = found.end()
        return found[0]

    def remember(self, name: str) -> str:
        self.seen.append(name)
        return name

    def until_end(self, read: Callable[[], T]) -> list[T]:
        found = []
        while not self.take("E"):
            found.append(read())
        return found

    def source_name(self) -> str:
        length = int(self.match(r"[1-9]\d*"))
        name = self.text[self.at : self.at + length]
        if len(name) != length:
            raise ValueError(f"{self.text}: ends inside a name")
        self.at += length
        return name

    def substitution(self) -> str:
        digits = self.match(r"S[0-9A-Z]*_")[1:-1]
        number = 0
        for digit in digits:
            number = 36 * number + _DIGITS.index(digit)
        index = number + 1 if digits else 0
        if index >= len(self.seen):
            raise ValueError(f"{self.text}: refers to part {index} of {len(self.seen)}")
        return self.seen[index]

    def arguments(self) -> str:
        self.match("I")
        return f"<{', '.join(self.until_end(self.argument))}>"

    def argument(self) -> str:
        if not self.take("L"):
            return self.type()
        kind = self.type()
        value = self.match(r"n?\d+").replace("n", "-")
        self.match("E")
        return {"0": "false", "1": "true"}[value] if kind == "bool" else value

    def nested_name(self) -> str:
        self.match("N")
        name = ""
        while not self.take("E"):
            if self.peek() == "S":
                name = self.substitution()
            elif self.peek() == "I":
                name = self.remember(name + self.arguments())
            else:
                name = self.remember(
                    f"{name}::{self.source_name()}" if name else self.source_name()
                )
        return name

    def type(self) -> str:
        if self.peek() == "N":
            return self.nested_name()
        if self.peek() == "S":
            name = self.substitution()
        elif self.peek().isdigit():
            name = self.remember(self.source_name())
        else:
            letter = self.match("[a-z]")
            if letter not in _BUILTIN:
                raise ValueError(f"{self.text}: type {letter!r} is not understood")
            return _BUILTIN[letter]
        return self.remember(name + self.arguments()) if self.peek() == "I" else name


def readable(mangled: str) -> str:
    """`_ZN16stream_attention1fINS_1AELi2EEEvv` → `f<A, 2>`: no parameters, not our namespace."""
    reader = _Mangled(mangled)
    if not reader.take("_Z"):
        return mangled  # extern "C"
    name = reader.nested_name() if reader.peek() == "N" else reader.type()
    return name.replace(NAMESPACE, "")


def _number(pattern: re.Pattern[str], text: str) -> int:
    found = pattern.search(text)
    return int(found[1]) if found else 0


def parse(report: str) -> dict[str, dict[str, Any]]:
    """Kernel → what a `ptxas -v` report says of it; `ValueError` for text of another kind.

    A kernel that is named twice is an error: two sources must not compile the same instance, nor
    one source for two architectures.
    """
    kernels: dict[str, dict[str, Any]] = {}
    for section in report.split("Compiling entry function")[1:]:
        entry, stack = _ENTRY.match(section), _STACK.search(section)
        registers = _REGISTERS.search(section)
        if not (entry and stack and registers):
            raise ValueError(f"not a report of ptxas: {section[:200]!r}")
        name = readable(entry[1])
        if name in kernels:
            raise ValueError(f"{name}: compiled twice")
        kernels[name] = {
            "target": entry[2],
            "registers": int(registers[1]),
            "barriers": _number(_BARRIERS, section),
            "stack_bytes": int(stack[1]),
            "spill_bytes": int(stack[2]) + int(stack[3]),
            "shared_bytes": _number(_SHARED, section),
        }
    if not kernels:
        raise ValueError("the report of ptxas names no kernel")
    return kernels


def resources(report: str) -> str:
    """The JSON of a report: one line a kernel, sorted, so that two builds differ where they do."""
    lines = [
        f"  {json.dumps(name)}: {json.dumps(said)}" for name, said in sorted(parse(report).items())
    ]
    return f'{{"format": {FORMAT}, "kernels": {{\n' + ",\n".join(lines) + "\n}}\n"


def main(argv: list[str]) -> int:
    if len(argv) != 3:
        print("usage: ptxas_resources REPORT OUT", file=sys.stderr)
        return 2
    try:
        text = resources(Path(argv[1]).read_text(encoding="utf-8"))
    except ValueError as error:
        print(f"ptxas_resources: {argv[1]}: {error}", file=sys.stderr)
        return 1
    Path(argv[2]).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
