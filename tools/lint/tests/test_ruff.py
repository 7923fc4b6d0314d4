import subprocess
import sys

import lint_tree
import pytest


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    root = tmp_path_factory.mktemp("tree")
    return lint_tree.stage(root, [*lint_tree.sources(".py"), *lint_tree.sources(".toml")])


def ruff(cwd, *args):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *args, "--no-cache", "."],
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_lint_finds_nothing(tree):
    code, output = ruff(tree, "check", "--output-format=concise")
    assert code == 0, output


def test_all_files_are_formatted(tree):
    code, output = ruff(tree, "format", "--check")
    assert code == 0, f"run `ruff format .` in the workspace\n{output}"


def test_ruff_with_this_configuration_reports_a_bad_file(tree, tmp_path):
    (tmp_path / "pyproject.toml").write_bytes((tree / "pyproject.toml").read_bytes())
    (tmp_path / "bad.py").write_text('"""A module."""\nimport os\nx = {  }\n')
    code, output = ruff(tmp_path, "check", "--output-format=concise")
    assert code == 1
    assert "F401" in output
    assert ruff(tmp_path, "format", "--check")[0] == 1
