import pathlib
import subprocess

import lint_tree
import pytest

BUILD_FILES = (".bazel", ".bzl", ".bzlmod")


def program():
    (path,) = pathlib.Path("..").glob("*buildifier*/buildifier")
    return path.resolve()


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    paths = [p for p in lint_tree.sources() if p.suffix in BUILD_FILES or p.name == "WORKSPACE"]
    assert len(paths) > 10
    return lint_tree.stage(tmp_path_factory.mktemp("tree"), paths)


def buildifier(folder, *args):
    done = subprocess.run(
        [program(), "-r", *args, "."],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_all_build_files_are_formatted_and_without_warnings(tree):
    code, output = buildifier(tree, "-mode=check", "-lint=warn")
    assert code == 0, f"run `./bazelw run //tools/lint:fix_build_files`\n{output}"


def test_buildifier_reports_a_bad_file(tmp_path):
    (tmp_path / "BUILD.bazel").write_text('load("//a:b.bzl", "c")\nfilegroup(srcs=[],name="x")\n')
    code, output = buildifier(tmp_path, "-mode=check", "-lint=warn")
    assert code != 0
    assert "unused" in output
    assert "reformat" in output
