"""What README.md and CONTRIBUTING.md say is true: their code runs, and what they name exists."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from documents import DOCUMENTS, Block, blocks, configs, labels, modules, paths
from lint_tree import targets

README = Path("README.md")
PYTHON = [
    block for document in DOCUMENTS for block in blocks(document) if block.language == "python"
]
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=str)


def run(block: Block) -> None:
    """Executes a block by itself, in a fresh namespace, so that each can be copied alone."""
    source = "\n" * (block.line - 1) + block.text
    exec(compile(source, str(block.document), "exec"), {"__name__": "__main__"})


def printed(heading: str) -> str:
    """The text block that a heading shows as output."""
    found = [b for b in blocks(README) if b.heading == heading and b.language == "text"]
    assert len(found) == 1, heading
    return found[0].text


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.heading.replace(" ", "_"))
def test_block_runs_by_itself(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    run(block)
    out = capsys.readouterr().out
    if block.heading == "How errors look":
        assert out == printed(block.heading)


def test_the_two_commands_come_first() -> None:
    first = blocks(README)[0]
    lines = [line.partition("#")[0].strip() for line in first.text.splitlines()]
    assert lines == ["./bazelw run //bench:paged_decode", "./bazelw test //..."]
    assert first.line <= 5


def test_readme_has_a_block_for_each_delivered_feature() -> None:
    code = "\n".join(block.text for block in PYTHON if block.document == README)
    calls = ("decode", "attention", "prefill", "train", "merge_states", "reference.attention")
    assert not [name for name in calls if f"stream_attn.{name}(" not in code]
    assert "plan.run()" in code
    assert "plan.explain()" in code


@pytest.mark.parametrize("heading", ["Add a route", "Add a peer", "Add a case"])
def test_contributing_adds_one_of_each_and_shows_that_it_took_effect(heading: str) -> None:
    (block,) = [b for b in PYTHON if b.heading == heading]
    assert block.document == Path("CONTRIBUTING.md")
    assert block.text.count("\nassert ") >= 2


@each_document
def test_named_targets_exist(document: Path) -> None:
    known = {target.label for target in targets()}
    named = labels(document)
    assert named
    assert named <= known


@each_document
def test_named_modules_import(document: Path) -> None:
    named = modules(document)
    assert named
    for name in named:
        importlib.import_module(name)


@each_document
def test_named_files_exist(document: Path) -> None:
    named = paths(document)
    assert named
    assert not [path for path in named if not Path(path).exists()]


def test_named_configs_exist() -> None:
    text = Path(".bazelrc").read_text(encoding="utf-8")
    named = configs(Path("CONTRIBUTING.md"))
    assert named >= {"sm90", "gpu", "cpu"}
    assert not [name for name in named if f"\ntest:{name} " not in text]


def test_an_open_block_is_an_error(tmp_path: Path) -> None:
    document = tmp_path / "open.md"
    document.write_text("# A\n\n```python\nx = 1\n")
    with pytest.raises(ValueError, match=r"open\.md:3: the block is not closed"):
        blocks(document)


def test_a_wrong_block_fails_at_its_own_line() -> None:
    block = Block(README, "python", "A", 7, "x = 1\nraise RuntimeError(x)\n")
    with pytest.raises(RuntimeError) as caught:
        run(block)
    assert caught.traceback[-1].lineno + 1 == 8
