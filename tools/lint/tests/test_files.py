"""Size, wording and portability of every file of the tree."""

import ast
import pathlib
import re

import lint_tree
import pytest

# About 400 lines a module, 600 a kernel (or a test with its tables), 80 a function. Longer
# ones say why, in their first lines, with the words "Longer than 400 lines because ...".
MODULE_LINES, KERNEL_LINES, FUNCTION_LINES = 400, 600, 80
EXCUSE = re.compile(r"longer than \d+ lines because \w+", re.IGNORECASE)
EXCUSE_WITHIN = 20

# Written in pieces, so that this file passes its own test.
FORBIDDEN = (
    ("a machine's path", re.compile(r"(?<![\w.$}/*-])/" + r"(?:work|root|home)/[\w.-]")),
    (
        "a registry's host",
        re.compile(r"\b(?:py" + r"pi\.org|python" + r"hosted|npm" + r"js\.(?:org|com))"),
    ),
    ("a registry's host", re.compile(r"\bdownload\.pytorch" + r"\.org|deb\." + r"debian\.org")),
    ("unfinished work", re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")),
    ("a hidden line of coverage", re.compile(r"pragma: *no" + r" cover")),
    ("a merge's leftover", re.compile(r"^(?:<{7} |>{7} |={7}$)")),
)


def line_limit(path):
    kernel = path.suffix in (".cu", ".cuh") or path.name.endswith("_kernels.py")
    return KERNEL_LINES if kernel or "tests" in path.parts else MODULE_LINES


def long_file(path, text):
    """Why the file is too long, or None."""
    lines = text.splitlines()
    limit = line_limit(path)
    if len(lines) <= limit or EXCUSE.search(" ".join(lines[:EXCUSE_WITHIN])):
        return None
    return f"{path}: {len(lines)} lines; at most {limit}, or say at the top why it is longer"


def long_functions(path, text):
    """One reason per function that is too long."""
    lines, found = text.splitlines(), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            # Whatever the signature's length: the excuse may stand in all of the docstring.
            top = " ".join(lines[node.lineno - 1 : node.body[0].end_lineno])
            if length > FUNCTION_LINES and not EXCUSE.search(top):
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines")
    return found


def forbidden(path, text):
    """One reason per forbidden word."""
    return [
        f"{path}:{number}: {what}: {line.strip()[:100]}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in FORBIDDEN
        if pattern.search(line)
    ]


def text_of(path):
    return path.read_text(encoding="utf-8")


def ours():
    """All files but the licence and the locks, which are not our writing."""
    return [p for p in lint_tree.sources() if p.name != "LICENSE" and p.suffix != ".lock"]


def test_no_module_is_longer_than_its_limit():
    paths = lint_tree.sources(".py", ".cu", ".cuh", ".h")
    assert [reason for p in paths if (reason := long_file(p, text_of(p)))] == []


def test_no_function_is_longer_than_its_limit():
    assert [r for p in lint_tree.sources(".py") for r in long_functions(p, text_of(p))] == []


def test_no_file_has_a_forbidden_word():
    assert [reason for path in ours() for reason in forbidden(path, text_of(path))] == []


def test_no_line_of_code_that_ruff_does_not_see_is_too_long():
    paths = lint_tree.sources(".cu", ".cuh", ".h")
    assert [
        f"{path}:{number}: {len(line)} columns; at most 100"
        for path in paths
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if len(line) > 100 and "http" not in line
    ] == []


def test_every_file_ends_with_one_newline_and_has_no_tabs_or_trailing_blanks():
    found = []
    for path in ours():
        text = text_of(path)
        if text and (not text.endswith("\n") or text.endswith("\n\n")):
            found.append(f"{path}: must end with one newline")
        for number, line in enumerate(text.splitlines(), 1):
            if line != line.rstrip() or ("\t" in line and path.suffix != ".tsv"):
                found.append(f"{path}:{number}: tab or trailing blank")
    assert found == []


def test_only_core_has_the_init_of_the_namespace():
    facades = [
        p for p in lint_tree.sources(".py") if p.parts[1:] == ("stream_attention", "__init__.py")
    ]
    assert facades == [pathlib.Path("core/stream_attention/__init__.py")]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("path = '/" + "home/ann/x'", "a machine's path"),
        ("# see /" + "root/.cache", "a machine's path"),
        ("index = 'https://py" + "pi.org/simple'", "a registry's host"),
        ("# TO" + "DO: later", "unfinished work"),
        ("if x:  # pragma: no" + " cover", "a hidden line of coverage"),
    ],
)
def test_each_forbidden_word_is_found(line, what):
    (reason,) = forbidden(pathlib.Path("a.py"), f"x = 1\n{line}\n")
    assert reason.startswith(f"a.py:2: {what}")


def test_a_long_file_and_a_long_function_are_found_and_can_be_excused():
    path, body = pathlib.Path("a.py"), "    x = 1\n" * 90
    assert long_functions(path, "def f():\n" + body) == ["a.py:1: f has 91 lines"]
    excuse = '    """Longer than 80 lines because its steps share state."""\n'
    assert long_functions(path, "def f():\n" + excuse + body) == []
    assert long_file(path, "x = 1\n" * 401) is not None
    assert long_file(path, "# Longer than 400 lines because one table.\n" + "x = 1\n" * 401) is None
    assert long_file(pathlib.Path("a.cu"), "x\n" * 600) is None
